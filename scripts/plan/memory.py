"""Forecasts the bytes that a run needs on a GPU, by part and phase, from the counts of counting.py.

The forecast is the peak bytes of live tensors in a step, and the phase of the step that has this
peak. It includes latents that lie on the device and, on a GPU, the driver's context and the
overhead of the caching allocator. The constants of this file have not been checked on a GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from accel.composite_optimizer import count_largest_part
from accel.technique import Technique
from common.config.build import build
from common.config.schema import TrainConfig
from common.errors import UserError
from common.memory import GIB
from common.text import shorten_error
from data.spec import LatentSpec
from scripts.plan.counting import (
    PassBytes,
    Peak,
    Place,
    build_planned_stack,
    count_pass,
    count_update,
    with_few_blocks,
)
from scripts.plan.question import Question
from training.heads import ModelWithHeads
from training.objective import Objective
from training.optim.ema import EMA
from training.optim.groups import make_parameter_groups
from training.weights.first_weights import add_adapter, find_base
from training.weights.pretrained import build_on_meta

CONTEXT_BYTES = 0.6 * GIB
"""Bytes of the CUDA driver's context on a GPU, with the workspaces of cuBLAS and cuDNN."""
ALLOCATOR_SLACK = 0.04
"""Bytes that PyTorch's allocator reserves without use, as a share of those of live tensors."""
OFFLOADED_PARTS = ("weights", "gradients", "averages", "optimizer")
"""Parts of the training state that stay in host memory if fsdp or hsdp runs with cpu_offload."""
COUNT_CACHE: dict[str, Any] = {}
"""Text of a count's settings -> its bytes. Forecasts that differ only in the optimizer, the batch
or the number of GPUs share many counts."""


class Needs(NamedTuple):
    """Bytes of one GPU, by part, at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    averages: float
    kept: float = 0.0
    """Bytes of the tensors that all blocks together save for the backward pass."""
    workspace: float = 0.0
    """Bytes of temporary tensors: the gradients of a block's activations, or the copies that an
    update makes."""
    latents: float = 0.0
    context: float = 0.0
    slack: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return sum(self)


@dataclass(frozen=True)
class Forecast:
    """Memory that a run needs on one GPU, extrapolated from models with few blocks."""

    question: Question
    network: ModelWithHeads
    """The model and its heads at their full depth, on the meta device."""
    techniques: list[Technique]
    period: int
    """Number of blocks after which the pattern of blocks repeats: 2, for example, if a technique
    treats every second block differently."""
    depths: list[int]
    passes: list[PassBytes]
    updates: list[dict[str, float]]

    def extrapolate(self, values: Sequence[float]) -> float:
        """Extrapolates bytes linearly to the model's depth. `values` has the bytes counted at each
        of the `depths`."""
        if len(self.depths) == 1:
            return values[0]
        first, second = self.depths
        share = (self.network.model.depth - first) / (second - first)
        return values[0] + share * (values[1] - values[0])

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.network.parameters())

    @property
    def phase(self) -> str:
        """The phase of the step that needs the most memory."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def needs(self) -> Needs:
        return self.phases[self.phase]

    @cached_property
    def kept(self) -> float:
        """Bytes of the tensors that a micro-batch's forward pass keeps for its backward pass."""
        return self.extrapolate([counted.kept for counted in self.passes])

    @cached_property
    def lasting(self) -> dict[str, float]:
        """Part, such as weights or optimizer -> its bytes on one GPU that last from one step to the
        next."""
        shards = self.question.shards
        parts = {name: self.count_whole(name) / shards for name in (*OFFLOADED_PARTS, "on_host")}
        if self.question.cfg.runtime.parallel.cpu_offload and shards > 1:
            parts["on_host"] += sum(parts[name] for name in OFFLOADED_PARTS)
            parts |= dict.fromkeys(OFFLOADED_PARTS, 0.0)
        return parts

    def count_whole(self, name: str) -> float:
        """Returns bytes before sharding: those of the part `name` of the state that lasts between
        steps or, if `name` is "temporary", those of the tensors that an update frees again."""
        return self.extrapolate([counted[name] for counted in self.updates])

    @property
    def buckets(self) -> float:
        """Bytes of the buckets (flat buffers) into which ddp copies the gradients; 0 without ddp,
        or if the gradients are views of the buckets."""
        copies = not self.question.cfg.runtime.parallel.gradient_as_bucket_view
        return self.lasting["gradients"] if self.question.mode == "ddp" and copies else 0.0

    @property
    def gathered(self) -> float:
        """Bytes of the parameters that a GPU has gathered from all shards: those of the running
        block and of the next one, or all if the model does not reshard after the forward pass; 0
        without shards."""
        if self.question.shards == 1:
            return 0.0
        if not self.question.cfg.runtime.parallel.reshard_after_forward:
            return 4.0 * self.parameters
        return 8.0 * max(
            sum(p.numel() for p in block.parameters()) for block in self.network.blocks
        )

    @cached_property
    def phases(self) -> dict[str, Needs]:
        """Phase of the step -> bytes of each part of memory at the peak of this phase."""
        question = self.question
        steps = question.cfg.accumulation_steps
        lasting = Needs(
            weights=self.lasting["weights"] + self.gathered,
            gradients=self.lasting["gradients"] + self.buckets,
            optimizer=self.lasting["optimizer"],
            averages=self.lasting["averages"],
            latents=question.resident,
        )

        # Passes were counted with at most two micro-batches; latents of further ones wait too.
        spec = question.spec
        batch = 4.0 * spec.channels * spec.height * spec.width + 8.0
        batches = max(0, steps - 2) * question.samples * batch

        phases = {}
        for phase, peak in self.find_peaks().items():
            rest = max(0.0, peak.live - self.count_whole("weights") - peak.gradients)
            # With several micro-batches, gradients are sharded only after the last one, so each GPU
            # holds them whole. With only one, no gradients exist yet in the forward pass.
            gradients = peak.gradients / (question.shards if steps == 1 else 1) + self.buckets
            phases[phase] = lasting._replace(
                gradients=0.0 if phase == "forward" and steps == 1 else gradients,
                kept=min(self.kept, rest),
                workspace=max(0.0, rest - self.kept) + batches,
            )

        # Averages are updated part by part, so the fp32 copy of the largest part makes the peak.
        parts = [sum(a.numel() for _, a in part) for part in EMA(self.network.model, 1.0).parts]
        phases["optimizer"] = lasting._replace(workspace=self.count_update_bytes())
        phases["ema"] = lasting._replace(workspace=4.0 * max(parts) / question.shards)

        # Before fsdp and hsdp shard the weights, each GPU builds the whole model.
        if question.shards > 1:
            whole = self.count_whole("weights")
            phases["start"] = Needs(whole, 0.0, 0.0, 0.0, latents=question.resident)
        if not question.gpu:
            return phases
        return {
            phase: needs._replace(context=CONTEXT_BYTES, slack=ALLOCATOR_SLACK * needs.total)
            for phase, needs in phases.items()
        }

    def count_update_bytes(self) -> float:
        """Returns the temporary bytes of an update on one GPU. If the optimizer updates the
        parameters part by part, these are the bytes for its largest part."""
        part = count_largest_part(make_parameter_groups(self.network, self.question.cfg.optim))
        sizes = [t.planning.count_part_bytes(t, part) for t in self.techniques]
        part_sizes = [size for size in sizes if size is not None]
        if not part_sizes:
            return self.count_whole("temporary") / self.question.shards
        last = self.updates[-1]
        return max(*part_sizes, last["temporary"] * part / last["part"])

    def find_peaks(self) -> dict[str, Peak]:
        """Returns phase of the step (such as forward or backward) -> its peak bytes: weights,
        gradients, saved and temporary tensors. The optimizer's state and the averages are not
        included."""
        places = [
            group_by_role(counted.peaks, depth, self.period)
            for counted, depth in zip(self.passes, self.depths, strict=True)
        ]
        peaks = {}
        for place in (place for place in places[0] if place in places[-1]):
            found = zip(*(roles[place] for roles in places), strict=True)
            peak = Peak(*map(self.extrapolate, found))
            peaks[place[0]] = max(peak, peaks.get(place[0], peak))
        return peaks


def group_by_role(peaks: dict[Place, Peak], depth: int, period: int) -> dict[Place, Peak]:
    """Selects the entries of `peaks` whose places exist in models of every depth: all places
    outside the blocks, the first `period` blocks, and the last `period` blocks, which get the
    indices -period to -1."""
    roles = {}
    for (phase, block), peak in peaks.items():
        if block is None or block < period:
            roles[phase, block] = peak
        if block is not None and block >= depth - period:
            roles[phase, block - depth] = peak
    return roles


def forecast(question: Question) -> Forecast:
    """Forecasts the memory of a run; takes seconds.

    Building the run changes process-wide flags of PyTorch, but no random number generator.
    UserError for a batch that the GPUs cannot share, and for a model whose step fails on fake
    tensors.
    """
    cfg = question.cfg
    if cfg.batch_size % (cfg.accumulation_steps * question.gpus):
        raise UserError(
            f"batch_size={cfg.batch_size} is not a multiple of "
            f"accumulation_steps={cfg.accumulation_steps} × gpus={question.gpus}; change one of "
            "them."
        )
    try:
        with torch.random.fork_rng([]):
            return count_run(question)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise UserError(
            f"model._target_={cfg.model.get('_target_')}: its step cannot be counted "
            f"without a device ({shorten_error(error)}); `python -m scripts.bench step` measures "
            "it."
        ) from error


def count_run(question: Question) -> Forecast:
    """Counts the bytes of the forward and backward passes, and of updates, for models of two small
    depths; or only for the model's own depth, if that is small or no key sets it."""
    cfg = question.cfg
    spec = question.spec
    model = build_on_meta(cfg.model, spec)
    if cfg.adapter:
        add_adapter(model, cfg.adapter, find_base(cfg, spec).new_classes)
    network = ModelWithHeads(model)
    build(cfg.objective, "objective", kind=Objective).attach_heads(network)
    techniques = build_planned_stack(cfg, question.gpu).techniques
    # Kinds of blocks repeat every `period` blocks, under checkpointing and in a hybrid.
    period = max(technique.planning.find_period(technique) for technique in techniques)
    period = math.lcm(period, cfg.model.get("attention_every") or 1)
    first = period + model.depth % period
    is_deep = "depth" in cfg.model and model.depth > first + period
    depths = [first, first + period] if is_deep else [model.depth]

    def count_once(count: Callable[[TrainConfig, LatentSpec, bool], Any], cfg: TrainConfig) -> Any:
        key = repr((count.__name__, cfg, spec.as_dict(), question.gpu))
        if key not in COUNT_CACHE:
            COUNT_CACHE[key] = count(cfg, spec, question.gpu)
        return COUNT_CACHE[key]

    # Count at most two micro-batches, because later ones repeat the second. Count passes with SGD:
    # their bytes do not depend on the optimizer, so forecasts with different ones share the counts.
    pass_cfg = replace(cfg, optim={"_target_": "torch.optim.SGD"})
    few_steps = min(2, cfg.accumulation_steps)
    passes = [
        count_once(count_pass, with_few_blocks(pass_cfg, depth, question.samples, few_steps))
        for depth in depths
    ]
    updates = [count_once(count_update, with_few_blocks(cfg, depth, 1, 1)) for depth in depths]
    return Forecast(question, network, techniques, period, depths, passes, updates)
