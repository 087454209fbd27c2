"""Figures of a run for people: metrics.jsonl, the lines on the terminal, the table at the end.

No run depends on them. metrics.jsonl has one JSON object a logged step.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.files import rename, write_atomically
from common.text import as_json, finite, is_figure
from training.goodput import told as shares

FILE = "metrics.jsonl"
"""The name in a run folder."""


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


class MetricsFile:
    """The metrics file of a run that goes on."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.torn = False
        """Whether a line could not be written, and may have no end."""

    def drop_after(self, step: int) -> list[dict[str, Any]]:
        """Drops logged steps after `step`, which a killed run had reached and this one will do
        again; returns the rest.

        What cannot be read goes too, with a warning, and `<file>.damaged` is then the file as it
        was.
        """
        file = self.file
        logged = read_metrics(file)
        kept = [line for line in logged.lines if line["step"] <= step]
        lost = logged.damaged - logged.torn
        if lost:
            aside = file.with_name(f"{file.name}.damaged")
            rename(file, aside)
            warnings.warn(
                f"{file}: {lost} lines cannot be read; they are left out, and kept in {aside}.",
                stacklevel=2,
            )
        if kept or file.exists():
            write_atomically(file, "".join(f"{as_json(line)}\n" for line in kept))
        return kept

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Adds a line; `not_finite` counts the values that it has as null because they are NaN or
        infinite.

        Where it cannot be written a warning says so, once, and the run goes on without.
        """
        line = finite(metrics)
        lost = sum(line[name] is None and metrics[name] is not None for name in line)
        if lost:
            line["not_finite"] = lost
        try:
            with self.file.open("a") as stream:
                stream.write("\n" * self.torn + as_json(line) + "\n")
        except OSError as error:
            if not self.torn:
                warnings.warn(
                    f"{self.file} cannot be written ({error.strerror}); the run goes on, and lines "
                    "are missing.",
                    stacklevel=2,
                )
            self.torn = True


def log_line(metrics: Mapping[str, Any], left: str) -> str:
    """One line of the figures that matter while a run goes on, and the time that is left."""
    parts = [f"step {metrics['step']:>6}", f"loss {metrics['loss']:.4f}"]
    if "eval_loss" in metrics:
        parts.append(f"eval_loss {metrics['eval_loss']:.4f}")
    for kind in ("fd_", "kd_"):
        distances = [f"{name} {metrics[name]:.4g}" for name in metrics if name.startswith(kind)]
        parts += distances
        if distances:
            break
    parts += [f"lr {metrics['lr']:.2e}", f"{metrics['samples_per_s']:.1f} samples/s"]
    if metrics.get("mfu") is not None:
        parts.append(f"mfu {metrics['mfu']:.1%}")
    parts.append(f"data wait {metrics['data_wait']:.1%}")
    notes = {
        "skipped": "{} steps skipped: their gradients were not finite or spikes",
        "skipped_data": "others stand in for {} samples of damaged data",
        "backed_off": "{} steps spent on finding fp16's loss scale",
    }
    parts += [note.format(metrics[name]) for name, note in notes.items() if metrics.get(name)]
    return "  ".join([*parts, left])


def summary_table(summary: Mapping[str, Any]) -> str:
    """The summary as aligned lines, the ledger left out (it was printed at the start)."""
    shown = {k: v for k, v in summary.items() if k != "ledger" and v is not None}
    if "time" in shown:
        shown["time"] = shares(shown["time"])

    damaged = summary.get("skipped_data") or {}
    shown["skipped_data"] = "none"
    if damaged:
        names = ", ".join([*damaged][:5]) + ", …" * (len(damaged) > 5)
        shown["skipped_data"] = (
            f"others stood in for {sum(damaged.values())} samples of {len(damaged)} damaged "
            f"blocks: {names}"
        )
    width = max(map(len, shown))
    values = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in shown.items()}
    return "\n".join(f"  {k.ljust(width)}  {v}" for k, v in values.items())
