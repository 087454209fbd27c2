"""A tiny run to draw samples from."""

import pytest

from common.config.compose import compose
from train import train

RUN = """model.dim=32 model.depth=2 model.head_dim=16 total_samples=256 batch_size=32 optim.lr=2e-2
schedule.warmup_samples=0 eval_every=0 sample_every=0 save_every=8 ema.half_life_samples=1
sampling.steps=3 runtime.tf32=false runtime.precision=fp32"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Eight quick steps of a tiny model on digits. Read only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(compose([*RUN.split(), f"run_dir={folder}"]))
    return folder
