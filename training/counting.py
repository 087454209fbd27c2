"""Counts what a training step takes without a device that takes it: on models of few blocks, which
more blocks extend.

The forward and backward pass run on PyTorch's fake tensors, which have shapes and no values, at the
run's own batch; compiled blocks through the partitioner that Inductor uses too. The update runs on
real tensors, for the optimizers of libraries take no others. Each place of a step has a peak of its
own, and that is a straight line over the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.composite_optimizer import innermost, kept_by
from accel.proof import Proof
from accel.stack import TECHNIQUES, AccelerationStack
from accel.techniques import weights
from accel.techniques.compilation import Compile
from accel.techniques.fused_kernels import FusedKernel
from accel.techniques.offload_activations import OffloadActivations
from accel.techniques.offload_optimizer import OffloadOptimizer
from data.loader import Batch, LatentSpec
from models.adapters import trained
from models.denoiser import Denoiser
from training.assemble import Parts, Training, assemble, build_stack
from training.config.schema import AttentionName, ParallelConfig, ParallelMode, TrainConfig
from training.memory import Bytes, lasting_bytes
from training.tracker import Op, Peak, Place, Placed, Tracker
from training.weights.pretrained import build_on_meta

CPU = torch.device("cpu")
PARTITIONER = "aot_eager_decomp_partition"
"""The backend that cuts a compiled block into its two passes as Inductor does, and generates no
code."""


class Passed(NamedTuple):
    """A forward and backward pass at some depth."""

    peaks: dict[Place, Peak]
    """Weights, inputs, kept tensors, gradients and what is at work."""
    ops: Counter[Op]
    """Of one micro-batch."""
    kept: float
    """Bytes that a micro-batch keeps for its backward pass."""
    moved: float
    """Bytes that it moves to host memory and back."""


class Updated(NamedTuple):
    """An update at some depth."""

    lasting: Bytes
    optimizer: float
    """Bytes that the optimizer takes beside what lasts."""
    ops: Counter[Op]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Every technique can be had inside, so that a CPU counts what a GPU would do."""
    with ExitStack() as changes:
        for kind in TECHNIQUES:
            changes.enter_context(patch.object(kind, "unavailable", lambda self: None))
        yield


def of_few_blocks(cfg: TrainConfig, depth: int, samples: int, micro_batches: int) -> TrainConfig:
    """The configuration with another depth and batch, for one process. Flash, cuDNN, efficient and
    flex attention keep the same tensors, so PyTorch's own choice stands for all; a captured step
    takes what an eager one does."""
    runtime = replace(
        cfg.runtime,
        attention=AttentionName.math
        if cfg.runtime.attention is AttentionName.math
        else AttentionName.auto,
        parallel=ParallelConfig(mode=ParallelMode.none),
        cuda_graph=False,
        cudnn_benchmark=False,
    )
    model = with_depth(cfg.model, depth)
    batch = {"batch_size": samples * micro_batches, "accumulation_steps": micro_batches}
    return replace(cfg, model=model, runtime=runtime, **batch)


def for_a_pass(cfg: TrainConfig, depth: int, samples: int) -> TrainConfig:
    """The configuration whose passes are counted: two micro-batches stand for all, and no optimizer
    plays a part."""
    small = of_few_blocks(cfg, depth, samples, min(2, cfg.accumulation_steps))
    runtime = replace(small.runtime, offload_optimizer=False, fused_adamw=False)
    return replace(small, optim={"_target_": "torch.optim.SGD"}, runtime=runtime)


def with_depth(node: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The model's node with another number of blocks; the same where it is no key, and the model is
    counted whole."""
    return dict(node) | ({"depth": depth} if "depth" in node else {})


def blank_model(node: Mapping[str, Any], spec: LatentSpec, _device: torch.device) -> Denoiser:
    """The model with zeros for weights; with fake ones inside a FakeTensorMode."""
    model = build_on_meta(node, spec)
    for module in model.modules():
        own: dict[str, Any]
        for name, tensor in module._parameters.items():
            if tensor is not None:
                zeros = torch.zeros_like(tensor, device=CPU)
                module._parameters[name] = nn.Parameter(zeros, requires_grad=tensor.requires_grad)
        own = module._buffers
        own.update(
            {name: torch.zeros_like(t, device=CPU) for name, t in own.items() if t is not None}
        )
    return model


def assumed_kernels(stack: AccelerationStack, model: nn.Module, *_: Any) -> dict[str, Any]:
    """Takes every fused kernel that is asked for as proved."""
    for technique in stack.techniques:
        if isinstance(technique, FusedKernel) and technique.asks_for_proof(model):
            technique.settle(Proof(True, "assumed"))
    return {}


def built(cfg: TrainConfig, spec: LatentSpec) -> Training:
    """The parts of a run without its data."""

    def loader(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(spec=spec)

    def weights(*_: Any) -> None:
        """Leaves the zeros."""

    alone = partial(build_stack, alone=True)
    return assemble(cfg, CPU, parts=Parts(loader, blank_model, assumed_kernels, alone, weights))


def passed(cfg: TrainConfig, spec: LatentSpec, fused: bool = False) -> Passed:
    """Counts a forward and backward pass of a micro-batch of `for_a_pass`; the second, if gradients
    are accumulated.

    `fused`: the blocks run uncompiled here, and their operations count as compiled ones do.
    """
    again = cfg.accumulation_steps
    samples = cfg.batch_size // again
    tracker = Tracker()
    with patch.object(Compile, "backend", PARTITIONER), FakeTensorMode(allow_non_fake_inputs=True):
        training = built(cfg, spec)
        step = training.step
        offload = training.stack.technique(OffloadActivations)
        numbers = torch.zeros(samples, dtype=torch.int64)
        latents = [
            torch.zeros(samples, spec.channels, spec.height, spec.width) for _ in range(again)
        ]
        batches = [Batch(some, numbers, numbers, numbers) for some in latents]
        compiled = training.stack.technique(Compile)
        if compiled.compiled:
            step.accumulate(batches)  # compiles
            step.optimizer.zero_grad(set_to_none=True)
        if not compiled.hides_blocks():
            blocks = training.model.blocks
            for i, block in enumerate(list(blocks)):
                blocks[i] = Placed(block, i, tracker, fused or bool(compiled.compiled))
        tracker.in_compiled = compiled.hides_blocks()
        to_host = offload.to_host
        kept = [0.0]
        moved = [0.0]

        def away(tensor: Tensor) -> Tensor:
            with patch.object(tracker, "know", lambda tensors: None):
                copy = to_host(tensor)
            moved[0] += tensor.nbytes / again
            tracker.know([copy], on_host=True)
            return copy

        def mark(phase: str) -> None:
            if phase == "forward":
                kept[0] = tracker.live - tracker.gradients - start
                tracker.at("backward")
            elif phase == "backward":
                tracker.at("forward")

        offload.to_host = away
        step.mark = mark
        for parameter in trained(training.model).values():
            parameter.register_post_accumulate_grad_hook(tracker.note_gradient)
        tracker.know([*training.model.parameters(), *training.model.buffers(), *latents, numbers])
        start = tracker.live
        with tracker:
            step.accumulate(batches)
    ops = Counter({op: n / again for op, n in tracker.ops.items()})
    return Passed(tracker.peaks, ops, kept[0], 2.0 * moved[0])


def updated(cfg: TrainConfig, spec: LatentSpec, depth: int, gpu: bool) -> Updated:
    """Counts an update of optimizer and averages, the second one: it finds its state."""
    training = built(of_few_blocks(cfg, depth, 1, 1), spec)
    step = training.step
    optimizer = training.step.optimizer
    for group in (group for own in innermost(optimizer) for group in own.param_groups):
        if gpu and not group.get("fused") and "foreach" in group:
            group["foreach"] = True  # PyTorch's choice on a GPU
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tracker = Tracker()
    lasting = lasting_bytes(training)
    own = [
        t for p in step.parameters for t in kept_by(optimizer, p).values() if isinstance(t, Tensor)
    ]
    for away in training.stack.technique(OffloadOptimizer).states:
        tracker.know(away.host.values(), on_host=True)
    gradients = [p.grad for p in step.parameters if p.grad is not None]
    tracker.know([*step.parameters, *gradients, *own, *training.state.ema.averages])
    start = tracker.live
    one = torch.ones(())
    few = max(2**10, sum(p.numel() for p in step.parameters) // 64)
    # what random bits take is reckoned with apart
    with tracker, patch.object(weights, "PART", few):
        tracker.at("optimizer")
        step.optimizer_step(gradients, one, one > 0)
        tracker.at("ema")
        training.state.ema.update(0.0 * one)
    return Updated(lasting, max(0.0, tracker.peaks["optimizer", None].live - start), tracker.ops)


def on_a_line(depths: Sequence[int], values: Sequence[float], depth: int) -> float:
    """What `depth` blocks take, from what two smaller numbers of blocks do; of one number, that
    itself."""
    if len(depths) == 1:
        return values[0]
    (a, b), (at_a, at_b) = depths, values
    return at_a + (at_b - at_a) * (depth - a) / (b - a)
