"""Runs a case in a forked process that may take 1 GiB of memory and 5 s of processor time."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.config.compose import report_user_errors
from common.errors import UserError
from common.files import lock_folder

GIB = 2**30
CPU_SECONDS = 5
HANG_SECONDS = 600
FORK: Any = multiprocessing.get_context("fork")


class Ending(NamedTuple):
    """How a case ended: "success" and "sentence" are right, "unfit message", "traceback" and
    "killed" are faults of the project."""

    kind: str
    text: str = ""

    @property
    def right(self) -> bool:
        return self.kind in ("success", "sentence")


def run_limited(case: Callable[[], object]) -> Ending:
    receiver, sender = FORK.Pipe(duplex=False)
    process = start_fork(answer, case, sender)
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return Ending("killed", f"exit code {process.exitcode}")


def start_fork(target: Callable[..., None], *arguments: object) -> Any:
    process = FORK.Process(target=target, args=arguments)
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; nothing that they hold is needed.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def take_lock(folder: Path, sender: Connection, part: dict[str, int]) -> None:
    """Sends what a process hears that wants a folder's lock, and waits to be killed."""
    try:
        lock = lock_folder(folder, "Busy.", **part)
        with lock.take_turn():
            sender.send("locked")
    except UserError as error:
        sender.send(str(error))
    signal.pause()


@contextlib.contextmanager
def lock_elsewhere(folder: Path, **part: int) -> Iterator[tuple[Any, str]]:
    """Yields another process that wants the lock of a folder, or of a part of it, and what it
    hears. The process keeps the lock until it is killed, at the end of the `with` block."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = start_fork(take_lock, folder, sender, part)
    yield process, receiver.recv()
    process.kill()
    process.join()


def answer(case: Callable[[], object], sender: Connection) -> None:
    """Sends the ending of the case, and ends the process at once, whatever threads it has."""
    set_limits(CPU_SECONDS)
    warnings.simplefilter("ignore")
    sender.send(judge(case))
    os._exit(0)


def set_limits(cpu_seconds: int) -> None:
    """Limits what this process may take from now on; an alarm ends it if it hangs."""
    torch.set_num_threads(1)
    taken = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
    limits = {resource.RLIMIT_DATA: 1024 * int(taken) + GIB, resource.RLIMIT_CPU: cpu_seconds}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, resource.RLIM_INFINITY))
    signal.alarm(HANG_SECONDS)


def judge(case: Callable[[], object]) -> Ending:
    """Runs a case here, and judges what a user would see."""
    errors = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(errors),
            report_user_errors(),
        ):
            case()
    except SystemExit:
        message = errors.getvalue().removesuffix("\n")
        return Ending("unfit message" if is_unfit(message) else "sentence", message[:3000])
    except BaseException:
        return Ending("traceback", traceback.format_exc()[-3000:])
    return Ending("success")


def is_unfit(message: str) -> bool:
    """Whether a message has line breaks, control characters or an address in memory, or is very
    long."""
    unfit = r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|\b0x[0-9a-f]{6}"
    return len(message) > 1500 or re.search(unfit, message) is not None
