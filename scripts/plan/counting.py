"""Counts the bytes of a training step without a device that takes it: on models of few blocks,
which more blocks extend.

The forward and backward pass run on PyTorch's fake tensors, which have shapes and no values, at the
run's own batch; compiled blocks through the partitioner that Inductor uses too. The update runs on
real tensors, for the optimizers of libraries take no others. Each place of a step has a peak of its
own, and that is a straight line over the blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from accel.composite_optimizer import collect_state, count_largest_part, iterate_innermost
from accel.stack import AccelerationStack
from accel.technique import Technique
from data.loader import Batch, LatentSpec
from models.adapters import find_trained_parameters
from models.denoiser import Denoiser
from training.assemble import Parts, Training, assemble, build_stack
from training.config.schema import ParallelConfig, TrainConfig
from training.failures import count_lasting_bytes
from training.optimizers import make_parameter_groups
from training.weights.pretrained import build_on_meta

CPU = torch.device("cpu")
Place = tuple[str, int | None]
"""A phase of the step and the block at work; None: none is."""


class Peak(NamedTuple):
    """The most bytes that live at a place, and those of gradients among them."""

    live: float
    gradients: float


class Tracker(TorchDispatchMode):
    """Counts live tensor storage of what runs inside, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.gradients = 0
        self.place: Place = ("forward", None)
        self.peaks: dict[Place, Peak] = {}
        self.on_host = False
        """Whether what is made now lies in host memory, and counts as nothing."""
        self.with_gradient: set[int] = set()
        self.tracked: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def track(self, tensors: Iterable[Any]) -> None:
        """Counts tensors as live until they are freed."""
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):
                self.track(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.tracked:
                size = 0 if self.on_host else storage.nbytes()
                self.tracked.add(storage._cdata)
                self.live += size
                weakref.finalize(storage, self.forget, storage._cdata, size).atexit = False
        if self.live > self.peaks.get(self.place, Peak(-1, 0)).live:
            self.peaks[self.place] = Peak(self.live, self.gradients)

    def forget(self, address: int, size: int) -> None:
        self.tracked.remove(address)
        self.live -= size

    @contextmanager
    def allocate_on_host(self) -> Iterator[None]:
        """What becomes known inside lies in host memory."""
        self.on_host = True
        try:
            yield
        finally:
            self.on_host = False

    def enter(self, phase: str, block: int | None = None) -> None:
        """What runs from now on runs there."""
        self.place = (phase, block)
        self.track(())

    def note_gradient(self, parameter: Tensor) -> None:
        """A hook that PyTorch calls when a gradient has been accumulated."""
        assert parameter.grad is not None
        if id(parameter) not in self.with_gradient:  # later micro-batches add to it
            self.with_gradient.add(id(parameter))
            self.gradients += parameter.grad.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.track(leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        return found


def track_block(block: nn.Module, index: int, tracker: Tracker) -> Callable[..., Any]:
    """The call of a block, compiled or not, which tells the tracker when its passes begin."""
    call = block._compiled_call_impl or block._call_impl

    def told(*inputs: Tensor) -> Any:
        tracker.enter("forward", index)
        if index == 0 and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: tracker.enter("embedding"))
        outputs = call(*inputs)
        tracker.enter("forward")
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: tracker.enter("backward", index))
        return outputs

    return told


class GpuStack(AccelerationStack):
    """All techniques that are asked for, as a GPU would have them."""

    def find_obstacle(self, technique: Technique) -> None:
        """A GPU is taken to have each."""


def build_planned_stack(cfg: TrainConfig, gpu: bool) -> AccelerationStack:
    """The techniques of one process, whatever the others do, of a GPU or of this CPU; they are set
    to what can be counted on fake tensors."""
    stack = build_stack(cfg, CPU, alone=True, kind=GpuStack if gpu else AccelerationStack)
    for technique in stack.techniques:
        if technique.enabled:
            technique.on_fake_device()
    return stack


def build_blank_model(node: Mapping[str, Any], spec: LatentSpec, _device: torch.device) -> Denoiser:
    """The model with zeros for weights; with fake ones inside a FakeTensorMode."""
    model = build_on_meta(node, spec)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros_like(parameter, device=CPU)
            setattr(module, name, nn.Parameter(zeros, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=CPU))
    return model


def build_without_data(cfg: TrainConfig, spec: LatentSpec, gpu: bool) -> Training:
    """The parts of a run without its data; fused kernels are taken as proved, and an adapter's base
    stays zero."""
    no_data: Any = SimpleNamespace(spec=spec)
    parts = Parts(
        loader=lambda *_: no_data,
        model=build_blank_model,
        kernels=lambda *_: {},
        stack=lambda cfg, _: build_planned_stack(cfg, gpu),
        weights=lambda *_: None,
    )
    return assemble(cfg, CPU, parts=parts)


def with_few_blocks(cfg: TrainConfig, depth: int, samples: int, micro_batches: int) -> TrainConfig:
    """The configuration of one process with another batch and another number of blocks; a model
    whose depth is no key is counted whole."""
    return replace(
        cfg,
        model=cfg.model | ({"depth": depth} if "depth" in cfg.model else {}),
        batch_size=samples * micro_batches,
        accumulation_steps=micro_batches,
        runtime=replace(cfg.runtime, parallel=ParallelConfig()),
    )


class PassBytes(NamedTuple):
    """A forward and backward pass at some depth."""

    peaks: dict[Place, Peak]
    """Weights, inputs, kept tensors, gradients and what is at work."""
    kept: float
    """Bytes that a micro-batch keeps for its backward pass."""


def count_pass(cfg: TrainConfig, spec: LatentSpec, gpu: bool) -> PassBytes:
    """Counts a forward and backward pass of a micro-batch; the second, if gradients are
    accumulated."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        training = build_without_data(cfg, spec, gpu)
        model = training.model
        step = training.step
        tracker = Tracker()
        samples = training.micro_batch
        numbers = torch.zeros(samples, dtype=torch.int64)
        latents = [
            torch.zeros(samples, spec.channels, spec.height, spec.width)
            for _ in range(cfg.accumulation_steps)
        ]
        batches = [Batch(some, numbers, numbers, numbers) for some in latents]

        # What compiles does so before anything is counted.
        if any(module._compiled_call_impl is not None for module in model.modules()):
            step.accumulate(batches)
            step.optimizer.zero_grad(set_to_none=True)

        # The tracker is told where the step is, and what it moves to the host.
        techniques = training.stack.techniques
        if not any(technique.hides_blocks() for technique in techniques):
            for i, block in enumerate(model.blocks):
                block._compiled_call_impl = track_block(block, i, tracker)
        for technique in techniques:
            technique.copy_to_host = tracker.allocate_on_host()(technique.copy_to_host)
        for parameter in find_trained_parameters(model).values():
            parameter.register_post_accumulate_grad_hook(tracker.note_gradient)
        tracker.track([*model.parameters(), *model.buffers(), *latents, numbers])
        start = tracker.live
        kept = 0.0

        def mark(phase: str) -> None:
            nonlocal kept
            if phase == "forward":
                kept = tracker.live - tracker.gradients - start
                tracker.enter("backward")
            elif phase == "backward":
                tracker.enter("forward")

        step.mark = mark
        with tracker:
            step.accumulate(batches)
    return PassBytes(tracker.peaks, kept)


def count_update(cfg: TrainConfig, spec: LatentSpec, gpu: bool) -> dict[str, float]:
    """Counts an update of the optimizer, the second one, which finds its state: the bytes that
    last, by name, those that are `temporary`, and the elements of the largest `part` of the
    parameters."""
    training = build_without_data(cfg, spec, gpu)
    step = training.step
    optimizer = step.optimizer
    for group in (group for own in iterate_innermost(optimizer) for group in own.param_groups):
        if gpu and not group.get("fused") and "foreach" in group:
            group["foreach"] = True  # PyTorch's choice on a GPU
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    tracker = Tracker()
    with tracker.allocate_on_host():
        for technique in training.stack.techniques:
            tracker.track(technique.list_host_tensors())
    entries = [value for p in step.parameters for value in collect_state(optimizer, p).values()]
    gradients = [p.grad for p in step.parameters if p.grad is not None]
    state = [value for value in entries if isinstance(value, Tensor)]
    tracker.track([*step.parameters, *gradients, *state])
    start = tracker.live
    lasting = count_lasting_bytes(training)._asdict()

    one = torch.ones(())
    with tracker:
        tracker.enter("optimizer")
        step.update_parameters(gradients, one, one > 0)
    temporary = max(0.0, tracker.peaks["optimizer", None].live - start)
    return lasting | {
        "temporary": temporary,
        "part": count_largest_part(make_parameter_groups(training.model, 0.0)),
    }
