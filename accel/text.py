"""Text that came from a file or a command line, made fit for one line of a message."""

from __future__ import annotations

import re

UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Line breaks, control characters, and bytes of a name that are not UTF-8."""


def printable(text: str) -> str:
    r"""The same text with line breaks, control characters and undecodable bytes as escapes, such as \n and \x1b."""
    return UNFIT.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
