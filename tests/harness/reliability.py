"""Writes the table of docs/benchmarks/faults.md from a run of the tests: `make reliability`."""

from __future__ import annotations

import platform
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from common.environment import read_cpu_name
from common.files import ROOT
from scripts.commands import replace_between

PAGE = ROOT / "docs" / "benchmarks" / "faults.md"
START = "<!-- faults: made by `make reliability` -->\n"
END = "<!-- end of faults -->"


class Table:
    """Results of the tests with `@pytest.mark.fault(what, outcome)`, to which the workers of xdist
    report."""

    def __init__(self) -> None:
        self.cases: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.files: dict[tuple[str, str], set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts = dict(report.user_properties)
        if "fault" not in facts or (report.when != "call" and report.outcome == "passed"):
            return
        row = tuple(facts["fault"])
        self.cases[row][report.outcome] += int(facts.get("struck", 1)) if report.passed else 1
        self.files[row].add(f"`{Path(report.nodeid.partition('::')[0]).name}`")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        failures = [
            row[0] for row, counts in self.cases.items() if counts["failed"] or not counts["passed"]
        ]
        if failures:
            print(f"\n{PAGE.name} is left as it was: {', '.join(failures)}: failed or skipped")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        PAGE.write_text(
            replace_between(PAGE.read_text(), START, END, f"{self.format_rows()}\n", PAGE.name)
        )

    def format_rows(self) -> str:
        total = sum(counts["passed"] for counts in self.cases.values())
        rows = [
            f"| {what} | {outcome} | {self.cases[what, outcome]['passed']} | "
            f"{', '.join(sorted(files))} |"
            for (what, outcome), files in self.files.items()
        ]
        versions = f"Python {platform.python_version()}, torch {torch.__version__}"
        lines = [
            f"{total} faults, {time.strftime('%Y-%m-%d')}, {read_cpu_name()}, {versions}, "
            "`make reliability`.",
            "",
            "| fault | outcome | times | proved by |",
            "|---|---|---|---|",
        ]
        return "\n".join(lines + rows)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-reliability",
        action="store_true",
        help="write docs/benchmarks/faults.md from this run",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-reliability") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table())


def pytest_itemcollected(item: pytest.Item) -> None:
    if mark := item.get_closest_marker("fault"):
        what, outcome = mark.args
        item.user_properties.append(("fault", [what, outcome]))
