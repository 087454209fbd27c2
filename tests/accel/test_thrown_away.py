"""Each row of the ledger says that a technique is not on if its work is done and thrown away."""

from collections import Counter

import pytest
import torch
from torch.utils._pytree import tree_map_only

from accel.counted_rows import AdapterGradients, OptimizerState
from accel.evidence import Evidence
from accel.stack import TECHNIQUES
from accel.techniques.fused_kernels import FusedKernel
from accel.techniques.offload_activations import OffloadActivations
from accel.techniques.offload_optimizer import MIN_OFFLOADED_ELEMENTS, HostState
from accel.techniques.parallel import DataParallel
from accel.techniques.weights import RoundedUpdate
from accel.update_probe import Update
from common.config.compose import compose
from models.mixers import attention
from tests.harness.adapters import EAGER_RUN, assemble_on, save_base
from tests.harness.steps import (
    checkpoint_values,
    compile_values,
    find_technique,
    key_of,
    make_call,
    read_ledger,
    tiny_training,
)
from tests.harness.words import CPU, CUDA
from training.assemble import assemble
from training.optim import muon
from training.optim.muon import Muon


def do_both(spent, used):
    """A function that calls `spent`, and returns what `used` returns."""

    def call(*inputs, **more):
        spent(*inputs, **more)
        return used(*inputs, **more)

    return call


def on_copies(function):
    """A function that works on copies of its tensors."""
    return lambda *inputs, **more: function(
        *tree_map_only(torch.Tensor, torch.clone, inputs), **more
    )


# What a real step shows.


def spend_adamw(training, patch):
    patch.setattr(torch, "_fused_adamw_", on_copies(torch._fused_adamw_))


def spend_products(training, patch):
    forward = training.step.forward
    training.step.forward = do_both(forward, forward.__wrapped__)


def spend_stream(training, patch):
    for block in training.model.blocks:
        block.register_forward_hook(
            lambda _, inputs, outputs: (*outputs[:2], outputs[2].bfloat16().float())
        )


def spend_attention(training, patch):
    def attend(q, k, v, *others):
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    patch.setattr(attention, "attend", do_both(attention.attend, attend))


def spend_recomputation(training, patch):
    for block in training.model.blocks:
        block.forward = do_both(block.forward, type(block).forward.__get__(block))


def spend_compilation(training, patch):
    for block in training.model.blocks:
        block._compiled_call_impl = do_both(block._compiled_call_impl, block._call_impl)


def spend_host_copies(training, patch):
    pack = OffloadActivations.pack
    patch.setattr(OffloadActivations, "pack", do_both(pack, lambda _, t: t.detach()))


def spend_host_state(training, patch):
    """The tensors of the device stay in the state."""
    step = HostState.step

    def keep(self):
        step(self)
        for state in self.members[0].state.values():
            if state["exp_avg"].numel() >= MIN_OFFLOADED_ELEMENTS:
                state["exp_avg"] = state["exp_avg"].to("meta")

    patch.setattr(HostState, "step", keep)


def spend_rounding(training, patch):
    patch.setattr(RoundedUpdate, "round_randomly", on_copies(RoundedUpdate.round_randomly))


def spend_factors(training, patch):
    """The other half of the factors learns."""
    kept = [p for name, p in training.model.named_parameters() if name.endswith("lora_A")]
    step = training.step.optimizer.step

    def step_back():
        before = [p.detach().clone() for p in kept]
        step()
        torch._foreach_copy_([p.data for p in kept], before)

    training.step.optimizer.step = step_back


def spend_iteration(training, patch, size=1.0):
    patch.setattr(muon, "iterate", do_both(muon.iterate, lambda x: size * x / x.norm()))


def spend_iteration_of_large_steps(training, patch):
    spend_iteration(training, patch, 1000.0)


def spend_orthogonal_steps(training, patch):
    patch.setattr(Muon, "orthogonalise", on_copies(Muon.orthogonalise))


def spend_matrices(training, patch):
    patch.setattr(Muon, "update_matrices", lambda *inputs: None)


def spend_steps(training, patch):
    patch.setattr(muon, "iterate", do_both(muon.iterate, torch.zeros_like))


def spend_momenta(training, patch):
    update = Muon.update_momenta

    def forget(self, parameters):
        steps = update(self, parameters)
        for parameter in parameters:
            self.state[parameter]["momentum"].zero_()
        return steps

    patch.setattr(Muon, "update_momenta", forget)


MUON = {"optim": "muon"}
SPENT = [
    ({"fused_adamw": True}, spend_adamw),
    ({"optim": "adamw", "fused_adamw": True}, spend_adamw),
    *((MUON, spend) for spend in (spend_iteration, spend_orthogonal_steps, spend_matrices)),
    *((MUON, spend) for spend in (spend_steps, spend_momenta, spend_iteration_of_large_steps)),
    ({"adapter": "lora"}, spend_factors),
    ({"precision": "bf16"}, spend_products),
    ({"residual_in_fp32": True, "precision": "bf16"}, spend_stream),
    ({"attention": "flash"}, spend_attention),
    (checkpoint_values("blocks"), spend_recomputation),
    (compile_values("blocks"), spend_compilation),
    ({"weights": "bf16"}, spend_rounding),
    ({"offload_optimizer": True}, spend_host_state),
    ({"offload_activations": True}, spend_host_copies),
]


@pytest.mark.usefixtures("quick_compiler", "any_precision", "techniques_of_a_gpu")
@pytest.mark.parametrize(("values", "spend"), SPENT, ids=lambda case: getattr(case, "__name__", ""))
def test_what_is_done_and_thrown_away_is_not_on(values, spend, monkeypatch, tmp_path):
    key = key_of(values)
    words = [f"optim={values['optim']}"] if key == "optim" else []
    runtime = {name: value for name, value in values.items() if name not in ("optim", "adapter")}

    def prepare():
        if key == "adapter":
            return assemble_on(save_base(tmp_path / "base.safetensors"), "adapter=lora")
        return tiny_training("dit", *words, **runtime)

    assert not read_ledger(prepare())[key].missing
    training = prepare()
    spend(training, monkeypatch)
    row = read_ledger(training)[key]
    assert row.missing, row.evidence


RIGHT = [
    "optim=muon optim.lr=2e-5",
    "optim=muon optim.lr=3e-4 optim.weight_decay=0.1",
    "optim=sgd optim.lr=1e-5",
    "runtime.attention=math",
    "data.classes=[0,1,2] adapter.targets=[blocks.*out_proj] adapter=lora runtime.attention=flash",
]


@pytest.mark.parametrize("words", RIGHT)
def test_what_is_right_is_on_from_the_zero_layers_of_a_new_model_on(words, tmp_path):
    words = [*words.split(), "runtime.on_unavailable=error"]
    if "adapter=lora" in words:
        training = assemble_on(save_base(tmp_path / "base.safetensors", "dit"), *words)
    else:
        training = assemble(compose([*EAGER_RUN, "model=dit_xs", *words]).cfg, CPU)
    assert not [row for row in training.warm_up() if row.missing]


# What only a GPU or several processes show; the evidence is made up.


def observe_made_up(key, evidence, patch, good):
    """Returns what a row says of evidence of a step on a GPU, or of two processes."""
    if key == "parallel":
        factor = 1.0 if good else 2.0
        gather = "accel.techniques.parallel.gather_objects"
        patch.setattr(gather, lambda norm: [norm, factor * norm])
        return DataParallel("ddp", CPU).observe(evidence)
    technique = find_technique(key)(True, CUDA)
    if isinstance(technique, FusedKernel):
        technique.switches = [torch.nn.Identity()]
        operator = f"fastlatent::{technique.op}"
        evidence.ops |= {f"{technique.op}_kernel": 1, f"{operator}_backward": int(good)}
        evidence.blocks = [[make_call(ops=Counter([operator]))]]
    return technique.observe(evidence)


MADE_UP = [kind.key for kind in FusedKernel.__subclasses__()]
MADE_UP += ["parallel", "tf32", "empty_cache_at_eval", "cuda_graph"]


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("key", MADE_UP)
def test_what_a_gpu_does_and_throws_away_is_not_on(key, good, monkeypatch):
    monkeypatch.setattr("accel.techniques.tf32.rounds_to_tf32", lambda device: (good, good))
    reserved = [1000]
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[-1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.append(1000 - 100 * good))

    norm = torch.tensor(1.0)
    evidence = Evidence(updates=[Update({}, norm, norm)])
    evidence.products["aten::mm", "float"] = 3
    # Names of CUDA 13.
    evidence.ops |= {"c10d::allreduce_": 1, "__cudaLaunchKernel": 90}
    evidence.warm_ops |= {"cudaGraphLaunch": 1, "cudaLaunchKernelExC": 5 if good else 95}
    assert bool(observe_made_up(key, evidence, monkeypatch, good).active) is good


def test_every_row_is_walked():
    """The autotuner of cuDNN has a test of its own."""
    walked = {*MADE_UP, *(key_of(values) for values, _ in SPENT), "cudnn_benchmark"}
    assert walked == {kind.key for kind in (*TECHNIQUES, OptimizerState, AdapterGradients)}
