"""scripts.average: averages of any length from the snapshots of a run."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.utils import parameters_to_vector

from common.config.compose import compose
from common.files import ROOT
from sampling.load import load_run
from scripts.average import MAX_RESIDUAL, AverageConfig, average, fit_profile
from tests.harness.plans import forecast_words
from tests.harness.refusals import expect_refusal
from tests.harness.sets import flip_byte
from train import train
from training.checkpoint.snapshots import Snapshot, write_average
from training.optim.power_averages import find_exponent

LENGTHS = (0.03, 0.04, 0.05, 0.07, 0.10, 0.13, 0.16, 0.20)
RUN = """model=conv_xs model.dim=32 model.depth=1 model.head_dim=16 model.patch_size=2 runtime=eager
batch_size=8 total_samples=1024 optim.lr=1e-2 log_every=64 eval_every=0 sample_every=0 save_every=0
ema.snapshots=32"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run that keeps averages of all lengths, and the averages at its end by length; the run's
    folder holds those of 0.05 and 0.10 only."""
    folder = tmp_path_factory.mktemp("average") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.assemble.LENGTHS", LENGTHS)
        train(compose([*RUN.split(), f"run_dir={folder}"]))
    files = {
        length: folder / f"averages/samples-1024-{length:.2f}.safetensors" for length in LENGTHS
    }
    averages = {length: load_file(file) for length, file in files.items()}
    for length in set(LENGTHS) - {0.05, 0.10}:
        for file in folder.glob(f"averages/*-{length:.2f}.safetensors"):
            file.unlink()
    return folder, averages


def average_walk(walk, end, length):
    """The average of the first `end` steps of a walk, by its definition."""
    times = np.arange(end + 1) / end
    return np.diff(times ** (find_exponent(length) + 1)) @ walk[:end]


@pytest.mark.parametrize(("count", "limit"), [(32, 1e-3), (8, 1e-2)])
def test_snapshots_of_a_random_walk_give_any_average(count, limit):
    walk = np.cumsum(np.random.default_rng(0).standard_normal((3200, 100)), axis=0)
    ends = np.linspace(0, 3200, count + 1)[1:].astype(int).tolist()
    snapshots = [Snapshot(end, length, Path()) for end in ends for length in (0.05, 0.10)]
    values = np.stack([average_walk(walk, s.samples, s.length) for s in snapshots])
    for length in LENGTHS:
        numbers, residual = fit_profile(snapshots, Snapshot(3200, length, Path()))
        expected = average_walk(walk, 3200, length)
        error = np.linalg.norm(numbers @ values - expected) / np.linalg.norm(expected)
        assert error < (1e-12 if length in (0.05, 0.10) else limit)
        assert residual < MAX_RESIDUAL
        assert numbers.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_an_average_of_a_run_is_the_one_it_would_have_kept(length, kept, tmp_path, capsys):
    """1e-5 of the weights at the lengths that the run kept, and 1e-3 at others."""
    run, averages = kept
    out = average(AverageConfig(str(run), length, out=str(tmp_path / "x.safetensors")))
    assert "from 64 files: the fit has an error of" in capsys.readouterr().out
    sums = load_file(out)
    assert sums.keys() == averages[length].keys()
    made, expected, other = (
        parameters_to_vector([tensors[name] for name in sorted(tensors)]).double()
        for tensors in (sums, averages[length], averages[0.05 if length > 0.05 else 0.10])
    )
    limit = 1e-5 if length in (0.05, 0.10) else 1e-3
    assert torch.dist(made, expected) < limit * expected.norm()
    assert torch.dist(made, expected) < 0.05 * torch.dist(other, expected)


def test_an_average_is_a_weights_file_of_its_run(kept):
    run, _ = kept
    out = average(AverageConfig(str(run), 0.15, samples=512))
    assert out == run / "averages" / "length-0.15-at-512.safetensors"
    trained = load_run(out, key="weights")
    assert trained.opened.description.step == 64
    assert trained.data == compose(RUN.split()).source["data"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"length": None}, "length is not set; say length=0.08"),
        ({"length": 0.02}, r"length=0\.02 must be at least 0\.03"),
        ({"run_dir": str(ROOT)}, "run_dir=.* has no snapshots; train with ema.snapshots=32"),
        ({"samples": 33}, r"samples=33 has no snapshot; choose one of \[32, 64"),
        (
            {"samples": 160, "length": 0.2},
            "10 files: the fit has an error of 1.* and at most 11% is accepted",
        ),
        ({"out": __file__}, "must be a new file"),
    ],
)
def test_what_snapshots_cannot_give_is_refused(changes, sentence, kept):
    settings = {"run_dir": str(kept[0]), "length": 0.08} | changes
    with expect_refusal(sentence):
        average(AverageConfig(**settings))


def test_a_plan_counts_both_averages():
    """The average that each run keeps, and two more."""
    one, three = (forecast_words(f"ema.snapshots={count}").needs.averages for count in (0, 32))
    assert three == pytest.approx(3 * one)


@pytest.mark.fault(
    "a bit of an average's snapshot flips on the disk", "refused by its hash; nothing is written"
)
@pytest.mark.parametrize(("value", "sentence"), [(None, "another hash"), (np.inf, "not finite")])
def test_a_damaged_snapshot_is_refused(value, sentence, kept, tmp_path):
    """A bit is flipped, or the run had diverged."""
    folder = shutil.copytree(kept[0], tmp_path / "run")
    for file in folder.glob("averages/*.safetensors"):
        if value is None:
            flip_byte(file, -2)
        else:
            with safe_open(file, "pt") as opened:
                header = opened.metadata()
            tensors = {name: t.fill_(value) for name, t in load_file(file).items()}
            write_average(file, tensors, header)
    out = tmp_path / "out.safetensors"
    with expect_refusal(sentence):
        average(AverageConfig(run_dir=str(folder), length=0.16, out=str(out)))
    assert not out.exists()
