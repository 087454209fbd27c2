"""A pretended GPU, for faults of a real one that can be found without it."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from accel.kernels.registry import OPERATORS
from accel.techniques.cuda_graph import CudaGraph

READS = ("_local_scalar_dense", "is_nonzero", "equal")
"""Operations with which the host reads a value of the device."""


def list_storages(values):
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}


def make_alias(value):
    return value.detach() if isinstance(value, Tensor) else value


class Recording(TorchDispatchMode):
    """Records each operation with its inputs and outputs, as a capture does; raises where the host
    reads a value."""

    def __init__(self):
        super().__init__()
        self.calls = []
        """Operation, arguments, and its outputs in new memory."""

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


class Launching(TorchDispatchMode):
    """Runs the Triton launcher of each of our operators in place of its definition, on any
    device."""

    def __init__(self):
        super().__init__()
        self.calls = []
        """Operator, its arguments, its outputs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        operator = OPERATORS.get(name) if func.namespace == "fastlatent" else None
        if operator is None:
            return func(*args, **(kwargs or {}))
        if operator.kernel is None:
            with self:
                return operator.definition(*args)
        outputs = operator.kernel(*args)
        self.calls.append((name, args, outputs if isinstance(outputs, tuple) else (outputs,)))
        return outputs


def run_backward(outputs):
    """Runs the backward pass from what an operator returned, with random gradients."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
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
