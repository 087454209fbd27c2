"""`python -m scripts.plan scale`: step time and memory of each way to use N GPUs, and where each
stops paying. docs/scaling.md has formulas and sources.

    python -m scripts.plan scale model=ssd_mlp_xl data=synthetic mfu=0.4
    python -m scripts.plan scale model=mamba_b data=synthetic gpus=[1,8,64] batch_per_gpu=64 \\
        hardware=a100 mfu=0.35
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from common.errors import UserError
from models.adapters import passes
from models.denoiser import Denoiser
from models.mixers.convolution import Convolution
from scripts.plan.memory import Forecast, Question, forecast
from scripts.plan.report import check_mfu, known_card
from scripts.tables import table
from training.assemble import latents_of
from training.config.schema import ParallelMode, TrainConfig
from training.hardware import GIB, Card
from training.weights.adapter_base import settled

PAYS = 0.8
"""A way to scale pays as long as N GPUs do at least this share of N times the work of one."""
WAYS = ("ddp", "fsdp", "hsdp")
GPUS_A_MACHINE = 8
BUCKET = 25 * 2**20
"""runtime.parallel.bucket_cap_mb."""
HOP = 1e-6
MACHINE_HOP = 5e-6
"""Seconds from GPU to GPU in a machine, and from machine to machine: of the order of NCCL's own
tables."""


@dataclass(frozen=True)
class ScaleConfig:
    """What to predict; any other word is an override of the training configuration."""

    gpus: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 64, 256, 1024])
    batch_per_gpu: int = 32
    hardware: str = "h200"
    mfu: float | None = None
    """Model FLOPs utilisation of one GPU, from a run's summary or `bench step`."""

    def check(self) -> None:
        """ValueError for a value that cannot be predicted for."""
        if not self.gpus or min(self.gpus) < 1 or self.batch_per_gpu < 1:
            raise UserError(
                f"gpus={self.gpus} and batch_per_gpu={self.batch_per_gpu} must be at least 1."
            )
        check_mfu(self.mfu)
        if self.mfu is None:
            raise UserError(
                "mfu is missing: say which share of its peak one GPU reaches, as mfu=0.4; the "
                "summary of a run on a GPU has it, and so has `python -m scripts.bench step`."
            )


class Row(NamedTuple):
    """One way on N GPUs."""

    way: str
    gpus: int
    seconds: float
    memory: float
    efficiency: float


def scale(cfg: ScaleConfig, words: list[str]) -> str:
    """The table of all ways, and what each is good for."""
    cfg.check()
    assert cfg.mfu is not None
    card = known_card(cfg.hardware)
    train = replace(settled(words).cfg, batch_size=cfg.batch_per_gpu, accumulation_steps=1)
    spec, resident = latents_of(train.data, train.seed, card.memory)
    one = forecast(Question(train, spec, resident=resident))
    model = one.counted.model
    parameters = sum(p.numel() for p in model.parameters())
    flops = passes(model) * model.flops_per_sample()

    # What one GPU computes, and what it sends: collectives are counted at the most GPUs.
    compute = flops * cfg.batch_per_gpu / (card.half * cfg.mfu)
    counted_at = max(2, *cfg.gpus)
    counts = collectives(model.depth, counted_at)
    width = 2 if train.runtime.parallel.reduce_dtype.value == "bf16" else 4
    step = Step(compute, parameters, width, counts["reduce_scatter"])
    rows = [
        row(one, way, gpus, step, card)
        for way in WAYS
        for gpus in cfg.gpus
        if way != "hsdp" or (gpus > GPUS_A_MACHINE and gpus % GPUS_A_MACHINE == 0)
    ]
    lines = [
        f"{parameters / 1e6:.0f} M parameters, {flops / 1e9:.0f} GFLOP a sample and step, "
        f"{one.counted.kept / one.question.samples / 2**20:.1f} MiB kept a sample",
        f"assumed: {cfg.hardware}, MFU {cfg.mfu:.0%} on one GPU, {cfg.batch_per_gpu} samples a "
        f"GPU, {GPUS_A_MACHINE} GPUs a machine; counted at {counted_at} GPUs with fsdp: "
        f"{dict(counts)}",
        "",
        shown(rows, cfg.batch_per_gpu, card),
        "",
        *(verdict(way, [row for row in rows if row.way == way], card) for way in WAYS),
    ]
    return "\n".join(lines)


def row(one: Forecast, way: str, gpus: int, step: Step, card: Card) -> Row:
    """What a way on so many GPUs comes to, each with as many samples as one has."""
    train = on_many(one.question.cfg, way, gpus)
    memory = forecast(replace(one.question, cfg=train, gpus=gpus)).needs.total
    seconds = step.compute + exposed(way, gpus, step, card)
    return Row(way, gpus, seconds, memory, step.compute / seconds)


def on_many(train: TrainConfig, way: str, gpus: int) -> TrainConfig:
    """The configuration of one GPU for many, which share the work in this way."""
    parallel = replace(train.runtime.parallel, mode=ParallelMode(way))
    runtime = replace(train.runtime, parallel=parallel)
    return replace(train, batch_size=train.batch_size * gpus, runtime=runtime)


def shown(rows: list[Row], batch_per_gpu: int, card: Card) -> str:
    """The rows as a table."""
    cells: list[tuple[object, ...]] = [
        ("way", "GPUs", "ms/step", "samples/s", "of ideal", "GiB a GPU", "")
    ]
    for way, gpus, seconds, memory, efficiency in rows:
        cells.append(
            (
                way,
                gpus,
                f"{1e3 * seconds:.1f}",
                f"{batch_per_gpu * gpus / seconds:.0f}",
                f"{efficiency:.0%}",
                f"{memory / GIB:.1f}",
                "" if memory < card.memory else "does not fit",
            )
        )
    return table(cells)


def verdict(way: str, found: list[Row], card: Card) -> str:
    """How far a way pays, in a sentence."""
    good = [row.gpus for row in found if row.efficiency >= PAYS and row.memory < card.memory]
    if not good:
        return f"{way}: does not pay, or does not fit, at any of these sizes"
    worse = [row.gpus for row in found if row.efficiency < PAYS and row.gpus > good[0]]
    stops = f"; at {min(worse)} it is below {PAYS:.0%}" if worse else ""
    return f"{way}: pays up to {max(good)} GPUs of those asked for{stops}"


def bandwidth(gpus: int, card: Card) -> float:
    """Across machines each GPU has a network card of its own, and rings go through all of them at
    once."""
    return card.intra if gpus <= GPUS_A_MACHINE else min(card.intra, GPUS_A_MACHINE * card.inter)


def gather(size: float, gpus: int, card: Card) -> float:
    """Seconds of an all-gather, or reduce-scatter, of `size` bytes in all: a ring, n-1 hops."""
    if gpus == 1:
        return 0.0
    machines = ceil(gpus / GPUS_A_MACHINE)
    hops = (gpus - machines) * HOP + (machines - 1) * MACHINE_HOP
    return (gpus - 1) / gpus * size / bandwidth(gpus, card) + hops


def all_reduce(size: float, gpus: int, rate: float, buckets: int = 1) -> float:
    """Seconds: every byte passes twice; a tree, 2 log2 n hops a bucket."""
    if gpus == 1:
        return 0.0
    return 2 * (gpus - 1) / gpus * size / rate + buckets * 2 * ceil(log2(gpus)) * MACHINE_HOP


class Step(NamedTuple):
    """What one GPU does in a step, and what is sent for it."""

    compute: float
    """Seconds."""
    parameters: int
    width: int
    """Bytes in which the gradient of a parameter travels."""
    scatters: int
    """Reduce-scatters of a step with fsdp: one a block, and the root's."""


def exposed(way: str, gpus: int, step: Step, card: Card) -> float:
    """Seconds of communication that nothing hides; `way` is ddp, fsdp or hsdp."""
    if gpus == 1:
        return 0.0
    forward = step.compute / 3
    backward = 2 * step.compute / 3
    gradients = float(step.width * step.parameters)
    if way == "ddp":
        buckets = ceil(gradients / BUCKET)
        reduction = all_reduce(gradients, gpus, bandwidth(gpus, card), buckets)
        last = reduction / buckets  # has nothing left to hide behind
        return max(0.0, reduction - last - backward) + last

    # A pass gathers as often as it reduces.
    calls = step.scatters
    shards = gpus if way == "fsdp" else min(gpus, GPUS_A_MACHINE)
    one = gather(4.0 * step.parameters / calls, shards, card)
    reduction = calls * gather(gradients / calls, shards, card)
    if way == "hsdp":  # then each part with those of its like, all network cards at once
        reduction += all_reduce(gradients / shards, gpus // shards, card.inter, calls)
    return one + max(0.0, calls * one - forward) + max(0.0, calls * one + reduction - backward)


@contextmanager
def pretended_processes(count: int) -> Iterator[None]:
    """This process is the first of so many inside; what it sends goes nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def collectives(depth: int, gpus: int) -> Counter[str]:
    """The collectives of one step with fsdp: a model of this depth, tiny, sharded over pretended
    GPUs."""
    image: dict[str, Any] = {"channels": 1, "height": 4, "width": 4, "num_classes": 2}
    model = Denoiser(**image, depth=depth, dim=32, head_dim=16, patch_size=2, mixer=Convolution)
    with pretended_processes(gpus), CommDebugMode() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of FSDP2 on the block's views, which nobody writes to
        mesh = dist.init_device_mesh("cpu", (gpus,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        labels = torch.zeros(1, dtype=torch.long)
        model(torch.zeros(1, 1, 4, 4), torch.zeros(1), labels).sum().backward()
    counts = seen.get_comm_counts().items()
    kinds = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "allreduce"}
    return Counter(
        {kind: sum(n for op, n in counts if part in str(op)) for kind, part in kinds.items()}
    )
