"""How a process ends. No torch in here: `--help` comes this way too."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from training import loggers

group_joined = False
"""Set by who makes this process one of a group."""


@contextmanager
def leaving() -> Iterator[None]:
    """Ends the process with the exit code of what is inside; one of a group, or one whose logger hangs, at once.

    A sharded model keeps its process group alive, so gloo's threads outlive `Ranks.close()`. One of them may just then
    need the interpreter to give back a tensor; while Python finalises it is ended inside C++ code, which aborts the
    process ("terminate called without an active exception"), and torchrun calls the run failed. And a logger that
    could not be finished in time would be waited for again.
    """
    code: Any = 0
    try:
        yield
    except SystemExit as ending:
        if not at_once():
            raise
        code = ending.code
    except BaseException:
        if not at_once():
            raise
        traceback.print_exc()
        code = 1
    if not at_once():
        return
    if isinstance(code, str):
        print(code, file=sys.stderr)
    if not loggers.hanging:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def at_once() -> bool:
    return group_joined or loggers.hanging
