"""Processes of our own: what they are given, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress


def environment() -> dict[str, str]:
    """Variables for a child: this process's, and its import path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session of its own, and all that it started; waits for it, and
    closes its stdin."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    with suppress(OSError):  # what it was told last was never read
        process.stdin.close()
