"""Counts the bytes of a training step without a device: runs the step of models with few blocks,
from which memory.py extrapolates to the whole depth.

The forward and backward pass run on PyTorch's fake tensors, which have shapes and no values, with
the run's own batch size; compiled blocks go through the partitioner that Inductor uses. The update
runs on real tensors, because optimizers of other libraries do not accept fake tensors. Each place
of a step (phase and block) has its own peak of live bytes, which grows linearly with the number of
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from accel.composite_optimizer import collect_state, count_largest_part, iterate_innermost
from accel.device_memory import LiveBytes
from accel.ledger import AUTO
from accel.stack import AccelerationStack
from accel.technique import Technique, find_switches
from common.config.build import build
from common.config.schema import ParallelConfig, TrainConfig
from common.distributed.ranks import SINGLE
from data.spec import LatentSpec
from models.adapters import find_trained_parameters
from models.denoiser import Denoiser
from training.assemble import Parts, Training, build_stack, join_parts, refuse_unfit
from training.objective import Objective
from training.optim.groups import make_parameter_groups
from training.preflight.memory import count_lasting_bytes, make_blank_batch
from training.weights.first_weights import open_base
from training.weights.pretrained import build_on_meta

CPU = torch.device("cpu")
Place = tuple[str, int | None]
"""(phase of the step, such as "backward"; index of the block that runs, or None outside the
blocks)"""


class Peak(NamedTuple):
    """Largest number of live bytes at a `Place` of the step, and the bytes of gradients among
    them."""

    live: float
    gradients: float


class Tracker(LiveBytes):
    """Counts live bytes by place. `peaks` maps each place of the step to the largest number of live
    bytes there."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = 0
        self.place: Place = ("forward", None)
        self.peaks: dict[Place, Peak] = {}
        self.with_gradient: set[int] = set()

    def track(self, tensors: Iterable[Any]) -> None:
        """Updates also the peak of the place where the step is."""
        super().track(tensors)
        if self.live > self.peaks.get(self.place, Peak(-1, 0)).live:
            self.peaks[self.place] = Peak(self.live, self.gradients)

    @contextmanager
    def allocate_on_host(self) -> Iterator[None]:
        """Inside the `with` block, new tensors lie in host memory, so the tracker adds no bytes for
        them."""
        self.on_host = True
        try:
            yield
        finally:
            self.on_host = False

    def enter(self, phase: str, block: int | None = None) -> None:
        """Records that the step enters a place: its phase, and the index of the block that runs
        (None: outside the blocks). Peaks from now on belong to this place."""
        self.place = (phase, block)
        self.track(())

    def note_gradient(self, parameter: Tensor) -> None:
        """Adds the bytes of a parameter's gradient to `gradients`. PyTorch calls this hook after it
        has accumulated the gradient."""
        assert parameter.grad is not None
        # Count a gradient only once, because later micro-batches add to the same tensor.
        if id(parameter) not in self.with_gradient:
            self.with_gradient.add(id(parameter))
            self.gradients += parameter.grad.nbytes


def track_block(block: nn.Module, index: int, tracker: Tracker) -> Callable[..., Any]:
    """Returns a function that calls the block, compiled or not, and calls `tracker.enter` when the
    block's forward pass and backward pass begin."""
    call = block._compiled_call_impl or block._call_impl

    def call_and_track(*inputs: Tensor, **options: Any) -> Any:
        tracker.enter("forward", index)
        if index == 0 and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: tracker.enter("embedding"))
        outputs = call(*inputs, **options)
        tracker.enter("forward")
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: tracker.enter("backward", index))
        return outputs

    return call_and_track


class GpuStack(AccelerationStack):
    """A stack of techniques that turns on all requested techniques, as on a GPU that supports them
    all."""

    def find_obstacle(self, technique: Technique) -> None:
        """Returns None (no obstacle): a plan assumes that the GPU supports every technique."""


def build_planned_stack(cfg: TrainConfig, gpu: bool) -> AccelerationStack:
    """Builds the techniques of a run on one process, for a GPU or for this CPU, and prepares the
    enabled techniques for fake tensors."""
    stack = build_stack(cfg, CPU, alone=True, kind=GpuStack if gpu else AccelerationStack)
    for technique in stack.techniques:
        if technique.enabled:
            technique.planning.on_fake_device(technique)
    return stack


def build_blank_model(node: Mapping[str, Any], spec: LatentSpec) -> Denoiser:
    """Builds the model with zeros as weights; inside a FakeTensorMode these are fake tensors."""
    model = build_on_meta(node, spec)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros_like(parameter, device=CPU)
            setattr(module, name, nn.Parameter(zeros, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=CPU))
    return model


def build_without_data(cfg: TrainConfig, spec: LatentSpec, gpu: bool) -> Training:
    """Assembles a run without its data. Fused kernels are used without their parity test. The
    weights of an adapter's base model stay zero, because no file is loaded."""
    loader: Any = SimpleNamespace(spec=spec)
    base = open_base(cfg, loader, SINGLE)
    model = build_blank_model(cfg.model, loader.spec)
    refuse_unfit(cfg, loader, model)
    objective = build(cfg.objective, "objective", kind=Objective)
    stack = build_planned_stack(cfg, gpu)
    stack.on_process()
    training = join_parts(cfg, CPU, SINGLE, Parts(loader, objective, base, model, stack))
    if gpu:
        # Let `auto` take `flash` on the fake CPU tensors, because no kernel of a GPU keeps the
        # scores, as the products of a CPU do.
        for layer in find_switches(training.model, "attention_backend"):
            if layer.attention_backend == AUTO:
                layer.attention_backend = "flash"  # pyright: ignore[reportArgumentType]
    return training


def with_few_blocks(cfg: TrainConfig, depth: int, samples: int, micro_batches: int) -> TrainConfig:
    """Returns the configuration of a run on one process with `depth` blocks and `micro_batches`
    micro-batches of `samples` samples. A model without the key `depth` keeps its number of blocks.

    Heads move to the first block, because they cost the same after every block.
    """
    few = {"depth": depth, "internal_block": min(1, cfg.model.get("internal_block") or 0)}
    return replace(
        cfg,
        model=cfg.model | {key: value for key, value in few.items() if key in cfg.model},
        objective=cfg.objective | ({"align_block": 1} if "align_block" in cfg.objective else {}),
        batch_size=samples * micro_batches,
        accumulation_steps=micro_batches,
        runtime=replace(cfg.runtime, parallel=ParallelConfig()),
    )


class PassBytes(NamedTuple):
    """Bytes of the forward and backward passes of a step, for a model with a given number of
    blocks."""

    peaks: dict[Place, Peak]
    """Place of the step -> peak of live bytes there: weights, inputs, saved tensors, gradients and
    temporary tensors."""
    kept: float
    """Bytes of the tensors that a micro-batch's forward pass keeps for its backward pass."""


def count_pass(cfg: TrainConfig, spec: LatentSpec, gpu: bool) -> PassBytes:
    """Counts the bytes of the forward and backward passes of all micro-batches of a step."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        training = build_without_data(cfg, spec, gpu)
        network = training.state.network
        step = training.step
        tracker = Tracker()
        batches = [
            make_blank_batch(training, training.micro_batch) for _ in range(cfg.accumulation_steps)
        ]

        # Compile the blocks before the count, because compiling allocates tensors too.
        if any(module._compiled_call_impl is not None for module in network.modules()):
            step.accumulate(batches)
            step.optimizer.zero_grad(set_to_none=True)

        # Install hooks that report to the tracker where the step is, and which tensors go to host
        # memory.
        if not training.stack.hides_blocks:
            for i, block in enumerate(network.blocks):
                block._compiled_call_impl = track_block(block, i, tracker)
        for technique in training.stack.techniques:
            technique.planning.decorate_copies(technique, tracker.allocate_on_host())
        for parameter in find_trained_parameters(network).values():
            parameter.register_post_accumulate_grad_hook(tracker.note_gradient)
        tracker.track([*network.parameters(), *network.buffers(), *tree_leaves(batches)])
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
    """Counts the bytes of the optimizer's second update, for which the optimizer's state exists
    already.

    Returns a dict of bytes: each part of the training state that lasts until the next step, and
    `temporary`, the tensors that the update frees again. The entry `part` is no number of bytes: it
    is the number of elements of the largest part into which an optimizer may divide the parameters.
    """
    training = build_without_data(cfg, spec, gpu)
    step = training.step
    optimizer = step.optimizer
    for inner in iterate_innermost(optimizer) if gpu else ():
        # Choose the optimizer's foreach implementation, which PyTorch uses on a GPU and which takes
        # more memory than the loop that PyTorch uses on a CPU; and Muon's type on a GPU.
        vars(inner)["cpu_dtype"] = torch.bfloat16
        for group in inner.param_groups:
            if not group.get("fused") and "foreach" in group:
                group["foreach"] = True
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    tracker = Tracker()
    with tracker.allocate_on_host():
        for technique in training.stack.techniques:
            tracker.track(technique.planning.list_host_tensors(technique))
    state = [value for p in step.parameters for value in collect_state(optimizer, p).values()]
    gradients = [p.grad for p in step.parameters if p.grad is not None]
    tracker.track([*step.parameters, *gradients, *state])
    start = tracker.live
    lasting = count_lasting_bytes(training)._asdict()

    gradient_norm = torch.ones(())
    with tracker:
        tracker.enter("optimizer")
        step.update_parameters(gradients, gradient_norm, gradient_norm > 0)
    return lasting | {
        "temporary": max(0.0, tracker.peaks["optimizer", None].live - start),
        "part": count_largest_part(make_parameter_groups(training.state.network, cfg.optim)),
    }
