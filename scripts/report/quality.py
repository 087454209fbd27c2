"""Distances and evaluations, kept apart where they were measured by different protocols."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.report.history import Evaluation, History, at, differing, number, settings, text, words
from scripts.report.plots import Plot

HEADS = ("run", "file", "weights", "features", "FD", "floor of FD", "KD ± std", "precision", "recall", "remark")


class Group(NamedTuple):
    """Figures of one protocol."""

    members: list[Any]
    """`History` or `Evaluation`."""
    protocol: dict[str, Any]
    """Its settings, flat."""
    apart: str
    """Why it is not the first group's; empty for the first."""


def by_protocol(members: Sequence[Evaluation] | Sequence[History]) -> list[Group]:
    """Members with equal protocols together; one without a protocol stands alone."""
    groups: list[Group] = []
    for member in members:
        protocol = settings(member.protocol)
        same = next((group for group in groups if protocol and group.protocol == protocol), None)
        if same:
            same.members.append(member)
            continue
        apart = ""
        if groups and protocol and groups[0].protocol:
            apart = f"they differ in {words(differing(groups[0].protocol, protocol))}"
        elif groups:
            apart = "one of the two is not recorded"
        groups.append(Group([member], protocol, apart))
    return groups


def evaluation_rows(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """A row under HEADS for each feature space of each evaluation."""
    rows = []
    for e in evaluations:
        kind, step = (at(e.protocol, "weights", key) for key in ("kind", "step"))
        weights = " ".join(text(part) for part in (kind, None if step is None else f"step {step}") if part is not None)
        for space, found in e.features.items():
            value = {k: text(at(found, k)) for k in ("fd", "floor_fd", "kd", "kd_std", "precision", "recall")}
            kd = value["kd"] + (f" ± {value['kd_std']}" if at(found, "kd_std") is not None else "")
            figures = (value["fd"], value["floor_fd"], kd, value["precision"], value["recall"])
            rows.append([e.run.name, e.file, weights or "–", space, *figures, at(found, "why", default="")])
    return rows


def distance_keys(runs: Sequence[History]) -> list[str]:
    """Keys of metrics.jsonl that are distances: fd_<features> and kd_<features>."""
    return list(dict.fromkeys(key for run in runs for line in run.lines for key in line if key[:3] in ("fd_", "kd_")))


def title_of(key: str) -> str:
    return f"{'Fréchet' if key.startswith('fd_') else 'Kernel'} distance, features {key[3:]}"


def distance_plots(runs: Sequence[History]) -> list[tuple[Plot, list[float]]]:
    """A plot over samples and, where seconds were recorded, one over seconds for each distance; and its floors.

    The floor is `features.<space>.floor_fd` (or `floor_kd`) of the protocol.
    """
    plots = []
    for key in distance_keys(runs):
        floor = number(at(runs[0].protocol, "features", key[3:], f"floor_{key[:2]}"))
        for over in ("samples", "train_seconds"):
            if any(run.series(key, over) for run in runs):
                plot = Plot(title_of(key), key[:2].upper(), re.escape(key), log=True, over=over)
                plots.append((plot, [floor] if math.isfinite(floor) else []))
    return plots
