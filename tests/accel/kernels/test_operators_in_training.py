"""The fused operators inside of training, on a CPU: compile, checkpointing, autocast, FSDP2."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel.kernels.add_norm.operator import fused_add_norm
from accel.kernels.local_mix.operator import fused_local_mix, local_mix
from accel.kernels.selective_scan.operator import selective_scan
from accel.saved_tensors import count_saved
from accel.techniques import gradient_checkpointing
from scripts.bench.floor import switch_kernels
from tests.harness.denoisers import fill_zero_layers, make_denoiser, make_inputs
from tests.harness.operators import (
    CASES,
    Sizes,
    as_tuple,
    assert_all_close,
    make_add_norm,
    make_ssd,
    run_both_ways,
)
from tests.harness.steps import assemble


def test_one_map_may_serve_both_ways():
    rows = torch.randperm(12)
    fused, plain, inputs, _ = make_add_norm(Sizes(), branch_rows=rows, h_rows=rows)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    assert_all_close(run_both_ways(compiled, inputs), run_both_ways(plain, inputs))


@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_under_autocast_the_stream_keeps_its_dtype(residual_in_fp32):
    inputs = make_add_norm(Sizes(dtype=torch.bfloat16)).inputs
    with torch.amp.autocast("cpu", torch.bfloat16):
        h, z = fused_add_norm(*inputs, residual_in_fp32=residual_in_fp32)
    assert h.dtype == torch.bfloat16
    assert z.dtype == (torch.float32 if residual_in_fp32 else torch.bfloat16)
    gradients = torch.autograd.grad(h.float().sum() + z.float().sum(), inputs)
    assert [g.dtype for g in gradients] == [t.dtype for t in inputs]


@pytest.mark.parametrize("family", ["mamba", "ssd_mlp", "dit"])
def test_a_model_with_fused_operators_is_the_same_model(family):
    losses = []
    for switch in (switch_kernels, lambda model: None):
        model, step, _, loader = assemble(family)
        switch(model)
        losses.append(torch.stack([step([next(loader)]).loss for _ in range(3)]))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0.0)


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# a block returns a view, the gate; nobody writes to it
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.usefixtures("process_group")
def test_sharded_parameters_reach_the_operators_whole():
    """FSDP2 gives the same gradients as a model that is not sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    gradients = []
    for sharded in (False, True):
        model = fill_zero_layers(make_denoiser("mamba"))
        switch_kernels(model)
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
        model(*make_inputs(model)).square().sum().backward()
        gradients.append([p.grad.full_tensor() if sharded else p.grad for p in model.parameters()])
    assert all(g.abs().max() > 0 for g in gradients[0])
    assert_all_close(gradients[1], gradients[0], rtol=1e-5)


def select(function):
    """Recomputes a function under the policy that keeps the outputs of products and scans."""
    return gradient_checkpointing.make_recomputed(
        function, context_fn=gradient_checkpointing.make_contexts
    )


WRAPPED = {
    "eager": lambda f: f,
    "checkpointed": lambda f: lambda *t: checkpoint(f, *t, use_reentrant=False),
    "compiled": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
    "selective": select,
    "selective, compiled": lambda f: torch.compile(select(f), fullgraph=True, backend="aot_eager"),
}


def make_block():
    """A block's two operators one after the other, and inputs for them."""
    add_norm = make_add_norm(Sizes())
    ssd = make_ssd(Sizes())

    def block(*t):
        h, z = add_norm.fused(*t[:5])
        return ssd.fused(h.unflatten(-1, (3, 16)), *t[5:]), z

    return block, [*add_norm.inputs, *ssd.inputs[1:]]


@pytest.mark.parametrize("way", WRAPPED)
def test_operators_survive_compiling_and_checkpointing(way):
    block, inputs = make_block()
    wrapped = run_both_ways(WRAPPED[way](block), inputs)
    assert_all_close(wrapped, run_both_ways(block, inputs), rtol=1e-7)


def test_a_selective_checkpoint_keeps_the_scan_and_not_the_norm():
    block, inputs = make_block()
    with count_saved(nn.Module()) as kept:
        select(block)(*inputs)
    assert {name.split("::")[1].split("_")[0] for name in kept.cached_ops} == {"ssd"}


@pytest.mark.parametrize("mix", [local_mix, fused_local_mix])
def test_the_gradient_of_a_convolution_has_its_usual_strides(mix):
    """With other strides DDP warns, and copies the gradient into its bucket."""
    x, weight, bias = CASES["local_mix"](Sizes()).inputs
    (gradient,) = torch.autograd.grad(mix(x, weight, bias, (3, 4)).sum(), weight)
    assert gradient.stride() == weight.stride()


@pytest.mark.parametrize("operator", [*CASES, "selective_scan, definition"])
@pytest.mark.parametrize("way", ["eager", "checkpointed", "compiled"])
def test_a_second_derivative_is_refused(operator, way):
    """In a sum with another term, the other term alone would give a wrong answer silently."""
    function, _, inputs, _ = CASES[operator.removesuffix(", definition")](Sizes())
    if operator.endswith("definition"):
        function = selective_scan
    output, *_ = as_tuple(WRAPPED[way](function)(*inputs))
    loss = output.square().sum() + inputs[0].pow(3).sum()

    def differentiate_twice():
        (gradient,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
        torch.autograd.grad(gradient.square().sum(), inputs[0])

    with pytest.raises(
        RuntimeError, match=r"no second derivative|not currently support double backward"
    ):
        differentiate_twice()
