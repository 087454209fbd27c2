"""Loaders give a GPU the batches that they give a CPU, even while the GPU is busy; run by
`pytest -m gpu`."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.harness.batches import LOADERS
from tests.harness.sets import save_random_set
from tests.harness.words import CPU, CUDA

pytestmark = pytest.mark.gpu
every_kind = pytest.mark.parametrize("kind", LOADERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_set(tmp_path_factory.mktemp("set"), 400, 400, 400, held_out=9)


def load(kind, folder, device):
    settings = {"samples": 100} if kind == "chunks" else {}
    return LOADERS[kind](folder, batch_size=32, device=device, **settings)


def assert_close(on_gpu, on_cpu):
    assert torch.equal(on_gpu.condition.labels.cpu(), on_cpu.condition.labels)
    assert torch.equal(on_gpu.ids.cpu(), on_cpu.ids)
    assert torch.equal(on_gpu.position.cpu(), on_cpu.position)
    torch.testing.assert_close(on_gpu.latents.cpu(), on_cpu.latents, rtol=1e-5, atol=1e-5)


@every_kind
def test_a_gpu_gets_what_a_cpu_gets_while_it_is_busy(kind, folder):
    """Kernels still run when the next copies start, so a buffer that is given away too early
    shows."""
    loader = load(kind, folder, CUDA)
    expected = load(kind, folder, CPU)
    matrix = torch.randn(2048, 2048, device=CUDA)
    batches = []
    for _ in range(120):
        batch = next(loader)
        for _ in range(4):
            matrix = torch.tanh(matrix @ matrix)

        # the clones follow the matrices on the same stream
        batches.append(tree_map_only(torch.Tensor, torch.clone, batch))
        del batch
    for batch in batches:
        assert_close(batch, next(expected))
    for batch, other in zip(loader.held_out(4), expected.held_out(4), strict=True):
        assert_close(batch, other)


@every_kind
def test_a_step_starts_without_a_wait_for_the_gpu(kind, folder):
    loader = load(kind, folder, CUDA)
    for _ in range(3):
        next(loader)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            next(loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
