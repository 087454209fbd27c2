"""Rows of tables: the result of a case, what identifies it, its remarks and its cells."""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.files import hash_content
from common.text import format_table
from scripts.bench import TABLES, Figures, Words
from scripts.timing import judge_ratio

UNITS = {"M": 1e6, "G": 1e9, "MiB": 2**20, "GiB": 2**30}


class Result(NamedTuple):
    """The figures of one case, and the facts of their measurement: hardware, versions, git commit,
    date and command."""

    entry: Figures
    environment: Figures


def identify(name: str, run: Figures) -> str:
    """Returns a hash of what identifies the result of the case `name`: hardware, versions of torch
    and Triton, overrides and keys. `run` is the result's `environment`. The code is no part of it:
    a result stays a result after the next commit, and says by which code it was measured."""
    versions = [run["versions"].get(package) for package in ("torch", "triton")]
    facts = [name, run["hardware"], versions, *map(run.get, ("words", "baseline", "keys"))]
    return hash_content(facts, sort_keys=True)[:12]


class Cells(string.Formatter):
    """String formatter for table cells: writes None as a dash, and bytes in MiB or GiB for {:MiB}
    and {:GiB}."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "–"
        if format_spec in UNITS:
            return f"{value / UNITS[format_spec]:.2f}"
        return format(value, format_spec)


def format_entry(entry: Figures, form: str) -> str:
    """Fills the format string `form`, such as "{step_ms:.1f}", with an entry's figures; a missing
    figure becomes a dash."""
    return Cells().vformat(form, (), defaultdict(lambda: None, entry)).replace("–––", "–")


def add_remarks(command: str, entries: Sequence[Figures]) -> list[Figures]:
    """Returns the entries, each with `times_before`, the ratio of its speed to that of the entry
    before, and with a `remark` such as "no difference", an error, or the techniques that are not
    on."""
    ratio = TABLES["ratios"].get(command, "speed")
    remarked = []
    before: Figures = {}
    for figures in entries:
        entry = {"ratio": ratio} | figures
        if entry.get("speed"):
            # Estimate the quartiles of the ratio from those of both entries. For the lower
            # quartile, divide this one's lower quartile by the upper quartile of the one before;
            # for the upper quartile, divide the upper one by the lower one.
            for quartile, opposite in (("", ""), ("_q1", "_q3"), ("_q3", "_q1")):
                speed = before.get(f"speed{opposite}")
                times = speed and entry[f"speed{quartile}"] / speed
                # On a GPU compare the times of a step themselves: its speed drifts less than the
                # baselines differ that each process times anew.
                if times and ratio == "times_before" and entry.get("memory_reserved_peak"):
                    times = before[f"step_ms{quartile}"] / entry[f"step_ms{opposite}"]
                entry[f"times_before{quartile}"] = times
            before = entry

        # Report techniques that the case requests and that are not on, except those that its
        # baseline also requests without effect: they do not change the comparison.
        entry["lost"] = {*entry.get("not_on", ())} - {*entry.get("baseline_not_on", ())}
        remarks = [entry.get("reason") or entry.get("error")]
        for label, keys in (("emulated", entry.get("emulated")), ("not on", entry["lost"])):
            remarks.append(f"{label}: {', '.join(sorted(keys))}" if keys else None)
        if entry.get(ratio) not in (None, 1.0) and not entry["lost"]:
            remarks.append(judge_ratio(entry, ratio))
        remarked.append(entry | {"remark": "; ".join(filter(None, remarks))})
    return remarked


def format_entries(command: str, entries: Sequence[Figures]) -> Words:
    """Returns a list of texts: the table of a command's entries, then the `text` of each entry that
    has one."""
    columns = TABLES["columns"].get(command, {})
    rows: list[Sequence[object]] = [("", *columns, "")]
    for entry in add_remarks(command, entries):
        cells = [format_entry(entry, form) for form in columns.values()]
        rows.append((entry["name"], *cells, entry["remark"]))
    return [format_table(rows), *(entry["text"] for entry in entries if "text" in entry)]


def find_fields(command: str) -> set[str]:
    """Returns the names of the figures of a command's entries that a page or a table prints."""
    forms = f"{TABLES['columns'].get(command)} {TABLES['guides']}"
    return {*TABLES["printed"], *re.findall(r"{(\w+)", forms)}
