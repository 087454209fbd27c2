"""Prepares text from files and command lines for error messages, values for JSON, and tables for
the terminal."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any, TypeGuard

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Matches line breaks, control characters, and surrogates, by which Python represents the bytes of
a file name that are not UTF-8."""


def escape_unprintable(text: str) -> str:
    r"""Replaces line breaks, control characters and undecodable bytes by escape sequences, such as
    \n and \x1b."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def split_lines(text: str) -> list[str]:
    """Splits a text at its line ends alone. Python's `splitlines` also splits at form feeds, U+2028
    and others, which stand inside of lines that people write."""
    return re.split(r"\r\n|\n|\r", text)


def to_json(content: Any) -> str:
    """Returns `content` as strict JSON in one line; NaN and infinity become null, because many JSON
    parsers refuse NaN and infinity."""
    return json.dumps(replace_non_finite(content))


def is_shift(value: Any) -> bool:
    """Says whether `value` can shift times (models/sampler.py): a number above 0, or "auto"."""
    return value == "auto" or (type(value) in (int, float) and value > 0)


def is_figure(value: Any) -> TypeGuard[float]:
    """Says whether a value is a float, or an integer that a float can hold; JSON may have larger
    integers."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 1000)


def replace_non_finite(content: Any) -> Any:
    """Returns `content` converted to JSON types, with None in place of NaN and infinity."""
    return json.loads(json.dumps(content), parse_constant=lambda _: None)


MEMORY_ADDRESS = re.compile(r"( at)? 0x[0-9a-fA-F]{6,}")


def shorten_error(error: BaseException) -> str:
    """Returns the first line of an error's message, without memory addresses such as 0x7f3a…; if
    the message is empty, the name of the error's type."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return MEMORY_ADDRESS.sub("", escape_unprintable(lines[0]))


BYTE_UNITS = ("B", "KiB", "MiB", "GiB")


def format_bytes(size: float) -> str:
    """Formats a number of bytes with up to four digits, such as "23.65 MiB"."""
    power = 0
    while size >= 1024 and power < len(BYTE_UNITS) - 1:
        size /= 1024
        power += 1
    return f"{size:.4g} {BYTE_UNITS[power]}"


NUMBER_CELL = re.compile(r"[+×-]*[\d–]")
"""Matches the start of a table cell that holds a number; `format_table` aligns it to the right."""


LINE_WIDTH = 118
"""Characters in a line of what commands print."""


def format_table(rows: Sequence[Sequence[object]], width: int = 0) -> str:
    """Formats rows as aligned columns; the first row contains the column heads. Columns of numbers
    are aligned to the right, and None becomes a dash. If `width` is given, the last column is text,
    and is wrapped so that no line is longer."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    columns = []
    for head, *column in zip(*cells, strict=True):
        size = max(map(len, (head, *column)))
        is_text = not columns or (width and len(columns) == len(cells[0]) - 1)
        numbers = not is_text and all(NUMBER_CELL.match(cell) for cell in column)
        align = str.rjust if numbers else str.ljust
        columns.append([align(cell, size) for cell in (head, *column)])
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]

    if width:
        indent = " " * sum(len(column[0]) + 2 for column in columns[:-1])
        lines = [textwrap.fill(line, width, subsequent_indent=indent) for line in lines]
    return "\n".join(lines)
