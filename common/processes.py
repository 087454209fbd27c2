"""Processes of our own: what they are given, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import IO


def environment(without: Collection[str] = ()) -> dict[str, str]:
    """Variables for a child: this process's, but for those `without`, and its import path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    own = {name: value for name, value in os.environ.items() if name not in without}
    return own | {"PYTHONPATH": path}


def attended(
    command: Sequence[str],
    seconds: float | None = None,
    output: IO[bytes] | None = None,
    without: Collection[str] = (),
) -> int | None:
    """Runs a command to its end, in a session of its own; returns its exit code, or None if it took
    longer than `seconds`. Whatever it started has ended too. `output` takes what it says,
    `without` names variables that it does not get."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env=environment(without),
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session of its own, and all that it started; waits for it, and
    closes its stdin."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):  # what it was told last was never read
            process.stdin.close()


def end_with(parent: int) -> None:
    """Ends this process, which leads a session of its own, and those that it started, within a
    second after `parent`, however that ends."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()
