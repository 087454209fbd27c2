"""Limits in seconds that follow the pace of the machine: all of them are written for one that imports torch in 2 s."""

from __future__ import annotations

import time

import pytest

began = time.perf_counter()
import torch  # noqa: E402, F401  # the first import in this process, as this is the first plugin that needs it

PACE = max(1.0, (time.perf_counter() - began) / 2.0)


def limit(seconds: float) -> float:
    return PACE * seconds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(limit(seconds)), append=False)
