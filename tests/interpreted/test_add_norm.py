"""The kernels of add_norm against their definition."""

from __future__ import annotations

import pytest
import torch

from accel.kernels.add_norm import backward_reference, forward_reference
from accel.kernels.add_norm_triton import choose_splits, launch_backward, launch_forward
from tests.interpreted.conftest import assert_near


@pytest.mark.parametrize("dim", [96, 384, 768, 1152])
@pytest.mark.parametrize("length", [1, 63, pytest.param(64, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize("variant", ["plain", "row maps", "narrow", "centred"])
def test_kernels_equal_the_definition(dim, length, variant, poison):
    torch.manual_seed(dim + length)
    dtype = torch.float16 if variant == "narrow" else torch.float32
    batch = 2
    branch = torch.randn(batch, length, dim).to(dtype)
    residual = 1.0 + 3.0 * torch.randn(batch, length, dim)
    centred = variant == "centred"
    cond = torch.randn(batch, 5, dim).to(dtype)  # slices of it are strided, as in a model
    maps = [torch.randperm(length).int() if variant == "row maps" else None for _ in range(2)]
    arguments = (
        branch,
        cond[:, 1],
        residual,
        cond[:, 2],
        cond[:, 4],
        *maps,
        1e-6,
        variant != "narrow",
        centred,
    )
    expected = forward_reference(*arguments)
    _, z, rstd = expected
    dh = torch.randn(batch, length, dim).to(dtype)
    dz = torch.randn(batch, length, dim).to(z.dtype)
    dz = dz if length != 63 else None
    backward = (dh, dz, z, branch, cond[:, 1], cond[:, 2], *maps, rstd, residual.dtype, centred)
    expected_backward = backward_reference(*backward)
    poison()
    for a, e in zip(launch_forward(*arguments), expected, strict=True):
        assert_near(a, e, dtype)
    for a, e in zip(launch_backward(*backward), expected_backward, strict=True):
        assert_near(a, e, dtype)


def test_the_stream_is_never_written_in_place():
    branch = torch.randn(1, 4, 96)
    residual = torch.randn(1, 4, 96)
    before = residual.clone()
    vector = torch.randn(1, 96)
    launch_forward(branch, vector, residual, vector, vector, None, None, 1e-6, True, False)
    assert torch.equal(residual, before)


@pytest.mark.parametrize(
    ("batch", "length", "block"), [(256, 256, 2), (1, 1024, 2), (8, 100, 4), (2, 1, 16)]
)
def test_stretches_cover_every_row_once(batch, length, block):
    splits, rows = choose_splits(batch, length, block, processors=132)
    assert rows % block == 0
    assert splits * rows >= length > (splits - 1) * rows
