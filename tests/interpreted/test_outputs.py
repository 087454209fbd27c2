"""What compiled code asserts of an operator's outputs, of every kernel, at odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from accel.kernels.add_norm import fused_add_norm
from accel.kernels.fused_ssd import fused_bidirectional_ssd
from accel.kernels.gated_norm import fused_gated_norm
from accel.kernels.local_mix import fused_local_mix
from accel.kernels.qk_rope import fused_qk_rope
from accel.kernels.ssd_mixed import fused_mixed_ssd
from accel.kernels.swiglu import fused_swiglu
from tests.harness.pretended_gpu import Launching, backward


def normal(*shape):
    return torch.randn(*shape).requires_grad_()


def scan(B, L, K, P, N):
    decays = (normal(B, L, 2, K), normal(2, K), normal(2, K))
    return (normal(B, L, K, P), *decays, normal(B, L, 2, N), normal(B, L, 2, N), normal(K))


def of_add_norm(L, K):
    vectors = [normal(2, 3 * K) for _ in range(3)]
    return fused_add_norm(normal(2, L, 3 * K), vectors[0], normal(2, L, 3 * K), *vectors[1:])


def of_mixed_ssd(L, K):
    mixed = 16 * K + 64
    widths = 16 * K + mixed + 2 * K
    rest = (normal(2, K), normal(2, K), normal(K), normal(K, 16))
    return fused_mixed_ssd(
        normal(2, L, widths), normal(mixed, 1, 1, 3), normal(mixed), (1, L), *rest
    )


CASES = {
    "add_norm": of_add_norm,
    "ssd": lambda L, K: fused_bidirectional_ssd(*scan(2, L, K, 16, 16)),
    "ssd, gated": lambda L, K: fused_bidirectional_ssd(
        *scan(2, L, K, 16, 16), normal(2, L, K, 16), normal(K, 16)
    ),
    "ssd in chunks": lambda L, K: fused_bidirectional_ssd(*scan(1, 506 + L, 1, 16, 16)),
    "mixed ssd": of_mixed_ssd,
    "gated_norm": lambda L, K: fused_gated_norm(
        normal(2, L, K, 16), normal(2, L, K, 16), normal(K, 16)
    ),
    "local_mix": lambda L, K: fused_local_mix(
        normal(2, L, 5 * K), normal(5 * K, 1, 1, 3), normal(5 * K), (1, L)
    ),
    "swiglu": lambda L, K: fused_swiglu(normal(2, L, 6 * K)),
    "qk_rope": lambda L, K: fused_qk_rope(normal(2, L, 3, K, 16), normal(16), normal(16), None),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_begin_at_a_multiple_of_16_bytes_and_share_no_memory(name):
    """With an odd number of heads, where half of a tensor of heads begins between two such
    addresses."""
    torch.manual_seed(0)
    launching = Launching()
    with launching:
        backward(CASES[name](7, 3))
    assert launching.calls
    for operator, arguments, found in launching.calls:
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            expected = getattr(torch.ops.fastlatent, operator)(*fake)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len({t.untyped_storage().data_ptr() for t in found if t.numel()}) == len(
            [t for t in found if t.numel()]
        )
        for i, (output, promised) in enumerate(zip(found, expected, strict=True)):
            assert output.storage_offset() * output.element_size() % 16 == 0, f"{operator}[{i}]"
            assert (output.shape, output.dtype) == (promised.shape, promised.dtype), (
                f"{operator}[{i}]"
            )
            assert output.stride() == promised.stride(), f"{operator}[{i}]"
