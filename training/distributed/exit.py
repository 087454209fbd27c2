"""How a process ends: with the right exit code, and without the interpreter's finalisation where
that would hang.

No torch in here: `--help` comes this way too.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common.terminal import advisory_printing
from training import loggers
from training.config.build import admit
from training.config.compose import one_sentence
from training.config.words import overrides_of, quoted, refuse_words

group_joined = False
"""`Ranks.connect` sets it: this process belongs to a process group."""


@contextmanager
def exiting() -> Iterator[None]:
    """Runs the block and exits with its code; with a process group or a hung logger, skips
    interpreter finalisation.

    A sharded model keeps its process group alive, so gloo's threads outlive `Ranks.close()`. One of
    them may need the interpreter, to give back a tensor, while Python finalises; Python then ends
    that thread inside C++ code, which aborts the process ("terminate called without an active
    exception"), and torchrun calls the run failed. And at exit Python would wait once more for a
    logger that did not finish in time.
    """
    code: Any = 0
    try:
        yield
    except SystemExit as ending:
        if not skips_finalisation():
            raise
        code = ending.code
    except BaseException:
        if not skips_finalisation():
            raise
        traceback.print_exc()
        code = 1
    if not skips_finalisation():
        return
    if isinstance(code, str):
        print(code, file=sys.stderr)
    if not loggers.finish_timed_out:
        atexit._run_exitfuncs()
    with advisory_printing():  # flushes what was printed
        pass
    os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def resumable_command() -> Iterator[None]:
    """Surrounds a command that goes on where it stopped: mistakes and Ctrl-C become one sentence
    and an exit code."""
    with exiting(), one_sentence():
        try:
            yield
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from what is finished", file=sys.stderr)
            sys.exit(130)


def skips_finalisation() -> bool:
    return group_joined or loggers.finish_timed_out


def run_app(app: Callable[[], None]) -> None:
    """Runs a `hydra.main` function as a command: mistakes become one sentence and exit code 1."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise, so that `one_sentence` can translate
    with exiting(), one_sentence():
        refuse_words(overrides_of(sys.argv[1:]))
        sys.argv[1:] = map(quoted, sys.argv[1:])
        overrides = (
            i for i, word in enumerate(sys.argv) if i and "=" in word and not word.startswith("-")
        )
        place = next(overrides, len(sys.argv))  # Hydra takes overrides in one stretch only
        sys.argv[place:place] = admit(sys.argv[1:])
        app()
