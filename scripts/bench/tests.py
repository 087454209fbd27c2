"""The tests that need a GPU, a row each.

    python -m scripts.bench tests select=first

They are those of `pytest -m gpu`: `first` the ones of whole steps, `rest` the others, compute-sanitizer last.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scripts.bench.report import table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig
from training.config.compose import ROOT

FIRST, LAST = "tests/test_step.py", "sanitizer"
"""The file whose tests come first, and part of the names of those that come last."""


@dataclass(frozen=True)
class TestsConfig(BenchConfig):
    """Keys of `tests`."""

    select: str = "all"
    """all; first: captured steps, no waiting, every technique on; rest: the others."""


OF_PYTEST = ("Config", "AssertRewrite", "UnknownMark")
"""Warnings about options of plugins that are not installed, and about modules that are imported already."""


class Collector:
    """A pytest plugin that notes the ids of the collected tests, and the outcome of what ran."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.reports: list[Any] = []

    def pytest_configure(self, config: Any) -> None:
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which need not be there")

    def pytest_collection_finish(self, session: Any) -> None:
        self.ids = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)


def pytest_main(*words: str) -> Collector:
    """Runs pytest in this process, on tests that need a GPU."""
    import pytest

    collector = Collector()
    quiet = [
        f"-Wignore::{kind}" for kind in ("DeprecationWarning", *(f"pytest.Pytest{what}Warning" for what in OF_PYTEST))
    ]
    quiet += ["-q", "--tb=short", "-p", "no:cacheprovider"]
    status = pytest.main([f"--rootdir={ROOT}", "-m", "gpu", *quiet, *words], plugins=[collector])
    if status not in (0, 1, 5) or (not collector.ids and status != 5):
        raise RuntimeError(f"pytest ended with status {int(status)} on {words[-1]}")
    return collector


def run_test(test: str) -> dict[str, Any]:
    """Its outcome; an AssertionError with the first line of what went wrong."""
    reports = pytest_main(str(ROOT / test)).reports
    failed = [report for report in reports if report.failed]
    skipped = [report for report in reports if report.skipped]
    if failed:
        crash = getattr(failed[0].longrepr, "reprcrash", None)
        raise AssertionError(crash.message if crash else str(failed[0].longrepr))
    if skipped:
        return {"reason": str(skipped[0].longrepr[2]).removeprefix("Skipped: ")}
    if not reports:
        raise RuntimeError("pytest ran nothing of this name")
    return {"passed": True}


def plan(cfg: TestsConfig, overrides: list[str], device: torch.device) -> list[Row]:
    if cfg.select not in ("all", "first", "rest"):
        raise ValueError(f"select={cfg.select}: choose all, first or rest.")
    if device.type != "cuda":
        return [Row("pytest -m gpu", partial(dict[str, Any], reason="needs an NVIDIA GPU"), 0)]
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    ids = pytest_main("--collect-only", *map(str, files)).ids
    first = [test for test in ids if test.startswith(FIRST)]
    rest = sorted((test for test in ids if test not in first), key=lambda test: LAST in test)
    chosen = {"all": first + rest, "first": first, "rest": rest}[cfg.select]
    return [Row(test, partial(run_test, test), 240 if LAST in test else 5) for test in chosen]


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Counts by test function, and a line for each failure."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for e in entries:
        kind = "failed" if "error" in e else "skipped" if "reason" in e else "passed"
        counts[re.sub(r"\[.*", "", e["name"])][kind] += 1
    kinds = ("passed", "failed", "skipped")
    rows = [("", *kinds), *((name, *(found[kind] for kind in kinds)) for name, found in counts.items())]
    noted = dict.fromkeys(
        f"{e['name']}: {e.get('error') or e['reason']}" for e in entries if {"error", "reason"} & e.keys()
    )
    return [table(rows), *(["\n".join(noted)] if noted else [])]


BENCHMARKS = {"tests": Benchmark(TestsConfig, plan, texts, __doc__ or "")}
