"""What the usual guides to fast training promise, who says it, and what is measured here.

    python -m scripts.bench claims setting=s256
    python -m scripts.bench claims setting=s256 model=dit_s

Each claim is measured on top of runtime=fast, or of what it names: the same work done two ways,
timed in turn with the quartiles of the ratio; memory, start-ups and rates once each, which the
verdict says. A claim is confirmed where the figure lies in the claimed range, give or take a fifth,
or beyond it; refuted where it falls short; and "no difference" where the quartiles of the ratio lie
on both sides of 1. docs/techniques.md lists all of them, with what guides propose and this
framework does not offer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any
from urllib.parse import urlsplit

import torch

from scripts.bench.claim_list import CLAIMS
from scripts.bench.practices import Bench, Pair, Practice, rows_of
from scripts.bench.report import entries_table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig
from scripts.timing import Spread

RATIOS: dict[str, Callable[[float], float]] = {
    "×": lambda ratio: ratio,
    "× as long": lambda ratio: ratio,
    "% faster": lambda ratio: 100.0 * (ratio - 1.0),
    "% slower": lambda ratio: 100.0 * (1.0 / ratio - 1.0),
    "% saved": lambda ratio: 100.0 * (1.0 - 1.0 / ratio),
}
"""Unit of a claim -> its figure, from how many times as fast or as small the other way is."""
AMOUNTS: dict[str, Callable[[float, float], float]] = {
    "% error": lambda one, other: 100.0 * one,
    "ms": lambda one, other: other,
    "GiB apart": lambda one, other: other - one,
}
"""Unit of a claim that is no ratio -> its figure, from those of both ways."""
COSTS = ("× as long", "% slower", "% error", "ms")
GAINS = ("×", "% faster", "% saved")


def short(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def promised(claim: Practice) -> str:
    """What a claim says, with its unit."""
    if not isinstance(claim.claimed, tuple):
        return claim.claimed or "no figure"
    low, high = claim.claimed
    bounds = f"above {low:g}" if high == inf else f"{low:g}" if low == high else f"{low:g}–{high:g}"
    return f"{bounds} {claim.unit}"


def judged(claim: Practice, measured: float, ratio: Spread | None = None) -> str:
    """The verdict, with a fifth of tolerance; of a cost, less is said as such and refutes
    nothing."""
    if not isinstance(claim.claimed, tuple):
        return "no figure is promised"
    if ratio and ratio.n > 1 and ratio.q1 <= 1.0 <= ratio.q3:
        return "no difference"
    low = claim.claimed[0] / 1.2
    high = claim.claimed[1] * 1.2
    gain = claim.unit in GAINS
    if low <= measured <= high and not (gain and measured <= RATIOS[claim.unit](1.0)):
        return "confirmed"
    side = "more" if measured > high else "less"
    if claim.unit in COSTS:
        return f"costs {side}"
    return f"confirmed: {side}" if gain and side == "more" else f"refuted: {side}"


def figures(claim: Practice, pair: Pair) -> dict[str, Any]:
    """`measured` in the claim's unit; the ratio of both ways and their medians, all with quartiles;
    the verdict."""
    ratio = Spread.of_ratio(pair.one, pair.other) if claim.unit in RATIOS else None
    if ratio:
        measured = RATIOS[claim.unit](ratio.median)
    else:
        measured = Spread.of(
            [AMOUNTS[claim.unit](*both) for both in zip(pair.one, pair.other, strict=True)]
        ).median
    return {
        "measured": measured,
        "verdict": judged(claim, measured, ratio) + (", one round" if len(pair.one) == 1 else ""),
        **(ratio.as_json("ratio") if ratio and ratio.n > 1 else {}),
        **Spread.of(pair.one).as_json("one"),
        **Spread.of(pair.other).as_json("other"),
        "beside": dict(pair.beside),
    }


def labels(claim: Practice) -> dict[str, Any]:
    """What is known of a claim without measuring."""
    known = {
        "claimed": promised(claim),
        "unit": claim.unit,
        "source": claim.source,
        "key": claim.key,
    }
    return known | {"ways": list(claim.ways), "of": claim.of}


def plan(cfg: BenchConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    return rows_of(CLAIMS, Bench([*overrides, "runtime=fast"], cfg, device), figures, labels)


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    def with_text(entry: dict[str, Any]) -> dict[str, Any]:
        if "measured" not in entry:
            return entry
        both = {way: entry[side] for way, side in zip(entry["ways"], ("one", "other"), strict=True)}
        remark = ", ".join(
            f"{way} {short(value)} {entry['of']}".rstrip()
            for way, value in (both | entry["beside"]).items()
        )
        quartiles = f"{entry['ratio_q1']:.2f}–{entry['ratio_q3']:.2f}" if "ratio" in entry else None
        return entry | {"shown": short(entry["measured"]), "quartiles": quartiles, "remark": remark}

    columns = {
        "claimed": "{claimed}",
        "measured here": "{shown} {unit}",
        "quartiles of the ratio": "{quartiles}",
        "verdict": "{verdict}",
    }
    return [entries_table(columns, [with_text(entry) for entry in entries])]


def linked(source: str) -> str:
    """A source whose address is a link that shows the host."""

    def link(found: re.Match[str]) -> str:
        address = urlsplit(found[0])
        last = address.path.strip("/").split("/")[-1] if address.netloc == "arxiv.org" else ""
        return f"[{address.netloc.removeprefix('www.')}{last and ' '}{last}]({found[0]})"

    return re.sub(r"https?://[^\s)]+", link, source)


def here(claim: Practice, entry: Mapping[str, Any] | None) -> str:
    """The figure and its verdict, or why there is none."""
    if claim.reason:
        return claim.reason
    if entry is None:
        return "not measured"
    if "measured" not in entry:
        return f"not measured: {entry.get('reason') or entry['error']}"
    return f"{short(entry['measured'])} {entry['unit']}: {entry['verdict']}"


def section(entries: Sequence[Mapping[str, Any]], source: str) -> str:
    """The table of all claims with what `entries` measured, and the `source` of these below."""
    measured = {entry["name"]: entry for entry in entries}
    table = ["| what | our key | who says it | claim | measured here |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        key = f"`{claim.key}`" if claim.key else "–"
        cells = (
            claim.name,
            key,
            linked(claim.source),
            promised(claim),
            here(claim, measured.get(claim.name)),
        )
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join([*table, *(["", f"{source}."] if source else [])]) + "\n"


BENCHMARKS = {"claims": Benchmark(BenchConfig, plan, texts, __doc__ or "")}
