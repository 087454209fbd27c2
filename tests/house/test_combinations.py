"""Every model, data set and runtime takes two steps with every other, and every experiment with
each, pairwise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from accel.techniques.compilation import Compile
from tests.harness.sets import pairwise, random_samples, save_latent_set
from tests.harness.words import TINY_MODEL
from training.config.compose import CONF


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


FAMILIES = sorted(name.removesuffix("_s") for name in choices("model") if name.endswith("_s"))
DATA = {
    "digits": [],
    "synthetic": ["data.height=4", "data.width=8", "data.count=20", "data.num_classes=3"],
    "resident": ["data.path=latents"],
    "webdataset": ["data.path=latents", "data.streams=4", "data.num_workers=0"],
}


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")


@pytest.fixture(autouse=True)
def latents(tmp_path, monkeypatch):
    """A small latent set in the folder `latents`, with flips and posterior; its decoder is the
    identity."""
    monkeypatch.chdir(tmp_path)
    shards = [("train", random_samples(30, 0)), ("held_out", random_samples(5, 1))]
    identity = {"_target_": "models.autoencoders.PixelAutoencoder"}
    save_latent_set(tmp_path / "latents", shards, encoder=identity, encoder_sha256=None)


def test_every_loader_is_here():
    assert set(DATA) == set(choices("data"))


def once_auto(cases: list[tuple[str, ...]]) -> Iterator[Any]:
    """`runtime=auto` tries candidates for ten seconds, whatever the model: one case is enough."""
    first = next(case for case in cases if case[-1] == "auto")
    for case in cases:
        others = case[-1] == "auto" and case != first
        yield pytest.param(*case, marks=[pytest.mark.slow] if others else [])


@pytest.mark.parametrize(
    ("model", "data", "runtime"), [*once_auto(pairwise(FAMILIES, list(DATA), choices("runtime")))]
)
def test_two_steps(model, data, runtime, run):
    words = [f"model={model}_s", f"data={data}", f"runtime={runtime}", "eval_every=1", *DATA[data]]
    summary = run(*words, *TINY_MODEL, *(["runtime.tune_seconds=1"] if runtime == "auto" else []))
    assert summary["steps"] == 2
    assert 0 < summary["loss"] < 20
    assert summary["ledger"]["compile"]["active"] is (runtime in ("production", "max"))


@pytest.mark.parametrize(
    ("experiment", "model", "data"), pairwise(choices("experiment"), FAMILIES, list(DATA))
)
def test_every_experiment_works_with_every_model_and_data(experiment, model, data, run):
    sizes = [
        "batch_size=8",
        "total_samples=16",
        "log_every=1",
        "sampling.steps=2",
        "sampling.per_class=1",
    ]
    every = ["save_every=1", "sample_every=1", "eval_every=1"]
    words = [
        f"experiment={experiment}",
        f"model={model}_s",
        f"data={data}",
        "runtime=fast",
        *DATA[data],
    ]
    summary = run(*words, *sizes, *every, *TINY_MODEL)
    assert summary["steps"] == 2
    assert summary["sample_grid"]


def test_pairwise_covers_all_pairs():
    rows = pairwise(["a", "b"], ["x", "y", "z"], ["1", "2", "3"])
    assert len(rows) <= 10
    for i, j in ((0, 1), (0, 2), (1, 2)):
        axes = (["a", "b"], ["x", "y", "z"], ["1", "2", "3"])
        assert {(row[i], row[j]) for row in rows} == set(product(axes[i], axes[j]))
