"""The fused operators, on a CPU, where they compute their definition: gradients, compile,
checkpointing, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel.kernels import bidirectional_ssd as definition
from accel.kernels.add_norm import add_norm, fused_add_norm
from accel.kernels.attend import attend
from accel.kernels.bidirectional_ssd import bidirectional_ssd
from accel.kernels.fused_ssd import fused_bidirectional_ssd
from accel.kernels.gated_norm import fused_gated_norm, gated_norm
from accel.kernels.local_mix import fused_local_mix, local_mix
from accel.kernels.qk_rope import fused_qk_rope, qk_rope
from accel.kernels.selective_scan import fused_selective_scan, selective_scan
from accel.kernels.ssd_decays import fused_ssd_decays
from accel.kernels.ssd_mixed import fused_mixed_ssd, mixed_ssd
from accel.kernels.swiglu import fused_swiglu, silu_product
from accel.saved_tensors import keeping
from accel.techniques import gradient_checkpointing
from models.mixers.attention import axial_rotations
from tests.accel.kernels.test_selective_scan import scan_inputs
from training.config.schema import KERNEL_KEYS

CHECKS = ("test_schema", "test_faketensor")


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def add_norm_inputs(dtype=torch.float64, B=2, L=5, D=12):
    torch.manual_seed(0)
    vectors = [normal(B, D, dtype=dtype) for _ in range(3)]
    return normal(B, L, D, dtype=dtype), vectors[0], normal(B, L, D), *vectors[1:]


def assert_equal_with_gradients(actual, expected, inputs, rtol=1e-10):
    weights = [torch.randn_like(e) for e in expected]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol)
    of_actual = torch.autograd.grad(actual, inputs, weights)
    for a, e in zip(of_actual, torch.autograd.grad(expected, inputs, weights), strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("maps", [(), ("branch_rows",), ("h_rows",), ("branch_rows", "h_rows")])
def test_fused_add_norm_has_the_gradients_of_its_definition(maps):
    inputs = add_norm_inputs()
    rows = {name: torch.randperm(5) for name in maps}
    assert_equal_with_gradients(fused_add_norm(*inputs, **rows), add_norm(*inputs, **rows), inputs)


def test_row_maps_are_gathers_left_out():
    branch, gate, residual, scale, shift = add_norm_inputs()
    there = torch.randperm(5)
    back = torch.randperm(5)
    h, z = add_norm(branch, gate, residual, scale, shift, branch_rows=there, h_rows=back)
    plain, z_plain = add_norm(branch[:, there], gate, residual, scale, shift)
    assert torch.equal(z, z_plain)
    assert torch.equal(h[:, back], plain)


def test_one_map_may_serve_both_ways():
    inputs = add_norm_inputs()
    rows = torch.randperm(5)
    compiled = torch.compile(fused_add_norm, fullgraph=True, backend="aot_eager")
    actual = compiled(*inputs, branch_rows=rows, h_rows=rows)
    assert_equal_with_gradients(actual, add_norm(*inputs, branch_rows=rows, h_rows=rows), inputs)


@pytest.mark.parametrize("unused", [0, 1])
def test_an_output_without_gradient_costs_none(unused):
    inputs = add_norm_inputs()
    actual = fused_add_norm(*inputs)[1 - unused]
    expected = add_norm(*inputs)[1 - unused]
    needed = inputs if unused == 1 else inputs[:3]  # z does not depend on scale and shift
    weight = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad(actual, needed, weight),
        torch.autograd.grad(expected, needed, weight),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


def test_strided_inputs_are_handled():
    branch, gate, residual, scale, shift = add_norm_inputs()
    strided = branch.detach().transpose(1, 2).contiguous().transpose(1, 2)
    rest = (gate, residual, scale, shift)
    assert torch.equal(fused_add_norm(strided, *rest)[0], fused_add_norm(branch, *rest)[0])
    cond = torch.randn(2, 4, 12, dtype=torch.float64)
    views = (cond[:, 0], residual, cond[:, 1], cond[:, 2])
    assert torch.equal(fused_add_norm(branch, *views)[0], add_norm(branch, *views)[0])


@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_under_autocast_the_stream_keeps_its_dtype(residual_in_fp32):
    branch, gate, residual, scale, shift = add_norm_inputs(torch.bfloat16)
    with torch.amp.autocast("cpu", torch.bfloat16):
        h, z = fused_add_norm(
            branch, gate, residual.float(), scale, shift, residual_in_fp32=residual_in_fp32
        )
    assert h.dtype == torch.bfloat16
    assert z.dtype == (torch.float32 if residual_in_fp32 else torch.bfloat16)
    grads = torch.autograd.grad(
        h.float().sum() + z.float().sum(), (branch, gate, residual, scale, shift)
    )
    assert [g.dtype for g in grads] == [torch.bfloat16] * 2 + [torch.float64] + [torch.bfloat16] * 2


@pytest.mark.parametrize("centred", [False, True])
def test_the_operators_are_well_formed(centred):
    inputs = [t.detach() for t in add_norm_inputs(torch.float32)]
    inputs[2] = inputs[2].float()
    arguments = (*inputs, None, None, 1e-6, True, centred)
    torch.library.opcheck(torch.ops.fastlatent.add_norm.default, arguments, test_utils=CHECKS)
    h, z, rstd = torch.ops.fastlatent.add_norm(*arguments)
    branch, gate, _, scale, _ = inputs
    backward = (h, None, z, branch, gate, scale, None, None, rstd, torch.float32, centred)
    torch.library.opcheck(
        torch.ops.fastlatent.add_norm_backward.default, backward, test_utils=CHECKS
    )


def ssd_inputs(length=9, dtype=torch.float64, B=2, K=3, P=16, N=16):
    torch.manual_seed(length)
    decays = normal(B, length, 2, K), normal(2, K), normal(2, K)
    groups = [normal(B, length, 2, N, dtype=dtype) for _ in range(2)]
    return normal(B, length, K, P, dtype=dtype), *decays, *groups, normal(K)


def gate_inputs(x):
    return torch.randn_like(x).requires_grad_(), normal(*x.shape[2:])


@pytest.mark.parametrize(("length", "longest"), [(1, 512), (9, 512), (40, 512), (40, 16), (37, 16)])
@pytest.mark.parametrize("gated", [False, True])
def test_the_fused_scan_has_the_gradients_of_its_definition(gated, length, longest, monkeypatch):
    monkeypatch.setattr(definition, "MAX_QUADRATIC", longest)
    monkeypatch.setattr(definition, "CHUNK", min(longest, 256))
    inputs = ssd_inputs(length)
    inputs = (*inputs, *gate_inputs(inputs[0])) if gated else inputs
    assert_equal_with_gradients(
        [fused_bidirectional_ssd(*inputs)], [bidirectional_ssd(*inputs)], inputs, rtol=1e-9
    )


def test_the_fused_scan_takes_slices_and_copies_what_it_must():
    x, dt, dt_bias, A_log, B_in, C_out, D = ssd_inputs()
    z, weight = gate_inputs(x)
    joined = torch.cat([t.flatten(2) for t in (x, B_in, C_out, dt, z)], dim=-1)
    parts = [
        p.unflatten(-1, (g, -1))
        for p, g in zip(joined.split((48, 32, 32, 6, 48), -1), (3, 2, 2, 2, 3), strict=True)
    ]
    slices = (parts[0], parts[3], dt_bias, A_log, parts[1], parts[2], D, parts[4], weight)
    turned = (
        x.transpose(2, 3).contiguous().transpose(2, 3),
        dt,
        dt_bias,
        A_log,
        B_in,
        C_out,
        D,
        z,
        weight,
    )
    expected = bidirectional_ssd(x, dt, dt_bias, A_log, B_in, C_out, D, z, weight)
    for values in (slices, turned):
        torch.testing.assert_close(fused_bidirectional_ssd(*values), expected)


@pytest.mark.parametrize(("batch", "length"), [(0, 9), (2, 0)])
def test_no_samples_and_no_tokens_are_refused(batch, length):
    scan = ssd_inputs(length, B=batch)
    gate = gate_inputs(scan[0])
    for call in (
        lambda: fused_add_norm(*add_norm_inputs(B=batch, L=length)),
        lambda: fused_bidirectional_ssd(*scan),
        lambda: bidirectional_ssd(*scan),
        lambda: fused_gated_norm(scan[0], *gate),
        lambda: fused_ssd_decays(*scan[1:4], 9),
        lambda: fused_local_mix(normal(batch, length, 5), normal(5, 1, 3, 3), normal(5), (3, 3)),
        lambda: fused_swiglu(normal(batch, length, 8)),
        lambda: fused_qk_rope(normal(batch, length, 3, 2, 8), None, None, None),
        lambda: fused_mixed_ssd(
            normal(batch, length, 166),
            normal(112, 1, 3, 3),
            normal(112),
            (3, 3),
            *scan[2:4],
            scan[6],
            gate[1],
        ),
    ):
        with pytest.raises(ValueError, match="give it at least one sample, token and channel"):
            call()


def test_impossible_shapes_are_refused():
    wide = torch.zeros(1, 1, 8193)
    vector = torch.zeros(1, 8193)
    with pytest.raises(
        ValueError, match=r"at most 8192 channels, and got 8193.*fused_add_norm=false"
    ):
        fused_add_norm(wide, vector, wide, vector, vector)
    with pytest.raises(ValueError, match=r"branch \(1, 1, 8193\) and residual \(1, 8193\)"):
        fused_add_norm(wide, vector, vector, vector, vector)
    x = torch.zeros(1, 12, 5)
    bias = torch.zeros(5)
    with pytest.raises(ValueError, match="3 × 2 taps"):
        fused_local_mix(x, torch.zeros(5, 1, 3, 2), bias, (3, 4))
    with pytest.raises(ValueError, match="swiglu got 5 channels"):
        fused_swiglu(torch.zeros(1, 2, 5))
    with pytest.raises(ValueError, match="takes up to 512 tokens, and got 600"):
        all_in_one(torch.zeros(1, 600, 166), *mixed_inputs()[1:])
    with pytest.raises(ValueError, match="12 tokens for a grid of 4 × 4"):
        fused_local_mix(x, torch.zeros(5, 1, 3, 3), bias, (4, 4))


def test_sizes_that_the_matrix_units_do_not_take_are_refused():
    with pytest.raises(ValueError, match=r"fused_scan=true.*got 24 and 16.*fused_scan=false"):
        fused_bidirectional_ssd(*ssd_inputs(P=24))


def test_the_scans_operators_are_well_formed():
    ops = torch.ops.fastlatent
    x, dt, dt_bias, A_log, B_in, C_out, D = (t.detach().float() for t in ssd_inputs())
    z, weight = (t.detach().float() for t in gate_inputs(x))
    for piece in (9, 4):
        prelude = (dt, dt_bias, A_log, piece)
        torch.library.opcheck(ops.ssd_decays.default, prelude, test_utils=CHECKS)
        backward = (*ops.ssd_decays(*prelude), dt, dt_bias, A_log, torch.empty_like(dt))
        torch.library.opcheck(ops.ssd_decays_backward.default, backward, test_utils=CHECKS)
    arguments = (x, *ops.ssd_decays(dt, dt_bias, A_log, 9), B_in, C_out, D)
    torch.library.opcheck(ops.ssd.default, arguments, test_utils=CHECKS)
    torch.library.opcheck(ops.ssd_gated.default, (*arguments, z, weight, 1e-6), test_utils=CHECKS)
    torch.library.opcheck(ops.ssd_backward.default, (x, *arguments), test_utils=CHECKS)
    torch.library.opcheck(ops.ssd_states.default, (x, B_in, arguments[1]), test_utils=CHECKS)
    states = ops.ssd_states(x, B_in, arguments[1])
    for more in ((x, None), (None, x)):
        torch.library.opcheck(
            ops.ssd_read.default, (states, C_out, arguments[1], *more), test_utils=CHECKS
        )
    torch.library.opcheck(ops.ssd_groups.default, (states, x, arguments[1]), test_utils=CHECKS)


@pytest.mark.parametrize(("grid", "taps"), [((3, 4), (3, 3)), ((1, 12), (1, 7)), ((12, 1), (3, 3))])
def test_fused_local_mixing_has_the_gradients_of_its_definition(grid, taps):
    torch.manual_seed(0)
    inputs = (normal(2, 12, 5), normal(5, 1, *taps), normal(5))
    actual = fused_local_mix(*inputs, grid)
    expected = local_mix(*inputs, grid)
    assert_equal_with_gradients([actual], [expected], inputs)
    turned = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(fused_local_mix(turned, *inputs[1:], grid), expected)


def test_the_fused_gated_norm_has_the_gradients_of_its_definition():
    torch.manual_seed(0)
    joined = normal(2, 5, 60)
    inputs = (normal(2, 5, 3, 16), joined, normal(3, 16))
    z = joined[..., 4:52].unflatten(-1, (3, 16))

    def both_ways(function):
        return [function(inputs[0], z, inputs[2])]

    assert_equal_with_gradients(both_ways(fused_gated_norm), both_ways(gated_norm), inputs)
    y = torch.randn(2, 5, 3, 16)
    z = torch.randn(2, 5, 3, 16)
    weight = torch.randn(3, 16)
    torch.library.opcheck(
        torch.ops.fastlatent.gated_norm.default, (y, z, weight, 1e-6), test_utils=CHECKS
    )
    backward = torch.ops.fastlatent.gated_norm_backward.default
    torch.library.opcheck(backward, (z, y, z, weight, 1e-6, torch.empty_like(z)), test_utils=CHECKS)


def mixed_inputs():
    """The projection (z, xBC and dt), weight and bias of the convolution, dt's bias, A_log, D and
    the weight of the head norm, on a grid of 3 × 4."""
    _, _, dt_bias, A_log, *_, D = ssd_inputs(length=12)
    return (
        normal(2, 12, 48 + 112 + 6),
        normal(112, 1, 3, 3),
        normal(112),
        dt_bias,
        A_log,
        D,
        normal(3, 16),
    )


def mixed_then_scanned(projected, weight, bias, *rest):
    return mixed_ssd(projected, weight, bias, (3, 4), *rest)


def all_in_one(projected, weight, bias, *rest):
    return fused_mixed_ssd(projected, weight, bias, (3, 4), *rest)


def test_mixing_and_scan_in_one_operator_have_the_gradients_of_the_two():
    inputs = mixed_inputs()
    assert_equal_with_gradients(
        [all_in_one(*inputs)], [mixed_then_scanned(*inputs)], inputs, rtol=1e-9
    )
    with pytest.raises(ValueError, match=r"fused_scan=true.*got 16 and 15"):
        all_in_one(
            *(t[..., :-4] if i == 0 else t[:-4] if i in (1, 2) else t for i, t in enumerate(inputs))
        )


def test_mixing_and_scan_in_one_operator_are_well_formed():
    ops = torch.ops.fastlatent
    inputs = [t.detach().float() for t in mixed_inputs()]
    arguments = (*inputs[:3], 3, 4, *inputs[3:], 1e-6)
    torch.library.opcheck(ops.ssd_mixed.default, arguments, test_utils=CHECKS)
    torch.library.opcheck(
        ops.ssd_mixed_backward.default, (*ops.ssd_mixed(*arguments), *arguments), test_utils=CHECKS
    )


def test_local_mixings_operators_are_well_formed():
    x = torch.randn(2, 12, 5)
    weight = torch.randn(5, 1, 3, 3)
    bias = torch.randn(5)
    torch.library.opcheck(
        torch.ops.fastlatent.local_mix.default, (x, weight, bias, 3, 4), test_utils=CHECKS
    )
    backward = torch.ops.fastlatent.local_mix_backward.default
    torch.library.opcheck(
        backward, (x, x, weight, bias, 3, 4, torch.empty_like(x)), test_utils=CHECKS
    )


def test_the_fused_swiglu_has_the_gradients_of_its_definition():
    joined = normal(2, 5, 12)
    assert_equal_with_gradients(
        [fused_swiglu(joined)], [silu_product(*joined.chunk(2, -1))], [joined]
    )
    ops = torch.ops.fastlatent
    joined = torch.randn(2, 5, 12)
    torch.library.opcheck(ops.swiglu.default, (joined,), test_utils=CHECKS)
    torch.library.opcheck(
        ops.swiglu_backward.default, (joined[..., :6].contiguous(), joined), test_utils=CHECKS
    )


def qk_inputs(normed=True, rotated=True):
    qkv = normal(2, 6, 3, 2, 8)
    weights = [normal(8), normal(8)] if normed else [None, None]
    return qkv, *weights, axial_rotations((2, 3), 8).double() if rotated else None


@pytest.mark.parametrize(("normed", "rotated"), [(True, True), (True, False), (False, True)])
def test_fused_queries_and_keys_have_the_gradients_of_their_definition(normed, rotated):
    """By themselves, and inside of attention, which gives gradients of other strides."""
    torch.manual_seed(0)
    inputs = qk_inputs(normed, rotated)
    wanted = inputs[: 3 if normed else 1]
    assert_equal_with_gradients(fused_qk_rope(*inputs), qk_rope(*inputs), wanted)
    attended = [[attend(*place(*inputs))] for place in (fused_qk_rope, qk_rope)]
    assert_equal_with_gradients(*attended, wanted)
    plain = [None if t is None else t.detach().float() for t in inputs]
    torch.library.opcheck(torch.ops.fastlatent.qk_rope.default, (*plain, 1e-6), test_utils=CHECKS)
    backward = torch.ops.fastlatent.qk_rope_backward.default
    torch.library.opcheck(backward, (*plain[0].unbind(2), *plain, 1e-6), test_utils=CHECKS)


@pytest.mark.parametrize(
    ("head_dim", "weights", "rotations", "sentence"),
    [
        (72, (None, None), (2, 2, 72), r"fused_rope=true.*got 72.*fused_rope=false"),
        (8, (None, None), (2, 3, 8), r"rotations of shape \(2, 3, 8\); it must be \(2, 2, 8\)"),
        (8, (None, None), (2, 1, 8), r"rotations of shape \(2, 1, 8\)"),
        (
            8,
            (torch.ones(8), torch.ones(4)),
            (2, 2, 8),
            r"k_weight of shape \(4,\); it must be \(8,\)",
        ),
        (8, (None, torch.ones(8)), (2, 2, 8), "for queries or for keys alone"),
    ],
)
def test_what_queries_and_keys_cannot_take_is_refused(head_dim, weights, rotations, sentence):
    with pytest.raises(ValueError, match=sentence):
        fused_qk_rope(torch.zeros(1, 2, 3, 1, head_dim), *weights, torch.zeros(rotations))


def fused(family: str, on: bool) -> tuple[Any, ...]:
    """The switches, not the techniques: those need a GPU."""
    from tests.harness.steps import assemble

    model, step, _, loader = assemble(family)
    for module in model.modules():
        for switch in KERNEL_KEYS:
            if hasattr(module, switch):
                setattr(module, switch, on)
    return model, step, loader


@pytest.mark.parametrize("family", ["mamba", "ssd_mlp", "dit"])
def test_a_model_with_fused_operators_is_the_same_model(family):
    losses = []
    for on in (False, True):
        _, step, loader = fused(family, on)
        losses.append(torch.stack([step([next(loader)]).loss for _ in range(3)]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0.0)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


# a block returns a view, the gate; nobody writes to it
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_sharded_parameters_reach_the_operators_whole(process_group):
    """FSDP2: the same gradients as without it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for sharded in (False, True):
        model, _, loader = fused("mamba", True)
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
        torch.manual_seed(0)
        x = torch.randn(2, *next(loader).latents.shape[1:])
        model(x, torch.rand(2), torch.zeros(2, dtype=torch.long)).square().sum().backward()
        grads = {
            name: p.grad.full_tensor() if sharded else p.grad
            for name, p in model.named_parameters()
        }
        found.append(grads)
    assert any(g.abs().max() > 0 for name, g in found[0].items() if "A_log" in name)
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, msg=name)


def both(*t):
    """A block's two operators, one after the other."""
    h, z = fused_add_norm(*t[:5])
    return fused_bidirectional_ssd(h.unflatten(-1, (3, 16)), *t[5:]).flatten(2), z


def through(inputs, wrap):
    h, z = wrap(both)(*inputs)
    return [h, z, *torch.autograd.grad((h.sin() + z.cos()).sum(), inputs)]


def test_operators_survive_compiling_and_checkpointing():
    inputs = (*add_norm_inputs(D=48, L=9), *ssd_inputs()[1:])
    plain = through(inputs, lambda f: f)
    compiled = through(inputs, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))
    recomputed = through(inputs, lambda f: lambda *t: checkpoint(f, *t, use_reentrant=False))

    def selectively(f):
        return gradient_checkpointing.recompute(f, context_fn=gradient_checkpointing.make_contexts)

    selective = through(inputs, selectively)
    with keeping(nn.Module()) as kept:
        selectively(both)(*inputs)
    compiled_too = through(
        inputs, lambda f: torch.compile(selectively(f), fullgraph=True, backend="aot_eager")
    )
    # the scan is kept, the norm is not
    assert {name.split("::")[1].split("_")[0] for name in kept.cached} == {"ssd"}
    for other in (compiled, recomputed, selective, compiled_too):
        for a, e in zip(other, plain, strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("mix", [local_mix, fused_local_mix])
def test_the_gradient_of_a_convolution_has_its_usual_strides(mix):
    """Otherwise ddp warns, and copies it into its bucket."""
    x, weight, bias = (
        normal(*shape, dtype=torch.float32) for shape in ((2, 12, 32), (32, 1, 3, 3), (32,))
    )
    (gradient,) = torch.autograd.grad(mix(x, weight, bias, (3, 4)).sum(), weight)
    assert gradient.stride() == weight.stride()


def second_order_inputs() -> dict[str, tuple[Any, tuple[torch.Tensor, ...]]]:
    """Each autograd function of accel/kernels with its inputs; gradients are taken of the first."""
    scan = ssd_inputs()
    mix = (normal(2, 12, 5), normal(5, 1, 3, 3), normal(5))
    gated = (*scan, *gate_inputs(scan[0]))
    return {
        "add_norm": (lambda *t: fused_add_norm(*t)[0], add_norm_inputs()),
        "local_mix": (lambda *t: fused_local_mix(*t, (3, 4)), mix),
        "ssd": (fused_bidirectional_ssd, scan),
        "ssd_gated": (fused_bidirectional_ssd, gated),
        "ssd_mixed": (all_in_one, mixed_inputs()),
        "ssd_decays": (lambda *t: fused_ssd_decays(*t, 9)[0], scan[1:4]),
        "gated_norm": (fused_gated_norm, (gated[0], *gated[-2:])),
        "swiglu": (fused_swiglu, (normal(2, 5, 12),)),
        "qk_rope": (lambda *t: fused_qk_rope(*t, None)[0], qk_inputs()[:3]),
        "selective_scan": (fused_selective_scan, tuple(scan_inputs(5))),
        "selective_scan, definition": (selective_scan, tuple(scan_inputs(5))),
    }


WRAPPED = {
    "eager": lambda f: f,
    "checkpointed": lambda f: lambda *t: checkpoint(f, *t, use_reentrant=False),
    "compiled": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("operator", second_order_inputs())
@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("in_a_sum", [False, True])
def test_a_second_derivative_is_refused(operator, way, in_a_sum):
    """In a sum, the other term alone would have given an answer."""
    function, inputs = second_order_inputs()[operator]

    def second_derivative():
        loss = WRAPPED[way](function)(*inputs).square().sum()
        if in_a_sum:
            loss = loss + inputs[0].pow(3).sum()
        (gradient,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
        torch.autograd.grad(gradient.square().sum(), inputs[0])

    with pytest.raises(
        RuntimeError, match=r"no second derivative|not currently support double backward"
    ):
        second_derivative()
