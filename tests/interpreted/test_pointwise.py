"""The kernels of SwiGLU, and of norm and rotary embedding of queries and keys, against their
definitions in fp64."""

from __future__ import annotations

import pytest
import torch

from accel.kernels import qk_rope, qk_rope_triton, swiglu, swiglu_triton
from models.mixers.attention import axial_rotations
from tests.interpreted.conftest import assert_near


@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 5, 600), (3, 7, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_swiglu(shape, dtype, poison):
    torch.manual_seed(0)
    joined = torch.randn(*shape).to(dtype)
    dh = torch.randn(*shape[:2], shape[2] // 2).to(dtype)
    expected = swiglu.forward_reference(joined.double())
    gradient = swiglu.backward_reference(dh.double(), joined.double())
    poison()
    assert_near(swiglu_triton.launch_forward(joined), expected.to(dtype), dtype)
    assert_near(swiglu_triton.launch_backward(dh, joined), gradient.to(dtype), dtype)


@pytest.mark.parametrize(
    ("grid", "heads", "head_dim"), [((1, 1), 1, 8), ((5, 9), 3, 64), ((5, 4), 2, 128)]
)
@pytest.mark.parametrize(("normed", "rotated"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_qk_rope(grid, heads, head_dim, normed, rotated, dtype, poison):
    """dq, dk and dv come as attention leaves them: by head, or as slices."""
    torch.manual_seed(0)
    length = grid[0] * grid[1]
    qkv = torch.randn(2, length, 3, heads, head_dim).to(dtype)
    weights = torch.randn(2, head_dim).unbind() if normed else (None, None)
    rotations = axial_rotations(grid, head_dim) if rotated else None
    of_heads = torch.randn(2, length, 3, heads, head_dim).to(dtype).unbind(2)
    arguments = (*weights, rotations)
    exact = [None if t is None else t.double() for t in (qkv, *arguments)]
    expected = qk_rope.forward_reference(*exact, 1e-6)
    gradients = qk_rope.backward_reference(*(d.double() for d in of_heads), *exact, 1e-6)
    poison()
    for a, e in zip(qk_rope_triton.launch_forward(qkv, *arguments, 1e-6), expected, strict=True):
        assert_near(a, e.to(dtype), dtype)
    found = qk_rope_triton.launch_backward(*of_heads, qkv, *arguments, 1e-6)
    for a, e in zip(found, gradients, strict=True):
        assert_near(a, e.to(a.dtype), dtype)
