"""Pretended GPUs, for faults of a real one that can be found without it.

On a CPU `pretend_graphs` captures and replays steps, and `Launching` runs launchers. The rest
stands for an H100 that is not there: the device, launches, and what the compiler asks;
tests/harness/pretended_worker.py uses it in a process of its own.
"""

import ctypes
import os
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import accel.kernels.attention.attend
import accel.kernels.counter_noise.draws
import accel.techniques.offload_optimizer
import accel.techniques.weights
import models.mixers.attention
from accel.kernels.registry import OPERATORS
from accel.techniques.cuda_graph import CudaGraph
from tests.harness.operators import as_tuple

READS = ("_local_scalar_dense", "is_nonzero", "equal")
"""Operations with which the host reads a value of the device."""


def list_storages(values):
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}


def make_alias(value):
    return value.detach() if isinstance(value, Tensor) else value


class NotingMode(TorchDispatchMode):
    """Notes operations in `calls`."""

    def __init__(self):
        super().__init__()
        self.calls = []


class Recording(NotingMode):
    """Records each operation with its inputs and its outputs in new memory, as a capture does;
    raises where the host reads a value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        made = list_storages(result) - list_storages((args, kwargs))
        # A view stays one in a replay, so it is not recorded.
        if made or func._schema.is_mutable:
            # The step may give its tensors other memory later, which a graph never sees. So the
            # record has other tensors of the same memory.
            inputs = tree_map(make_alias, (args, kwargs or {}))
            outputs = tree_map(make_alias, result)
            self.calls.append(
                (func, inputs, [t for t in tree_leaves(outputs) if list_storages(t) & made])
            )
        return result


class Graph:
    """A CUDA graph on a CPU: a replay runs the recorded operations again, on the tensors of the
    capture. Like a real one, it sees nothing that the step has changed since."""

    def __init__(self):
        self.recording = Recording()
        self.replays = 0

    def replay(self):
        self.replays += 1
        # The recording has already computed the step, which a real capture does not.
        if self.replays == 1:
            return
        with torch.no_grad():
            for func, (args, kwargs), made in self.recording.calls:
                taken = list_storages((args, kwargs))
                again = [t for t in tree_leaves(func(*args, **kwargs)) if list_storages(t) - taken]
                for old, new in zip(made, again, strict=True):
                    old.copy_(new)


class Streams:
    """Stands for `torch.cuda`'s streams and captures, by name; entering one makes it current."""

    def __init__(self):
        self.current = "default"

    @contextmanager
    def enter(self, name):
        before = self.current
        self.current = name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, graph, stream, capture_error_mode):
        before = self.current
        self.current = stream
        try:
            with graph.recording:
                yield
        except Exception as error:
            # torch.cuda.graph raises here too, and stays in its stream.
            message = "CUDA error: operation failed due to a previous error during capture"
            raise RuntimeError(message) from error
        self.current = before


class Name(str):
    """A stream."""

    def wait_stream(self, other):
        pass


def pretend_graphs(monkeypatch):
    """Lets `runtime.cuda_graph=true` run on a CPU."""
    streams = Streams()
    monkeypatch.setattr(CudaGraph, "find_obstacle", lambda self: None)
    for name, stand_in in {
        "CUDAGraph": Graph,
        "graph": streams.capture,
        "Stream": lambda device=None: Name("capture"),
        "stream": streams.enter,
        "current_stream": lambda device=None: Name(streams.current),
        "set_stream": lambda stream: setattr(streams, "current", str(stream)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return streams


class Launching(NotingMode):
    """Runs the Triton launcher of each of our operators in place of its definition, on any device;
    notes operator, arguments and outputs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        operator = OPERATORS.get(name) if func.namespace == "fastlatent" else None
        if operator is None:
            return func(*args, **(kwargs or {}))
        if operator.kernel is None:
            with self:
                return operator.definition(*args)
        outputs = operator.kernel(*args)
        self.calls.append((name, args, as_tuple(outputs)))
        return outputs


def run_backward(outputs):
    """Runs the backward pass from what an operator returned, with random gradients."""
    outputs = as_tuple(outputs)
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])


def make_profiler_event(name, on_gpu=False, annotation=False):
    """Makes an event of a millisecond as the profiler records it."""
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    facts = {
        "name": name,
        "device_type": device,
        "is_user_annotation": annotation,
        "duration_ns": 10**6,
        "start_ns": 0,
        "start_thread_id": 1,
        "dtypes": [],
    }
    return SimpleNamespace(**{key: lambda value=value: value for key, value in facts.items()})


# An H100.

DEVICES = 10
"""Devices that PyTorch's own stand-in for a device guard counts; autograd asks for the context of
each."""


class Device(SimpleNamespace):
    """Properties of an H100."""

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
    """A device, guard or stream, which does nothing."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass

    def wait_stream(self, other):
        pass


def always(value):
    return lambda *_, **__: value


def pretend_device():
    """Lets PyTorch's Python side find one H100, and its C++ side count one device."""
    from torch._subclasses import fake_tensor

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
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
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
    # A FakeTensorMode belongs to one thread.
    torch.autograd.set_multithreading_enabled(False)


def pretend_launches():
    """Replaces what fake tensors cannot do: launch Triton, choose an attention backend, page-lock
    memory."""
    for module in (accel.kernels.counter_noise.draws, accel.techniques.weights):
        module.draw = draw
    accel.techniques.offload_optimizer.make_host_tensor = partial(torch.empty_like, device="cpu")
    models.mixers.attention.attend = attend
    torch._fused_adamw_ = partial(fused_update, 4)


def draw(kind, seed, purpose, position, words):
    dtype = torch.int64 if kind == "bits" else torch.float32
    return torch.empty(len(position), words, dtype=dtype, device=position.device)


def attend(q, k, v, backend="auto", groups=None, prefix=None):
    """Attention by a backend; "auto" is PyTorch's choice on an H100, or a backend that takes fp32
    or a mask."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if backend == "flex":
        return accel.kernels.attention.attend.attend_by_flex(q, k, v, groups, prefix)
    assert groups is None
    ops = torch.ops.aten
    if prefix is not None:
        assert backend in ("auto", "efficient")
        mask = accel.kernels.attention.attend.make_mask(groups, prefix, q.shape[2])
        bias = torch.where(mask, 0.0, -torch.inf).to(q.dtype).expand(*q.shape[:3], -1)
        return ops._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]
    if backend == "math":
        return (q @ k.mT).softmax(-1) @ v
    if backend == "cudnn":
        return ops._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0]
    if backend == "efficient" or q.dtype == torch.float32:
        return ops._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]
    return ops._scaled_dot_product_flash_attention(q, k, v)[0]


def fused_update(lists, *tensors, **options):
    """Stands for an update by one kernel: checks devices and dtypes of its inputs."""
    device = tensors[0][0].device
    dtype = tensors[0][0].dtype
    for t in chain(*tensors[:lists]):
        assert (t.device, t.dtype) == (device, dtype), (
            f"{t.dtype} on {t.device} beside {dtype} on {device}"
        )
    for t in chain(*tensors[lists:]):
        assert t.device == device, f"a step count on {t.device} beside parameters on {device}"
    if options["grad_scale"] is None:
        return  # the host decides whether Muon takes a step
    for name in ("grad_scale", "found_inf", "lr"):
        value = options[name]
        assert isinstance(value, Tensor), f"{name} is {value}, a number of the host"
        assert (value.device, value.dtype) == (device, torch.float32), (
            f"{name} is {value.dtype} on {value.device}"
        )


def pretend_compiler():
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
    driver = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=always(limits)),
        get_current_target=always(GPUTarget("cuda", 90, 32)),
        get_current_device=always(0),
        get_device_interface=always(torch.cuda),
        is_active=always(True),
    )
    triton.runtime.driver.set_active(driver)
