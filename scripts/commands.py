"""Helpers of this folder's commands: they run a command, split the arguments of a command line into
the command's own keys and overrides of the training configuration, find encoders, format tables,
and replace parts of pages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, TypeVar, cast

from common.config.compose import CONF_FOLDER, parse_words, parse_yaml, report_user_errors
from common.errors import UserError

Keys = TypeVar("Keys")
NUMBER_CELL = re.compile(r"[+×-]*[\d–]")
"""Matches the start of a table cell that holds a number; `format_table` aligns it to the right."""

ENCODER_CLASSES = {
    "encoder": "models.autoencoders.DiffusersAutoencoder",
    "text_encoder": "models.text_encoders.HubTextEncoder",
}
"""Group of the configuration -> class that opens a folder or hub id."""


def run_command(
    run: Callable[[Keys], object],
    schema: type[Keys],
    help_text: str | None,
    report_errors: Callable[[], AbstractContextManager[None]] = report_user_errors,
) -> None:
    """Runs the function `run` of a command with the keys of the command line, an instance of
    `schema`; `report_errors` turns mistakes of the user into messages."""
    with report_errors():
        run(parse_words(schema, sys.argv[1:], help_text or ""))


def split_words(schema: type[Keys], words: list[str], help_text: str) -> tuple[Keys, list[str]]:
    """Splits the arguments `words` of a command line. Returns an instance of `schema`, made from
    the arguments that set one of its keys, and a list of all other arguments, which are overrides
    of the training configuration."""
    keys = {field.name for field in fields(cast(Any, schema))}
    overrides = [word for word in words if "=" in word and word.partition("=")[0] not in keys]
    key_words = [word for word in words if word not in overrides]
    return parse_words(schema, key_words, help_text), overrides


def format_rows(value: Any, levels: int = 2) -> str:
    """Formats lists and dicts as JSON. A value that lies `levels` levels deep stands on one line
    with all that it contains."""
    if levels == 0 or not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, dict):
        lines = [
            f"{json.dumps(key)}: {format_rows(item, levels - 1)}" for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}"
    return "[\n" + ",\n".join(format_rows(item, levels - 1) for item in value) + "\n]"


def replace_between(text: str, start: str, end: str, content: str, page: str) -> str:
    """Returns `text` with `content` in place of the text between the marks `start` and `end`.
    Raises a UserError that names `page` if a mark is missing."""
    if start not in text or end not in text:
        raise UserError(
            f"{page} has lost the lines {start.strip()} and {end}; put them around the table."
        )
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def format_table(rows: Sequence[Sequence[object]]) -> str:
    """Formats rows as aligned columns; the first row contains the column heads. Columns of numbers
    are aligned to the right, and None becomes a dash."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    columns = []
    for head, *column in zip(*cells, strict=True):
        width = max(map(len, (head, *column)))
        numbers = all(NUMBER_CELL.match(cell) for cell in column)
        align = str.rjust if columns and numbers else str.ljust
        columns.append([align(cell, width) for cell in (head, *column)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def find_encoder_node(group: str, name: str) -> dict[str, Any]:
    """Returns the configuration of an encoder: a file of conf/<group>, or a folder or hub id."""
    file = CONF_FOLDER / group / f"{name}.yaml"
    if file.is_file() and name not in ("local", "transformers"):
        return parse_yaml(file.read_text())
    return {"_target_": ENCODER_CLASSES[group], "path": name}
