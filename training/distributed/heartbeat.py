"""Work that all processes wait for: as long as each of them makes progress, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from training.distributed.ranks import Ranks

ROUND = 1.0
"""Seconds between two exchanges of how far each process is, while the work goes on."""


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
        ended: list[tuple[Any, str, BaseException | None]] = []

        def run() -> None:
            try:
                ended.append((work(), "", None))
            except OSError as error:
                where = f": {error.filename}" if error.filename else ""
                ended.append(
                    (None, f"{error.strerror}{where}" if error.strerror else str(error), None)
                )
            except BaseException as error:
                ended.append((None, "", error))

        self.advance()
        # a disk may hang
        thread = threading.Thread(target=run, name=threading.current_thread().name, daemon=True)
        thread.start()
        while True:
            thread.join(min(ROUND, self.patience / 4))
            result, problem, failure = ended[0] if ended else (None, "", None)
            still = 0.0 if ended else time.monotonic() - self.advanced
            shares = self.exchanged(
                (bool(ended), still, result, problem, repr(failure) if failure else "")
            )
            if failure is not None:
                raise failure
            for rank, (_, still, _, _, failed) in enumerate(shares):
                if failed:
                    raise RuntimeError(f"process {rank} failed: {failed}")
                if still > self.patience:
                    raise TimeoutError(
                        f"process {rank} has written nothing for {self.patience:.0f} s"
                    )
            if all(share[0] for share in shares):
                if problems := [problem for _, _, _, problem, _ in shares if problem]:
                    raise OSError(problems[0])
                return [share[2] for share in shares]

    def exchanged(self, share: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if self.group is None:
            return [share]
        shares: list[Any] = [None] * self.ranks.world_size
        try:
            dist.all_gather_object(shares, share, group=cast("dist.ProcessGroup", self.group))
        except RuntimeError as error:
            raise TimeoutError(
                f"another process has ended, or has not answered for {self.patience:.0f} s"
            ) from error
        return shares
