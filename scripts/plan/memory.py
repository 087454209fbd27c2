"""Forecasts the bytes that a run takes of a GPU, by part and phase, from what counting.py counts
of its step.

That is the peak of live tensors over a whole step, and where it occurs; to it come the driver's
context, what the caching allocator loses, and latents that lie on the device. No constant here was
checked on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from accel.composite_optimizer import count_largest_part
from accel.technique import Technique
from common.errors import UserError
from common.text import shorten_error
from data.loader import LatentSpec
from models.denoiser import Denoiser
from scripts.plan.counting import (
    PassBytes,
    Peak,
    Place,
    build_planned_stack,
    count_pass,
    count_update,
    with_few_blocks,
)
from training.components import foresee_latents
from training.config.schema import TrainConfig
from training.environment import GIB
from training.optimizers import make_parameter_groups
from training.step import EMA
from training.weights.adapter_base import add_adapter, find_base
from training.weights.pretrained import build_on_meta

CONTEXT_BYTES = 0.6 * GIB
"""The driver's context, and the workspaces of cuBLAS and cuDNN."""
ALLOCATOR_SLACK = 0.04
"""Share of the live bytes by which the caching allocator reserves more."""
OFFLOADED_PARTS = ("weights", "gradients", "averages", "optimizer")
"""What sharding with cpu_offload keeps in host memory."""
COUNT_CACHE: dict[str, Any] = {}
"""All passes and updates that this process has counted. Forecasts of other optimizers, batches or
more processes count few of them again."""


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
class Forecast:
    """What a run takes of one GPU, from what was counted of models of few blocks."""

    question: Question
    model: Denoiser
    """The whole one, on the meta device."""
    techniques: list[Technique]
    period: int
    """Blocks after which the next ones are like the first."""
    depths: list[int]
    passes: list[PassBytes]
    updates: list[dict[str, float]]
    like: Forecast | None = None
    """That of a narrower model as deep, whose updates stand for this one's by the parameters, for
    an update is counted on real tensors, and a wide one would not fit this machine."""

    def extrapolate(self, values: Sequence[float]) -> float:
        """What all blocks take, from what those of the counted models do: a straight line."""
        if len(self.depths) == 1:
            return values[0]
        first, second = self.depths
        slope = (values[1] - values[0]) / (second - first)
        return values[0] + slope * (self.model.depth - first)

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def needs(self) -> Needs:
        return self.phases[self.phase]

    @cached_property
    def kept(self) -> float:
        """Bytes that a micro-batch keeps for its backward pass."""
        return self.extrapolate([some.kept for some in self.passes])

    @cached_property
    def lasting(self) -> dict[str, float]:
        """Bytes from one step to the next, of one GPU's share."""
        shards = self.question.shards
        found = {name: self.count_whole(name) / shards for name in (*OFFLOADED_PARTS, "on_host")}
        if self.question.cfg.runtime.parallel.cpu_offload and shards > 1:
            found["on_host"] += sum(found[name] for name in OFFLOADED_PARTS)
            found |= dict.fromkeys(OFFLOADED_PARTS, 0.0)
        return found

    def count_whole(self, name: str) -> float:
        """The same, or an update's temporary bytes, of a process that has all of the model."""
        if self.like is not None:
            return self.like.count_whole(name) * self.parameters / self.like.parameters
        return self.extrapolate([some[name] for some in self.updates])

    @property
    def buckets(self) -> float:
        """Copies of the gradients that ddp sends."""
        copies = not self.question.cfg.runtime.parallel.gradient_as_bucket_view
        return self.lasting["gradients"] if self.question.mode == "ddp" and copies else 0.0

    @property
    def gathered(self) -> float:
        """Whole parameters that a sharded model holds: the block at work and the next one."""
        if self.question.shards == 1:
            return 0.0
        if not self.question.cfg.runtime.parallel.reshard_after_forward:
            return 4.0 * self.parameters
        return 8.0 * max(sum(p.numel() for p in block.parameters()) for block in self.model.blocks)

    @cached_property
    def phases(self) -> dict[str, Needs]:
        """Phase -> the bytes at its peak."""
        question = self.question
        steps = question.cfg.accumulation_steps
        held = Needs(
            weights=self.lasting["weights"] + self.gathered,
            gradients=self.lasting["gradients"] + self.buckets,
            optimizer=self.lasting["optimizer"],
            averages=self.lasting["averages"],
            latents=question.resident,
        )

        # Two micro-batches are counted; the batches of the others wait on the device too.
        spec = question.spec
        batch = 4.0 * spec.channels * spec.height * spec.width + 8.0
        batches = max(0, steps - 2) * question.samples * batch

        found = {}
        for phase, peak in self.find_peaks().items():
            rest = max(0.0, peak.live - self.count_whole("weights") - peak.gradients)
            # Gradients are whole until the last micro-batch, and there are none before the first.
            gradients = peak.gradients / (question.shards if steps == 1 else 1) + self.buckets
            found[phase] = held._replace(
                gradients=0.0 if phase == "forward" and steps == 1 else gradients,
                kept=min(self.kept, rest),
                workspace=max(0.0, rest - self.kept) + batches,
            )

        # The averages are updated by one fp32 copy of the largest part.
        parts = [sum(a.numel() for _, a in part) for part in EMA(self.model, 1.0).parts]
        found["optimizer"] = held._replace(workspace=self.count_update_bytes())
        found["ema"] = held._replace(workspace=4.0 * max(parts) / question.shards)

        # A model that is sharded is built whole on each GPU first.
        if question.shards > 1:
            found["start"] = Needs(
                self.count_whole("weights"), 0.0, 0.0, 0.0, latents=question.resident
            )
        if not question.gpu:
            return found
        return {
            phase: needs._replace(context=CONTEXT_BYTES, slack=ALLOCATOR_SLACK * needs.total)
            for phase, needs in found.items()
        }

    def count_update_bytes(self) -> float:
        """Temporary bytes of the optimizer. An update in parts takes what its largest part does."""
        part = count_largest_part(make_parameter_groups(self.model, 0.0))
        least = [technique.count_part_bytes(part) for technique in self.techniques]
        in_parts = [size for size in least if size is not None]
        if not in_parts:
            return self.count_whole("temporary") / self.question.shards
        last = (self.like or self).updates[-1]
        return max(*in_parts, last["temporary"] * part / last["part"])

    def find_peaks(self) -> dict[str, Peak]:
        """Phase -> the most that lives in it: weights, gradients, what is kept, workspace; not the
        rest that lasts."""
        places = [
            group_by_role(some.peaks, depth, self.period)
            for some, depth in zip(self.passes, self.depths, strict=True)
        ]
        found: dict[str, Peak] = {}
        for place in (place for place in places[0] if place in places[-1]):
            phase = place[0]
            live = self.extrapolate([by[place].live for by in places])
            gradients = self.extrapolate([by[place].gradients for by in places])
            if phase not in found or live > found[phase].live:
                found[phase] = Peak(live, gradients)
        return found


def group_by_role(found: dict[Place, Peak], depth: int, period: int) -> dict[Place, Peak]:
    """The places that models of every depth have: the first `period` blocks, and the last, counted
    from the end."""
    roles: dict[Place, Peak] = {}
    for (phase, block), peak in found.items():
        if block is None or block < period:
            roles[phase, block] = peak
        if block is not None and block >= depth - period:
            roles[phase, block - depth] = peak
    return roles


def make_question(cfg: TrainConfig, memory: float, gpus: int = 1, gpu: bool = True) -> Question:
    """Asks of a run on devices with so many bytes, where its latents may lie."""
    spec, resident = foresee_latents(cfg.data, cfg.seed, memory)
    return Question(cfg, spec, gpus, resident, gpu)


def forecast(question: Question, like: Forecast | None = None) -> Forecast:
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
            return count_run(question, like)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise UserError(
            f"model._target_={cfg.model.get('_target_')}: its step cannot be counted "
            f"without a device ({shorten_error(error)}); `python -m scripts.bench step` measures it."
        ) from error


def count_run(question: Question, like: Forecast | None) -> Forecast:
    """Counts passes, and updates where there is no model `like` this one, at two depths, or at the
    model's own where that is small or no key."""
    cfg = question.cfg
    spec = question.spec
    model = build_on_meta(cfg.model, spec)
    if cfg.adapter:
        add_adapter(model, cfg.adapter, find_base(cfg, spec).new_classes)
    techniques = build_planned_stack(cfg, question.gpu).techniques
    period = max(technique.period for technique in techniques)
    first = period + model.depth % period
    few = "depth" in cfg.model and model.depth > first + period
    depths = [first, first + period] if few else [model.depth]

    def once(count: Callable[[TrainConfig, LatentSpec, bool], Any], cfg: TrainConfig) -> Any:
        key = repr((count.__name__, cfg, spec.as_dict(), question.gpu))
        if key not in COUNT_CACHE:
            COUNT_CACHE[key] = count(cfg, spec, question.gpu)
        return COUNT_CACHE[key]

    # Two micro-batches stand for all, and no optimizer plays a part in a pass.
    plain = replace(cfg, optim={"_target_": "torch.optim.SGD"})
    few_steps = min(2, cfg.accumulation_steps)
    passes = [
        once(count_pass, with_few_blocks(plain, depth, question.samples, few_steps))
        for depth in depths
    ]
    updates = []
    if like is None:
        updates = [once(count_update, with_few_blocks(cfg, depth, 1, 1)) for depth in depths]
    return Forecast(question, model, techniques, period, depths, passes, updates, like)
