"""Training steps on fake CUDA tensors, and Inductor's code for CUDA, in a process that pretends to
have an H100.

tests/accel/test_pretended_gpu.py starts it with two small libraries in its environment: one counts
devices, one stands for the driver. `python -m tests.harness.pretended_worker` prints a line
of JSON for each case.
"""

import json
import re
import traceback
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from accel.composite_optimizer import is_fused
from accel.techniques.fused_kernels import FusedKernel
from common.condition import Condition, EncodedText
from common.config.build import build
from common.config.compose import compose
from common.distributed.ranks import SINGLE
from common.files import ROOT
from data.loader import Batch
from data.spec import LatentSpec, TextSpec
from tests.harness.pretended_gpu import (
    NotingMode,
    always,
    pretend_compiler,
    pretend_device,
    pretend_launches,
)
from tests.harness.steps import HEADS
from training.assemble import Parts, build_stack, join_parts
from training.weights.pretrained import build_on_meta

CUDA = torch.device("cuda")
FAMILIES = ("mamba", "zigzag", "mamba1", "ssd_mlp", "hybrid", "conv", "dit")
STEPS = {
    f"{family}, {preset}": f"{family} {preset}"
    for family in FAMILIES
    for preset in ("eager", "fast", "lowmem")
}
STEPS |= {
    "max, accumulation": "mamba max runtime.compile=false accumulation_steps=2",
    "max, spikes": "zigzag max runtime.compile=false guards.spike_sigmas=6",
    "heads": f"hybrid max runtime.compile=false {' '.join(HEADS)}",
    "fp16": "dit fast runtime.precision=fp16",
    "fp16, accumulation, spikes": (
        "ssd_mlp fast runtime.precision=fp16 accumulation_steps=2 guards.spike_sigmas=6"
    ),
    "bf16 weights": "ssd_mlp fast runtime.weights=bf16",
    "selective": (
        "ssd_mlp fast runtime.gradient_checkpointing=true runtime.checkpoint_policy=selective"
    ),
    "drop path, spikes": "mamba fast model.drop_path=0.1 guards.spike_sigmas=6",
    "optimizer's state on the host": "ssd_mlp fast runtime.offload_optimizer=true",
    "muon": "mamba fast optim=muon",
    "adafactor": "mamba fast optim=adafactor",
    "sgd": "mamba fast optim=sgd",
    **{
        f"attention={name}": f"dit fast runtime.attention={name}"
        for name in ("flash", "cudnn", "efficient", "math")
    },
}
STEPS |= {
    "text": "dit fast model.conditioning=text model.text_tokens=true",
    "text, lowmem": "hybrid lowmem model.conditioning=class_and_text model.text_tokens=true",
    "text, one vector": "mamba fast model.conditioning=text",
}
"""Name of a case -> family, preset, and further words."""
COMPILED = {family: f"{family} production" for family in FAMILIES}
COMPILED |= {
    "max": "mamba max accumulation_steps=2",
    "whole model": "dit production runtime.compile_scope=model runtime.precision=fp16",
    "heads": f"hybrid production runtime.compile_scope=model {' '.join(HEADS)}",
    "checkpointing": "ssd_mlp production runtime.gradient_checkpointing=true",
    "selective": (
        "ssd_mlp production runtime.gradient_checkpointing=true runtime.checkpoint_policy=selective"
    ),
    "bf16 weights": "conv production runtime.weights=bf16",
    "text": "hybrid production model.conditioning=text model.text_tokens=true",
    "text, flex": (
        "dit production runtime.attention=flex model.conditioning=text model.text_tokens=true"
    ),
    "flex": "dit production runtime.attention=flex model.mixer.window=2",
}
SPEC = LatentSpec(
    channels=4,
    height=32,
    width=32,
    num_classes=1000,
    count=50000,
    class_names=[],
    mean=[0.0] * 4,
    std=[1.0] * 4,
    text=TextSpec(
        encoder={},
        encoder_sha256="",
        width=256,
        max_tokens=64,
        dtype="float16",
        count=1000,
        per_image=4,
        mean=[0.0] * 256,
        empty_pooled=[1.0] * 256,
        empty_tokens=[[1.0] * 256],
    ),
)
STEP_COUNT = 2


# Steps.


class Waits(NotingMode):
    """Notes each place where the host reads a value of the device, or waits for a copy; the host
    then continues with a made-up value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name == "_local_scalar_dense":
            if args[0].is_cuda:
                self.note("reads a value")
            return {torch.bool: True, torch.int64: 1}.get(args[0].dtype, 1.0)
        check_devices(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            waits = not (
                kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            )
            if waits and source.device.type != result.device.type:
                self.note(f"copies from {source.device.type} to {result.device.type}")
        return result

    def note(self, event):
        """Adds the innermost file of this project, or of PyTorch's optimizers, to the calls."""
        files = [frame.filename for frame in traceback.extract_stack()]
        known = [file for file in files if "torch/optim/" in file or "site-packages" not in file]
        place = [file for file in known if file != __file__][-1]
        name = place.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
        self.calls.append(f"{name} {event}")


def check_devices(func, args, kwargs):
    """RuntimeError where an operation would write a value of the device to the host: fake scalars
    let that pass."""
    arguments = func._schema.arguments
    values = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    written = [values.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    to_host = any(isinstance(t, Tensor) and not t.is_cuda for t in tree_leaves(written))
    copies = func.overloadpacket.__name__ in ("copy_", "_foreach_copy_")
    if to_host and not copies and any(t.is_cuda for t in tensors):
        raise RuntimeError(f"{func} writes to the host what it computes from the device")


def build_blank_model(node, spec, device):
    """A model of fake tensors on `device`."""
    model = build_on_meta(node, spec)
    # Module.to_empty would swap real tensors for fake ones, which PyTorch refuses.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = torch.empty_like(parameter, device=device)
            module._parameters[name] = nn.Parameter(fake, parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    return model


def accept_kernels(stack, model):
    """Accepts every fused kernel without proof."""
    for technique in stack.techniques:
        if isinstance(technique, FusedKernel) and technique.asks_for_proof(model):
            technique.planning.on_fake_device(technique)


def assemble_run(words):
    """Assembles a run whose step is never captured."""
    family, preset, *more = words.split()
    cfg = compose(
        [f"model={family}_xs", f"runtime={preset}", "data=synthetic", "batch_size=8", *more]
    ).cfg
    model = build_blank_model(cfg.model, SPEC, CUDA)
    objective = build(cfg.objective, "objective")
    stack = build_stack(cfg, CUDA, alone=True)
    stack.on_process()
    accept_kernels(stack, model)
    parts = Parts(SimpleNamespace(spec=SPEC), objective, None, model, stack)
    training = join_parts(cfg, CUDA, SINGLE, parts)
    assert not training.stack.reasons, f"could not be had: {training.stack.reasons}"
    training.step.update = training.step.take_step
    return training


def make_batches(training):
    samples = training.micro_batch
    numbers = torch.zeros(samples, dtype=torch.int64, device=CUDA)
    latents = torch.empty(samples, SPEC.channels, SPEC.height, SPEC.width, device=CUDA)
    text = None
    if training.model.text_embed is not None:
        vectors = torch.empty(samples, 65, 256, dtype=torch.float16, device=CUDA)
        text = EncodedText(vectors[:, 0], vectors[:, 1:], numbers.int(), numbers)
    batch = Batch(latents, Condition(numbers, text), numbers, numbers)
    return [batch] * training.cfg.accumulation_steps


def take_steps(training, watched):
    """Takes two steps; AssertionError if one returns something that is not on the device."""
    for i in range(STEP_COUNT):
        training.step.schedule(i * training.cfg.batch_size)
        batches = make_batches(training)
        with watched:
            output = training.step(batches)
        for value in tree_leaves(output):
            assert value.is_cuda, f"a result of the step is on {value.device}: {output}"


def run_steps(words):
    """Takes two steps; returns where the host waited, whether the optimizer is fused, and the
    device of its state."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        training = assemble_run(words)
        waits = Waits()
        take_steps(training, waits)
        state = tree_leaves(training.step.optimizer.state_dict()["state"])
        return {
            "fused": is_fused(training.step.optimizer),
            "waits": waits.calls,
            "state": sorted({t.device.type for t in state if isinstance(t, Tensor)}),
        }


# Compiled blocks.


@contextmanager
def record_code():
    """Records the names of Inductor's Triton kernels, and (is a backward pass, code of the wrapper)
    of each graph. A graph runs uncompiled."""
    from torch._inductor import compile_fx
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    kernels = []
    codes = []
    codegen = GraphLowering.codegen
    compile_graph = compile_fx.fx_codegen_and_compile

    def add_kernel(_compiler, name, source, **_):
        compile(source, name, "exec")
        kernels.append(name)
        return SimpleNamespace(run=always(None))

    def note_code(lowering):
        code = codegen(lowering)
        codes.append((lowering.is_backward, code[0].value))
        return code

    def keep_uncompiled(graph, *args, **kwargs):
        copy = deepcopy(graph)
        compiled = compile_graph(graph, *args, **kwargs)

        def call(inputs):
            arguments = list(inputs)
            inputs.clear()
            return copy(*arguments)

        compiled.current_callable = call
        return compiled

    with (
        patch.object(AsyncCompile, "triton", add_kernel),
        patch.object(GraphLowering, "codegen", note_code),
        patch.object(compile_fx, "fx_codegen_and_compile", keep_uncompiled),
    ):
        yield kernels, codes


def run_compiled(words):
    """Takes two steps with compiled blocks; returns the number of graphs and kernels, and our
    operators in their code."""
    with record_code() as (kernels, codes), FakeTensorMode(allow_non_fake_inputs=True):
        take_steps(assemble_run(words), nullcontext())
    text = "\n".join(code for _, code in codes)
    backward = [is_backward for is_backward, _ in codes]
    return {
        "forward": backward.count(False),
        "backward": backward.count(True),
        "kernels": len(kernels),
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "operators": sorted(set(re.findall(r"torch\.ops\.fastlatent\.(\w+)", text))),
    }


def main():
    torch.set_num_threads(1)
    pretend_device()
    pretend_launches()
    for kind, cases, run in (("step", STEPS, run_steps), ("compiled", COMPILED, run_compiled)):
        if kind == "compiled":
            pretend_compiler()
        for name, words in cases.items():
            try:
                result = run(words)
            except Exception:
                result = {"failed": traceback.format_exc()[-3000:]}
            print(json.dumps({"case": f"{kind} {name}", **result}), flush=True)


if __name__ == "__main__":
    main()
