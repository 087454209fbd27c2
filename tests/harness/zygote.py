"""Starts training processes in milliseconds: a process imports everything once and forks.

It reads one request a line, an `Attempt` in JSON, and answers each with the exit codes of the run's
processes (minus the signal where one was killed).
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
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common.files import ROOT

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Python's audit events for the changes of files that a save makes."""
PARENT = os.getppid()
HANG = 600.0
"""Seconds after which a run, or a wait of a few seconds, counts as hanging."""
IMPORTED_ONCE = [
    "tests.harness.parallel_worker",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.profiler",
    "functorch.compile",
    "sklearn.datasets",
    "networkx",
    "evaluation.evaluator",
    "models.mixers.bidirectional_ssd",
]


class Attempt(NamedTuple):
    """One start of a run, and the signal that strikes it."""

    words: list[str]
    folder: str
    ranks: int = 1
    environment: dict[str, str] = {}  # noqa: RUF012  # never changed
    kill_rank: int = 0
    at_event: int | None = None
    """SIGKILL just before this change of a file in `checkpoints`, counted from 1."""
    after_seconds: float | None = None
    """Seconds between the first step and the signal."""
    after_lines: int | None = None
    """Lines in metrics.jsonl at which the signal strikes."""
    signal: str = "SIGKILL"


class Zygote:
    """`zygote(folder, *words, **how)`: the exit codes of the processes of a run.

    A request that hits its limit, or that of the test, kills all its processes; the next request
    gets a new zygote.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, folder: Path, *words: str, **how: Any) -> list[int]:
        request = Attempt([*words], str(folder), **how)._asdict()
        try:
            self.process = self.process or self.start()
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return json.loads(self.read_line(self.process))
        except BaseException:
            self.stop()
            raise

    def start(self) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "tests.harness.zygote"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            program, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def read_line(self, process: subprocess.Popen[str]) -> str:
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
    """Text that the processes of a run have printed."""
    return Path(f"{folder}.log").read_text()


def die_at(event: int, folder: str) -> None:
    """Kills this process at the event-th change of `folder` or a file below it, in whichever
    thread."""
    events = count(1)

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name not in EVENTS:
            return
        path = str(arguments[0])
        # rmtree names files relative to an open folder.
        if (
            name in ("os.remove", "os.rmdir")
            and isinstance(arguments[1], int)
            and arguments[1] >= 0
        ):
            path = f"{os.readlink(f'/proc/self/fd/{arguments[1]}')}/{path}"
        if folder not in path:
            return
        if name == "open" and not (isinstance(arguments[1], str) and "w" in arguments[1]):
            return
        if next(events) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def run_rank(attempt: Attempt, rank: int, port: int) -> None:
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
        die_at(attempt.at_event, f"{attempt.folder}/checkpoints")
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
    """Forks the processes, sends the signal, and waits; a process that fails takes the others
    along, as under torchrun."""
    port = find_free_port()
    log = Path(f"{attempt.folder}.log")
    log.touch()
    due = watch(attempt, log.stat().st_size)
    pids = []
    for rank in range(attempt.ranks):
        pid = os.fork()
        if not pid:
            run_rank(attempt, rank, port)
        pids.append(pid)
    codes: dict[int, int] = {}
    struck = attempt.after_seconds is None and attempt.after_lines is None
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                for other in set(pids) - codes.keys() if codes[pid] not in (0, 75) else ():
                    os.kill(other, signal.SIGKILL)
        target = pids[attempt.kill_rank]
        if not struck and target not in codes and next(due):
            os.kill(target, getattr(signal, attempt.signal))
            struck = True
        # The tests are gone.
        if os.getppid() != PARENT:
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def watch(attempt: Attempt, log_size: int) -> Iterator[bool]:
    """Yields whether it is time for the signal of an attempt; earlier attempts have printed
    `log_size` bytes."""
    metrics = Path(attempt.folder) / "metrics.jsonl"
    while attempt.after_lines is not None:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        yield lines >= attempt.after_lines
    log = Path(f"{attempt.folder}.log")
    while not re.search(rb"^(starting|resumed) from", log.read_bytes()[log_size:], re.MULTILINE):
        yield False
    began = time.monotonic()
    while True:
        yield time.monotonic() - began > (attempt.after_seconds or 0.0)


def main() -> None:
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(run(Attempt(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
