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
    z = torch.randn(2, length, inner + 24).to(dtype)[..., :inner].unflatten(-1, (heads, head_dim))  # a slice
    y, weight = torch.randn(2, length, heads, head_dim).to(dtype), torch.randn(heads, head_dim)
    dh = torch.randn(2, length, heads, head_dim).to(dtype)
    exact = [t.double() for t in (y, z, weight)]
    expected = gated_norm(*exact, 1e-6)
    gradients = backward_reference(dh.double(), *exact, 1e-6)
    poison()
    assert_near(launch_forward(y, z, weight, 1e-6), expected.to(dtype), dtype)
    for a, e in zip(launch_backward(dh, y, z, weight, 1e-6), gradients, strict=True):
        assert_near(a, e.to(a.dtype), dtype)
