"""Overrides that make runs and jobs tiny, and the parameters of slow tests."""

import pytest
import torch

CPU = torch.device("cpu")
CUDA = torch.device("cuda")

TINY_MODEL = ["model.dim=64", "model.depth=2", "model.head_dim=32", "model.patch_size=2"]
"""Shrinks a model of any family."""

TINY_RUN = [
    "total_samples=16",
    "batch_size=8",
    "log_every=1",
    "eval_every=0",
    "sample_every=0",
    "save_every=0",
    "runtime.on_unavailable=degrade",
    *TINY_MODEL,
]
"""A run of two steps."""

TINY_JOB = [
    "encoder=local",
    "runtime=eager",
    "resolution=[16,12]",
    "batch_size=4",
    "shard_size=6",
    "block_size=4",
    "held_out=0.2",
    "num_workers=0",
    "min_psnr=-100",
]
"""A job that holds 4 of 20 images out in one shard, and trains on 16 in shards of 6, 6 and 4."""

TINY_SYNTHETIC = [
    "data=synthetic",
    "data.channels=1",
    "data.height=4",
    "data.width=6",
    "data.count=64",
    "data.num_classes=3",
    "model=conv_xs",
    "model.dim=32",
    "model.head_dim=16",
    "model.depth=2",
    "model.patch_size=2",
]
"""The smallest model, on 64 random latents of 4 tokens."""


def slow(*values):
    """Parameters of a case that only slow runs of the tests have."""
    return pytest.param(*values, marks=pytest.mark.slow)
