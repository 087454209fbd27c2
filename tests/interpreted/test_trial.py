"""The trial of accel/trial.py with the real kernels, on real blocks: all of them pass, with room to
spare."""

from __future__ import annotations

import pytest
import torch

from accel.parity import ComparingMode
from accel.proof import record_uses
from accel.technique import find_switches
from accel.techniques.precision import Precision
from accel.trial import draw_inputs, run_both_passes, switch
from tests.harness.steps import tiny_training
from tests.harness.words import CPU

OPERATORS = {
    "fused_add_norm": {"add_norm"},
    "fused_conv": {"local_mix"},
    "fused_scan": {"ssd_decays", "ssd_gated"},
}
OPERATORS |= {"fused_swiglu": {"swiglu"}, "fused_rope": {"qk_rope"}}
BACKWARD = {"ssd_gated": {"ssd_backward", "gated_norm_backward"}}


@pytest.mark.parametrize("precision", ["fp16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["mamba", pytest.param("zigzag", marks=pytest.mark.slow), "dit"])
def test_every_operator_of_a_block_is_compared_and_passes(family, precision):
    model = tiny_training(family, "model.depth=2").model
    autocast = Precision(precision, CPU).autocast
    t = torch.full((2,), 0.5)
    labels = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad(), autocast():
        use = record_uses(model, lambda: model(torch.zeros(2, 1, 8, 8), t, labels))[-1]
    assert use.inputs[0][2] == {"fp16": "float16", "fp32": "float32"}[precision]
    assert use.inputs[2][2] == "float32"
    of_family = [key for key in OPERATORS if find_switches(use.block, key)]
    for keys in (*([key] for key in of_family), of_family):
        comparing = ComparingMode()
        inputs = draw_inputs(use.inputs, 3, CPU, seed=1)
        for key in of_family:
            switch(use.block, key, key in keys)
        with comparing:
            run_both_passes(use.block, inputs, autocast())
        forward = set().union(*(OPERATORS[key] for key in keys))
        backward = {name for op in forward for name in BACKWARD.get(op, {f"{op}_backward"})}
        assert {c.output.partition("[")[0] for c in comparing.comparisons} == forward | backward
        assert [c.describe_refusal() for c in comparing.comparisons] == [None] * len(
            comparing.comparisons
        )
        assert max(c.excess for c in comparing.comparisons) < 0.6
