"""What differs between two runs: configuration, ledger, versions, speed, loss.

python -m scripts.bench compare runs/a runs/b
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.text import is_figure, printable
from training.config.yaml_text import read_config

FIGURES = (
    "samples_per_s",
    "mfu",
    "memory_reserved_peak",
    "loss",
    "eval_loss",
    "steps",
    "warm_up_seconds",
    "seconds",
)
PLACES = ("run_dir", "checkpoint", "sample_grid")


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a tree of mappings."""
    if not isinstance(node, Mapping):
        return {prefix.removesuffix("."): node}
    return {
        k: v for name, value in node.items() for k, v in flat(value, f"{prefix}{name}.").items()
    }


def read_run(folder: str) -> dict[str, dict[str, Any]]:
    """Section -> flat facts of a finished run; ValueError if `folder` is none."""
    path = Path(folder).expanduser()
    try:
        config = read_config(path / "config.yaml")
        environment, summary = (
            json.loads((path / f"{name}.json").read_text()) for name in ("environment", "summary")
        )
        return {
            "configuration": {k: v for k, v in flat(config).items() if k not in PLACES},
            # Without the evidence, which holds counts that differ for good reasons.
            "ledger": {
                key: f"{row['requested']} → {row['active']}"
                for key, row in summary["ledger"].items()
            },
            "versions": environment["versions"]
            | {"hardware": environment["hardware"], "git": environment["git"]},
            "result": {name: summary[name] for name in FIGURES if is_figure(summary.get(name))},
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        name = Path(str(getattr(error, "filename", None) or "its JSON")).name
        raise UserError(
            f"{folder} is no finished run: {name} cannot be read; name two run folders."
        ) from None


def number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value))


def ratio(a: Any, b: Any) -> str | None:
    numbers = isinstance(a, int | float) and isinstance(b, int | float) and a
    return f"×{b / a:.3f}" if numbers else None


def comparison(a: str, b: str) -> str:
    """The whole answer as text."""
    first = read_run(a)
    second = read_run(b)
    from scripts.bench.report import table  # brings torch

    parts = []
    for section in first:
        one = first[section]
        other = second[section]
        result = section == "result"
        rows = [
            (
                key,
                number(one.get(key)),
                number(other.get(key)),
                ratio(one.get(key), other.get(key)) if result else "",
            )
            for key in one | other
            if one.get(key) != other.get(key)
        ]
        head = (section, a, b, "B / A" if result else "")
        parts.append(table([head, *rows]) if rows else f"{section}: the same")
    return "\n\n".join(parts)


def main(words: list[str]) -> None:
    if len(words) != 2 or any(word.startswith("-") for word in words):
        raise UserError(
            "bench compare takes two run folders: python -m scripts.bench compare runs/a runs/b"
        )
    print(comparison(*words))
