"""What commands of this folder share: keys of their own among a training's overrides, tables of
text, and parts of pages that they make anew."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from common.errors import UserError
from training.config.compose import parse_words

Keys = TypeVar("Keys")
NUMBER = re.compile(r"[+×-]*[\d–]")


def split_words(schema: type[Keys], words: list[str], help_text: str) -> tuple[Keys, list[str]]:
    """Reads the words that set a key of `schema`, and returns the others, which are overrides."""
    own = {field.name for field in fields(cast(Any, schema))}
    others = [word for word in words if "=" in word and word.partition("=")[0] not in own]
    return parse_words(schema, [word for word in words if word not in others], help_text), others


def replace_between(text: str, start: str, end: str, content: str, page: str) -> str:
    """Returns the text of `page` with `content` between its marks; ValueError if a mark is gone."""
    if start not in text or end not in text:
        raise UserError(
            f"{page} has lost the lines {start.strip()} and {end}; put them around the table."
        )
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def format_table(rows: Sequence[Sequence[object]]) -> str:
    """Aligns rows as columns, the first row being the heads; columns of numbers to the right."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    columns = []
    for head, *column in zip(*cells, strict=True):
        width = max(map(len, (head, *column)))
        numbers = all(NUMBER.match(cell) for cell in column)
        align = str.rjust if columns and numbers else str.ljust
        columns.append([align(cell, width) for cell in (head, *column)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))
