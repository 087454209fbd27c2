"""Encoded photos, and imported latents of other tools."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from precompute_latents import precompute
from scripts.import_latents import ImportConfig, check_config, import_latents
from tests.harness.foreign import COUNT, Write, npy
from tests.harness.sets import Job
from tests.harness.words import TINY_JOB
from training.config.compose import compose

Import = Callable[..., Path]


@pytest.fixture(scope="module")
def encoded(vae: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """`encoded("key=value", …)` returns the folder of the photos' latents, which it encodes once in
    a module for each set of overrides. Read only."""

    @cache
    def start(*overrides: str) -> Path:
        out = tmp_path_factory.mktemp("latents") / "out"
        words = [*TINY_JOB, f"encoder.path={vae}", f"source={photos}", f"out={out}", *overrides]
        return precompute(compose(words, "precompute_latents")).parent

    return start


@pytest.fixture
def done(encoded: Job, tmp_path: Path) -> Job:
    """`done("key=value", …)` copies such a folder to where `job` writes by default."""

    def start(*overrides: str) -> Path:
        return Path(shutil.copytree(encoded(*overrides), tmp_path / "out"))

    return start


@pytest.fixture(scope="module")
def samples() -> tuple[Tensor, Tensor]:
    """Raw latents about 2 in size, as the tiny autoencoder gives them, and labels."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randn(COUNT, 2, 8, 8, generator=generator), torch.arange(COUNT) % 3


@pytest.fixture
def import_files(vae: Path, samples: tuple[Tensor, Tensor], tmp_path: Path) -> Import:
    """`import_files(write, latents, labels, key=value, …)` writes files below `in`, the raw samples
    unless others are given, imports them to `out`, and returns that folder."""

    def start(
        write: Write = npy,
        latents: Tensor = samples[0],
        labels: Tensor = samples[1],
        /,
        **settings: Any,
    ) -> Path:
        (tmp_path / "in").mkdir(exist_ok=True)
        given = write(tmp_path / "in", latents, labels)
        defaults: dict[str, Any] = {
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
        return import_latents(check_config(ImportConfig(**defaults | given | settings))).parent

    return start
