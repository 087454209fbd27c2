"""Counts what a training step takes without a device that takes it: on models of few blocks, which more blocks extend.

The forward and backward pass run on PyTorch's fake tensors, which have shapes and no values, at the run's own batch;
compiled blocks through the partitioner that Inductor uses too. The update runs on real tensors, for the optimizers of
libraries take no others. Each place of a step has a peak of its own, and that is a straight line over the blocks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from accel import weights
from accel.compilation import Compile
from accel.fused_kernels import FusedKernel
from accel.members import innermost, kept_by
from accel.offload_activations import OffloadActivations
from accel.offload_optimizer import OffloadOptimizer
from accel.proof import Proof
from accel.stack import TECHNIQUES, AccelerationStack
from data.loader import Batch, LatentSpec
from models.denoiser import Denoiser
from training.assemble import Parts, Training, assemble
from training.config.schema import AttentionName, ParallelConfig, ParallelMode, TrainConfig
from training.memory import Bytes, lasting_bytes
from training.pretrained import build_on_meta

CPU = torch.device("cpu")
PARTITIONER = "aot_eager_decomp_partition"
"""The backend that cuts a compiled block into its two passes as Inductor does, and generates no code."""
Place = tuple[str, int | None]
"""A phase of the step and the block at work; None: none is."""


class Op(NamedTuple):
    """An operation as the device would run it."""

    flops: int
    """Of matrix products; 0 for anything else."""
    bytes: int
    """Read and written."""
    bits: int
    """Of an element of a product's second factor."""
    fused: bool
    """In a compiled block, and no product: Inductor makes one kernel of several."""


class Peak(NamedTuple):
    """The most bytes that live at a place, and those of gradients among them."""

    live: float
    gradients: float


class Tracker(TorchDispatchMode):
    """Counts live tensor storage and the operations of what runs inside, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.gradients = 0
        self.place: Place = ("forward", None)
        self.peaks: dict[Place, Peak] = {}
        self.ops: Counter[Op] = Counter()
        self.in_compiled = False
        self.having_gradients: set[int] = set()
        self.known: dict[int, Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def know(self, tensors: Iterable[Any], on_host: bool = False) -> None:
        """Counts tensors as live until they are freed; those in the host's memory as nothing."""
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):
                self.know((getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]), on_host)
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                size = 0 if on_host else storage.nbytes()
                self.known[storage._cdata] = weakref.ref(storage, self.forgetter(storage._cdata, size))
                self.live += size
        if self.live > self.peaks.get(self.place, Peak(-1, 0)).live:
            self.peaks[self.place] = Peak(self.live, self.gradients)

    def forgetter(self, address: int, size: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            del self.known[address]
            self.live -= size

        return forget

    def at(self, phase: str, block: int | None = None) -> None:
        """What runs from now on runs there."""
        self.place = (phase, block)
        self.know(())

    def note_gradient(self, parameter: Tensor) -> None:
        """A hook that PyTorch calls when a gradient has been accumulated."""
        assert parameter.grad is not None
        if id(parameter) not in self.having_gradients:  # later micro-batches add to it
            self.having_gradients.add(id(parameter))
            self.gradients += parameter.grad.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = ([leaf for leaf in tree_leaves(t) if isinstance(leaf, Tensor)] for t in ((args, kwargs), found))
        self.know(made)
        own = {t.untyped_storage()._cdata for t in given}
        moves = func._schema.is_mutable or any(t.untyped_storage()._cdata not in own for t in made)
        if moves and not func._schema.name.startswith("aten::empty"):
            formula = flop_registry.get(func._overloadpacket)
            out = made[0] if len(made) == 1 else tuple(made)
            flops = formula(*args, **(kwargs or {}), out_val=out) if formula else 0
            bits = 8 * given[1].element_size() if formula else 0
            size = sum({id(t): t.nbytes for t in (*given, *made)}.values())
            self.ops[Op(flops, size, bits, self.in_compiled and not formula)] += 1
        return found


class Placed(nn.Module):
    """Stands in for a block and tells the tracker when its passes begin."""

    def __init__(self, block: nn.Module, index: int, tracker: Tracker, compiled: bool) -> None:
        super().__init__()
        self.block, self.index, self.tracker, self.compiled = block, index, tracker, compiled

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.block, name)  # switches that the model reads

    def begins(self, phase: str) -> None:
        self.tracker.at(phase, self.index)
        self.tracker.in_compiled = self.compiled

    def ends(self, phase: str) -> None:
        self.tracker.at(phase)
        self.tracker.in_compiled = False

    def forward(self, *inputs: Tensor) -> Any:
        self.begins("forward")
        if self.index == 0 and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self.ends("embedding"))
        outputs = self.block(*inputs)
        self.ends("forward")
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.begins("backward"))
        return outputs


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
    ema: float
    """The same of the averages."""
    ops: Counter[Op]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Every technique can be had inside, so that a CPU counts what a GPU would do."""
    with ExitStack() as changes:
        for kind in TECHNIQUES:
            changes.enter_context(patch.object(kind, "unavailable", lambda self: None))
        yield


def of_few_blocks(cfg: TrainConfig, depth: int, samples: int, micro_batches: int) -> TrainConfig:
    """The configuration with another depth and batch, for one process. Flash, cuDNN, efficient and flex attention keep
    the same tensors, so PyTorch's own choice stands for all; a captured step takes what an eager one does."""
    runtime = replace(
        cfg.runtime,
        attention=AttentionName.math if cfg.runtime.attention is AttentionName.math else AttentionName.auto,
        parallel=ParallelConfig(mode=ParallelMode.none),
        cuda_graph=False,
        cudnn_benchmark=False,
    )
    model, sizes = cfg.model | {"depth": depth}, {"batch_size": samples * micro_batches}
    return replace(cfg, model=model, runtime=runtime, accumulation_steps=micro_batches, **sizes)


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
        own.update({name: torch.zeros_like(t, device=CPU) for name, t in own.items() if t is not None})
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

    return assemble(cfg, CPU, parts=Parts(loader, blank_model, assumed_kernels))


def passed(cfg: TrainConfig, spec: LatentSpec, depth: int, samples: int, fused: bool = False) -> Passed:
    """Counts a forward and backward pass of `samples` samples; the second one, if gradients are accumulated.

    `fused`: the blocks run uncompiled here, and their operations count as compiled ones do.
    """
    again = min(2, cfg.accumulation_steps)
    tracker = Tracker()
    with patch.object(Compile, "backend", PARTITIONER), FakeTensorMode(allow_non_fake_inputs=True):
        small = of_few_blocks(cfg, depth, samples, again)
        plain = replace(small.runtime, offload_optimizer=False)
        training = built(replace(small, optim={"_target_": "torch.optim.SGD"}, runtime=plain), spec)
        step, offload = training.step, training.stack.technique(OffloadActivations)
        numbers = torch.zeros(samples, dtype=torch.int64)
        latents = [torch.zeros(samples, spec.channels, spec.height, spec.width) for _ in range(again)]
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
        to_host, kept, moved = offload.to_host, [0.0], offload.moved

        def away(tensor: Tensor) -> Tensor:
            with patch.object(tracker, "know", lambda tensors: None):
                copy = to_host(tensor)
            tracker.know([copy], on_host=True)
            return copy

        def mark(phase: str) -> None:
            if phase == "forward":
                kept[0] = tracker.live - tracker.gradients - start
                tracker.at("backward")
            elif phase == "backward":
                tracker.at("forward")

        offload.to_host, step.mark = away, mark
        for parameter in step.parameters:
            parameter.register_post_accumulate_grad_hook(tracker.note_gradient)
        tracker.know([*training.model.parameters(), *training.model.buffers(), *latents, numbers])
        start = tracker.live
        with tracker:
            step.accumulate(batches)
        moved = (offload.moved - moved) / again
    ops = Counter({op: n / again for op, n in tracker.ops.items()})
    return Passed(tracker.peaks, ops, kept[0], 2.0 * moved)


def updated(cfg: TrainConfig, spec: LatentSpec, depth: int, gpu: bool) -> Updated:
    """Counts an update of optimizer and averages, the second one: it finds its state."""
    training = built(of_few_blocks(cfg, depth, 1, 1), spec)
    step, optimizer = training.step, training.step.optimizer
    for group in (group for own in innermost(optimizer) for group in own.param_groups):
        if gpu and not group.get("fused") and "foreach" in group:
            group["foreach"] = True  # PyTorch's choice on a GPU
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tracker, lasting = Tracker(), lasting_bytes(training)
    own = [t for p in step.parameters for t in kept_by(optimizer, p).values() if isinstance(t, Tensor)]
    for away in training.stack.technique(OffloadOptimizer).states:
        tracker.know(away.host.values(), on_host=True)
    gradients = [p.grad for p in step.parameters if p.grad is not None]
    tracker.know([*step.parameters, *gradients, *own, *training.state.ema.averages])
    start, one = tracker.live, torch.ones(())
    few = max(2**10, sum(p.numel() for p in step.parameters) // 64)
    with tracker, patch.object(weights, "PART", few):  # what random bits take is reckoned with apart
        tracker.at("optimizer")
        step.optimizer_step(gradients, one, one > 0)
        tracker.at("ema")
        training.state.ema.update(0.0 * one)
    by_optimizer, by_ema = (max(0.0, tracker.peaks[phase, None].live - start) for phase in ("optimizer", "ema"))
    return Updated(lasting, by_optimizer, by_ema, tracker.ops)


def on_a_line(depths: Sequence[int], values: Sequence[float], depth: int) -> float:
    """What `depth` blocks take, from what two smaller numbers of blocks do; of one number, that itself."""
    if len(depths) == 1:
        return values[0]
    (a, b), (at_a, at_b) = depths, values
    return at_a + (at_b - at_a) * (depth - a) / (b - a)
