"""How good samples are: the figures of a run, during it and after it, and what they depend on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from common.files import ROOT
from evaluation import evaluator as comparing
from evaluation.distances import (
    FeatureStats,
    compute_distances,
    compute_figures,
    compute_floor,
    frechet_distance,
)
from evaluation.distances import collect_stats as summed
from evaluation.evaluator import Evaluator, make_folder_source
from models.autoencoders import PixelAutoencoder
from sampling.load import SampleStream
from scripts.evaluate import EvaluateConfig, evaluate_run
from tests.harness.words import CPU, TINY_MODEL
from train import train
from training.components import build_loader
from training.config.compose import compose
from training.config.schema import FdConfig
from training.distributed.ranks import SINGLE

DIGITS = {"_target_": "data.digits.DigitLatents"}
RUN = [
    "total_samples=128",
    "batch_size=32",
    "optim.lr=2e-2",
    "schedule.warmup_samples=0",
    "eval_every=2",
    "fd_every=2",
]
RUN += [
    "sample_every=0",
    "save_every=2",
    "keep_checkpoints=1",
    "keep_best=fd_encoder",
    "fd.count=200",
    *TINY_MODEL,
]
RUN += ["ema.half_life_samples=500", "ema.ramp=10", "sampling.steps=2", "runtime.precision=fp32"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps of a tiny model on digits, which measured its distances at the second and the
    fourth. Read only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    summary = train(compose([*RUN, f"run_dir={folder}"]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # no time of training
    assert summary["maintenance_seconds"] > sum(line["distances_s"] for line in lines) > 0
    return folder


def config(trained, out, **changes) -> EvaluateConfig:
    given = {"run_dir": trained and str(trained), "count": 200, "batch_size": 16, "device": "cpu"}
    return EvaluateConfig(**given | {"out": out and str(out)} | changes)


@pytest.fixture(scope="module")
def evaluator():
    """Of the digits, without a run."""
    cfg = FdConfig(reference_count=50_000)
    spec = build_loader(DIGITS, 0, 64, CPU).spec
    return Evaluator(cfg, spec, DIGITS, PixelAutoencoder(), CPU, SINGLE)


def stats_of(evaluator: Evaluator, images: np.ndarray) -> dict[str, FeatureStats]:
    return summed(map(evaluator.of, torch.from_numpy(images).split(300)))


def digits(evaluator: Evaluator) -> np.ndarray:
    (batches,) = evaluator.source.images([range(evaluator.source.count)])
    return torch.cat(list(batches)).numpy()


def test_halves_of_the_digits_give_the_floor_and_noise_a_large_figure(evaluator):
    """tests/house/test_digits.py finds samples of a trained model between the two."""
    images = digits(evaluator)
    assert evaluator.source.facts["kind"] == "reconstructions"
    assert len(images) == evaluator.source.count == 1617
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    same = compute_figures(stats_of(evaluator, images), evaluator.reference)
    other = compute_figures(stats_of(evaluator, noise), evaluator.reference)
    for name in ("encoder", "random"):
        assert abs(same[name]["fd"]) < 1e-6
        assert same[name]["precision"] == same[name]["recall"] == same[name]["copied"] == 1.0
        assert same[name]["why"].endswith(
            "is expected: the model may repeat images of the reference"
        )
        assert other[name]["copied"] == 0.0
        assert 0.0 < same[name]["floor_fd"] < other[name]["fd"] / 20
        assert abs(same[name]["floor_kd"]) < other[name]["kd"] / 20
        assert other[name]["precision"] < 0.1


def test_images_that_are_not_what_was_meant_are_far_away(evaluator):
    """Wrong quantisation and the like: farther than one half of the reference is from the other."""
    planted = {
        "half of their range": lambda x: x // 2,
        "rounded down from a coarser grid": lambda x: x // 32 * 32,
        "inverted": lambda x: 255 - x,
        "upside down": lambda x: np.ascontiguousarray(x[:, ::-1]),
    }
    for fault, changed in planted.items():
        for name, stats in stats_of(evaluator, changed(digits(evaluator))).items():
            real = evaluator.reference[name]
            assert frechet_distance(stats.all, real.all) > 1.2 * frechet_distance(*real.halves), (
                fault,
                name,
            )


def test_the_figure_of_a_run_is_that_of_the_command_and_its_own(trained, tmp_path):
    """Drawn by the loop from the averages it holds, and from a checkpoint: the averaged weights, or
    both would differ.

    The tiny model has seen 128 samples; its averages are far from its weights.
    """
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "fd_encoder" in line] == [2, 4]
    assert lines[0]["train_seconds"] < lines[1]["train_seconds"]
    found = evaluate_run(config(trained, tmp_path / "again"))
    assert found["protocol"]["weights"]["kind"] == "ema"
    for name in ("encoder", "random"):
        assert found["features"][name]["kd"] == pytest.approx(lines[1][f"kd_{name}"], rel=1e-4)
    assert found["features"]["encoder"]["fd"] == pytest.approx(lines[1]["fd_encoder"], rel=1e-5)
    told = json.loads((trained / "fd_protocol.json").read_text())
    assert told["features"] == found["protocol"]["features"]
    assert told["floors"]["encoder"]["floor_fd"] == found["features"]["encoder"]["floor_fd"]
    weights = next((trained / "checkpoints").glob("step-4/model.safetensors"))
    raw = evaluate_run(config(trained, tmp_path / "raw", run_dir=None, weights=str(weights)))
    assert raw["protocol"]["weights"]["kind"] == "model"
    assert abs(raw["features"]["encoder"]["fd"] / found["features"]["encoder"]["fd"] - 1) > 0.01


def test_no_minutes_go_by_without_a_word(evaluator, capsys, monkeypatch, tmp_path):
    """Before features of a reference are made, and then in images; nothing where they are known."""
    monkeypatch.setattr("common.terminal.LINE_INTERVAL_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    evaluator.collect_reference_stats(SINGLE)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "making features (encoder, random) of 1617 images of the reference; a later run finds "
        f"them in {tmp_path}/fastlatent/references"
    )
    assert second.startswith("64/1617 images, ")
    evaluator.collect_reference_stats(SINGLE)
    assert capsys.readouterr().out == ""


def test_too_few_samples_have_no_frechet_distance_but_a_kernel_distance(trained, tmp_path, capsys):
    """200 are enough for the 64 values of these encoder features, and not for 256 random ones."""
    assert not any(
        "fd_random" in line for line in (trained / "metrics.jsonl").read_text().splitlines()
    )
    found = evaluate_run(config(trained, tmp_path / "few"))["features"]["random"]
    assert found["fd"] is None
    assert found["kd"] > 0.0
    assert "fd of 256 features needs more than 512 samples, there are 200" in found["why"]
    assert found["why"] in capsys.readouterr().out


def test_the_best_checkpoint_is_kept_by_the_distance_that_was_asked_for(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    best = min(lines, key=lambda line: line["fd_encoder"])["step"]
    assert {file.name for file in (trained / "checkpoints").glob("step-*")} == {
        f"step-{best}",
        "step-4",
    }
    for words, said in (
        (
            ["keep_best=fd_random", "fd_every=0"],
            "keep_best=fd_random needs that figure at every checkpoint",
        ),
        (["keep_best=fd_random", "fd_every=3", "save_every=4"], "divisor of save_every=4"),
        (
            ["keep_best=fd_inception"],
            "choose eval_loss, fd_encoder, fd_random, kd_encoder, kd_random",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            compose(words)
    with pytest.raises(
        ValueError, match="keep_best=fd_random: fd of 256 features needs more than 512"
    ):
        train(compose([*RUN, f"run_dir={trained}-other", "keep_best=fd_random"]))


def test_the_result_says_all_that_the_figures_depend_on(trained, tmp_path):
    found = evaluate_run(config(trained, tmp_path / "out", labels=[3], steps=3, seed=2))
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(found))
    assert found["features"].keys() == {"encoder", "random"}
    columns = {"fd", "kd", "kd_std", "precision", "recall", "copied", "floor_fd", "floor_kd"}
    assert found["features"]["encoder"].keys() == columns
    protocol = found["protocol"]
    assert (
        protocol
        | {"count": 200, "labels": [3], "steps": 3, "seed": 2, "solver": "heun", "shift": 1.0}
        == protocol
    )
    told = (
        "guidance",
        "guidance_interval",
        "precision",
        "data",
        "autoencoder",
        "quantisation",
        "rows",
        "neighbours",
    )
    assert protocol.keys() >= {*told, "reference", "features", "weights"}
    assert protocol["reference"].keys() >= {"kind", "sha256", "count", "resize"}
    assert len(protocol["weights"]["sha256"]) == 64
    assert "torch" in found["environment"]["versions"]
    assert not list(tmp_path.glob("*.parts"))


def test_a_killed_command_goes_on_to_the_same_figures(trained, tmp_path):
    """SIGKILL in the second of three pieces; a subprocess, as nothing less dies of it."""
    words = [
        f"run_dir={trained}",
        "count=1100",
        "batch_size=64",
        "steps=1",
        "device=cpu",
        "features=[encoder]",
    ]
    program = (
        "import os, sys, sampling.draw as p; write = p.ResumableChunks.write\n"
        "def dying(self, number, tensors):\n"
        "    if 'samples.parts' in str(self.folder) and number == 1: os.kill(os.getpid(), 9)\n"
        "    write(self, number, tensors)\n"
        "p.ResumableChunks.write = dying\n"
        "import runpy; runpy.run_module('scripts.evaluate', None, '__main__', True)"
    )
    command = [sys.executable, "-c", program, *words, f"out={tmp_path / 'samples'}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -9
    assert len(list((tmp_path / "samples.parts").glob("*.safetensors"))) == 1
    cfg = config(
        trained, tmp_path / "samples", count=1100, batch_size=64, steps=1, features=["encoder"]
    )
    found = evaluate_run(cfg)
    whole = evaluate_run(replace(cfg, out=str(tmp_path / "whole")))
    assert found["features"] == whole["features"]


def test_two_processes_come_to_the_same_figures(trained, tmp_path):
    words = [
        f"run_dir={trained}",
        "count=1100",
        "batch_size=64",
        "steps=1",
        "device=cpu",
        "features=[encoder]",
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "scripts.evaluate", *words, f"out={tmp_path / 'two'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cfg = config(
        trained, tmp_path / "one", count=1100, batch_size=64, steps=1, features=["encoder"]
    )
    found = json.loads((tmp_path / "two.json").read_text())["features"]
    alone = evaluate_run(cfg)["features"]
    assert found["encoder"] == pytest.approx(alone["encoder"], rel=1e-9)


def save_digits(folder, evaluator) -> None:
    for i, image in enumerate(digits(evaluator)[:300]):
        file = folder / str(i % 2) / f"{i:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)


def test_a_folder_of_images_is_a_reference_and_is_read_once(
    trained, evaluator, tmp_path, monkeypatch
):
    folder = tmp_path / "images"
    save_digits(folder, evaluator)
    folder.chmod(0o555)  # a read-only set works
    cfg = config(
        trained,
        tmp_path / "a",
        reference=str(folder),
        reference_count=250,
        features=["random", "encoder"],
    )
    found = evaluate_run(cfg)
    assert (
        found["protocol"]["reference"] | {"kind": "images", "count": 250}
        == found["protocol"]["reference"]
    )

    def refuse(*_):
        raise AssertionError("the reference was read again")

    monkeypatch.setattr(comparing, "DecodedImages", refuse)
    assert evaluate_run(replace(cfg, out=str(tmp_path / "b")))["features"] == found["features"]
    stats = stats_of(
        evaluator, digits(evaluator)[:300]
    )  # the PNGs are those images, no pixel moved
    assert (
        abs(compute_distances(stats["encoder"], evaluator.reference["encoder"])["fd"])
        < 3 * compute_floor(stats["encoder"])["floor_fd"]
    )


def save_flat(folder, count: int) -> None:
    folder.mkdir()
    for i in range(count):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.bmp")


def test_other_pixels_are_another_reference(tmp_path):
    """Also of the same names and sizes; and a folder needs no classes."""
    save_flat(tmp_path / "flat", 9)
    first = make_folder_source(str(tmp_path / "flat"), 8, 100).facts
    assert make_folder_source(str(tmp_path / "flat"), 8, 100).facts == first
    Image.new("RGB", (8, 8), (99, 0, 0)).save(tmp_path / "flat" / "3.bmp")
    assert make_folder_source(str(tmp_path / "flat"), 8, 100).facts["sha256"] != first["sha256"]


def test_one_run_has_distances_of_one_protocol(trained, tmp_path):
    """A resume that would measure otherwise is refused, and what is there stays."""
    folder = shutil.copytree(trained, tmp_path / "run")
    before = (folder / "fd_protocol.json").read_bytes()
    with pytest.raises(
        ValueError, match=r"distances of another protocol: steps was 2, is 3\. Set that back"
    ):
        train(compose([*RUN, f"run_dir={folder}", "sampling.steps=3", "total_samples=192"]))
    assert (folder / "fd_protocol.json").read_bytes() == before
    train(compose([*RUN, f"run_dir={folder}", "total_samples=192"]))
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [2, 4, 6]


def test_samples_that_are_not_finite_have_no_figures(trained, tmp_path, monkeypatch, capsys):
    """An 8-bit image of NaN looks like any other. A run warns and goes on, a command stops with a
    sentence."""
    monkeypatch.setattr(
        SampleStream,
        "batch",
        lambda self, number: (torch.zeros(16).long(), torch.full((16, 1, 8, 8), torch.nan)),
    )
    with pytest.raises(ValueError, match="draws samples that are not finite"):
        evaluate_run(config(trained, tmp_path / "out"))
    folder = tmp_path / "run"
    assert train(compose([*RUN, f"run_dir={folder}", "keep_best=eval_loss"]))["steps"] == 4
    assert "warning: samples are not finite" in capsys.readouterr().out
    assert not any("kd_" in line for line in (folder / "metrics.jsonl").read_text().splitlines())


def test_results_of_other_settings_do_not_replace_each_other(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    for steps in (1, 2, 2):
        evaluate_run(config(folder, None, steps=steps, features=["encoder"], count=20))
    assert len(list((folder / "evaluation").glob("step-4-*.json"))) == 2


def test_what_cannot_be_evaluated_is_said(trained, tmp_path):
    weights = tmp_path / "copied.safetensors"
    weights.write_bytes(next((trained / "checkpoints").glob("step-4/ema.safetensors")).read_bytes())
    (tmp_path / "empty").mkdir()
    save_flat(tmp_path / "few", 3)
    for changes, said in (
        ({"run_dir": None, "weights": str(weights)}, "give reference=<folder>"),
        ({"features": ["encodr"]}, "features=encodr is unknown"),
        ({"count": 3}, "count=3 must be at least 4"),
        ({"reference": str(tmp_path / "empty")}, f"reference={tmp_path / 'empty'} holds no images"),
        ({"reference": str(tmp_path / "few")}, "gives 3 images to compare with; give 8 or more"),
        ({"reference_count": 2}, "reference_count=2 must be at least 8"),
        ({"features": ["inception"]}, "inception="),
    ):
        with pytest.raises(ValueError, match=said):
            evaluate_run(config(trained, tmp_path / "out", **changes))
    with pytest.raises(ValueError, match="out is not set"):
        evaluate_run(config(None, None, weights=str(weights)))


def test_a_reference_that_another_process_makes_is_waited_for(tmp_path, monkeypatch):
    """One waits; a command without a right to wait is refused."""
    from sampling import draw
    from sampling.draw import ResumableChunks

    calls = []
    held = draw.lock_folder

    def busy_twice(folder, refusal):
        calls.append(folder)
        if len(calls) < 3:
            raise ValueError(refusal)
        return held(folder, refusal)

    monkeypatch.setattr(draw, "lock_folder", busy_twice)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert ResumableChunks(tmp_path / "waits", {}, 1, SINGLE, waits=True).missing() == [0]
    calls.clear()
    with pytest.raises(ValueError, match="another process works on it"):
        ResumableChunks(tmp_path / "refused", {}, 1, SINGLE)
