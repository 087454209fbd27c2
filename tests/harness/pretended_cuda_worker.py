"""Training steps on fake CUDA tensors, and Inductor's code for CUDA, in a process that pretends to
have an H100.

tests/accel/test_pretended_cuda.py starts it with two small libraries in its environment: one counts
devices, one stands in the driver's place. `python -m tests.harness.pretended_cuda_worker <kind>`
prints a line of JSON for each case of that kind.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import accel.kernels.attend
import accel.kernels.counter_noise
import accel.techniques.offload_optimizer
import accel.techniques.weights
import models.mixers.attention
from accel.composite_optimizer import is_fused
from accel.stack import AccelerationStack
from accel.techniques.fused_kernels import FusedKernel
from common.files import ROOT
from data.loader import Batch, LatentSpec
from models.denoiser import Denoiser
from training.assemble import Parts, Training, assemble, build_stack
from training.config.compose import compose
from training.weights.pretrained import build_on_meta

CUDA = torch.device("cuda")
FAMILIES = ("mamba", "zigzag", "mamba1", "ssd_mlp", "conv", "dit")
STEPS = {
    f"{family}, {preset}": f"{family} {preset}"
    for family in FAMILIES
    for preset in ("eager", "fast", "lowmem")
}
STEPS |= {
    "max, accumulation": "mamba max runtime.compile=false accumulation_steps=2",
    "max, spikes": "zigzag max runtime.compile=false guards.spike_sigmas=6",
    "fp16": "dit fast runtime.precision=fp16",
    "fp16, accumulation, spikes": (
        "ssd_mlp fast runtime.precision=fp16 accumulation_steps=2 guards.spike_sigmas=6"
    ),
    "bf16 weights, stochastic": "ssd_mlp fast runtime.weights=bf16 runtime.rounding=stochastic",
    "bf16 weights, Kahan": "ssd_mlp fast runtime.weights=bf16 runtime.rounding=kahan",
    "selective": (
        "ssd_mlp fast runtime.gradient_checkpointing=true runtime.checkpoint_policy=selective"
    ),
    "drop path, spikes": "mamba fast model.drop_path=0.1 guards.spike_sigmas=6",
    "optimizer's state on the host": "ssd_mlp fast runtime.offload_optimizer=true",
    "parameters on the host": "conv fast guards.spike_sigmas=6",
    "muon": "mamba fast optim=muon",
    "adafactor": "mamba fast optim=adafactor",
    "sgd": "mamba fast optim=sgd",
    **{
        f"attention={name}": f"dit fast runtime.attention={name}"
        for name in ("flash", "cudnn", "efficient", "math")
    },
}
"""Name of a case -> family, preset, and further words."""
COMPILED = {family: f"{family} production" for family in FAMILIES}
COMPILED |= {
    "max": "mamba max accumulation_steps=2",
    "whole model": "dit production runtime.compile_scope=model runtime.precision=fp16",
    "checkpointing": "ssd_mlp production runtime.gradient_checkpointing=true",
    "selective": (
        "ssd_mlp production runtime.gradient_checkpointing=true runtime.checkpoint_policy=selective"
    ),
    "bf16 weights": "conv production runtime.weights=bf16",
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
)
STEP_COUNT = 2
DEVICES = 10
"""As many as PyTorch's own stand-in for a device guard counts; autograd asks for the context of
each."""


# The device that is not there.


class Device(SimpleNamespace):
    """What is asked about an H100."""

    name = "NVIDIA H100 80GB HBM3"
    major = 9
    minor = 0
    multi_processor_count = 132
    total_memory = 80 * 2**30
    regs_per_multiprocessor = 65536
    warp_size = 32
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    L2_cache_size = 50 * 2**20
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    gcnArchName = ""  # noqa: N815  # PyTorch's name


class Nothing:
    """A device, guard or stream that is entered and waited for."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def pretend_device() -> None:
    """Lets PyTorch's Python side find one H100, and its C++ side count one device."""
    import torch._subclasses.fake_tensor

    state = torch.zeros(16, dtype=torch.uint8)
    facts = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": Device,
        "get_device_capability": (9, 0),
        "get_device_name": Device.name,
        "is_current_stream_capturing": False,
        "mem_get_info": (70 * 2**30, 80 * 2**30),
        "get_rng_state": state,
        "current_stream": Nothing(),
    }
    names = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    facts |= dict.fromkeys(names, 0)
    names = ("_lazy_init", "init", "synchronize", "empty_cache", "reset_peak_memory_stats")
    facts |= dict.fromkeys((*names, "set_device", "set_rng_state"))
    for name, value in facts.items():
        setattr(torch.cuda, name, always(value))
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.Stream = torch.cuda.device = torch.cuda._DeviceGuard = Nothing  # pyright: ignore[reportAttributeAccessIssue]
    fake_tensor.init_gpu_context = always(None)
    FakeTensorMode.avoid_device_init = property(always(True))  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.c_byte.in_dll(
        ctypes.CDLL(os.environ["PRETENDED_CUDA"]), "pretended_devices"
    ).value = DEVICES
    torch.autograd.set_multithreading_enabled(False)  # a FakeTensorMode is one thread's


def pretend_launches() -> None:
    """Stands in for what fake tensors cannot do: launch Triton, choose an attention backend,
    page-lock memory."""
    for module in (accel.kernels.counter_noise, accel.techniques.weights):
        module.draw = draw
    accel.techniques.offload_optimizer.make_host_tensor = partial(torch.empty_like, device="cpu")
    models.mixers.attention.attend = attend
    torch._fused_adamw_ = partial(fused_update, 4)


def draw(kind: str, seed: int, purpose: int, position: Tensor, words: int) -> Tensor:
    dtype = torch.int64 if kind == "bits" else torch.float32
    return torch.empty(len(position), words, dtype=dtype, device=position.device)


def attend(
    q: Tensor, k: Tensor, v: Tensor, backend: str = "auto", groups: Tensor | None = None
) -> Tensor:
    """The backend that is named; for "auto", what PyTorch takes on an H100 or what takes fp32."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if backend == "flex":
        return accel.kernels.attend.attend_by_flex(q, k, v, groups)
    assert groups is None
    ops = torch.ops.aten
    if backend == "math":
        return (q @ k.mT).softmax(-1) @ v
    if backend == "cudnn":
        return ops._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0]
    if backend == "efficient" or q.dtype == torch.float32:
        return ops._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]
    return ops._scaled_dot_product_flash_attention(q, k, v)[0]


def fused_update(lists: int, *tensors: list[Tensor], **options: Any) -> None:
    """An update by one kernel, which the device decides about: checks where and what its inputs
    are."""
    device = tensors[0][0].device
    dtype = tensors[0][0].dtype
    for t in (t for some in tensors[:lists] for t in some):
        assert (t.device, t.dtype) == (device, dtype), (
            f"{t.dtype} on {t.device} beside {dtype} on {device}"
        )
    for t in (t for some in tensors[lists:] for t in some):
        assert t.device == device, f"a step count on {t.device} beside parameters on {device}"
    for name in ("grad_scale", "found_inf", "lr"):
        value = options[name]
        assert isinstance(value, Tensor), f"{name} is {value}, a number of the host"
        assert (value.device, value.dtype) == (device, torch.float32), (
            f"{name} is {value.dtype} on {value.device}"
        )


# Steps.


class Waits(TorchDispatchMode):
    """Notes each place where the host reads a value of the device, or copies so that it waits, and
    goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    def note(self, what: str) -> None:
        files = [at.filename for at in traceback.extract_stack() if at.filename != __file__]
        known = [file for file in files if "torch/optim/" in file or "site-packages" not in file]
        self.places.append(
            f"{known[-1].removeprefix(f'{ROOT}/').rpartition('site-packages/')[2]} {what}"
        )


def check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """RuntimeError where an operation would write to the host what lies on the device: fake scalars
    let that pass."""
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [
        (argument, kwargs[argument.name])
        for argument in func._schema.arguments
        if argument.name in kwargs
    ]
    written = tree_leaves(
        [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
    )
    on_host = any(isinstance(t, Tensor) and not t.is_cuda for t in written)
    copies = func.overloadpacket.__name__ in ("copy_", "_foreach_copy_")
    if (
        on_host
        and not copies
        and any(isinstance(t, Tensor) and t.is_cuda for t in tree_leaves((args, kwargs)))
    ):
        raise RuntimeError(f"{func} writes to the host, and not all that it takes is there")


def blank_model(
    device: torch.device, node: Any, spec: LatentSpec, _device: torch.device
) -> Denoiser:
    """The model on `device`, of fake tensors."""
    model = build_on_meta(node, spec)
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                fake = torch.empty_like(tensor, device=device)
                module._parameters[name] = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = torch.empty_like(tensor, device=device)
    return model


def assumed_kernels(stack: AccelerationStack, model: nn.Module, *_: Any) -> dict[str, Any]:
    """Takes every fused kernel that is asked for as proved."""
    for technique in stack.techniques:
        if isinstance(technique, FusedKernel) and technique.asks_for_proof(model):
            technique.on_fake_device()
    return {}


def assembled(words: str, home: torch.device = CUDA) -> Training:
    """A run with its parameters on `home`; its step is never captured."""
    family, preset, *more = words.split()
    cfg = compose(
        [f"model={family}_xs", f"runtime={preset}", "data=synthetic", "batch_size=8", *more]
    ).cfg
    alone = partial(build_stack, alone=True)
    parts = Parts(
        always(SimpleNamespace(spec=SPEC)),
        partial(blank_model, home),
        assumed_kernels,
        alone,
        always(None),
    )
    training = assemble(cfg, CUDA, parts=parts)
    assert not training.stack.reasons, f"could not be had: {training.stack.reasons}"
    training.step.update = training.step.take_step
    return training


def batches(training: Training) -> list[Batch]:
    samples = training.micro_batch
    numbers = torch.zeros(samples, dtype=torch.int64, device=CUDA)
    latents = torch.empty(samples, SPEC.channels, SPEC.height, SPEC.width, device=CUDA)
    return [Batch(latents, numbers, numbers, numbers)] * training.cfg.accumulation_steps


def lend(training: Training) -> None:
    """Each forward pass finds copies on the device of the parameters, which stay on the host: as
    sharding does it."""
    model = training.model
    forward = training.step.forward

    def on_device(*args: Any, **kwargs: Any) -> Tensor:
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        copies = {name: t.to(CUDA, non_blocking=True) for name, t in own.items()}
        with _reparametrize_module(model, copies):
            return forward(*args, **kwargs)

    training.step.forward = on_device


def take_steps(training: Training, watched: AbstractContextManager[Any]) -> None:
    """Two steps; an AssertionError if one gives something that is not on the device."""
    for i in range(STEP_COUNT):
        training.step.schedule(i * training.cfg.batch_size)
        given = batches(training)
        with watched:
            output = training.step(given)
        for name, value in output._asdict().items():
            assert value.is_cuda, f"{name} of the step is on {value.device}"


def places_of_state(training: Training) -> list[str]:
    state = training.step.optimizer.state_dict()["state"]
    return sorted(
        {
            t.device.type
            for entries in state.values()
            for t in entries.values()
            if isinstance(t, Tensor)
        }
    )


def run_steps(name: str, words: str) -> dict[str, Any]:
    """Where the host waited in two steps, whether the optimizer is fused, and where its state
    lies."""
    home = torch.device("cpu") if name == "parameters on the host" else CUDA
    with FakeTensorMode(allow_non_fake_inputs=True):
        training = assembled(words, home)
        waits = Waits()
        if home != CUDA:
            lend(training)
        take_steps(training, waits)
        fused = is_fused(training.step.optimizer)
        return {
            "fused": fused,
            "waits": waits.places,
            "state": places_of_state(training),
            "steps": STEP_COUNT,
        }


# Compiled blocks.


class Generated:
    """What Inductor makes: graphs' wrapper code and Triton kernels. A graph runs as it was given to
    Inductor."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.codes: list[tuple[bool, str]] = []
        """Of each graph: whether it is a backward pass, and its wrapper's code."""

    def kernel(self, name: str, source: str, **_: Any) -> Any:
        compile(source, name, "exec")
        self.kernels.append(name)
        return SimpleNamespace(run=always(None))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.graph import GraphLowering

        codegen = GraphLowering.codegen
        compile_graph = compile_fx.fx_codegen_and_compile

        def noted(lowering: GraphLowering) -> Any:
            code = codegen(lowering)
            self.codes.append((lowering.is_backward, code[0].value))
            return code

        def as_given(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            copy = deepcopy(graph)
            made = compile_graph(graph, *args, **kwargs)

            def call(inputs: list[Any]) -> Any:
                given = list(inputs)
                inputs.clear()
                return copy(*given)

            made.current_callable = call
            return made

        with (
            patch.object(AsyncCompile, "triton", self.kernel),
            patch.object(GraphLowering, "codegen", noted),
            patch.object(compile_fx, "fx_codegen_and_compile", as_given),
        ):
            yield


def pretend_compiler() -> None:
    """Lets Inductor and Triton find the device, and keeps them from running anything on it."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget

    inductor.compile_threads = 1
    inductor.fx_graph_cache = inductor.shape_padding = inductor.joint_graph_constant_folding = False
    inductor.triton.autotune_at_compile_time = False
    functorch.enable_autograd_cache = False
    for interface in (CudaInterface, CudaInterface.Worker):
        interface.current_device = staticmethod(always(0))
        interface.get_device_properties = staticmethod(always(Device))
    CudaInterface.device = Nothing  # pyright: ignore[reportAttributeAccessIssue]
    CudaInterface.is_available = CudaInterface.is_bf16_supported = staticmethod(always(True))
    CudaInterface.get_compute_capability = staticmethod(always(90))
    CudaInterface.synchronize = staticmethod(always(None))
    torch._C._cuda_getCurrentRawStream = always(0)
    limits = {
        "max_shared_mem": 232448,
        "max_num_regs": 65536,
        "multiprocessor_count": 132,
        "warpSize": 32,
    }
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=always(limits)),
        get_current_target=always(target),
        get_current_device=always(0),
        get_device_interface=always(torch.cuda),
        is_active=always(True),
    )
    triton.runtime.driver.set_active(driver)


def run_compiled(name: str, words: str) -> dict[str, Any]:
    """Two steps with compiled blocks: the graphs and kernels that were made, and our operators in
    their code."""
    generated = Generated()
    with generated.recorded(), FakeTensorMode(allow_non_fake_inputs=True):
        training = assembled(words)
        take_steps(training, nullcontext())
    text = "\n".join(code for _, code in generated.codes)
    backward = [is_backward for is_backward, _ in generated.codes]
    return {
        "steps": STEP_COUNT,
        "forward": backward.count(False),
        "backward": backward.count(True),
        "kernels": len(generated.kernels),
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "operators": sorted(set(re.findall(r"torch\.ops\.fastlatent\.(\w+)", text))),
    }


def main(kind: str) -> None:
    torch.set_num_threads(1)
    pretend_device()
    pretend_launches()
    if kind == "compiled":
        pretend_compiler()
    cases, run = (COMPILED, run_compiled) if kind == "compiled" else (STEPS, run_steps)
    for name, words in cases.items():
        try:
            result = run(name, words)
        except Exception:
            result = {"failed": traceback.format_exc()[-3000:]}
        print(json.dumps({"case": name, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
