"""Loaders on a GPU: what arrives there is what arrives on a CPU, also while the GPU is busy; run by
`pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.loader import Batch, LatentLoader
from data.resident import ResidentLatents
from data.streamed import StreamedLatents
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.words import CPU

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
WAYS = ["resident", "int8", "chunks", "webdataset", "webdataset, 2 workers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("set")
    train = [("train", random_samples(400, seed)) for seed in range(3)]
    save_latent_set(path, [*train, ("held_out", random_samples(9, 9))])
    return path


def make(way: str, folder: Path, device: torch.device) -> LatentLoader:
    shared: dict = {"path": str(folder), "batch_size": 32, "seed": 0, "device": device}
    if way.startswith("webdataset"):
        return StreamedLatents(
            **shared, streams=16, window=12, num_workers=2 if "workers" in way else 0
        )
    if way == "int8":
        return ResidentLatents(**shared, storage="int8")
    return ResidentLatents(
        **shared, device_memory_gib=2 * 100 * 240 / 2**30 if way == "chunks" else 1.0
    )


def same(on_gpu: Batch, on_cpu: Batch) -> None:
    for name in ("ids", "labels", "position"):
        assert torch.equal(getattr(on_gpu, name).cpu(), getattr(on_cpu, name)), name
    torch.testing.assert_close(on_gpu.latents.cpu(), on_cpu.latents, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_gpu_gets_what_a_cpu_gets_while_it_is_busy(way: str, folder: Path):
    """Kernels still run when the next copies are started: a buffer given away too early would
    show."""
    loader = make(way, folder, CUDA)
    expected = make(way, folder, CPU)
    matrix = torch.randn(2048, 2048, device=CUDA)
    kept = []
    for _ in range(120):
        batch = next(loader)
        for _ in range(4):
            matrix = torch.tanh(matrix @ matrix)
        # after the matrices, on the same stream
        kept.append(Batch(*(tensor.clone() for tensor in batch)))
        del batch
    for batch in kept:
        same(batch, next(expected))
    for batch, other in zip(loader.held_out(4), expected.held_out(4), strict=True):
        same(batch, other)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_starts_without_a_wait_for_the_gpu(way: str, folder: Path):
    loader = make(way, folder, CUDA)
    for _ in range(3):
        next(loader)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            next(loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
