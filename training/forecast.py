"""Predicts a run's memory, time and cost on a card from what training/counting.py counts of its
step.

Memory: the peak of live tensors over a whole step, and where it occurs; to that come the driver's
context, what the caching allocator loses, and latents that lie on the device. Time: each operation
takes as long as its FLOPs or its bytes need at the card's rates, whichever is longer, and at least
as long as a launch; a range, for no kernel reaches a data sheet's rates. No constant here was
checked on a GPU yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from accel.composite_optimizer import PART, largest_part
from accel.techniques.fused_kernels import FusedKernel
from common.errors import UserError
from common.text import first_line
from data.loader import LatentSpec
from models.denoiser import Denoiser
from training.assemble import Training
from training.config.schema import CheckpointPolicyName, TrainConfig
from training.counting import (
    Passed,
    Updated,
    as_on_a_gpu,
    for_a_pass,
    on_a_line,
    passed,
    updated,
    with_depth,
)
from training.ema import EMA
from training.hardware import GIB, Card, this_card
from training.memory import Bytes, lasting_bytes, memory_of
from training.optimizers import parameter_groups
from training.roofline import Running, Time, seconds_of
from training.tracker import Op, Peak, Place
from training.weights.adapter_base import find_base, put_on
from training.weights.pretrained import build_on_meta

CONTEXT = 0.6 * GIB
"""The driver's context, and the workspaces of cuBLAS and cuDNN."""
SLACK = 0.04
"""Share of the live bytes by which the caching allocator reserves more."""
DRAW = 19.0
"""Bytes an element that drawing the bits of stochastic rounding takes, for `PART` elements at a
time; as counted."""
PASSES: dict[str, Passed] = {}
"""All passes that this process has counted. Forecasts of other optimizers, or of more processes,
count none again."""
UPDATES: dict[str, Updated] = {}
"""All updates that this process has counted. Forecasts of other batches or kernels count none
again."""


class Needs(NamedTuple):
    """Bytes of one GPU, by part, at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    averages: float
    kept: float
    """For the backward pass, all blocks together."""
    workspace: float
    """Of the operation at work: the gradients of a block's activations, or an update's temporary
    copies."""
    latents: float
    context: float
    slack: float

    @property
    def total(self) -> float:
        return sum(self)


class Forecast:
    """What a configuration takes of one GPU of `gpus` that share each batch.

    `spec` describes its latents, `resident` are bytes of them on the device. `gpu=False` counts
    what this machine's CPU would do: techniques that it cannot have are off. Random number
    generators stay as they are, process-wide flags do
    not: building a run sets them both ways. Counting takes seconds. ValueError for a model that
    cannot be counted.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        spec: LatentSpec,
        *,
        gpus: int = 1,
        resident: float = 0.0,
        gpu: bool = True,
    ) -> None:
        self.describe(cfg, spec, gpus, gpu)
        self.resident = resident
        self.compiled = cfg.runtime.compile
        self.kept_in_blocks = None
        with self.counting():
            self.passes = [self.pass_at(depth) for depth in self.depths]
            self.updates = [self.update_at(depth) for depth in self.depths]
            self.updated_at = self.depths

    @classmethod
    def of_run(cls, training: Training) -> Forecast:
        """Of a run that is warm: what lasts and what its blocks keep is known, so only an eager
        pass is counted."""
        own = cls.__new__(cls)
        gpu = training.device.type == "cuda"
        own.describe(training.cfg, training.loader.spec, training.ranks.world_size, gpu)
        own.kept_in_blocks = training.stack.kept
        own.compiled = training.stack.value("compile") is True
        kernels = {
            t.key: t.value is True for t in training.stack.techniques if isinstance(t, FusedKernel)
        }
        eager = replace(
            training.cfg, runtime=replace(training.cfg.runtime, compile=False, **kernels)
        )
        with own.counting():
            own.passes = [
                passed(for_a_pass(eager, depth, own.samples), own.spec, own.compiled)
                for depth in own.depths
            ]
        here = lasting_bytes(training)
        own.resident = max(0.0, float(training.held - here.weights - here.averages))
        lasting = Bytes(*(own.shards * size for size in here))
        moved = sum(lasting) + 2 * (lasting.weights + lasting.averages)
        own.updates = [Updated(lasting, 0.0, Counter({Op(0, moved, 0, False): 1}))]
        own.updated_at = [own.depth]
        return own

    def describe(self, cfg: TrainConfig, spec: LatentSpec, gpus: int, gpu: bool) -> None:
        self.cfg = cfg
        self.spec = spec
        self.gpus = gpus
        self.gpu = gpu
        self.samples = max(1, cfg.batch_size // cfg.accumulation_steps // gpus)
        mode = cfg.runtime.parallel.mode.value
        self.mode = "none" if gpus == 1 else "ddp" if mode in ("auto", "none") else mode
        self.model = self.network(cfg.model)
        self.depth = self.model.depth
        every_2 = (
            cfg.runtime.gradient_checkpointing
            and cfg.runtime.checkpoint_policy is CheckpointPolicyName.every_2
        )
        self.period = 2 if every_2 else 1
        """Blocks after which the next ones are like the first."""
        first = (2 + self.depth % 2) if every_2 else 1
        few = "depth" in cfg.model and self.depth > first + self.period
        self.depths = [first, first + self.period] if few else [self.depth]

    def network(self, node: dict[str, Any]) -> Denoiser:
        """The model of a configuration node, with the run's adapter, on the meta device."""
        model = build_on_meta(node, self.spec)
        if self.cfg.adapter:
            put_on(model, self.cfg.adapter, find_base(self.cfg, self.spec).new_classes)
        return model

    @contextmanager
    def counting(self) -> Iterator[None]:
        """ValueError for a model of the user's own that does something else with fake tensors than
        compute."""
        try:
            with torch.random.fork_rng([]), as_on_a_gpu() if self.gpu else nullcontext():
                yield
        except (ValueError, ImportError):
            raise
        except Exception as error:
            raise UserError(
                f"model._target_={self.cfg.model.get('_target_')}: its step cannot be counted "
                f"without a device ({first_line(error)}); `python -m scripts.bench step` measures "
                "it."
            ) from error

    def pass_at(self, depth: int) -> Passed:
        """`passed`, or what it came to when an earlier forecast called it with the same
        configuration."""
        small = for_a_pass(self.cfg, depth, self.samples)
        key = repr((small, self.spec.as_dict(), self.gpu))
        if key not in PASSES:
            PASSES[key] = passed(small, self.spec)
        return PASSES[key]

    def update_at(self, depth: int) -> Updated:
        """The same of `updated`, which depends on no batch."""
        runtime = self.cfg.runtime
        how = (runtime.weights, runtime.rounding, runtime.offload_optimizer, runtime.fused_adamw)
        network = (self.cfg.model, self.cfg.adapter, self.spec.as_dict())
        key = repr((network, self.cfg.optim, self.cfg.max_grad_norm, how, self.gpu, depth))
        if key not in UPDATES:
            UPDATES[key] = updated(self.cfg, self.spec, depth, self.gpu)
        return UPDATES[key]

    def on(self, gpus: int, mode: str) -> Forecast:
        """The same samples a GPU on so many GPUs, which share the work in this way."""
        other = Forecast.__new__(Forecast)
        other.__dict__ = {
            k: v for k, v in self.__dict__.items() if k not in ("lasting", "peaks", "phases")
        }
        other.gpus = gpus
        other.mode = mode if gpus > 1 else "none"
        return other

    def of_passes(self, values: list[float]) -> float:
        """What the passes of all blocks take, from what those of the counted ones do."""
        return on_a_line(self.depths, values, self.depth)

    def of_updates(self, values: list[float]) -> float:
        return on_a_line(self.updated_at, values, self.depth)

    @property
    def kept(self) -> float:
        """Bytes that a micro-batch keeps for its backward pass."""
        return self.of_passes([p.kept for p in self.passes]) + self.kept_otherwise

    @property
    def kept_otherwise(self) -> float:
        """What the blocks of a warm run were seen to keep beyond what was counted here: their
        compiler decided."""
        if self.kept_in_blocks is None or not self.compiled:
            return 0.0
        counted = (
            self.depth
            * (self.passes[-1].kept - self.passes[0].kept)
            / max(1, self.depths[-1] - self.depths[0])
        )
        return self.kept_in_blocks - counted if len(self.depths) > 1 else 0.0

    @cached_property
    def lasting(self) -> dict[str, float]:
        """Bytes from one step to the next, of one GPU's share."""
        names = ("weights", "gradients", "averages", "optimizer", "on_host")
        found = {
            name: self.of_updates([getattr(u.lasting, name) for u in self.updates])
            for name in names
        }
        shared = {name: size / self.shards for name, size in found.items()}
        if self.cfg.runtime.parallel.cpu_offload and self.shards > 1:
            away = ("weights", "gradients", "optimizer", "averages")
            shared = {name: 0.0 if name in away else size for name, size in shared.items()}
            shared["on_host"] += sum(found[name] for name in away) / self.shards
        return shared

    @property
    def shards(self) -> int:
        """GPUs over which the state is cut."""
        if self.mode == "fsdp":
            return self.gpus
        return (
            min(self.cfg.runtime.parallel.shard_degree or 8, self.gpus)
            if self.mode == "hsdp"
            else 1
        )

    @cached_property
    def peaks(self) -> dict[str, Peak]:
        """Phase -> the most that lives in it: weights, gradients, what is kept, workspace; not the
        rest that lasts."""
        places = [
            by_role(p.peaks, depth, self.period)
            for p, depth in zip(self.passes, self.depths, strict=True)
        ]
        found: dict[str, Peak] = {}
        for place in places[0].keys() & places[-1].keys():
            live, gradients = (self.of_passes([by[place][i] for by in places]) for i in range(2))
            live += self.kept_otherwise if place[0] in ("forward", "backward") else 0.0
            if place[0] not in found or live > found[place[0]].live:
                found[place[0]] = Peak(live, gradients)
        return found

    @cached_property
    def phases(self) -> dict[str, Needs]:
        """Phase -> the bytes at its peak."""
        lasting = self.lasting
        kept = self.kept
        whole = self.of_updates([u.lasting.weights for u in self.updates])
        sizes = (self.spec.channels, self.spec.height, self.spec.width)
        # two micro-batches are counted
        more = max(0, self.cfg.accumulation_steps - 2) * self.samples
        batches = more * (4.0 * math.prod(sizes) + 8.0)
        held = Needs(
            lasting["weights"] + self.gathered,
            0.0,
            lasting["optimizer"],
            lasting["averages"],
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
        )
        found = {}
        for phase, peak in self.peaks.items():
            rest = max(0.0, peak.live - whole - peak.gradients)
            share = 0.0 if phase == "forward" and self.cfg.accumulation_steps == 1 else 1.0
            # they are whole until the last micro-batch
            cut = self.shards if self.cfg.accumulation_steps == 1 else 1
            gradients = share * peak.gradients / cut + (self.buckets if share else 0.0)
            found[phase] = held._replace(
                gradients=gradients, kept=min(kept, rest), workspace=max(0.0, rest - kept) + batches
            )
        for phase, extra in (("optimizer", self.update_bytes), ("ema", self.average_bytes)):
            found[phase] = held._replace(
                gradients=lasting["gradients"] + self.buckets, workspace=extra
            )
        return {phase: self.with_the_rest(needs) for phase, needs in found.items()}

    def with_the_rest(self, needs: Needs) -> Needs:
        needs = needs._replace(latents=self.resident)
        return needs._replace(context=CONTEXT, slack=SLACK * needs.total) if self.gpu else needs

    @property
    def phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def needs(self) -> Needs:
        return self.phases[self.phase]

    @property
    def gathered(self) -> float:
        """Whole parameters that a sharded model holds: the block at work and the next one."""
        if self.shards == 1:
            return 0.0
        if not self.cfg.runtime.parallel.reshard_after_forward:
            return 4.0 * sum(p.numel() for p in self.model.parameters())
        return 8.0 * max(sum(p.numel() for p in block.parameters()) for block in self.model.blocks)

    @property
    def buckets(self) -> float:
        """Copies of the gradients that ddp sends."""
        copies = self.mode == "ddp" and not self.cfg.runtime.parallel.gradient_as_bucket_view
        return self.lasting["gradients"] if copies else 0.0

    @property
    def update_bytes(self) -> float:
        """Temporary bytes of the optimizer. An update in parts takes what its largest part does."""
        runtime = self.cfg.runtime
        if not runtime.offload_optimizer and runtime.weights.value != "bf16":
            return self.of_updates([u.optimizer for u in self.updates]) / self.shards
        few = self.network(with_depth(self.cfg.model, self.depths[-1]))
        part = largest_part(parameter_groups(self.model, 0.0))
        draws = runtime.weights.value == "bf16" and runtime.rounding.value == "stochastic"
        rounding = 4.0 * part + DRAW * min(part, PART) if draws else 0.0
        return max(
            rounding, self.updates[-1].optimizer * part / largest_part(parameter_groups(few, 0.0))
        )

    @property
    def average_bytes(self) -> float:
        """Temporary bytes of the averages: one fp32 copy of the largest part."""
        parts = EMA(self.model, 1.0).parts
        return (
            4.0 * max(sum(average.numel() for _, average in part) for part in parts) / self.shards
        )

    def time(self, card: Card) -> Time:
        """Seconds of a step, without communication."""
        return Time(self.seconds(card, "best"), self.seconds(card, "worst"))

    def seconds(self, card: Card, end: str) -> float:
        """The time at one end of the range."""
        device = Running(card, self.cfg.runtime.tf32, self.cfg.runtime.cuda_graph)

        def costs(counted: Sequence[Passed | Updated]) -> list[float]:
            return [
                sum(n * seconds_of(op, device, end) for op, n in some.ops.items())
                for some in counted
            ]

        of_pass = self.of_passes(costs(self.passes))
        of_update = self.of_updates(costs(self.updates))
        flops = self.of_passes([sum(n * op.flops for op, n in p.ops.items()) for p in self.passes])
        # in attention and fused kernels
        hidden = max(0.0, 3.0 * self.model.flops_per_sample() * self.samples - flops)
        bits = 32 if self.cfg.runtime.precision.value == "fp32" else 16
        of_pass += seconds_of(Op(int(hidden), 0, bits, False), device, end)
        steps = self.cfg.accumulation_steps
        moved = (
            steps * self.of_passes([p.moved for p in self.passes]) + 2.0 * self.lasting["on_host"]
        )
        return steps * of_pass + of_update / self.shards + moved / card.host


def by_role(peaks: Mapping[Place, Peak], depth: int, period: int) -> dict[Place, Peak]:
    """The places that models of every depth have: the first `period` blocks, and the last, counted
    from the end."""
    found: dict[Place, Peak] = {}
    for (phase, block), peak in peaks.items():
        if block is None or block < period:
            found[phase, block] = peak
        if block is not None and block >= depth - period:
            found[phase, block - depth] = peak
    return found


def predicted(training: Training) -> dict[str, float | None]:
    """What a warm run should come to: `peak_gib` reserved, and `step_ms` at best and at worst, None
    on a CPU or a card whose rates are not known. On a GPU compare the peak with
    `memory_reserved_peak`, without the driver's context."""
    try:
        found = Forecast.of_run(training)
    finally:
        training.stack.on_process()  # the small models set flags of their own
    card = this_card(training.device, memory_of(training.device))
    time = found.time(card) if card else None
    ends = {
        f"step_ms_{end}": 1e3 * getattr(time, end) if time else None for end in ("best", "worst")
    }
    return {"peak_gib": (found.needs.total - found.needs.context) / GIB} | ends
