"""Ends the process with an error message if fastlatent is not tested with this version of Python,
and with one line at Ctrl-C, until a command catches that itself. Silences PyTorch's profiler.

Each command imports this file before any other file, so this file must parse on any Python from 3.8
on.
"""

import os
import signal
import sys
import time

PROCESS_START = time.perf_counter()
"""Value of time.perf_counter(), in seconds, when this module was imported, which is the first thing
that a command does."""
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)
MAIN_PROCESS = os.getpid()
STOPPED = "stopped; the same command starts again, or continues from what is saved"


def refuse_python(version: tuple = sys.version_info, program: str = sys.executable) -> None:
    """Ends the process with an error message if `version`, a Python version such as (3, 11, 7), is
    outside the tested range."""
    if not OLDEST_PYTHON <= tuple(version[:2]) <= NEWEST_PYTHON:
        oldest, newest, this = (
            ".".join(map(str, numbers[:3])) for numbers in (OLDEST_PYTHON, NEWEST_PYTHON, version)
        )
        sys.exit(
            f"error: fastlatent needs Python {oldest} to {newest}; this is {this} ({program}); "
            f"`make setup PYTHON=python{oldest}` makes .venv/bin/python with one of them."
        )


def stop_at_once(*_: object) -> None:
    """Ends the process at Ctrl-C, without a traceback of what it was importing or compiling."""
    if os.getpid() == MAIN_PROCESS:  # and no worker that was forked
        os.write(2, f"\n{STOPPED}\n".encode())
    os._exit(130)


refuse_python()
# The profiler's messages about the warm-up do not help a user. PyTorch reads this variable when it
# is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Leave notebooks and tests, which import a command, their own handling of Ctrl-C. While `python -m`
# imports the package of a command, the program's name is "-m".
IS_COMMAND = os.path.basename(sys.argv[0]) in ("train.py", "precompute_latents.py", "-m")
if IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, stop_at_once)
