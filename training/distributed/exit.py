"""How a process ends: asked to by a signal, with the right exit code, and without the interpreter's
finalisation where that would hang.

No torch in here: `--help` comes this way too.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Any

from common.terminal import tolerate_broken_output
from training.config.build import admit_extensions
from training.config.compose import report_user_errors
from training.config.words import quote, refuse_words, select_overrides

if TYPE_CHECKING:
    from training.distributed.ranks import Ranks

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""The last is what Slurm can be told to send some time before the end (`--signal=USR1@120`)."""
RESUMABLE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the same command again goes on."""
group_joined = False
"""`Ranks.connect` sets it: this process belongs to a process group."""


class Request(IntEnum):
    """What the processes ask each other for, the strongest wins."""

    nothing = 0
    look = 1
    """At what may have to end the run: one of `also` was true in one of them."""
    stop = 2


class StopRequest:
    """Whether a signal has asked the run to stop. Inside `with` the signals no longer end the
    process.

    Of several processes one asked is enough. The question travels while the next step runs, so it
    costs no time; the answer is one step old. SIGHUP stays ignored where it is, for that is what
    nohup does.
    """

    def __init__(self, ranks: Ranks, *also: Callable[[], bool]) -> None:
        self.ranks = ranks
        self.also = also
        self.name = ""
        self.before: dict[str, Any] = {}
        self.answer: Callable[[], int] | None = None
        """Waits for the strongest of what all processes asked for at the step before."""

    def __enter__(self) -> StopRequest:
        # Python lets no other thread set handlers
        if threading.current_thread() is threading.main_thread():
            # scripts start background jobs without SIGINT
            nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            heard = [name for name in SIGNALS if not (nohup and name == "SIGHUP")]
            self.before = {
                name: signal.signal(getattr(signal, name), self.note_signal) for name in heard
            }
        return self

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        if self.name == "SIGINT" and number == signal.SIGINT:  # the second Ctrl-C: do not wait
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, handler in self.before.items():
            signal.signal(getattr(signal, name), handler)
        if self.answer is not None and kind is None:
            self.answer()

    def poll(self) -> Request:
        """To be called once a step, by all processes."""
        own = Request.look if any(bad() for bad in self.also) else Request.nothing
        if self.name:
            own = Request.stop
        if self.ranks.world_size == 1:
            return own
        strongest = self.answer() if self.answer else Request.nothing
        self.answer = self.ranks.begin_max(own)
        return Request(strongest)


@contextmanager
def exit_cleanly() -> Iterator[None]:
    """Runs the block and exits with its code; with a process group it skips the interpreter's
    finalisation.

    A sharded model keeps its process group alive, so gloo's threads outlive `Ranks.close()`. One of
    them may need the interpreter, to give back a tensor, while Python finalises; Python then ends
    that thread inside C++ code, which aborts the process ("terminate called without an active
    exception"), and torchrun calls the run failed.
    """
    code: Any = 0
    try:
        yield
    except BaseException as ending:
        if not group_joined:
            raise
        code = 1
        if isinstance(ending, SystemExit):
            code = ending.code
        else:
            traceback.print_exc()
    if not group_joined:
        return

    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    with tolerate_broken_output():  # flushes what was printed
        pass
    os._exit(code if isinstance(code, int) else int(code is not None))


@contextmanager
def resumable_command() -> Iterator[None]:
    """Surrounds a command that goes on where it stopped: mistakes and Ctrl-C become one sentence
    and an exit code."""
    with exit_cleanly(), report_user_errors():
        try:
            yield
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from what is finished", file=sys.stderr)
            sys.exit(130)


def run_app(app: Callable[[], None]) -> None:
    """Runs a `hydra.main` function as a command: mistakes become one sentence and exit code 1."""
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # makes Hydra raise, so that `report_user_errors` can translate
    )
    with exit_cleanly(), report_user_errors():
        refuse_words(select_overrides(sys.argv[1:]))
        sys.argv[1:] = map(quote, sys.argv[1:])
        overrides = (
            i for i, word in enumerate(sys.argv) if i and "=" in word and not word.startswith("-")
        )
        place = next(overrides, len(sys.argv))  # Hydra takes overrides in one stretch only
        sys.argv[place:place] = admit_extensions(sys.argv[1:])
        app()
