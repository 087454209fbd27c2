"""Being asked to stop: a signal sets a flag, and the run ends at the next step that all processes
agree on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from training.distributed.ranks import Ranks

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""The last is what Slurm can be told to send some time before the end (`--signal=USR1@120`)."""
EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the same command again goes on."""


class Asked(IntEnum):
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
        self.pending: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> StopRequest:
        # Python lets no other thread set handlers
        if threading.current_thread() is threading.main_thread():
            # scripts start background jobs without SIGINT
            nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            heard = [name for name in SIGNALS if not (nohup and name == "SIGHUP")]
            self.before = {name: signal.signal(getattr(signal, name), self.note) for name in heard}
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.name == "SIGINT" and number == signal.SIGINT:  # the second Ctrl-C: do not wait
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, handler in self.before.items():
            signal.signal(getattr(signal, name), handler)
        if self.pending is not None and kind is None:
            self.pending[0].wait()

    def asked(self) -> Asked:
        """To be called once a step, by all processes."""
        own = Asked.nothing
        if any(bad() for bad in self.also):
            own = Asked.look
        if self.name:
            own = Asked.stop
        if self.ranks.world_size == 1:
            return own
        answer = Asked.nothing
        if self.pending is not None:
            work, votes = self.pending
            work.wait()
            answer = Asked(int(votes.item()))
        votes = torch.tensor(float(own))
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, async_op=True)
        self.pending = work, votes
        return answer
