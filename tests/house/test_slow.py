"""Long proofs, run by `make test-slow`: the whole matrix, compiled by Inductor, and real photos."""

from itertools import product

import pytest

from common.config.compose import compose
from precompute_latents import precompute
from tests.harness.combinations import DATA, FAMILIES, choose_model, list_choices
from tests.harness.words import TINY_MODEL
from train import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("runtime", list_choices("runtime"))
@pytest.mark.parametrize(("model", "data"), list(product(FAMILIES, ["digits", "synthetic"])))
def test_two_steps_of_everything_with_the_real_compiler(model, data, runtime, run):
    choices = [*choose_model(model), f"data={data}", f"runtime={runtime}"]
    summary = run(*choices, *DATA[data], "eval_every=1", *TINY_MODEL)
    assert summary["steps"] == 2
    if runtime != "auto":  # its search decides
        compiles = runtime in ("production", "max")
        assert summary["ledger"]["compile"]["active"] is compiles


def test_real_photos_are_encoded_and_learnt(assets, tmp_path):
    latents = tmp_path / "latents"
    job = [
        f"source={assets / 'images' / 'grocery'}",
        f"out={latents}",
        "encoder=local",
        f"encoder.path={assets / 'vae' / 'taef2'}",
        "resolution=128",
        "limit=400",
        "flips=true",
    ]
    precompute(compose(job, "precompute_latents"))
    run = [
        "data=resident",
        f"data.path={latents}",
        f"run_dir={tmp_path / 'run'}",
        "model=mamba_s",
        "model.dim=128",
        "model.depth=4",
        "model.head_dim=32",
        "model.mixer.state_dim=16",
        "total_samples=6400",
        "batch_size=32",
        "eval_every=50",
        "sample_every=0",
        "save_every=0",
    ]
    # A model that knows nothing has a loss of 2.
    assert train(compose(run))["eval_loss"] < 1.6
