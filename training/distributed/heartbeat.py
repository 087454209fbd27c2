"""Work that all processes wait for: as long as each of them makes progress, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from training.distributed.ranks import Ranks

ROUND = 1.0
"""Seconds between two exchanges of how far each process is, while the work goes on."""


class Share(NamedTuple):
    """What a process tells the others of its work."""

    ended: bool = False
    still: float = 0.0
    """Seconds since it made progress."""
    result: Any = None
    problem: str = ""
    """What went wrong with its disk."""
    failure: str = ""
    """What went wrong otherwise."""


class Together:
    """Runs a function in every process, each in a thread of its own, and gives all of them all
    results.

    The function calls `advance` as it gets on. A process that has not done so for `patience`, or
    that does not answer for so long, ends the work of all with a TimeoutError. Training goes on
    beside it: the exchange has its own group.
    """

    def __init__(self, ranks: Ranks, patience: timedelta) -> None:
        self.ranks = ranks
        self.patience = patience.total_seconds()
        self.group = None if ranks.alone else dist.new_group(backend="gloo", timeout=patience)
        self.done = 0
        """Bytes, of this process."""
        self.advanced = time.monotonic()

    def advance(self, count: int = 0) -> None:
        self.done = self.done + count
        self.advanced = time.monotonic()

    def results(self, work: Callable[[], Any]) -> list[Any]:
        """The results of all processes, in order; all of them call it.

        OSError, the same in all processes, if the work of one ended with an OSError; TimeoutError
        as said above; any other exception is raised where it happened, and as a RuntimeError in the
        others.
        """
        done: tuple[Share, BaseException | None] | None = None

        def run() -> None:
            nonlocal done
            done = share_of(work)

        # In a thread that nobody has to wait for: a disk may hang.
        self.advance()
        thread = threading.Thread(target=run, name=threading.current_thread().name, daemon=True)
        thread.start()
        while True:
            thread.join(min(ROUND, self.patience / 4))
            own, failure = done or (Share(still=time.monotonic() - self.advanced), None)
            shares = self.exchanged(own)
            if failure is not None:
                raise failure
            for rank, share in enumerate(shares):
                if share.failure:
                    raise RuntimeError(f"process {rank} failed: {share.failure}")
                if share.still > self.patience:
                    raise TimeoutError(
                        f"process {rank} has written nothing for {self.patience:.0f} s"
                    )
            if all(share.ended for share in shares):
                break

        for share in shares:
            if share.problem:
                raise OSError(share.problem)
        return [share.result for share in shares]

    def exchanged(self, share: Share) -> list[Share]:
        if self.group is None:
            return [share]
        shares: list[Any] = [None] * self.ranks.world_size
        try:
            dist.all_gather_object(shares, share, group=self.group)  # pyright: ignore[reportArgumentType]
        except RuntimeError as error:
            raise TimeoutError(
                f"another process has ended, or has not answered for {self.patience:.0f} s"
            ) from error
        return shares


def share_of(work: Callable[[], Any]) -> tuple[Share, BaseException | None]:
    """Does the work, whatever it ends with; returns what to tell of it, and a failure of our
    own."""
    try:
        return Share(ended=True, result=work()), None
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        problem = f"{error.strerror}{where}" if error.strerror else str(error)
        return Share(ended=True, problem=problem), None
    except BaseException as error:
        return Share(ended=True, failure=repr(error)), error
