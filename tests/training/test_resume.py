"""Killed anywhere and started again by the same command, a run ends bit for bit as if nothing had
happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.files import ROOT
from tests.harness.outcomes import read_outcome
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.words import TINY_RUN
from train import train
from training.checkpoint.load import find_checkpoints, find_damage, list_complete
from training.config.compose import compose

STEPS = 24
WORDS = [
    *TINY_RUN,
    "deterministic=true",
    "runtime=eager",
    f"total_samples={8 * STEPS}",
    "save_every=5",
    "log_every=4",
    "eval_every=8",
    "model.drop_path=0.2",
    "accumulation_steps=2",
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "uninterrupted"
    train(compose([*WORDS, f"run_dir={folder}", "keep_checkpoints=9"]))
    return folder


def start(folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "train.py", *WORDS, f"run_dir={folder}", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    )


# tests/faults kills in all manner of ways, from a process that forks; this is the real command
@pytest.mark.slow
def test_killed_twice_and_started_again_ends_bit_for_bit_the_same(uninterrupted, tmp_path):
    folder = tmp_path / "killed"
    # kill -9 once so many lines are in metrics.jsonl, wherever the run then is
    for logged in (2, 4):
        process = start(folder)
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= logged):
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(folder).wait() == 0
    assert read_outcome(folder) == read_outcome(uninterrupted)


@pytest.mark.parametrize(
    "stop", [10, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (5, 15, 20))]
)
def test_resuming_from_any_checkpoint_ends_the_same(uninterrupted, tmp_path, stop):
    """As if killed at `stop`: only what a kill there would have left is kept."""
    folder = tmp_path / "resumed"
    shutil.copytree(uninterrupted, folder)
    for checkpoint in list_complete(folder / "checkpoints"):
        if int(checkpoint.name.removeprefix("step-")) > stop:
            shutil.rmtree(checkpoint)
    train(compose([*WORDS, f"run_dir={folder}", "keep_checkpoints=9"]))
    assert read_outcome(folder) == read_outcome(uninterrupted)


@pytest.mark.parametrize(
    "words",
    [
        ["data=synthetic", "data.height=8", "data.width=8"],
        ["runtime=fast", "model=dit_xs"],
        ["data=webdataset", "data.window=6", "data.num_workers=1"],
        ["data=resident", f"data.device_memory_gib={30 * 240 / 2**30}"],  # in chunks
    ],
)
def test_other_loaders_models_and_runtimes_resume_too(words, tmp_path):
    if "data=webdataset" in words or "data=resident" in words:
        save_latent_set(
            tmp_path / "set", [("train", random_samples(45, 0)), ("held_out", random_samples(4, 1))]
        )
        words = [*words, f"data.path={tmp_path / 'set'}"]
    common = [*WORDS, *words, "eval_every=0", "total_samples=96", "keep_checkpoints=9"]
    common = [word for word in common if not (word == "runtime=eager" and "runtime=fast" in words)]
    train(compose([*common, f"run_dir={tmp_path / 'one'}"]))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for step in (10, 12):
        shutil.rmtree(tmp_path / "two" / "checkpoints" / f"step-{step}")
    train(compose([*common, f"run_dir={tmp_path / 'two'}"]))
    assert read_outcome(tmp_path / "two") == read_outcome(tmp_path / "one")
    if "data=webdataset" in words:
        other = [
            *WORDS,
            "data=resident",
            words[-1],
            f"resume={tmp_path / 'one' / 'checkpoints' / 'step-10'}",
        ]
        said = r"The latents are the same: their order, .* was channel-6 and is channel, as data="
        with pytest.raises(ValueError, match=said):
            train(compose([*other, f"run_dir={tmp_path / 'three'}"]))


def test_a_finished_run_is_left_as_it_is(uninterrupted, tmp_path):
    folder = tmp_path / "again"
    shutil.copytree(uninterrupted, folder)
    summary = train(compose([*WORDS, f"run_dir={folder}"]))
    assert summary["steps"] == STEPS
    assert summary["loss"] == json.loads((uninterrupted / "summary.json").read_text())["loss"]
    assert read_outcome(folder) == read_outcome(uninterrupted)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(uninterrupted, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(uninterrupted, folder)
    newest = list_complete(folder / "checkpoints")[-1]
    content = bytearray((newest / "ema.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "ema.safetensors").write_bytes(content)
    assert "ema.safetensors" in find_damage(newest)
    with pytest.warns(UserWarning, match="ema.safetensors does not match its sha256"):
        train(compose([*WORDS, f"run_dir={folder}"]))
    assert (folder / "checkpoints" / f"{newest.name}.corrupt").is_dir()
    assert read_outcome(folder) == read_outcome(uninterrupted)


def test_a_half_written_checkpoint_does_not_count(uninterrupted, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(uninterrupted, folder)
    newest = list_complete(folder / "checkpoints")[-1]
    newest.rename(newest.with_name(newest.name + ".tmp"))
    train(compose([*WORDS, f"run_dir={folder}"]))
    assert read_outcome(folder) == read_outcome(uninterrupted)


@pytest.mark.fault(
    "a model, data set or seed other than the checkpoints", "refused with the difference"
)
def test_another_model_or_data_set_is_refused(uninterrupted, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(uninterrupted, folder)
    with pytest.raises(ValueError, match=r"another model: depth was 2, is 3"):
        train(compose([*WORDS, f"run_dir={folder}", "model.depth=3"]))
    with pytest.raises(ValueError, match=r"another data: .*seed was 0, is 1"):
        train(compose([*WORDS, f"run_dir={folder}", "seed=1"]))
    with pytest.raises(ValueError, match=r"another objective: timestep_shift was 1.0, is 2"):
        train(compose([*WORDS, f"run_dir={folder}", "objective.timestep_shift=2"]))
    with pytest.raises(
        ValueError, match=r"another optimizer: class was torch.optim.AdamW, is torch.optim.SGD"
    ):
        train(
            compose([*WORDS, f"run_dir={folder}", "optim._target_=torch.optim.SGD", "~optim.betas"])
        )
    with pytest.raises(ValueError, match="resume=never"):
        train(compose([*WORDS, f"run_dir={folder}", "resume=never"]))
    assert read_outcome(folder) == read_outcome(uninterrupted)


@pytest.mark.fault(
    "other settings on resume, such as accumulation_steps", "allowed, and said; the same stream"
)
def test_other_settings_are_allowed_and_said(uninterrupted, tmp_path, capsys):
    folder = tmp_path / "other"
    shutil.copytree(uninterrupted, folder)
    for checkpoint in list_complete(folder / "checkpoints"):
        if checkpoint.name != "step-20":
            shutil.rmtree(checkpoint)
    words = [word for word in WORDS if not word.startswith(("accumulation_steps", "log_every"))]
    train(compose([*words, f"run_dir={folder}", "log_every=2", "eval_every=12"]))
    assert "at step 20; since then accumulation_steps was 2, is 1\n" in capsys.readouterr().out
    expected = read_outcome(uninterrupted).metrics
    found = read_outcome(folder).metrics
    assert expected[-1]["step"] == found[-1]["step"] == STEPS
    assert found[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=1e-4)


def test_a_chosen_checkpoint_is_resumed_in_a_new_folder(uninterrupted, tmp_path):
    checkpoint = list_complete(uninterrupted / "checkpoints")[-2]
    folder = tmp_path / "branch"
    train(compose([*WORDS, f"run_dir={folder}", f"resume={checkpoint}"]))
    assert read_outcome(folder).state == read_outcome(uninterrupted).state


def test_a_run_folder_is_resumed_at_its_newest_checkpoint(uninterrupted, tmp_path, capsys):
    words = [*WORDS, f"run_dir={tmp_path / 'branch'}", f"resume={uninterrupted}"]
    train(compose(words))
    last = list_complete(uninterrupted / "checkpoints")[-1]
    assert f"resumed from {last} at step {STEPS}" in capsys.readouterr().out
    for path in (uninterrupted, uninterrupted / "checkpoints", last):
        assert find_checkpoints(str(path))[-1] == last
    shutil.copytree(last, tmp_path / "branch" / "checkpoints" / last.name)
    with pytest.raises(
        ValueError, match=r"resume=/nope is or has no usable checkpoint; name a run folder"
    ):
        train(compose([*words[:-1], "resume=/nope"]))  # though the run has checkpoints of its own


def test_the_same_command_continues_a_branch(uninterrupted, tmp_path):
    checkpoint = list_complete(uninterrupted / "checkpoints")[-2]
    folder = tmp_path / "branch"
    words = [*WORDS, f"run_dir={folder}", f"resume={checkpoint}", "total_samples=184"]
    train(compose(words))
    lines = (folder / "metrics.jsonl").read_text()
    train(compose(words))
    assert (folder / "metrics.jsonl").read_text() == lines


def test_an_older_checkpoint_of_the_same_run_is_refused(uninterrupted):
    older = list_complete(uninterrupted / "checkpoints")[0]
    with pytest.raises(ValueError, match=r"holds a later checkpoint, step-24"):
        train(compose([*WORDS, f"run_dir={uninterrupted}", f"resume={older}"]))


@pytest.mark.fault("every checkpoint damaged", "refused; nothing is overwritten")
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(uninterrupted, tmp_path):
    folder = tmp_path / "lost"
    shutil.copytree(uninterrupted, folder)
    for checkpoint in list_complete(folder / "checkpoints"):
        (checkpoint / "ema.safetensors").write_bytes(b"")
    metrics = (folder / "metrics.jsonl").read_text()
    with (
        pytest.warns(UserWarning, match="ema"),
        pytest.raises(ValueError, match="no checkpoint that verifies"),
    ):
        train(compose([*WORDS, f"run_dir={folder}"]))
    with pytest.raises(ValueError, match="no checkpoint that verifies"):  # nor the second time
        train(compose([*WORDS, f"run_dir={folder}"]))
    assert (folder / "metrics.jsonl").read_text() == metrics
