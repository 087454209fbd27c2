"""The factors with which kernels need no timing (accel/trial/gains.json) are those of their
sources."""

import pytest
import torch

from accel.trial.kernels import Contest
from common.files import ROOT, read_object
from scripts.bench.floor import SUMS, Traffic
from scripts.bench.kernels import SHAPES, draw_inputs, make_operators
from tests.harness.operators import as_tuple
from tests.harness.proofs import make_stack, make_use

GAINS = read_object(ROOT / "accel" / "trial" / "gains.json")
OPERATORS = {
    "fused_add_norm": "add_norm",
    "fused_scan": "bidirectional_ssd, gated",
    "fused_conv": "local_mix",
    "fused_swiglu": "swiglu",
    "fused_rope": "qk_rope",
}


def count_bytes(function, inputs):
    """Bytes that both passes of an operator move, and those of them that products and convolutions
    do."""
    with Traffic() as traffic:
        outputs = as_tuple(function(*inputs))
        torch.autograd.grad(outputs, inputs, [torch.empty_like(t) for t in outputs])
    moved = traffic.bytes
    products = moved["convolution"] + moved["convolution_backward"] + moved[SUMS[1]]
    return sum(moved[name] for name in SUMS), products


@pytest.mark.parametrize("key", OPERATORS)
def test_factors_are_those_that_bytes_and_gpus_give(key):
    name = OPERATORS[key]
    device = torch.device("meta")
    inputs = draw_inputs(name, SHAPES["b256"], device)
    op = make_operators("b256", device)[name]
    least, _ = count_bytes(op.fused, inputs)
    rows = read_object(ROOT / "docs" / "benchmarks" / "h100" / "kernels.json")["cases"]
    us = {row["name"]: row["us"] for row in rows}
    for mode, moved in zip(("eager", "compiled"), count_bytes(op.definition, inputs), strict=True):
        factors = GAINS[mode][key]
        assert factors["bytes"] == pytest.approx(moved / least, rel=0.02, abs=0.05)
        measured = us[f"{name} {mode}"] / us[f"{name} fused"]
        # Of this pair docs/LOG.md has a loss.
        if (key, mode) != ("fused_swiglu", "eager"):
            assert factors["measured"]["H100"] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("card", "expected"),
    [("H100", {"fused_scan", "fused_swiglu", "fused_rope"}), ("A100", {"fused_scan"})],
)
def test_kernels_that_never_lose_are_not_timed_where_the_gpu_is_busy(card, expected, monkeypatch):
    monkeypatch.setattr("accel.trial.kernels.get_device_name", lambda _: f"NVIDIA {card}")
    stack = make_stack(runtime={"compile": True})
    busy, idle = (Contest(stack, {}, [make_use(2**16)], samples).gains for samples in (256, 255))
    assert (set(busy), idle) == (expected, {})
