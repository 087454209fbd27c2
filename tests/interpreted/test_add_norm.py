"""The kernels of add_norm: LayerNorm, a residual stream in 16 bits, and how rows are split."""

import pytest
import torch

from accel.kernels.add_norm.kernels_triton import choose_splits, launch_forward
from accel.kernels.add_norm.operator import add_norm, fused_add_norm
from tests.harness.operators import Case, Sizes, make_add_norm


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {"centred": True}), (torch.float16, {"residual_in_fp32": False})],
)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_kernels_equal_the_definition(dtype, options, head_dim, compare):
    inputs = make_add_norm(Sizes((7, 9), heads=6, head_dim=head_dim, dtype=dtype)).inputs
    inputs[2] = inputs[2].detach().mul(3.0).add(1.0).requires_grad_()
    compare(
        Case(lambda *t: fused_add_norm(*t, **options), lambda *t: add_norm(*t, **options), inputs)
    )


@pytest.mark.parametrize("output", [0, 1])
def test_an_output_without_gradient_costs_none(output, compare):
    fused, definition, inputs, _ = make_add_norm(Sizes((7, 9), dtype=torch.float32))
    needed, rest = (inputs, []) if output == 0 else (inputs[:3], inputs[3:])
    compare(
        Case(lambda *t: fused(*t, *rest)[output], lambda *t: definition(*t, *rest)[output], needed)
    )


def test_the_stream_is_never_written_in_place():
    inputs = make_add_norm(Sizes(dtype=torch.float32)).inputs
    before = inputs[2].clone()
    launch_forward(*inputs, None, None, 1e-6, True, False)
    assert torch.equal(inputs[2], before)


@pytest.mark.parametrize(("batch", "length", "block"), [(256, 256, 2), (8, 100, 4), (2, 1, 16)])
def test_stretches_cover_every_row_once(batch, length, block):
    splits, rows = choose_splits(batch, length, block, processors=132)
    assert rows % block == 0
    assert splits * rows >= length > (splits - 1) * rows
