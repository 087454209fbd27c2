"""Shows the progress of a command, and keeps the command running when its output cannot be
written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

LINE_INTERVAL_SECONDS = 10.0
"""Seconds between two printed lines of progress; used if stderr is no terminal, so that no progress
bar is shown."""


class Progress:
    """Shows how much of `total` is done, or nothing if `silent` is true. On a terminal it shows a
    tqdm bar; the finished bar stays on the screen if `lasting` is true. Without a terminal it
    prints a line every `LINE_INTERVAL_SECONDS`, unless `plain` is false."""

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
        self.initial = initial
        self.count = initial
        self.started = time.perf_counter()
        self.last_line = self.started
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
        if self.plain and time.perf_counter() - self.last_line >= LINE_INTERVAL_SECONDS:
            self.last_line = time.perf_counter()
            rate = (self.count - self.initial) / (self.last_line - self.started)
            print(
                f"{self.count}/{self.total} {self.unit}, {rate:.1f} {self.unit}/s, "
                f"{self.format_time_left()}",
                flush=True,
            )

    def format_time_left(self) -> str:
        """Formats the remaining time at the average rate so far, such as "02:46:39 left"."""
        done = self.count - self.initial
        if done <= 0:
            return "time left unknown"
        seconds = max(0, self.total - self.count) / done * (time.perf_counter() - self.started)
        return f"{self.bar.format_interval(seconds)} left"

    def say(self, line: str) -> None:
        """Prints a line above the progress bar."""
        if self.silent:
            return
        self.bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()


class AdvisoryStream:
    """A text stream that cannot end the command by an OSError: if writing to the underlying stream
    fails, it warns once on stderr and drops all later output."""

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
        """Calls `act`, which writes to or flushes the stream. If that raises an OSError, redirects
        the file descriptor of the stream to /dev/null, and warns."""
        try:
            act()
        except OSError as error:
            # Redirect the file descriptor, not only the Python object: at exit Python flushes the
            # stream's buffer to the descriptor, which then does not fail again.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
            with suppress(OSError):
                print(
                    f"warning: output cannot be written ({error.strerror}); the command continues "
                    "without output.",
                    file=sys.__stderr__,
                    flush=True,
                )


@contextmanager
def tolerate_broken_output() -> Iterator[None]:
    """In the `with` block, an OSError when writing to stdout or stderr causes a warning, not an
    exception."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:  # the shell closed it (`>&-`)
                stream = stack.enter_context(open(os.devnull, "w"))
            advisory: Any = AdvisoryStream(stream)
            stack.callback(advisory.flush)
            stack.enter_context(redirect(advisory))
        yield
