"""The kernels of gate and head norm against their definition in fp64."""

from __future__ import annotations

import pytest
import torch

from accel.kernels.gated_norm import backward_reference, gated_norm
from accel.kernels.gated_norm_triton import launch_backward, launch_forward
from tests.interpreted.conftest import assert_near


@pytest.mark.parametrize("length", [1, 31, 32, 100])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 32), (2, 64), (1, 48), (2, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_equal_the_definition(length, heads, head_dim, dtype, poison):
    torch.manual_seed(length)
    inner = heads * head_dim
    z, dz = (
        t.to(dtype)[..., :inner].unflatten(-1, (heads, head_dim))
        for t in torch.randn(2, 2, length, inner + 24)
    )
    y = torch.randn(2, length, heads, head_dim).to(dtype)
    weight = torch.randn(heads, head_dim)
    dh = torch.randn(2, length, heads, head_dim).to(dtype)
    exact = [t.double() for t in (y, z, weight)]
    expected = gated_norm(*exact, 1e-6)
    exact_dz = torch.empty_like(exact[1])
    gradients = backward_reference(dh.double(), *exact, 1e-6, exact_dz)
    poison()
    assert_near(launch_forward(y, z, weight, 1e-6), expected.to(dtype), dtype)
    found = launch_backward(dh, y, z, weight, 1e-6, dz.fill_(float("nan")))
    for a, e in zip((dz, *found), (exact_dz, *gradients), strict=True):
        assert_near(a, e.to(a.dtype), dtype)
