"""Text that came from a file or a command line, made fit for one line of a message."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The same text with line breaks, control characters and whatever else cannot be shown as escapes, such as \n."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
