"""Samples by the thousand: solvers, numbered samples, chunks that survive a kill, formats."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from accel.techniques.compilation import Compile
from data.loader import LatentSpec
from data.resident import ChunkedLatents
from models.sampler import sample
from sampling import load as sampling
from sampling.draw import DrawConfig, ResumableChunks, SampleJob
from sampling.load import deal_labels_of_data, draw_latents, find_class_numbers, load_run
from scripts.sample import Format, SampleConfig, sample_run
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.words import CPU
from train import train
from training.checkpoint.load import list_complete
from training.components import build_loader
from training.config.compose import compose, parse_words
from training.distributed.ranks import SINGLE, Ranks
from training.weights.adapter_file import load_model

RUN = [
    "model.dim=32",
    "model.depth=2",
    "model.head_dim=16",
    "total_samples=256",
    "batch_size=32",
    "optim.lr=2e-2",
]
RUN += [
    "schedule.warmup_samples=0",
    "eval_every=0",
    "sample_every=0",
    "save_every=8",
    "ema.half_life_samples=1",
]
RUN += ["sampling.steps=3", "runtime.tf32=false", "runtime.precision=fp32"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Eight quick steps of a tiny model on digits. Read only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(compose([*RUN, f"run_dir={folder}"]))
    return folder


def gaussian(mean: float, std: float):
    """The exact velocity of data z ~ N(mean, std²): v = E[ε - z | x]. Its paths end at mean + std ·
    x(1)."""

    def velocity(x, t):
        variance = (1 - t) ** 2 * std**2 + t**2
        centred = (x - (1 - t) * mean) / variance
        return t * centred - (mean + (1 - t) * std**2 * centred)

    return velocity


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("ab2", 2)])
def test_solvers_converge_with_their_order(solver, order, shift):
    """To the known end of the path, also where steps are unequal."""
    noise = torch.full((1, 1, 1, 1), 1.3)
    with torch.no_grad():
        errors = [
            abs(sample(gaussian(0.7, 0.4), noise, steps, solver, shift).item() - (0.7 + 0.4 * 1.3))
            for steps in (40, 80)
        ]
    assert order - 0.15 < math.log2(errors[0] / errors[1]) < order + 0.6
    assert errors[1] < {1: 0.03, 2: 3e-3}[order]


def test_the_sde_draws_the_distribution_of_the_data():
    """And not along the paths of the ODE: one starting point spreads."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(40_000, 1, 1, 1, generator=draw)
    found = sample(
        gaussian(0.7, 0.4),
        noise,
        200,
        "sde",
        fresh=lambda i: torch.randn(noise.shape, generator=draw),
    )
    assert found.mean().item() == pytest.approx(0.7, abs=4 * 0.4 / math.sqrt(40_000) + 0.005)
    assert found.std().item() == pytest.approx(0.4, rel=0.03)
    assert abs(torch.corrcoef(torch.stack((noise.flatten(), found.flatten())))[0, 1]) < 0.7
    with pytest.raises(ValueError, match="solver=sde needs noise"):
        sample(gaussian(0.7, 0.4), noise, 2, "sde")


def drawing(trained, *words: str, ranks: Ranks = SINGLE) -> SampleJob:
    return SampleJob(
        parse_words(DrawConfig, [f"run_dir={trained}", "device=cpu", *words], ""), ranks
    )


@pytest.mark.parametrize("solver", ["ab2", "sde"])
def test_a_sample_depends_on_seed_and_number_alone(trained, solver):
    """Bit for bit at equal batch size, within rounding else."""
    six, four = (
        drawing(trained, f"batch_size={size}", f"solver={solver}", "seed=5").stream
        for size in (6, 4)
    )
    labels, latents = (torch.cat(parts) for parts in zip(six.batch(0), six.batch(1), strict=True))
    others = [torch.cat(parts) for parts in zip(*(four.batch(i) for i in range(3)), strict=True)]
    assert labels.tolist() == others[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    torch.testing.assert_close(latents, others[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(six.batch(1)[1], latents[6:])
    again = draw_latents(six.forward, six.spec, labels[6:], torch.arange(6, 12), 5, six.sampling)
    assert torch.equal(again, latents[6:])
    assert not torch.allclose(latents[0], latents[10], atol=0.1)  # one label, other noise


def test_the_runtime_and_the_settings_are_the_runs_own(trained, monkeypatch):
    found = drawing(trained, "batch_size=4")
    assert found.stream.sampling.steps == 3
    ledger = found.ledger.as_dict()
    assert (ledger["precision"]["requested"], ledger["fused_scan"]["requested"]) == ("fp32", "auto")
    assert "no GPU has proved" in ledger["cuda_graph"]["evidence"]
    assert found.protocol()["weights"]["kind"] == "ema"
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    compiled = drawing(trained, "batch_size=4", "runtime.compile=true", "steps=2")
    assert compiled.ledger.as_dict()["compile"]["active"] is True
    assert compiled.stream.sampling.steps == 2
    torch.testing.assert_close(
        compiled.stream.batch(0)[1], drawing(trained, "steps=2").stream.batch(0)[1][:4]
    )
    with pytest.raises(ValueError, match="prcision: there is no such key; did you mean precision"):
        drawing(trained, "runtime.prcision=fp32")


def test_labels_are_dealt_or_as_in_the_data(trained, tmp_path):
    given = drawing(trained, "labels=[3,7,7]", "batch_size=4", "count=8")
    assert given.stream.batch(1)[0].tolist() == [7, 7, 3, 7]
    data = drawing(trained, "labels=data", "batch_size=100")
    found = torch.cat([data.stream.batch(number)[0] for number in (3, 0, 1)])
    assert torch.equal(found[:100], data.stream.batch(3)[0])
    assert set(Counter(found.tolist())) == set(range(10))
    for words, said in (
        (
            ["labels=[11]"],
            r"labels: 11 is no class of this run; its 10 classes are, from 0 on, 0, 1, ",
        ),
        (["labels=[-1]"], "-1 is no class"),
        (["labels=[true]"], "True is no class"),
        (["labels=[1.5]"], r"1\.5 is no class"),
        (["labels=some"], "labels=some must be balanced"),
        (["labels=[]"], r"labels=\[\] must be balanced"),
    ):
        with pytest.raises(ValueError, match=said):
            drawing(trained, *words)
    weights = shutil.copy(next((trained / "checkpoints").glob("*/ema.safetensors")), tmp_path)
    with pytest.raises(ValueError, match="labels=data needs the run's data"):
        SampleJob(DrawConfig(weights=str(weights), labels="data", device="cpu"), SINGLE)


NAMED = LatentSpec(1, 2, 2, 4, 9, ["apple", "7", "pear", "pear"], [0.0], [1.0])


def test_classes_go_by_number_and_by_name():
    assert find_class_numbers([3, "apple", "7", np.int64(1)], NAMED) == [3, 0, 1, 1]
    # names nobody gave
    assert find_class_numbers(["2", 0], dataclasses.replace(NAMED, class_names=[])) == [2, 0]
    for label, said in (
        ("aple", "'aple' is no class of this run; did you mean apple?"),
        (
            "quince",
            "'quince' is no class of this run; its 4 classes are, from 0 on, apple, 7, pear, pear.",
        ),
        (7, "7 is no class"),
        ("pear", r"'pear' is the name of 2 classes, \[2, 3\]; give their numbers"),
        (None, "None is no class"),
        ("x" * 5000, "x is no class|x{70} is no class"),
    ):
        with pytest.raises(ValueError, match=f"labels: .*{said.replace('?', '[?]')}") as caught:
            find_class_numbers([label], NAMED)
        assert len(str(caught.value)) < 300


def test_names_are_drawn_and_told(trained, tmp_path):
    """The digits' names look like numbers: in quotes they are names."""
    given = drawing(trained, "labels=['7',3]", "batch_size=4")
    assert given.stream.batch(0)[0].tolist() == [7, 3, 7, 3]
    assert given.protocol()["labels"] == [7, 3]  # whichever way they were given
    assert drawing(trained).classes() == {str(digit): str(digit) for digit in range(10)}
    npz = sample_run(settings(trained, tmp_path / "named", labels=["7", 3], count=4))
    assert np.load(npz)["labels"].tolist() == [7, 3, 7, 3]
    assert json.loads((tmp_path / "named.json").read_text())["classes"] == {"3": "3", "7": "7"}
    assert load_run(trained, device="cpu").sample(["7"], steps=1).shape == (1, 8, 8, 3)


@pytest.mark.fault(
    "sampling from a run that removes its checkpoint meanwhile", "the next one is loaded"
)
@pytest.mark.parametrize("after", [False, True], ids=["before it is read", "after"])
def test_a_run_that_saves_while_it_is_read(after, trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "live")
    newest = list_complete(tmp_path / "live" / "checkpoints")[-1]
    opened = []

    def removed(file, *arguments):
        found = [load_model(file, *arguments)] if after else []
        if newest.exists():
            newest.rename(newest.with_name("step-99"))
        opened.append(file.parent.name)
        return found[0] if found else load_model(file, *arguments)

    monkeypatch.setattr(sampling, "load_model", removed)
    assert drawing(tmp_path / "live").protocol()["weights"]["step"] == 8
    assert opened == (["step-8"] if after else ["step-8", "step-99"])


def test_labels_of_a_set_in_chunks(tmp_path):
    """Its loader's place is more than a number of samples."""
    save_latent_set(
        tmp_path, [("train", random_samples(40, seed=0)), ("held_out", random_samples(4, seed=1))]
    )
    node = {
        "_target_": "data.resident.ResidentLatents",
        "path": str(tmp_path),
        "device_memory_gib": 5e-6,
    }
    assert isinstance(build_loader(node, 0, 4, CPU).loader, ChunkedLatents)
    forwards, backwards = (deal_labels_of_data(node, 0, 4, CPU) for _ in range(2))
    found = {i: forwards(torch.arange(4 * i, 4 * i + 4)) for i in range(5)}
    assert all(
        torch.equal(backwards(torch.arange(4 * i, 4 * i + 4)), found[i]) for i in (4, 0, 2, 1, 3)
    )


def settings(trained, out, **changes) -> SampleConfig:
    return SampleConfig(
        **{
            "run_dir": str(trained),
            "count": 1100,
            "steps": 2,
            "batch_size": 64,
            "device": "cpu",
            "out": str(out),
        }
        | changes
    )


def picture(file) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image)


def test_formats_grid_and_bytes(trained, tmp_path, monkeypatch):
    npz = sample_run(settings(trained, tmp_path / "a", grid=40))
    found = np.load(npz)
    assert found["arr_0"].shape == (1100, 8, 8, 3)
    assert found["arr_0"].dtype == np.uint8
    assert found["labels"].tolist() == [i % 10 for i in range(1100)]
    # a row a class, 8 pixels and a border, enlarged, right of the names
    grid = picture(tmp_path / "a.png")
    assert (grid[4:36:4, -36:-4:4] == found["arr_0"][30]).all()
    assert grid.shape[0] == 10 * 40
    assert 0 < grid.shape[1] - 4 * 40 < 40
    assert (grid[:, : -4 * 40] < 128).any()
    told = json.loads((tmp_path / "a.json").read_text())
    assert (told["count"], told["solver"], told["steps"], told["labels"]) == (
        1100,
        "heun",
        2,
        "balanced",
    )

    few = np.load(sample_run(settings(trained, tmp_path / "few", count=70)))
    assert (few["arr_0"] == found["arr_0"][:70]).all()
    assert not (tmp_path / "few.png").exists()  # only when asked
    folder = sample_run(settings(trained, tmp_path / "pngs", count=25, format=Format.png))
    assert (picture(folder / "0003" / "000013.png") == found["arr_0"][13]).all()
    assert len(list(folder.rglob("*.png"))) == 25
    with pytest.raises(ValueError, match="pngs is there already"):
        sample_run(settings(trained, tmp_path / "pngs", count=5, format=Format.png))
    latents = np.load(
        sample_run(settings(trained, tmp_path / "latents", count=25, format=Format.latents))
    )
    run = load_run(trained, device="cpu")
    pixels = ((torch.from_numpy(latents["latents"]).clamp(-1, 1) + 1) * 127.5).round()
    assert run.spec.channels == 1
    assert (pixels[:, 0].numpy() == found["arr_0"][:25, ..., 0]).all()
    assert not list(tmp_path.glob("*.parts"))


class Killed(BaseException):
    """Ends a command as a kill would: nothing of it is caught."""


def test_a_stopped_command_goes_on_to_the_same_bytes(trained, tmp_path, monkeypatch, capsys):
    whole = sample_run(settings(trained, tmp_path / "whole")).read_bytes()
    write = ResumableChunks.write

    def dying(self, number, tensors):
        if number == 1:
            (self.folder / "000001-tmp").write_bytes(b"half")
            raise Killed
        write(self, number, tensors)

    cfg = settings(trained, tmp_path / "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(ResumableChunks, "write", dying)
        with pytest.raises(Killed):
            sample_run(cfg)
    parts = tmp_path / "stopped.parts"
    (chunk,) = parts.glob("000000-*.safetensors")
    with pytest.raises(
        ValueError, match=r"count was 1100, is 1200\); delete it or use another out"
    ):
        sample_run(settings(trained, tmp_path / "stopped", count=1200))
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")  # and a disk that lied: it is drawn again
    assert sample_run(cfg).read_bytes() == whole
    assert not parts.exists()


def test_processes_draw_their_share(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "wait_for_all", lambda self: None)
    alone = drawing(trained, "count=1100", "batch_size=64")
    one = alone.run(tmp_path / "one", {}, lambda labels, latents: {"latents": latents})
    for rank in (1, 2, 0):
        share = drawing(trained, "count=1100", "batch_size=64", ranks=Ranks(rank, 3))
        several = share.run(tmp_path / "three", {}, lambda labels, latents: {"latents": latents})
        several.close()
    assert one.count == several.count == 3
    for number in range(3):
        assert torch.equal(one.read(number)["latents"], several.read(number)["latents"])
    next((tmp_path / "one").glob("000001-*")).unlink()
    with pytest.raises(ValueError, match="piece 1 is gone or damaged"):
        one.read(1)


def test_what_cannot_be_drawn_is_said(trained, tmp_path):
    for changes, said in (
        ({"count": 0}, "count=0 must be at least 1"),
        ({"grid": 5000}, "grid=5000 must be at most 1024"),
        ({"grid": 5, "format": Format.latents}, "grid=5 is made of images"),
        ({"weights": "x"}, "both set"),
    ):
        with pytest.raises(ValueError, match=said):
            sample_run(settings(trained, tmp_path / "x", **changes))
