"""Processes of our own: what they are given, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
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


def run_watched(command: list[str], news: Path, log: Path, patience: Callable[[], float]) -> str:
    """Runs a command that writes to the file `news` as it gets on, and returns how it ended, as the
    end of a sentence. It is killed after `patience()` seconds without news."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    limit = patience()
    since = time.monotonic()
    seen = None
    try:
        while process.poll() is None:
            time.sleep(0.05)
            stamp = news.stat().st_mtime_ns if news.exists() else None
            if stamp != seen:
                seen = stamp
                since = time.monotonic()
                limit = patience()
            if time.monotonic() - since > limit:
                return f"did not answer for {limit:.0f} s"
    finally:
        process.kill()
        code = process.wait()

    lines = log.read_text(errors="replace").strip().splitlines()
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    return f"ended with {name}" + (f" ({lines[-1].strip()})" if lines else "")
