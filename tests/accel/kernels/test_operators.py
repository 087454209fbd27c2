"""The fused operators on a CPU, where they compute their definition: gradients and refusals."""

import pytest
import torch

from accel.kernels.add_norm.operator import add_norm, fused_add_norm
from accel.kernels.attention.qk_rope import fused_qk_rope
from accel.kernels.local_mix.operator import fused_local_mix
from accel.kernels.registry import OPERATORS
from accel.kernels.swiglu.operator import fused_swiglu
from tests.harness.operators import (
    CASES,
    OF_TRITON,
    ROWS,
    Sizes,
    assert_all_close,
    make_add_norm,
    make_mixed_ssd,
    make_row,
    make_ssd,
    name_rows,
    run_both_ways,
    shorten_chunks,
)
from tests.harness.pretended_gpu import NotingMode
from tests.harness.refusals import expect_refusal


@pytest.mark.parametrize("row", ROWS, ids=name_rows(ROWS))
def test_a_fused_operator_has_the_gradients_of_its_definition(row, monkeypatch):
    fused, plain, inputs, _ = make_row(row, torch.float64, monkeypatch)
    assert_all_close(run_both_ways(fused, inputs), run_both_ways(plain, inputs))


def test_row_maps_are_gathers_left_out():
    branch_rows = torch.randperm(12)
    h_rows = torch.randperm(12)
    branch, *rest = make_add_norm(Sizes()).inputs
    h, z = add_norm(branch, *rest, branch_rows=branch_rows, h_rows=h_rows)
    h_plain, z_plain = add_norm(branch[:, branch_rows], *rest)
    assert torch.equal(z, z_plain)
    assert torch.equal(h[:, h_rows], h_plain)


class Recording(NotingMode):
    """Notes each call of an operator of ours with its arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fastlatent":
            return func(*args, **(kwargs or {}))
        inputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in args]
        self.calls.append((func, tuple(inputs)))
        # a definition may call other operators
        with self:
            return OPERATORS[func.overloadpacket.__name__].definition(*args)


def test_every_operator_is_well_formed(monkeypatch):
    """Checks schemas and fake tensors with the arguments of real calls."""
    recording = Recording()
    with recording:
        for make in CASES.values():
            fused, _, inputs, _ = make(Sizes(dtype=torch.float32))
            run_both_ways(fused, inputs)
        shorten_chunks(monkeypatch, 16)
        fused, _, inputs, _ = make_ssd(Sizes(grid=(1, 17), dtype=torch.float32))
        run_both_ways(fused, inputs)
    planted = {name for name in OPERATORS if name.startswith("planted")}  # by test_trial
    names = {operator.overloadpacket.__name__ for operator, _ in recording.calls}
    assert names == OPERATORS.keys() - planted
    for operator, arguments in recording.calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("operator", OF_TRITON)
@pytest.mark.parametrize("sizes", [Sizes(batch=0), Sizes(grid=(0, 4))], ids=["samples", "tokens"])
def test_no_samples_and_no_tokens_are_refused(operator, sizes):
    fused, _, inputs, _ = CASES[operator](sizes)
    with expect_refusal("give it at least one sample, token and channel"):
        fused(*inputs)


def test_impossible_shapes_are_refused():
    wide = torch.zeros(1, 1, 8193)
    vector = torch.zeros(1, 8193)
    with expect_refusal(r"at most 8192 channels, and got 8193.*fused_add_norm=false"):
        fused_add_norm(wide, vector, wide, vector, vector)
    x = torch.zeros(1, 12, 5)
    bias = torch.zeros(5)
    with expect_refusal("3 × 2 taps"):
        fused_local_mix(x, torch.zeros(5, 1, 3, 2), bias, (3, 4))
    with expect_refusal("12 tokens for a grid of 4 × 4"):
        fused_local_mix(x, torch.zeros(5, 1, 3, 3), bias, (4, 4))
    with expect_refusal("swiglu got 5 channels"):
        fused_swiglu(torch.zeros(1, 2, 5))
    fused, _, inputs, _ = make_mixed_ssd(Sizes(grid=(1, 600)))
    with expect_refusal("takes up to 512 tokens, and got 600"):
        fused(*inputs)


@pytest.mark.parametrize("operator", ["ssd", "ssd, gated", "ssd_mixed"])
@pytest.mark.parametrize(("head_dim", "state_dim"), [(24, 16), (16, 15)])
def test_sizes_that_the_matrix_units_do_not_take_are_refused(operator, head_dim, state_dim):
    fused, _, inputs, _ = CASES[operator](Sizes(head_dim=head_dim, state_dim=state_dim))
    with expect_refusal(rf"fused_scan=true.*got {head_dim} and {state_dim}.*fused_scan=false"):
        fused(*inputs)


@pytest.mark.parametrize(
    ("head_dim", "weights", "rotations", "sentence"),
    [
        (72, (None, None), (2, 2, 72), r"fused_rope=true.*got 72.*fused_rope=false"),
        (8, (None, None), (2, 3, 8), r"rotations of shape \(2, 3, 8\); it must be \(2, 2, 8\)"),
        (8, (torch.ones(8), torch.ones(4)), (2, 2, 8), r"k_weight of shape \(4,\); it must be"),
        (8, (None, torch.ones(8)), (2, 2, 8), "for queries or for keys alone"),
    ],
)
def test_what_queries_and_keys_cannot_take_is_refused(head_dim, weights, rotations, sentence):
    with expect_refusal(sentence):
        fused_qk_rope(torch.zeros(1, 2, 3, 1, head_dim), *weights, torch.zeros(rotations))
