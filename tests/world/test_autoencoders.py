"""The autoencoders of FLUX.2 and Qwen-Image, of diffusers' own classes, from pictures to samples.

tests/models/test_autoencoders.py compares what they compute, tests/scripts/test_export.py what
stock diffusers draws with them.
"""

import pytest

from common.config.compose import compose
from sampling.load import load_run
from tests.harness.sets import save_tiny_autoencoder
from tests.harness.words import TINY_RUN
from train import train


@pytest.mark.parametrize("kind", ["AutoencoderKLFlux2", "AutoencoderKLQwenImage"])
def test_from_pictures_to_samples(kind, job, tmp_path):
    vae = save_tiny_autoencoder(kind, tmp_path / "vae")
    path = job(f"encoder.path={vae}")
    words = [*TINY_RUN, "save_every=16", "data=resident", f"data.path={path}"]
    train(compose([*words, f"run_dir={tmp_path / 'run'}"]))
    run = load_run(tmp_path / "run", device="cpu")
    assert run.sample(["cat"], steps=1).shape == (1, 16, 12, 3)
