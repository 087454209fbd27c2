"""What commands of this folder share: keys of their own among a training's overrides, tables of
text, and parts of pages that they make anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

from common.errors import UserError
from training.config.compose import from_words

Keys = TypeVar("Keys")


def own_and_others(schema: type[Keys], words: list[str], help_text: str) -> tuple[Keys, list[str]]:
    """Reads the words that set a key of `schema`, and returns the others, which are overrides."""
    own = {field.name for field in fields(cast(Any, schema))}
    others = [word for word in words if "=" in word and word.partition("=")[0] not in own]
    return from_words(schema, [word for word in words if word not in others], help_text), others


def put_between(text: str, start: str, end: str, content: str, page: str) -> str:
    """Returns the text of `page` with `content` between its marks; ValueError if a mark is gone."""
    if start not in text or end not in text:
        raise UserError(
            f"{page} has lost the lines {start.strip()} and {end}; put them around the table."
        )
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def table(rows: Sequence[Sequence[object]]) -> str:
    """Aligns rows as columns, the first row being the heads; columns of numbers to the right."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def aligned(cell: str, i: int) -> str:
        leads = (row[i].lstrip("+-×").replace("–", "0")[:1] for row in cells[1:])
        if i > 0 and all(lead.isdigit() for lead in leads):
            return cell.rjust(widths[i])
        return cell.ljust(widths[i])

    lines = ("  ".join(aligned(cell, i) for i, cell in enumerate(row)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)
