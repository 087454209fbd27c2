"""What commands print: progress, and a stream that may break without ending them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")
LINE_INTERVAL_SECONDS = 10.0
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
        if self.plain and time.perf_counter() - self.shown >= LINE_INTERVAL_SECONDS:
            self.shown = time.perf_counter()
            rate = (self.count - self.initial) / (self.shown - self.started)
            print(
                f"{self.count}/{self.total} {self.unit}, {rate:.1f} {self.unit}/s, {self.format_time_left()}",
                flush=True,
            )

    def format_time_left(self) -> str:
        """The time that the rest takes at the rate so far, such as 02:46:39."""
        done = self.count - self.initial
        if done <= 0:
            return "time left unknown"
        seconds = max(0, self.total - self.count) / done * (time.perf_counter() - self.started)
        return f"{self.bar.format_interval(seconds)} left"

    def say(self, line: str) -> None:
        """Prints a line without breaking the bar."""
        if self.silent:
            return
        self.bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()


def show_progress(
    items: Iterable[Item], total: int, unit: str, silent: bool = False
) -> Iterator[Item]:
    """The items, with progress towards `total` of them while they are used."""
    progress = Progress(total, unit, silent=silent, lasting=False)
    try:
        for item in items:
            yield item
            progress.advance(1)
    finally:
        progress.close()


class AdvisoryStream:
    """A text stream that warns once, on stderr, where it cannot be written, and loses what comes
    after that."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, act: Callable[[], object]) -> None:
        """Acts on the stream; after an OSError its file descriptor is /dev/null, which also takes
        what is still in its buffer."""
        try:
            act()
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            with suppress(OSError):
                print(
                    f"warning: what is printed cannot be written ({error.strerror}); it is lost "
                    "from here on, and the command goes on.",
                    file=sys.__stderr__,
                    flush=True,
                )


@contextmanager
def tolerate_broken_output() -> Iterator[None]:
    """Inside, nothing that is printed to stdout or stderr can raise an OSError."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:  # it was closed before Python started (`>&-`)
                stream = stack.enter_context(open(os.devnull, "w"))
            advisory: Any = AdvisoryStream(stream)
            stack.callback(advisory.flush)
            stack.enter_context(redirect(advisory))
        yield
