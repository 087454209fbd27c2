"""Encoded photos, and imported latents of other tools."""

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from common.config.compose import compose
from precompute_latents import precompute
from scripts.import_latents import ImportConfig, import_latents
from tests.harness.foreign import COUNT, npy
from tests.harness.words import TINY_JOB


@pytest.fixture(scope="module")
def encoded(vae, photos, tmp_path_factory):
    """`encoded("key=value", …)` returns the folder of the photos' latents, which it encodes once in
    a module for each set of overrides. Read only."""

    @cache
    def start(*overrides):
        out = tmp_path_factory.mktemp("latents") / "out"
        words = [*TINY_JOB, f"encoder.path={vae}", f"source={photos}", f"out={out}", *overrides]
        return precompute(compose(words, "precompute_latents")).parent

    return start


@pytest.fixture
def done(encoded, tmp_path):
    """`done("key=value", …)` copies such a folder to where `job` writes by default."""

    def start(*overrides):
        return Path(shutil.copytree(encoded(*overrides), tmp_path / "out"))

    return start


@pytest.fixture(scope="module")
def samples():
    """Raw latents about 2 in size, as the tiny autoencoder gives them, and labels."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randn(COUNT, 2, 8, 6, generator=generator), torch.arange(COUNT) % 3


@pytest.fixture
def import_files(vae, samples, tmp_path):
    """`import_files(write, latents, labels, key=value, …)` writes files below `in`, the raw samples
    unless others are given, imports them to `out`, and returns that folder."""

    def start(write=npy, latents=samples[0], labels=samples[1], /, **settings):
        (tmp_path / "in").mkdir(exist_ok=True)
        given = write(tmp_path / "in", latents, labels)
        defaults = {
            "encoder": str(vae),
            "scale": 1.0,
            "shift": 0.0,
            "check_scale": False,
            "out": str(tmp_path / "out"),
            "device": "cpu",
            "held_out": 0.2,
            "shard_size": 7,
            "block_size": 3,
            "dtype": "float32",
        }
        return import_latents(ImportConfig(**defaults | given | settings)).parent

    return start
