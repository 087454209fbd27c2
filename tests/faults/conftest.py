"""Runs of twelve steps, in processes that may be killed."""

import shutil
from pathlib import Path

import pytest
import torch

from data.digits import DigitLatents
from tests.harness.outcomes import TWELVE_STEPS
from tests.harness.zygote import read_output


@pytest.fixture(scope="session")
def zygote(zygote):
    """Starts runs of twelve steps."""
    return lambda folder, *words, **how: zygote(folder, *TWELVE_STEPS, *words, **how)


@pytest.fixture(scope="session")
def run_whole(zygote, tmp_path_factory):
    """`run_whole(*words)`: the folder of an undisturbed run, made once for each choice of words."""
    folders = {}

    def find(*words, ranks=1):
        key = (*words, ranks)
        if key not in folders:
            folder = tmp_path_factory.mktemp("whole") / "run"
            assert zygote(folder, *words, ranks=ranks) == [0] * ranks, read_output(folder)
            folders[key] = folder
        return folders[key]

    return find


@pytest.fixture
def finished(run_whole, tmp_path):
    """A copy of a finished run, whose checkpoints are step-10 and step-12."""
    return Path(shutil.copytree(run_whole(), tmp_path / "run"))


@pytest.fixture
def poison_latents(monkeypatch):
    """`poison_latents(first, last, bad)` multiplies the latents of these steps by `bad`."""

    def start(first, last, bad=torch.nan):
        draw = DigitLatents.__next__

        def draw_poisoned(self):
            batch = draw(self)
            step = int(batch.position[0]) // 8 + 1
            factor = bad if first <= step <= last else 1.0
            return batch._replace(latents=batch.latents * factor)

        monkeypatch.setattr(DigitLatents, "__next__", draw_poisoned)

    return start


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """A test need not wait for a disk to recover."""
    monkeypatch.setattr("training.checkpoint.save.RETRY_PAUSES", (0.01, 0.02))
    monkeypatch.setattr("training.checkpoint.load.RETRY_PAUSES", (0.01, 0.02))
