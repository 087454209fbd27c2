"""Ends the process with a sentence if this Python is none that fastlatent is tested with.

Entry points import it before anything else, so any Python from 3.8 on has to be able to read it.
"""

import sys
import time

PROCESS_START = time.perf_counter()
"""When this process began, but for Python itself."""
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)


def refuse_python(version: tuple = sys.version_info, program: str = sys.executable) -> None:
    """SystemExit with a sentence for a version outside of the range."""
    if not OLDEST_PYTHON <= tuple(version[:2]) <= NEWEST_PYTHON:
        oldest, newest, this = (
            ".".join(map(str, numbers[:3])) for numbers in (OLDEST_PYTHON, NEWEST_PYTHON, version)
        )
        sys.exit(
            f"error: fastlatent needs Python {oldest} to {newest}; this is {this} ({program}); "
            f"`make setup PYTHON=python{oldest}` makes .venv/bin/python with one of them."
        )


refuse_python()
