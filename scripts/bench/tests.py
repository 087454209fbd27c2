"""The tests that need a GPU, a row each.

    python -m scripts.bench tests select=smoke

They are those of `pytest -m gpu`: `smoke` some of every kind, in two minutes; `rest` the others,
the sanitizer last.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common.errors import UserError
from common.files import ROOT
from scripts.bench.report import table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig

SMOKE = (
    "test_draws_are_those_of_the_definition",
    r"test_near_the_definition_and_the_same_twice\[\w+-[012]-dtype0\]",  # bf16
    r"test_on_a_gpu_a_captured_step_loses_as_an_uncaptured_one\[fast-1\]",
    r"test_every_kernel_passes_its_parity_test\[mamba-bf16\]",
    "test_a_captured_run_chooses_before_its_capture",
    "test_a_gpu_gets_what_a_cpu_gets_while_it_is_busy",
)
"""Patterns of the tests that come first: draws, kernels, a captured step, ledgers, loaders."""
LAST = "sanitizer"
"""Part of the names of the tests that come last."""


@dataclass(frozen=True)
class TestsConfig(BenchConfig):
    """Keys of `tests`."""

    select: str = "all"
    """all; smoke: some of every kind, in two minutes; rest: the others."""


OF_PYTEST = ("Config", "AssertRewrite", "UnknownMark")
"""Warnings about options of plugins that are not installed, and about modules that are imported
already."""


class Collector:
    """A pytest plugin that notes the ids of the collected tests, and the outcome of what ran."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.reports: list[Any] = []
        self.warnings: list[str] = []

    def pytest_configure(self, config: Any) -> None:
        config.addinivalue_line(
            "markers", "timeout(seconds): of pytest-timeout, which need not be there"
        )

    def pytest_collection_finish(self, session: Any) -> None:
        self.ids = [item.nodeid for item in session.items]

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        self.warnings.append(str(warning_message.message).strip().partition("\n")[0])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)


def pytest_main(*words: str) -> Collector:
    """Runs pytest in this process, on tests that need a GPU. Warnings are noted and fail nothing:
    which ones a GPU, its driver and its libraries give is not known before."""
    import pytest

    collector = Collector()
    ignored = ["DeprecationWarning", *(f"pytest.Pytest{what}Warning" for what in OF_PYTEST)]
    quiet = [
        "-Wdefault",
        *(f"-Wignore::{kind}" for kind in ignored),
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    status = pytest.main([f"--rootdir={ROOT}", "-m", "gpu", *quiet, *words], plugins=[collector])
    if status not in (0, 1, 5) or (not collector.ids and status != 5):
        raise RuntimeError(f"pytest ended with status {int(status)} on {words[-1]}")
    return collector


def run_test(test: str) -> dict[str, Any]:
    """Its outcome, with warnings; an AssertionError with the first line of what went wrong."""
    collector = pytest_main(str(ROOT / test))
    reports = collector.reports
    failed = [report for report in reports if report.failed]
    skipped = [report for report in reports if report.skipped]
    if failed:
        crash = getattr(failed[0].longrepr, "reprcrash", None)
        raise AssertionError(crash.message if crash else str(failed[0].longrepr))
    if skipped:
        return {"reason": str(skipped[0].longrepr[2]).removeprefix("Skipped: ")}
    if not reports:
        raise RuntimeError("pytest ran nothing of this name")
    return {"passed": True} | (
        {"warnings": sorted({*collector.warnings})} if collector.warnings else {}
    )


def plan(cfg: TestsConfig, overrides: list[str], device: torch.device) -> list[Row]:
    if cfg.select not in ("all", "smoke", "rest"):
        raise UserError(f"select={cfg.select}: choose all, smoke or rest.")
    if device.type != "cuda":
        return [Row("pytest -m gpu", partial(dict[str, Any], reason="needs an NVIDIA GPU"), 0)]
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    ids = pytest_main("--collect-only", *map(str, files)).ids
    smoke = [test for test in ids if any(re.search(pattern, test) for pattern in SMOKE)]
    rest = sorted((test for test in ids if test not in smoke), key=lambda test: LAST in test)
    chosen = {"all": smoke + rest, "smoke": smoke, "rest": rest}[cfg.select]
    return [Row(test, partial(run_test, test), 240 if LAST in test else 5) for test in chosen]


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Counts by test function, and a line for each failure, skip or warning."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for e in entries:
        kind = "failed" if "error" in e else "skipped" if "reason" in e else "passed"
        counts[re.sub(r"\[.*", "", e["name"])][kind] += 1
    kinds = ("passed", "failed", "skipped")
    rows = [
        ("", *kinds),
        *((name, *(found[kind] for kind in kinds)) for name, found in counts.items()),
    ]
    notes = {
        e["name"]: [e.get("error") or e.get("reason") or "", *e.get("warnings", [])]
        for e in entries
    }
    noted = [
        f"{name}: {'; '.join(filter(None, said))}" for name, said in notes.items() if any(said)
    ]
    return [table(rows), *(["\n".join(noted)] if noted else [])]


BENCHMARKS = {"tests": Benchmark(TestsConfig, plan, texts, __doc__ or "")}
