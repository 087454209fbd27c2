"""What a command prints is advice: a reader that goes away, or a full disk behind stdout, does not
end the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
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
