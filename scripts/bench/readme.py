"""Writes the README's table of techniques from the newest results in docs/benchmarks.

    python -m scripts.bench readme

The figures are those of `python -m scripts.bench techniques` on a GPU, kept as docs/benchmarks/techniques_*.json. What
was not measured says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accel.stack import TECHNIQUES
from scripts.bench.report import put_between
from training.config.compose import ROOT

START, END = "<!-- techniques: made by `python -m scripts.bench readme` -->\n", "<!-- end of techniques -->"


def newest_results() -> list[dict[str, Any]]:
    """All results of `bench techniques` on a GPU that were kept, the newest date first."""
    files = sorted((ROOT / "docs" / "benchmarks").glob("techniques_*.json"))
    results = [json.loads(file.read_text()) | {"file": file.name} for file in files]
    measured = [result for result in results if result["environment"]["device"] == "cuda"]
    return sorted(measured, key=lambda result: result["environment"]["date"], reverse=True)


def cell(results: list[dict[str, Any]], key: str) -> str:
    """Speed and memory of a technique alone over its baseline; the best of its ways."""
    for result in results:
        measured = [e for e in result["alone"] if e["key"] == key and "speed" in e and key not in e["not_on"]]
        if measured:
            best = max(measured, key=lambda e: e["speed"])
            memory, base = best["memory_reserved_peak"], best["baseline_memory_reserved_peak"]
            shown = f", {memory / base:.0%} of the memory" if memory and base else ""
            way = "" if len(measured) == 1 else f" ({best['name'].split('=')[-1]})"
            return f"×{best['speed']:.2f}{shown}{way}"
    return "not measured"


def section(results: list[dict[str, Any]]) -> str:
    """The table, with the source of its figures below."""
    lines = ["| key | what it does | alone, over `eager`, on a GPU |", "|---|---|---|"]
    lines += [f"| `{kind.key}` | {kind.summary} | {cell(results, kind.key)} |" for kind in TECHNIQUES]
    if results:
        newest = results[0]
        e = newest["environment"]
        lines += [
            "",
            f"{e['hardware']}, torch {e['versions']['torch']}, triton {e['versions']['triton']}, {e['date']}, setting "
            f"`{newest['setting']}`, median of {next(r['n'] for r in newest['alone'] if 'n' in r)}: "
            f"[{newest['file']}](docs/benchmarks/{newest['file']}).",
        ]
    return "\n".join(lines) + "\n"


def rewritten(text: str, results: list[dict[str, Any]]) -> str:
    """The README with its table made anew; ValueError if the marks around it are gone."""
    return put_between(text, START, END, section(results), "README.md")


def main(words: list[str]) -> None:
    if words:
        raise ValueError(f"bench readme takes no arguments, and got {' '.join(words)}.")
    file: Path = ROOT / "README.md"
    file.write_text(rewritten(file.read_text(), newest_results()))
    print(file)
