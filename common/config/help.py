"""Makes the text of `--help`: what a command does, and a line for each of its keys."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, get_args, get_type_hints

from common.config.words import list_choices, name_type
from common.text import LINE_WIDTH, format_table

MAX_VALUE = 30
"""Characters that are shown of a default."""
REST = re.compile(r"(;|\.( |$)).*")
"""Matches what follows the first clause of a text."""


def read_docstrings(schema: type) -> dict[str, str]:
    """Returns name of a field -> the docstring below it, for the fields of a dataclass and of its
    bases."""
    texts = {}
    for kind in reversed(schema.__mro__[:-1]):
        (node,) = ast.parse(inspect.getsource(kind)).body
        for statement, after in pairwise(getattr(node, "body", [])):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                texts[ast.unparse(statement.target)] = str(ast.literal_eval(after.value))
    return texts


def list_keys(keys: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Lists (key=value, the first clause of its docstring) for the fields of a dataclass object,
    with those of nested objects under dotted names. A field without a docstring is left out."""
    texts = read_docstrings(type(keys))
    hints = get_type_hints(type(keys))
    rows = []
    for node in fields(keys):
        value = getattr(keys, node.name)
        if is_dataclass(value):
            rows += list_keys(value, f"{prefix}{node.name}.")
        elif node.name in texts:
            shown = re.sub(r'[" ]', "", json.dumps(value, ensure_ascii=False))
            shown = shown if len(shown) <= MAX_VALUE else f"{shown[:MAX_VALUE]}…"
            meaning = REST.sub("", " ".join(texts[node.name].split()))
            for kind in get_args(hints[node.name]) or [hints[node.name]]:
                if isinstance(kind, type) and issubclass(kind, Enum):
                    meaning += f": {name_type(kind)}"
            rows.append((f"{prefix}{node.name}={shown}", meaning))
    return rows


def format_help(text: str, defaults: Any, groups: Mapping[str, str] | None = None) -> str:
    """Returns the text of `--help` for a command whose keys are the fields of the dataclass object
    `defaults`; `text` says what the command does. `groups` maps each group of configuration files
    that the command takes to its default."""
    rows = [("key=default", "meaning"), *list_keys(defaults)]
    pages = [text.strip(), format_table(rows, LINE_WIDTH)]
    if groups:
        rows = [("group=default", "files of conf/<group>/")]
        for group, file in groups.items():
            rows.append((f"{group}={file}", ", ".join(list_choices(group))))
        pages.insert(1, format_table(rows, LINE_WIDTH))
    return "\n\n".join(pages)
