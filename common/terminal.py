"""What a command prints is advice: a reader that goes away, or a full disk behind stdout, does not
end the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO


class AdvisoryStream:
    """A text stream that warns once, on stderr, where it cannot be written, and loses what comes
    after that."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self.failures_warned():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self.failures_warned():
            self.stream.flush()

    @contextmanager
    def failures_warned(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            send_nowhere(self.stream)
            with suppress(OSError):
                print(
                    f"warning: what is printed cannot be written ({error.strerror}); it is lost "
                    "from here on, and the command goes on.",
                    file=sys.__stderr__,
                    flush=True,
                )


def send_nowhere(stream: TextIO) -> None:
    """Points the stream's file descriptor at /dev/null; what is still in its buffer goes there
    too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def advisory_printing() -> Iterator[None]:
    """Inside, nothing that is printed to stdout or stderr can raise an OSError."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:  # it was closed before Python started (`>&-`)
                stream = stack.enter_context(open(os.devnull, "w"))
            advisory: Any = AdvisoryStream(stream)
            stack.callback(advisory.flush)
            stack.enter_context(redirect(advisory))
        yield
