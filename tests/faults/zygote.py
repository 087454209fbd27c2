"""Starts training processes in milliseconds: imports everything once, then forks for every run that is asked for.

Reads one JSON object a line, an `Attempt`, and answers each with a list: how every process of it ended, as
`subprocess` counts (minus the signal that killed it).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Of Python's audit events, those of a save."""


class Attempt(NamedTuple):
    """One start of a run, and what befalls it."""

    words: list[str]
    folder: str
    ranks: int = 1
    kill_rank: int = 0
    at_event: int | None = None
    """SIGKILL just before this one of the things done to files in `checkpoints`, counted from 1."""
    after_seconds: float | None = None
    """A signal so long after the first step may begin."""
    after_lines: int | None = None
    """A signal once so many lines are logged."""
    signal: str = "SIGKILL"


def die_at(event: int, folder: str) -> None:
    """SIGKILL for this process at the event-th change of a file below `folder`/checkpoints, in whichever thread."""
    left = [event]

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name not in EVENTS:
            return
        path = str(arguments[0])
        if name in ("os.remove", "os.rmdir") and isinstance(arguments[1], int) and arguments[1] >= 0:  # rmtree's way
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
    from tests.conftest import TINY_RUN
    from train import train
    from training.config.compose import compose, one_sentence

    log = os.open(f"{attempt.folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    if attempt.ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": attempt.ranks, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    if attempt.at_event is not None and rank == attempt.kill_rank:
        die_at(attempt.at_event, attempt.folder)
    code: Any = 0
    try:
        with one_sentence():
            train(compose([*TINY_RUN, *attempt.words, f"run_dir={attempt.folder}"]))
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def run(attempt: Attempt) -> list[int]:
    """Forks the processes, strikes, and waits for their end; one killed by a signal takes the others along."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = Path(f"{attempt.folder}.log").stat().st_size if Path(f"{attempt.folder}.log").exists() else 0
    pids = []
    for rank in range(attempt.ranks):
        if not (pid := os.fork()):
            child(attempt, rank, port)
        pids.append(pid)
    began, codes = None, {}
    metrics, log = Path(attempt.folder) / "metrics.jsonl", Path(f"{attempt.folder}.log")
    pending = attempt.after_seconds is not None or attempt.after_lines is not None
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                for other in set(pids) - codes.keys() if codes[pid] not in (0, 75) else ():
                    os.kill(other, signal.SIGKILL)  # as torchrun does
        if began is None and attempt.after_seconds is not None and log.exists():
            begun = re.search(rb"^(starting from|resumed from)", log.read_bytes()[printed:], re.MULTILINE)
            began = time.monotonic() if begun else None
        late = began is not None and time.monotonic() - began > (attempt.after_seconds or 0.0)
        if pending and not late and attempt.after_lines is not None and metrics.exists():
            late = metrics.read_bytes().count(b"\n") >= attempt.after_lines
        if pending and late and pids[attempt.kill_rank] not in codes:
            os.kill(pids[attempt.kill_rank], getattr(signal, attempt.signal))
            pending = False
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def main() -> None:
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.profiler

    import train  # noqa: F401  # all of these so that no child has to

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(Attempt(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
