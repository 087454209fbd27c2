"""Long proofs, run by `make test-slow`: the whole matrix, kills at random moments, every family on
real data."""

from __future__ import annotations

from itertools import product

import pytest

from precompute_latents import precompute
from scripts.sample import SampleConfig, sample_run
from tests.harness.words import TINY_MODEL
from tests.house.test_combinations import DATA, FAMILIES, choices
from tests.house.test_digits import recognised
from train import train
from training.config.compose import compose

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("runtime", choices("runtime"))
@pytest.mark.parametrize(("model", "data"), list(product(FAMILIES, ["digits", "synthetic"])))
def test_two_steps_of_everything_with_the_real_compiler(model, data, runtime, run):
    summary = run(
        f"model={model}_s",
        f"data={data}",
        f"runtime={runtime}",
        "eval_every=1",
        *DATA[data],
        *TINY_MODEL,
    )
    assert summary["steps"] == 2
    assert summary["ledger"]["compile"]["active"] is (runtime == "production")


@pytest.mark.parametrize("model", ["mamba_xs", "ssd_mlp_xs", "dit_xs"])
def test_every_family_learns_to_draw_digits(model, tmp_path):
    train(compose([f"run_dir={tmp_path / model}", f"model={model}", "sample_every=0"]))
    npz = sample_run(
        SampleConfig(
            run_dir=str(tmp_path / model), count=200, seed=1, out=str(tmp_path / "samples")
        )
    )
    assert recognised(npz) >= 0.9


def test_real_photos_are_encoded_and_learnt(assets, tmp_path):
    source = assets / "images" / "grocery"
    encoder = assets / "vae" / "taef2"
    words = [
        f"source={source}",
        f"out={tmp_path / 'latents'}",
        "encoder=local",
        f"encoder.path={encoder}",
    ]
    precompute(compose([*words, "resolution=128", "limit=400", "flips=true"], "precompute_latents"))
    small = [
        "model=mamba_s",
        "model.dim=128",
        "model.depth=4",
        "model.head_dim=32",
        "model.mixer.state_dim=16",
    ]
    length = [
        "total_samples=6400",
        "batch_size=32",
        "eval_every=50",
        "sample_every=0",
        "save_every=0",
    ]
    folder = f"run_dir={tmp_path / 'run'}"
    summary = train(
        compose(["data=resident", f"data.path={tmp_path / 'latents'}", *small, *length, folder])
    )
    assert summary["eval_loss"] < 1.6  # 2 for a model that knows nothing
