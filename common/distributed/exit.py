"""Ends a process on a signal or an error, with the right exit code. Skips the finalisation of
Python's interpreter if the finalisation could abort the process.

This file must not import torch, because `--help` imports this file and must stay quick.
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
from dataclasses import replace
from enum import IntEnum
from types import FrameType
from typing import Any

from common.config.build import admit_extensions
from common.config.compose import compose, list_groups, report_user_errors
from common.config.help import format_help
from common.config.schema import PrecomputeConfig
from common.config.words import quote, refuse_words, select_overrides
from common.output import tolerate_broken_output

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that ask a run to stop. Slurm can send SIGUSR1 before the time limit
(`--signal=USR1@120`)."""
RESUMABLE_EXIT_CODE = 75
"""Exit code of a run that a signal stopped, and that the same command resumes: EX_TEMPFAIL,
"temporary failure", of C's header sysexits.h."""


class Request(IntEnum):
    """A request that one rank sends to all ranks; every rank obeys the highest request of all
    ranks."""

    nothing = 0
    look = 1
    """All ranks must check for a failure, because a failure check of some rank returned true."""
    stop = 2
    """A signal asked the run to stop."""


class StopRequest:
    """Catches signals that ask the run to stop; in its `with` block these signals no longer end the
    process.

    A signal to one rank stops all ranks. The ranks exchange their requests while the next step
    runs, which costs no time; each rank therefore sees the other ranks' requests one step later.
    Under nohup, which ignores SIGHUP, SIGHUP stays ignored.
    """

    def __init__(
        self,
        *failure_checks: Callable[[], bool],
        begin_max: Callable[[int], Callable[[], int]] | None = None,
    ) -> None:
        self.begin_max = begin_max
        """`Ranks.begin_max`, by which the ranks exchange requests; None if there is only this
        process."""
        self.failure_checks = failure_checks
        self.name = ""
        """Name of the last signal that arrived, such as SIGTERM; empty before the first one."""
        self.before: dict[str, Any] = {}
        """Name of a signal -> the handler of the signal that the `with` statement replaced, and
        restores at its end."""
        self.answer: Callable[[], int] | None = None
        """Function that waits for, and returns, the highest request that any rank sent in the step
        before; None before the first step."""

    def __enter__(self) -> StopRequest:
        # Outside of the main thread, do not set signal handlers, because Python lets only the main
        # thread set them.
        if threading.current_thread() is not threading.main_thread():
            return self
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for name in SIGNALS:
            if not (nohup and name == "SIGHUP"):
                self.before[name] = signal.signal(getattr(signal, name), self.note_signal)
        return self

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        # The second Ctrl-C ends the process without saving; a sweep sends SIGTERM in between.
        if self.name == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.name != "SIGINT":
            self.name = signal.Signals(number).name

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, handler in self.before.items():
            signal.signal(getattr(signal, name), handler)
        if self.answer is not None and kind is None:
            self.answer()

    def poll(self) -> Request:
        """Returns the highest request of all ranks: with one rank, its request in this step; with
        several ranks, the highest request that any rank sent in the step before. All ranks must
        call the method once per step."""
        request = Request.nothing
        if any(may_have_failed() for may_have_failed in self.failure_checks):
            request = Request.look
        if self.name:
            request = Request.stop
        if self.begin_max is None:
            return request
        highest = self.answer() if self.answer else Request.nothing
        self.answer = self.begin_max(request)
        return Request(highest)


@contextmanager
def exit_cleanly() -> Iterator[None]:
    """Runs the `with` block. If the process is then in a process group, leaves the group, exits
    with the exit code of the block, and skips the finalisation of Python's interpreter.

    Nothing in the block may leave the group. A sharded model keeps gloo's threads alive even then,
    and this function would not know of them. If one of these threads must release a tensor while
    Python finalises, it needs the interpreter; Python then ends the thread inside C++ code, which
    aborts the process ("terminate called without an active exception"), and torchrun reports a
    failed run.
    """
    try:
        yield
    except BaseException as ending:
        end_if_in_group(ending)
        raise
    end_if_in_group(SystemExit())


def end_if_in_group(ending: BaseException) -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return

    code = 1
    if isinstance(ending, SystemExit):
        code = ending.code or 0
    else:
        traceback.print_exception(ending)
    # After a failure, do not leave the group, because that may wait for ranks that have ended.
    if code in (0, RESUMABLE_EXIT_CODE):
        distributed.destroy_process_group()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    # Flush stdout and stderr, because `os._exit` does not: `tolerate_broken_output` flushes both
    # when its `with` block ends.
    with tolerate_broken_output():
        pass
    os._exit(code)


def run_app(
    app: Callable[[], None], config_name: str = "train", help_text: str | None = None
) -> None:
    """Runs `app`, a `hydra.main` function of this `config_name`, as a command; prints one sentence
    and exits with code 1 for a mistake of the user. `--help` prints `help_text` and the keys."""
    # Make Hydra raise its errors, which `report_user_errors` turns into sentences.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with exit_cleanly(), report_user_errors(config_name):
        if {"-h", "--help"} & {*sys.argv[1:]}:
            defaults: Any = compose([]).cfg
            if config_name != "train":
                defaults = replace(PrecomputeConfig(), runtime=defaults.runtime)
            print(format_help(help_text or "", defaults, list_groups(config_name)))
            return
        refuse_words(select_overrides(sys.argv[1:]))
        sys.argv[1:] = map(quote, sys.argv[1:])

        # Insert the overrides that extensions need directly before the first override of the
        # command line, because Hydra accepts overrides only next to each other.
        overrides = (
            i for i, word in enumerate(sys.argv) if i and "=" in word and not word.startswith("-")
        )
        place = next(overrides, len(sys.argv))
        sys.argv[place:place] = admit_extensions(sys.argv[1:])
        app()
