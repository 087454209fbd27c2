"""The kernels of local mixing against their definition in fp64."""

from __future__ import annotations

import pytest
import torch

from accel.kernels.local_mix import backward_reference, forward_reference
from accel.kernels.local_mix_triton import launch_backward, launch_forward
from tests.interpreted.conftest import assert_near

GRIDS = [
    ((1, 1), (3, 3)),
    ((4, 7), (3, 3)),
    ((8, 9), (3, 3)),
    ((1, 50), (1, 7)),
    ((1, 33), (1, 3)),
    ((5, 2), (1, 5)),
]


@pytest.mark.parametrize(("grid", "taps"), GRIDS)
@pytest.mark.parametrize("dim", [96, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_equal_the_definition(grid, taps, dim, dtype, poison):
    torch.manual_seed(dim)
    length = grid[0] * grid[1]
    # slices of a projection
    x, dx = torch.randn(2, 2, length, dim + 40).to(dtype)[..., 24 : 24 + dim]
    weight = torch.randn(dim, 1, *taps)
    bias = torch.randn(dim)
    dy = torch.randn(2, length, dim).to(dtype)
    exact = [t.double() for t in (x, weight, bias)]
    expected = forward_reference(*exact, *grid)
    exact_dx = torch.empty_like(exact[0])
    gradients = backward_reference(dy.double(), *exact, *grid, exact_dx)
    poison()
    assert_near(launch_forward(x, weight, bias, *grid), expected.to(dtype), dtype)
    found = launch_backward(dy, x, weight, bias, *grid, dx.fill_(float("nan")))
    for a, e in zip((dx, *found), (exact_dx, *gradients), strict=True):
        assert_near(a, e.to(a.dtype), dtype)
