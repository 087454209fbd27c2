"""Progress: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
EVERY = 10.0
"""Seconds between two plain lines."""


class Progress:
    """Counts towards `total`: a tqdm bar on a terminal; elsewhere a line every `EVERY` seconds,
    unless `plain` is off.

    `lasting` leaves the finished bar on the screen.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        initial: int = 0,
        *,
        plain: bool = True,
        silent: bool = False,
        lasting: bool = True,
    ) -> None:
        from tqdm import tqdm

        self.total = total
        self.unit = unit
        self.silent = silent
        self.count = self.initial = initial
        self.started = self.shown = time.perf_counter()
        terminal = sys.stderr.isatty() and not silent
        self.bar = tqdm(
            total=total,
            initial=initial,
            unit=f" {unit}",
            unit_scale=True,
            disable=not terminal,
            leave=lasting,
        )
        self.plain = plain and not terminal and not silent

    def advance(self, count: int) -> None:
        self.count += count
        self.bar.update(count)
        if self.plain and time.perf_counter() - self.shown >= EVERY:
            self.shown = time.perf_counter()
            rate = (self.count - self.initial) / (self.shown - self.started)
            print(
                f"{self.count}/{self.total} {self.unit}, {rate:.1f} {self.unit}/s, {self.left()}",
                flush=True,
            )

    def left(self) -> str:
        """The time that the rest takes at the rate so far, in words."""
        done = self.count - self.initial
        if done <= 0:
            return "time left unknown"
        seconds = round((self.total - self.count) / done * (time.perf_counter() - self.started))
        hours = seconds // 3600
        minutes = seconds // 60
        if hours:
            return f"{hours} h {minutes % 60} min left"
        return f"{minutes} min left" if minutes else f"{seconds} s left"

    def say(self, line: str) -> None:
        """Prints a line without breaking the bar."""
        if self.silent:
            return
        self.bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()


def counted(items: Iterable[Item], total: int, unit: str, silent: bool = False) -> Iterator[Item]:
    """The items, with progress towards `total` of them while they are used."""
    progress = Progress(total, unit, silent=silent, lasting=False)
    try:
        for item in items:
            yield item
            progress.advance(1)
    finally:
        progress.close()
