"""The trial of accel/trial/child.py with the real kernels, on real blocks: all of them pass, with
room to spare."""

import pytest
import torch

from accel.technique import find_switches
from accel.techniques.precision import Precision
from accel.trial.child import draw_inputs, run_both_passes, switch
from accel.trial.parity import ComparingMode
from accel.trial.uses import record_uses
from tests.harness.steps import tiny_training
from tests.harness.words import CPU, slow

OPERATORS = {
    "fused_add_norm": {"add_norm"},
    "fused_conv": {"local_mix"},
    "fused_scan": {"ssd_decays", "ssd_gated"},
    "fused_swiglu": {"swiglu"},
    "fused_rope": {"qk_rope"},
}
BACKWARD = {"ssd_gated": {"ssd_backward", "gated_norm_backward"}}


@pytest.mark.parametrize("precision", ["fp16", slow("fp32")])
@pytest.mark.parametrize("family", ["mamba", slow("zigzag"), "dit"])
def test_every_operator_of_a_block_is_compared_and_passes(family, precision):
    model = tiny_training(family, "model.depth=2").model
    autocast = Precision(precision, CPU).autocast
    latents = torch.zeros(2, 1, 8, 8)
    labels = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad(), autocast():
        use = record_uses(model, lambda: model(latents, torch.full((2,), 0.5), labels))[-1]
    available = [key for key in OPERATORS if find_switches(use.block, key)]
    for key in available:
        switch(use.block, key, True)
    with ComparingMode() as comparing:
        inputs = draw_inputs(use.inputs, 3, CPU, seed=1)
        run_both_passes(use.block, inputs, use.options, autocast())
    forward = set().union(*(OPERATORS[key] for key in available))
    backward = {name for op in forward for name in BACKWARD.get(op, {f"{op}_backward"})}
    compared = comparing.comparisons
    assert {c.output.partition("[")[0] for c in compared} == forward | backward
    assert not any(c.describe_refusal() for c in compared)
    assert max(c.excess for c in compared) < 0.6
