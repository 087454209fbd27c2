"""Progress: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Counts towards `total`. On a terminal a tqdm bar; elsewhere a line every `every` seconds if `every` is set."""

    def __init__(
        self, total: int, unit: str, initial: int = 0, every: float | None = None, silent: bool = False
    ) -> None:
        from tqdm import tqdm

        self.total, self.unit, self.every = total, unit, every
        self.count = self.initial = initial
        self.started = self.shown = time.perf_counter()
        terminal, self.silent = sys.stderr.isatty() and not silent, silent
        self.bar = tqdm(total=total, initial=initial, unit=unit, unit_scale=True, disable=not terminal)
        self.plain = every is not None and not terminal and not silent

    def advance(self, count: int) -> None:
        self.count += count
        self.bar.update(count)
        if self.plain and time.perf_counter() - self.shown >= (self.every or 0.0):
            self.shown = time.perf_counter()
            rate = (self.count - self.initial) / (self.shown - self.started)
            left = (self.total - self.count) / rate
            print(
                f"{self.count}/{self.total} {self.unit}, {rate:.1f} {self.unit}/s, {left / 60:.1f} min left", flush=True
            )

    def say(self, line: str) -> None:
        """Prints a line without breaking the bar."""
        if self.silent:
            return
        self.bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()
