"""Runs that are killed, and what they must have become in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.outcomes import TWELVE_STEPS
from tests.harness.zygote import Start, read_output


@pytest.fixture(scope="session")
def zygote(zygote) -> Start:
    """With the words that all these runs share."""
    return lambda folder, *words, **how: zygote(folder, *TWELVE_STEPS, *words, **how)


@pytest.fixture(scope="session")
def run_whole(zygote, tmp_path_factory) -> Callable[..., Path]:
    """The folder of a run that nothing befell, one for each choice of words and ranks."""
    made: dict[tuple, Path] = {}

    def find(*words, ranks=1):
        key = (*words, ranks)
        if key not in made:
            folder = tmp_path_factory.mktemp("whole") / "run"
            assert zygote(folder, *words, ranks=ranks) == [0] * ranks, read_output(folder)
            made[key] = folder
        return made[key]

    return find


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch) -> None:
    """Nobody mends the disk while a test waits for it."""
    monkeypatch.setattr("training.checkpoint.save.RETRY_PAUSES", (0.01, 0.02))
    monkeypatch.setattr("training.checkpoint.load.RETRY_PAUSES", (0.01, 0.02))
