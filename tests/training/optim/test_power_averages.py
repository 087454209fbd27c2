"""Power-function averages and their snapshots."""

import errno
import shutil

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from common.clock import CLOCK
from common.config.compose import compose
from tests.harness.outcomes import TWELVE_STEPS, read_outcome
from tests.harness.refusals import expect_refusal
from tests.harness.words import TINY_RUN
from train import train
from training.checkpoint.files import write_tensors
from training.checkpoint.snapshots import list_snapshots
from training.optim.power_averages import PowerAverage, find_exponent
from training.weights.pretrained import read_description

WORDS = [*TINY_RUN, *TWELVE_STEPS, "keep_checkpoints=9", "ema.snapshots=5"]


def start_run(folder, *words):
    train(compose([*WORDS, *words, f"run_dir={folder}"]))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return start_run(tmp_path_factory.mktemp("averages") / "run")


def read_snapshots(run):
    return {snapshot.file.name: snapshot.file.read_bytes() for snapshot in list_snapshots(run)}


@pytest.mark.parametrize(("length", "exponent"), [(0.05, 16.97), (0.10, 6.94)])
def test_an_average_has_its_profile_in_closed_form(length, exponent, monkeypatch):
    """Also after the batch has changed, and in two parts; exponents as published."""
    monkeypatch.setattr("accel.composite_optimizer.PART_ELEMENTS", 8)
    found = find_exponent(length)
    assert found == pytest.approx(exponent, abs=5e-3)
    assert np.sqrt(found + 1) / (found + 2) / np.sqrt(found + 3) == pytest.approx(length, rel=1e-9)
    ends = np.cumsum([8] * 300 + [16] * 200)
    walk = np.cumsum(np.random.default_rng(0).standard_normal((500, 16)), axis=0)
    model = torch.nn.ParameterList(torch.full((2, 8), 1e3).unbind())
    average = PowerAverage(model, length)
    assert len(average.parts) == 2
    for end, batch, values in zip(ends, np.diff(ends, prepend=0), walk, strict=True):
        for parameter, value in zip(model, torch.from_numpy(values).float().split(8), strict=True):
            parameter.data = value
        average.update(torch.tensor(average.compute_weight(int(end), int(batch))))

    shares = np.diff((ends / ends[-1]) ** (found + 1), prepend=0.0)
    expected = torch.from_numpy(shares @ walk).float()
    assert_close(torch.cat(average.averages), expected, rtol=1e-5, atol=1e-4)


def test_snapshots_are_where_they_are_due_and_a_longer_run_keeps_them(whole, tmp_path):
    """Every 19.2 of 96 samples and then every 38.4 of 192, in steps of 8."""
    folder = start_run(shutil.copytree(whole, tmp_path / "copy"), "total_samples=192")
    found = [(snapshot.samples, snapshot.length) for snapshot in list_snapshots(folder)]
    ends = (24, 40, 64, 80, 96, 120, 160, 192)
    assert found == [(end, length) for end in ends for length in (0.05, 0.10)]
    assert read_snapshots(whole).items() < read_snapshots(folder).items()
    assert read_description(list_snapshots(whole)[2].file).step == 5


def test_a_snapshot_takes_no_time_of_training(run, monkeypatch):
    kinds = []
    monkeypatch.setattr(
        "training.checkpoint.snapshots.write_average", lambda *_: kinds.append(CLOCK.kind)
    )
    run("ema.snapshots=2")
    assert kinds == ["saving"] * 4


def test_what_cannot_be_had_is_refused(run, tmp_path, monkeypatch):
    run("save_every=1", "total_samples=8")
    with expect_refusal(r"it has no averages for ema\.snapshots"):
        run("save_every=1", "ema.snapshots=2")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with expect_refusal(r"ema\.snapshots=2: 2 snapshots of 2 averages: .* are free"):
            run("ema.snapshots=2", folder="small")


def test_a_full_disk_loses_no_snapshot(whole, run_dir, monkeypatch):
    """Step 8 is of a snapshot and of a checkpoint. The resumed run removes snapshots of steps that
    it takes again."""

    def refuse(file, *content):
        write_tensors(file, *content)
        if file.name.startswith("samples-64-0.10"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoint.snapshots.write_tensors", refuse)
        with expect_refusal(r"samples-64-0\.10\.safetensors cannot be written .*from step-6"):
            start_run(run_dir, "async_checkpoints=false")
    assert {file.suffix for file in (run_dir / "averages").iterdir()} == {".safetensors"}
    shutil.copy(list_snapshots(run_dir)[0].file, run_dir / "averages/samples-72-0.05.safetensors")
    assert read_snapshots(start_run(run_dir)) == read_snapshots(whole)
    assert read_outcome(run_dir).state == read_outcome(whole).state
