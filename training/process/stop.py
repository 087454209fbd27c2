"""Being asked to stop: a signal sets a flag, and the run ends at the next step that all processes agree on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from training.process.ranks import Ranks

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
"""The last is what Slurm can be told to send some time before the end (`--signal=USR1@120`)."""
EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the same command again goes on."""


class StopRequest:
    """True once a signal has asked the run to stop. Inside `with` the signals no longer end the process.

    `also` is asked too: a save that failed in the background. Of several processes one asked is enough. The question
    travels while the next step runs, so it costs no time; the answer is one step old.
    """

    def __init__(self, ranks: Ranks, also: Callable[[], bool] = lambda: False) -> None:
        self.ranks, self.also, self.name = ranks, also, ""
        self.before: dict[str, Any] = {}
        self.pending: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            self.before = {name: signal.signal(getattr(signal, name), self.note) for name in SIGNALS}
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

    def __bool__(self) -> bool:
        """Asked once a step, by all processes."""
        if self.ranks.world_size == 1:
            return bool(self.name) or self.also()
        answer = False
        if self.pending is not None:
            work, votes = self.pending
            work.wait()
            answer = bool(votes.item())
        votes = torch.tensor(float(bool(self.name) or self.also()))
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, async_op=True)
        self.pending = work, votes
        return answer
