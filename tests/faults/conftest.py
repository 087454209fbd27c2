"""Runs that are killed, and what they must have become in the end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.harness.zygote import Zygote, said
from training.checkpoint.files import assembled, flat
from training.checkpoint.load import complete, damage, description
from training.distributed.ranks import Ranks
from training.state import KEPT

WORDS = [
    *(
        "runtime=eager",
        "deterministic=true",
        "total_samples=96",
        "batch_size=8",
        "log_every=3",
        "eval_every=4",
    ),
    *(
        "save_every=2",
        "keep_checkpoints=2",
        "model.drop_path=0.2",
        "guards.spike_sigmas=6",
        "guards.spike_window=8",
    ),
]
"""Twelve steps, six checkpoints; all state there is: moments, averages, a window of norms, a window
of metrics."""


@dataclass(frozen=True)
class Outcome:
    """All that must not depend on what befell a run."""

    state: str
    """Hash of every tensor and counter of the last checkpoint."""
    metrics: list[dict]


TIMING = (
    "train_seconds",
    "samples_per_s",
    "tokens_per_s",
    "model_tflops",
    "data_wait",
    "save_stall_s",
    "save_s",
)


def outcome(folder: Path) -> Outcome:
    last = complete(folder / "checkpoints")[-1]
    described = description(last)
    digest = hashlib.sha256(
        json.dumps([described["counters"], described["loader"], described["window"]]).encode()
    )
    for rank in range(described["world_size"]):
        found = assembled(last, described, KEPT, Ranks(rank, described["world_size"], rank))
        for name, leaf in sorted(flat(found), key=lambda pair: pair[0]):
            if isinstance(leaf, torch.Tensor):
                digest.update(
                    name.encode() + leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        digest.hexdigest(), [{k: v for k, v in line.items() if k not in TIMING} for line in lines]
    )


Start = Callable[..., list[int]]


@pytest.fixture(scope="session")
def zygote(zygote: Zygote) -> Start:
    """With the words that all these runs share."""
    return lambda folder, *words, **how: zygote(folder, *WORDS, *words, **how)


@pytest.fixture(scope="session")
def whole(zygote: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run that nothing befell, one for each choice of words and ranks."""
    made: dict[tuple, Path] = {}

    def find(*words: str, ranks: int = 1) -> Path:
        key = (*words, ranks)
        if key not in made:
            folder = tmp_path_factory.mktemp("whole") / "run"
            assert zygote(folder, *words, ranks=ranks) == [0] * ranks, said(folder)
            made[key] = folder
        return made[key]

    return find


def nothing_unverified(folder: Path) -> None:
    """Whenever a run is stopped, the newest complete checkpoint is one that loads."""
    if found := complete(folder / "checkpoints"):
        assert damage(found[-1]) is None


def tidy(folder: Path) -> None:
    """What a finished run leaves among its checkpoints, whatever befell it."""
    checkpoints = folder / "checkpoints"
    names = {file.name for file in checkpoints.iterdir()}
    assert names == {found.name for found in complete(checkpoints)}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody mends the disk while a test waits for it."""
    monkeypatch.setattr("training.checkpoint.save.PAUSES", (0.01, 0.02))
    monkeypatch.setattr("training.checkpoint.load.PAUSES", (0.01, 0.02))
