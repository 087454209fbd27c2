"""Text that came from a file or a command line, made fit for one line of a message."""

from __future__ import annotations

import json
import re
from typing import Any, TypeGuard

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Line breaks, control characters, and bytes of a name that are not UTF-8."""


def escape_unprintable(text: str) -> str:
    r"""The same text with line breaks, control characters and undecodable bytes as escapes, such as
    \n and \x1b."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def to_json(content: Any) -> str:
    """Returns strict JSON in a line: null stands for a float that is not finite, which other
    readers of JSON refuse."""
    return json.dumps(replace_non_finite(content), allow_nan=False)


def is_figure(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that a float can hold; JSON may have longer ones."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 1000)


def replace_non_finite(content: Any) -> Any:
    """The same content, as JSON has it, with None in the place of floats that are not finite."""
    return json.loads(json.dumps(content), parse_constant=lambda _: None)


MEMORY_ADDRESS = re.compile(r"( at)? 0x[0-9a-fA-F]{6,}")


def shorten_error(error: BaseException) -> str:
    """The first line of an error's message without addresses in memory, or its type where the
    message is empty."""
    return MEMORY_ADDRESS.sub(
        "", escape_unprintable((str(error).strip().splitlines() or [type(error).__name__])[0])
    )
