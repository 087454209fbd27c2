"""Forecasts the bytes that a run takes of a GPU, by part and phase, from what counting.py counts
of its step.

That is the peak of live tensors over a whole step, and where it occurs; to it come the driver's
context, what the caching allocator loses, and latents that lie on the device. No constant here was
checked on a GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from accel.composite_optimizer import largest_part
from common.errors import UserError
from common.text import first_line
from data.loader import LatentSpec
from models.denoiser import Denoiser
from scripts.plan.counting import (
    CPU,
    CpuStack,
    GpuStack,
    Passed,
    Peak,
    Place,
    Updated,
    for_a_pass,
    of_few_blocks,
    passed,
    updated,
)
from training.assemble import build_stack, latents_of
from training.config.schema import TrainConfig
from training.hardware import GIB, memory_of
from training.optimizers import parameter_groups
from training.step import EMA
from training.weights.adapter_base import find_base, put_on
from training.weights.pretrained import build_on_meta

CONTEXT = 0.6 * GIB
"""The driver's context, and the workspaces of cuBLAS and cuDNN."""
SLACK = 0.04
"""Share of the live bytes by which the caching allocator reserves more."""
AWAY = ("weights", "gradients", "averages", "optimizer")
"""What sharding with cpu_offload keeps in host memory."""
COUNTED: dict[str, Any] = {}
"""All passes and updates that this process has counted. Forecasts of other optimizers, batches or
more processes count few of them again."""
Found = TypeVar("Found", Passed, Updated)


class Needs(NamedTuple):
    """Bytes of one GPU, by part, at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    averages: float
    kept: float = 0.0
    """For the backward pass, all blocks together."""
    workspace: float = 0.0
    """Of the operation at work: the gradients of a block's activations, or an update's temporary
    copies."""
    latents: float = 0.0
    context: float = 0.0
    slack: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Question:
    """A run of which memory is asked: its configuration, on `gpus` GPUs that share each batch.

    `spec` describes its latents, `resident` are bytes of them on the device. `gpu=False` asks what
    this machine's CPU would do: techniques that it cannot have are off.
    """

    cfg: TrainConfig
    spec: LatentSpec
    gpus: int = 1
    resident: float = 0.0
    gpu: bool = True

    @property
    def samples(self) -> int:
        """In a micro-batch of one GPU."""
        return max(1, self.cfg.batch_size // self.cfg.accumulation_steps // self.gpus)

    @property
    def mode(self) -> str:
        """How the GPUs share the work."""
        if self.gpus == 1:
            return "none"
        mode = self.cfg.runtime.parallel.mode.value
        return "ddp" if mode in ("auto", "none") else mode

    @property
    def shards(self) -> int:
        """GPUs over which the state is cut."""
        if self.mode == "hsdp":
            return min(self.cfg.runtime.parallel.shard_degree or 8, self.gpus)
        return self.gpus if self.mode == "fsdp" else 1


@dataclass(frozen=True)
class Counted:
    """What was counted of models of few blocks, and the whole model, on the meta device."""

    model: Denoiser
    depths: list[int]
    period: int
    """Blocks after which the next ones are like the first."""
    part: int
    """Elements of the largest part of the parameters."""
    part_bytes: float | None
    """That an update in parts takes at least; None where the parameters are updated at once."""
    passes: list[Passed]
    updates: list[Updated]

    def extended(self, values: Sequence[float]) -> float:
        """What all blocks take, from what those of the counted models do: a straight line."""
        if len(self.depths) == 1:
            return values[0]
        first, second = self.depths
        slope = (values[1] - values[0]) / (second - first)
        return values[0] + slope * (self.model.depth - first)

    @property
    def kept(self) -> float:
        """Bytes that a micro-batch keeps for its backward pass."""
        return self.extended([some.kept for some in self.passes])

    @cached_property
    def lasting(self) -> dict[str, float]:
        """Bytes from one step to the next, of a process that has all of the model."""
        names = (*AWAY, "on_host")
        return {
            name: self.extended([getattr(some.lasting, name) for some in self.updates])
            for name in names
        }


@dataclass(frozen=True)
class Forecast:
    """What a run takes of one GPU."""

    question: Question
    counted: Counted
    lasting: dict[str, float]
    """Bytes from one step to the next, of one GPU's share."""
    phases: dict[str, Needs]
    """Phase -> the bytes at its peak."""

    @property
    def phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def needs(self) -> Needs:
        return self.phases[self.phase]


def forecast(question: Question) -> Forecast:
    """Counts what a run takes; that takes seconds. Random number generators stay as they are,
    process-wide flags do not: building a run sets them both ways. ValueError for a batch that the
    GPUs cannot share, and for a model that does something else with fake tensors than compute."""
    cfg = question.cfg
    if cfg.batch_size % (cfg.accumulation_steps * question.gpus):
        raise UserError(
            f"batch_size={cfg.batch_size} is not a multiple of "
            f"accumulation_steps={cfg.accumulation_steps} × gpus={question.gpus}; change one of "
            "them."
        )
    try:
        with torch.random.fork_rng([]):
            counted = count(question)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise UserError(
            f"model._target_={cfg.model.get('_target_')}: its step cannot be counted "
            f"without a device ({first_line(error)}); `python -m scripts.bench step` measures it."
        ) from error
    lasting = share(question, counted)
    return Forecast(question, counted, lasting, phases(question, counted, lasting))


def planned_bytes(cfg: TrainConfig, gpu: bool = True) -> float:
    """Bytes that a run of one process should reserve at its peak, latents on this machine's device
    included; without the driver's context, which PyTorch's own figures leave out too."""
    device = torch.device("cuda" if gpu and torch.cuda.is_available() else "cpu")
    spec, resident = latents_of(cfg.data, cfg.seed, memory_of(device))
    needs = forecast(Question(cfg, spec, resident=resident, gpu=gpu)).needs
    return needs.total - needs.context


def count(question: Question) -> Counted:
    """Counts passes and updates at two depths, or at the model's own where that is small or no
    key."""
    cfg = question.cfg
    spec = question.spec
    model = build_on_meta(cfg.model, spec)
    if cfg.adapter:
        put_on(model, cfg.adapter, find_base(cfg, spec).new_classes)
    stack = build_stack(cfg, CPU, alone=True, kind=GpuStack if question.gpu else CpuStack)
    period = max(technique.period for technique in stack.techniques)
    first = period if period == 1 else period + model.depth % period
    few = "depth" in cfg.model and model.depth > first + period
    depths = [first, first + period] if few else [model.depth]
    part = largest_part(parameter_groups(model, 0.0))
    least = [technique.part_bytes(part) for technique in stack.techniques]
    return Counted(
        model,
        depths,
        period,
        part,
        max((size for size in least if size is not None), default=None),
        [once(passed, question, for_a_pass(cfg, depth, question.samples)) for depth in depths],
        [once(updated, question, of_few_blocks(cfg, depth, 1, 1)) for depth in depths],
    )


def once(
    counter: Callable[[TrainConfig, LatentSpec, bool], Found], question: Question, cfg: TrainConfig
) -> Found:
    """What the counter finds, or found when it was asked the same before."""
    key = repr((counter.__name__, cfg, question.spec.as_dict(), question.gpu))
    if key not in COUNTED:
        COUNTED[key] = counter(cfg, question.spec, question.gpu)
    return COUNTED[key]


def share(question: Question, counted: Counted) -> dict[str, float]:
    """Lasting bytes of one GPU's share of the state."""
    found = {name: size / question.shards for name, size in counted.lasting.items()}
    if question.cfg.runtime.parallel.cpu_offload and question.shards > 1:
        found["on_host"] += sum(found[name] for name in AWAY)
        found |= dict.fromkeys(AWAY, 0.0)
    return found


def phases(question: Question, counted: Counted, lasting: Mapping[str, float]) -> dict[str, Needs]:
    """Phase -> the bytes at its peak."""
    steps = question.cfg.accumulation_steps
    kept = counted.kept
    copies = buckets(question, lasting)
    held = Needs(
        weights=lasting["weights"] + gathered(question, counted.model),
        gradients=lasting["gradients"] + copies,
        optimizer=lasting["optimizer"],
        averages=lasting["averages"],
        latents=question.resident,
    )

    # Two micro-batches are counted; the batches of the others wait on the device too.
    spec = question.spec
    batch = 4.0 * math.prod((spec.channels, spec.height, spec.width)) + 8.0
    batches = max(0, steps - 2) * question.samples * batch

    found = {}
    for phase, peak in peaks(counted).items():
        rest = max(0.0, peak.live - counted.lasting["weights"] - peak.gradients)
        # Gradients are whole until the last micro-batch, and there are none before the first.
        gradients = peak.gradients / (question.shards if steps == 1 else 1) + copies
        found[phase] = held._replace(
            gradients=0.0 if phase == "forward" and steps == 1 else gradients,
            kept=min(kept, rest),
            workspace=max(0.0, rest - kept) + batches,
        )
    found["optimizer"] = held._replace(workspace=update_bytes(question, counted))
    found["ema"] = held._replace(workspace=average_bytes(question, counted.model))
    if not question.gpu:
        return found
    return {
        phase: needs._replace(context=CONTEXT, slack=SLACK * needs.total)
        for phase, needs in found.items()
    }


def peaks(counted: Counted) -> dict[str, Peak]:
    """Phase -> the most that lives in it: weights, gradients, what is kept, workspace; not the rest
    that lasts."""
    places = [
        by_role(some.peaks, depth, counted.period)
        for some, depth in zip(counted.passes, counted.depths, strict=True)
    ]
    found: dict[str, Peak] = {}
    for place in (place for place in places[0] if place in places[-1]):
        phase = place[0]
        live = counted.extended([by[place].live for by in places])
        gradients = counted.extended([by[place].gradients for by in places])
        if phase not in found or live > found[phase].live:
            found[phase] = Peak(live, gradients)
    return found


def by_role(found: Mapping[Place, Peak], depth: int, period: int) -> dict[Place, Peak]:
    """The places that models of every depth have: the first `period` blocks, and the last, counted
    from the end."""
    roles: dict[Place, Peak] = {}
    for (phase, block), peak in found.items():
        if block is None or block < period:
            roles[phase, block] = peak
        if block is not None and block >= depth - period:
            roles[phase, block - depth] = peak
    return roles


def gathered(question: Question, model: Denoiser) -> float:
    """Whole parameters that a sharded model holds: the block at work and the next one."""
    if question.shards == 1:
        return 0.0
    if not question.cfg.runtime.parallel.reshard_after_forward:
        return 4.0 * sum(p.numel() for p in model.parameters())
    return 8.0 * max(sum(p.numel() for p in block.parameters()) for block in model.blocks)


def buckets(question: Question, lasting: Mapping[str, float]) -> float:
    """Copies of the gradients that ddp sends."""
    copies = not question.cfg.runtime.parallel.gradient_as_bucket_view
    return lasting["gradients"] if question.mode == "ddp" and copies else 0.0


def update_bytes(question: Question, counted: Counted) -> float:
    """Temporary bytes of the optimizer. An update in parts takes what its largest part does."""
    last = counted.updates[-1]
    if counted.part_bytes is not None:
        return max(counted.part_bytes, last.temporary * counted.part / last.part)
    return counted.extended([some.temporary for some in counted.updates]) / question.shards


def average_bytes(question: Question, model: Denoiser) -> float:
    """Temporary bytes of the averages: one fp32 copy of the largest part."""
    sizes = [sum(average.numel() for _, average in part) for part in EMA(model, 1.0).parts]
    return 4.0 * max(sizes) / question.shards
