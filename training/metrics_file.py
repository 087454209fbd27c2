"""metrics.jsonl: one JSON object a logged step. It is for people and plots; no run depends on
it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.files import rename, write_atomically
from common.text import as_json, finite, is_figure

NAME = "metrics.jsonl"


class Logged(NamedTuple):
    """What a metrics file holds."""

    lines: list[dict[str, Any]]
    damaged: int
    """Lines that are no object of a step and numbers."""
    torn: bool
    """Whether the last line is one of them and has no end: a process was killed while it wrote."""


def read_metrics(file: Path) -> Logged:
    """The lines of a metrics file, as far as they can be read; none where there is no file."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return Logged([], 0, False)
    except OSError:
        return Logged([], 1, False)
    found = [as_metrics(line) for line in content.splitlines()]
    torn = bool(found) and found[-1] is None and not content.endswith(b"\n")
    return Logged([line for line in found if line is not None], found.count(None), torn)


def as_metrics(line: bytes) -> dict[str, Any] | None:
    try:
        found = finite(json.loads(line))  # earlier versions wrote NaN
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, dict) and type(found.get("step")) is int
    return found if whole and all(y is None or is_figure(y) for y in found.values()) else None


def append_metrics(file: Path, metrics: Mapping[str, Any], torn: bool = False) -> None:
    """Adds a line; `not_finite` counts the values that it has as null because they are NaN or
    infinite.

    `torn`: the line before may have no end. OSError as the disk gives it.
    """
    line = finite(metrics)
    lost = sum(line[name] is None and metrics[name] is not None for name in line)
    with file.open("a") as stream:
        stream.write("\n" * torn + as_json(line | ({"not_finite": lost} if lost else {})) + "\n")


def drop_after(file: Path, step: int) -> list[dict[str, Any]]:
    """Drops logged steps after `step`, which a killed run had reached and this one will do again;
    returns the rest.

    What cannot be read goes too, with a warning, and `<file>.damaged` is then the file as it was.
    """
    logged = read_metrics(file)
    kept = [line for line in logged.lines if line["step"] <= step]
    if lost := logged.damaged - logged.torn:
        aside = file.with_name(f"{file.name}.damaged")
        rename(file, aside)
        warnings.warn(
            f"{file}: {lost} lines cannot be read; they are left out, and kept in {aside}.",
            stacklevel=2,
        )
    if kept or file.exists():
        write_atomically(file, "".join(f"{as_json(line)}\n" for line in kept))
    return kept
