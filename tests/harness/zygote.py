"""Starts training processes in milliseconds: imports everything once, then forks for every run that
is asked for.

Reads one request a line, its number and an `Attempt` in JSON, and answers each with that number and
how every process ended, as `subprocess` counts (minus the signal that killed it).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common.files import ROOT

Start = Callable[..., list[int]]
"""`start(folder, *words, **how)`: a zygote, with or without words of its own."""
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Of Python's audit events, those of a save."""
PARENT = os.getppid()
HANG = 600.0
"""Seconds after which what should take a few hangs."""
IMPORTED_ONCE = [
    *(
        "tests.harness.parallel_worker",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.profiler",
        "functorch.compile",
    ),
    *("sklearn.datasets", "networkx", "evaluation.evaluator", "models.mixers.bidirectional_ssd"),
]


class Attempt(NamedTuple):
    """One start of a run, and what befalls it."""

    words: list[str]
    folder: str
    ranks: int = 1
    environment: dict[str, str] = {}  # noqa: RUF012  # never changed
    kill_rank: int = 0
    at_event: int | None = None
    """SIGKILL just before this one of the things done to files in `checkpoints`, counted from 1."""
    after_seconds: float | None = None
    """A signal so long after the first step may begin."""
    after_lines: int | None = None
    """A signal once so many lines are logged."""
    signal: str = "SIGKILL"


class Zygote:
    """`zygote(folder, *words, **how)`: a run in processes of its own; how each of them ended.

    A request that is given up, by its own limit or by the test's, takes all its processes along;
    the next one gets a new zygote.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.number = 0

    def __call__(self, folder: Path, *words: str, **how: Any) -> list[int]:
        self.number += 1
        request = [self.number, Attempt([*words], str(folder), **how)._asdict()]
        try:
            self.process = self.process or self.begun()
            print(json.dumps(request), file=self.process.stdin, flush=True)
            number, codes = json.loads(self.line(self.process))
            assert number == self.number
        except BaseException:
            self.stop()
            raise
        return codes

    def begun(self) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "tests.harness.zygote"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            program, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], HANG)[0]:
            pytest.fail(f"a run has not ended after {HANG:.0f} s")
        return process.stdout.readline()

    def stop(self) -> None:
        if self.process:
            with self.process:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None


def read_output(folder: Path) -> str:
    """What the processes of a run printed."""
    return Path(f"{folder}.log").read_text()


def die_at(event: int, folder: str) -> None:
    """SIGKILL for this process at the event-th change of a file below `folder`/checkpoints, in
    whichever thread."""
    left = [event]

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name not in EVENTS:
            return
        path = str(arguments[0])
        # rmtree's way
        if (
            name in ("os.remove", "os.rmdir")
            and isinstance(arguments[1], int)
            and arguments[1] >= 0
        ):
            path = f"{os.readlink(f'/proc/self/fd/{arguments[1]}')}/{path}"
        if f"{folder}/checkpoints" not in path:
            return
        if name == "open" and not (isinstance(arguments[1], str) and "w" in arguments[1]):
            return
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def child(attempt: Attempt, rank: int, port: int) -> None:
    """A training process; never returns."""
    from tests.harness import parallel_worker

    log = os.open(f"{attempt.folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    if attempt.ranks > 1:
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": attempt.ranks,
            "MASTER_PORT": port,
        }
        os.environ.update(
            {name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1"
        )
    os.environ.update(attempt.environment)
    if attempt.at_event is not None and rank == attempt.kill_rank:
        die_at(attempt.at_event, attempt.folder)
    code: Any = 0
    try:
        parallel_worker.main([*attempt.words, f"run_dir={attempt.folder}"])
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def run(attempt: Attempt) -> list[int]:
    """Forks the processes, strikes, and waits for their end; one killed by a signal takes the
    others along."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = (
        Path(f"{attempt.folder}.log").stat().st_size
        if Path(f"{attempt.folder}.log").exists()
        else 0
    )
    pids = []
    for rank in range(attempt.ranks):
        if not (pid := os.fork()):
            child(attempt, rank, port)
        pids.append(pid)
    began = None
    codes = {}
    metrics = Path(attempt.folder) / "metrics.jsonl"
    log = Path(f"{attempt.folder}.log")
    pending = attempt.after_seconds is not None or attempt.after_lines is not None
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                for other in set(pids) - codes.keys() if codes[pid] not in (0, 75) else ():
                    os.kill(other, signal.SIGKILL)  # as torchrun does
        if began is None and attempt.after_seconds is not None and log.exists():
            begun = re.search(
                rb"^(starting from|resumed from)", log.read_bytes()[printed:], re.MULTILINE
            )
            began = time.monotonic() if begun else None
        late = began is not None and time.monotonic() - began > (attempt.after_seconds or 0.0)
        if pending and not late and attempt.after_lines is not None and metrics.exists():
            late = metrics.read_bytes().count(b"\n") >= attempt.after_lines
        if pending and late and pids[attempt.kill_rank] not in codes:
            os.kill(pids[attempt.kill_rank], getattr(signal, attempt.signal))
            pending = False
        if os.getppid() != PARENT:  # whoever asked is gone
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def main() -> None:
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    for line in sys.stdin:
        number, attempt = json.loads(line)
        print(json.dumps([number, run(Attempt(**attempt))]), flush=True)


if __name__ == "__main__":
    main()
