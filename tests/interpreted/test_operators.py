"""Every Triton kernel against the definition of its operator in fp64, and the layout of its
outputs, which compiled code asserts."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.harness.operators import (
    CASES,
    OF_TRITON,
    TOLERANCE,
    Sizes,
    as_tuple,
    run_both_ways,
    shorten_chunks,
)
from tests.harness.pretended_gpu import Launching

ADD_NORM = [
    Sizes((1, 1), heads=6),
    Sizes((7, 9), heads=6, head_dim=64),
    Sizes((1, 5), heads=6, head_dim=192),
]
LOCAL_MIX = [
    Sizes((1, 1), heads=1, head_dim=96),
    Sizes((8, 9), heads=1, head_dim=200),
    Sizes((1, 50), heads=1, head_dim=96, taps=(1, 7)),
]
GATED_NORM = [
    Sizes((1, 1), heads=3, head_dim=32),
    Sizes((1, 31), heads=1, head_dim=48),
    Sizes((1, 100), heads=2, head_dim=128),
]
QK_ROPE = [Sizes((1, 1), heads=1, head_dim=8), Sizes((5, 9), heads=3, head_dim=64)]
SIZES = {
    "add_norm": ADD_NORM,
    "add_norm, rows": ADD_NORM,
    "ssd_mixed": [Sizes((4, 7), heads=2, head_dim=32)],
    "gated_norm": GATED_NORM,
    "local_mix": LOCAL_MIX,
    "swiglu": [
        Sizes((1, 1), heads=1),
        Sizes((1, 5), heads=1, head_dim=300),
        Sizes((1, 7), heads=8),
    ],
    "qk_rope": QK_ROPE,
    "qk_rope, not rotated": QK_ROPE,
    "qk_rope, not normed": QK_ROPE,
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("operator", "sizes"), [(name, sizes) for name, row in SIZES.items() for sizes in row]
)
def test_kernels_equal_the_definition(operator, sizes, dtype, compare):
    """Inputs are slices of a projection, whose tokens lie apart."""
    compare(CASES[operator](replace(sizes, dtype=dtype, padding=24)))


@pytest.mark.parametrize("operator", [*OF_TRITON, "ssd in chunks"])
def test_outputs_begin_at_a_multiple_of_16_bytes_and_share_no_memory(operator, monkeypatch):
    """With an odd number of heads, half of a tensor of heads begins between two such addresses."""
    sizes = Sizes((1, 7), dtype=torch.float32)
    if operator == "ssd in chunks":
        operator = "ssd"
        sizes = Sizes((1, 39), heads=1, dtype=torch.float32)
        shorten_chunks(monkeypatch, 32)
    fused, _, inputs, _ = CASES[operator](sizes)
    with Launching() as launching:
        run_both_ways(fused, inputs)
    assert launching.calls

    # fake tensors promise compiled code where outputs lie
    for name, arguments, outputs in launching.calls:
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            promised = as_tuple(getattr(torch.ops.fastlatent, name)(*fake))
        addresses = [t.untyped_storage().data_ptr() for t in outputs if t.numel()]
        assert len(set(addresses)) == len(addresses)
        for output, expected in zip(outputs, promised, strict=True):
            assert output.storage_offset() * output.element_size() % 16 == 0, name
            assert (output.shape, output.dtype) == (expected.shape, expected.dtype), name
            assert output.stride() == expected.stride(), name
