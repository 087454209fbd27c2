"""Predicts step time and memory of ddp, fsdp and hsdp on N GPUs, and the largest N at which each of
them still pays: reaches 80 % of N times the speed of one GPU. docs/scaling.md has the formulas and
their sources.

    python -m scripts.plan scale model=ssd_mlp_xl data=synthetic mfu=0.4
    python -m scripts.plan scale model=mamba_b data=synthetic gpus=[1,8,64] batch_per_gpu=64 \\
        hardware=a100 mfu=0.35
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Annotated, NamedTuple

from annotated_types import Gt, Le

from common.errors import UserError
from models.adapters import count_passes
from scripts.commands import format_table
from scripts.plan.memory import Question, forecast, make_question
from training.config.schema import ParallelMode, refuse_values
from training.environment import CARDS, GIB, Card
from training.weights.adapter_base import compose_pretrained

LEAST_EFFICIENCY = 0.8
"""A kind of parallelism (ddp, fsdp or hsdp) pays with N GPUs if their samples per second are at
least this share of N times those of one GPU."""
WAYS = ("ddp", "fsdp", "hsdp")
HEADS = ("way", "GPUs", "ms/step", "samples/s", "of ideal", "GiB a GPU", "")
GPUS_A_MACHINE = 8
BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients in one all-reduce of ddp: the default of runtime.parallel.bucket_cap_mb."""
HOP_SECONDS = 1e-6
"""Assumed latency, in seconds, of one message between two GPUs of a machine: about the value in
NCCL's tuning tables."""
MACHINE_HOP_SECONDS = 5e-6
"""Assumed latency, in seconds, of one message between GPUs of two machines."""


Share = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True)
class ScaleConfig:
    """Keys of the command `scale`; any other argument is an override of the training
    configuration."""

    gpus: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 64, 256, 1024])
    batch_per_gpu: int = 32
    hardware: str = "h200"
    mfu: Share | None = None
    """Model FLOPs utilisation of one GPU: the share of its peak FLOP/s, as a run's summary or
    `python -m scripts.bench step` reports it."""

    def check(self) -> None:
        """Raises ValueError if the keys allow no prediction, for example if `mfu` is missing."""
        if not self.gpus or min(self.gpus) < 1 or self.batch_per_gpu < 1:
            raise UserError(
                f"gpus={self.gpus} and batch_per_gpu={self.batch_per_gpu} must be at least 1."
            )
        refuse_values(self)
        if self.mfu is None:
            raise UserError(
                "mfu is missing: say which share of its peak one GPU reaches, such as mfu=0.4; the "
                "summary of a run on a GPU has it, and so has `python -m scripts.bench step`."
            )


def find_card(hardware: str) -> Card:
    """Returns the entry of the table `CARDS` for the GPU model `hardware`: memory, peak FLOP/s and
    bandwidths. ValueError if the table does not have this model."""
    if hardware not in CARDS:
        raise UserError(f"hardware={hardware} is not known; choose one of {', '.join(CARDS)}.")
    return CARDS[hardware]


def scale(cfg: ScaleConfig, words: list[str]) -> str:
    """Returns a table with a row for each kind of parallelism (`WAYS`) and number of GPUs, and a
    sentence for each kind: the largest number of GPUs at which it reaches `LEAST_EFFICIENCY` and
    the model fits the memory."""
    cfg.check()
    assert cfg.mfu is not None
    card = find_card(cfg.hardware)
    train = replace(
        compose_pretrained(words).cfg, batch_size=cfg.batch_per_gpu, accumulation_steps=1
    )
    plan = forecast(make_question(train, card.memory))
    model = plan.model
    parameters = sum(p.numel() for p in model.parameters())
    flops = count_passes(model) * model.flops_per_sample()

    # Describe the work of one GPU in a step, which does not depend on the number of GPUs.
    compute = flops * cfg.batch_per_gpu / (card.flops_16bit * cfg.mfu)
    width = 2 if train.runtime.parallel.reduce_dtype.value == "bf16" else 4
    step = Step(compute, parameters, width, model.depth + 1)

    # Add a row for each kind of parallelism and number of GPUs.
    rows: list[tuple[object, ...]] = [HEADS]
    verdicts = []
    for way in WAYS:
        good = []
        worse = []
        for gpus in cfg.gpus:
            if way == "hsdp" and (gpus <= GPUS_A_MACHINE or gpus % GPUS_A_MACHINE):
                continue
            memory = forecast(share_over_gpus(plan.question, way, gpus)).needs.total
            seconds = compute + time_exposed(way, gpus, step, card)
            efficiency = compute / seconds
            fits = memory < card.memory
            if efficiency < LEAST_EFFICIENCY:
                worse.append(gpus)
            elif fits:
                good.append(gpus)
            rows.append(
                (
                    way,
                    gpus,
                    f"{1e3 * seconds:.1f}",
                    f"{cfg.batch_per_gpu * gpus / seconds:.0f}",
                    f"{efficiency:.0%}",
                    f"{memory / GIB:.1f}",
                    "" if fits else "does not fit",
                )
            )
        verdicts.append(f"{way}: {describe_range(good, worse)}")

    lines = [
        f"{parameters / 1e6:.0f} M parameters, {flops / 1e9:.0f} GFLOP a sample and step, "
        f"{plan.kept / plan.question.samples / 2**20:.1f} MiB kept a sample",
        f"assumed: {cfg.hardware}, MFU {cfg.mfu:.0%} on one GPU, {cfg.batch_per_gpu} samples a "
        f"GPU, {GPUS_A_MACHINE} GPUs a machine; with fsdp {step.scatters} reduce-scatters a step",
        "",
        format_table(rows),
        "",
        *verdicts,
    ]
    return "\n".join(lines)


def share_over_gpus(question: Question, way: str, gpus: int) -> Question:
    """Returns the `Question` for a run on `gpus` GPUs with the parallelism `way`, from the question
    for one GPU. Each GPU keeps its batch, so the batch of the run grows."""
    parallel = replace(question.cfg.runtime.parallel, mode=ParallelMode(way))
    runtime = replace(question.cfg.runtime, parallel=parallel)
    batch_size = question.cfg.batch_size * gpus
    cfg = replace(question.cfg, batch_size=batch_size, runtime=runtime)
    return replace(question, cfg=cfg, gpus=gpus)


def describe_range(good: list[int], worse: list[int]) -> str:
    """Returns a phrase that says up to how many GPUs a kind of parallelism pays. `good` are the
    numbers of GPUs at which its efficiency (seconds of computation / seconds of a step) is at least
    `LEAST_EFFICIENCY` and the model fits the memory; `worse` are those at which the efficiency is
    lower."""
    if not good:
        return "does not pay, or does not fit, at any of these sizes"
    beyond = [gpus for gpus in worse if gpus > good[0]]
    stops = f"; at {min(beyond)} it is below {LEAST_EFFICIENCY:.0%}" if beyond else ""
    return f"pays up to {max(good)} GPUs, among the given numbers{stops}"


def find_bandwidth(gpus: int, card: Card) -> float:
    """Returns the bytes per second that pass through a ring of `gpus` GPUs. Each GPU is assumed to
    have its own network card; across machines, several rings use all network cards at once."""
    if gpus <= GPUS_A_MACHINE:
        return card.intra_bandwidth
    return min(card.intra_bandwidth, GPUS_A_MACHINE * card.inter_bandwidth)


def time_gather(size: float, gpus: int, card: Card) -> float:
    """Estimates the seconds of an all-gather or reduce-scatter over `gpus` GPUs; `size` is the
    bytes of the whole tensor. The GPUs form a ring, which the data passes in gpus - 1 hops."""
    if gpus == 1:
        return 0.0
    machines = ceil(gpus / GPUS_A_MACHINE)
    hops = (gpus - machines) * HOP_SECONDS + (machines - 1) * MACHINE_HOP_SECONDS
    return (gpus - 1) / gpus * size / find_bandwidth(gpus, card) + hops


def time_all_reduce(size: float, gpus: int, rate: float, buckets: int = 1) -> float:
    """Estimates the seconds of an all-reduce of `size` bytes over `gpus` GPUs at `rate` bytes per
    second: each GPU sends about 2 * `size` bytes, and each bucket passes a tree with 2 log2(gpus)
    hops."""
    if gpus == 1:
        return 0.0
    transfer = 2 * (gpus - 1) / gpus * size / rate
    return transfer + buckets * 2 * ceil(log2(gpus)) * MACHINE_HOP_SECONDS


class Step(NamedTuple):
    """Work of one GPU in a training step: its computation, and the sizes that determine its
    communication."""

    compute: float
    """Seconds that the GPU computes."""
    parameters: int
    width: int
    """Bytes of one gradient value as GPUs send it: 2 (bf16) or 4."""
    scatters: int
    """Number of reduce-scatters in a step with fsdp: one per block, and one for the root module."""


def time_exposed(way: str, gpus: int, step: Step, card: Card) -> float:
    """Estimates the seconds of a step in which a GPU waits for communication that no computation
    hides; `way` is ddp, fsdp or hsdp."""
    if gpus == 1:
        return 0.0
    forward = step.compute / 3
    backward = 2 * step.compute / 3
    gradients = float(step.width * step.parameters)
    if way == "ddp":
        buckets = ceil(gradients / BUCKET_BYTES)
        reduction = time_all_reduce(gradients, gpus, find_bandwidth(gpus, card), buckets)
        # The all-reduce of the last bucket starts after the backward pass, so no computation hides
        # it.
        last = reduction / buckets
        return max(0.0, reduction - last - backward) + last

    # fsdp and hsdp wrap `calls` modules: the blocks and the root. GPUs all-gather the parameters of
    # each module in the forward pass and again in the backward pass, and reduce-scatter its
    # gradients once.
    calls = step.scatters
    shards = gpus if way == "fsdp" else min(gpus, GPUS_A_MACHINE)
    one_gather = time_gather(4.0 * step.parameters / calls, shards, card)
    gathers = calls * one_gather
    reduction = calls * time_gather(gradients / calls, shards, card)
    # hsdp shards only within a machine, so after the reduce-scatter it all-reduces each shard
    # between the machines, through all network cards at once.
    if way == "hsdp":
        reduction += time_all_reduce(
            gradients / shards, gpus // shards, card.inter_bandwidth, calls
        )
    return one_gather + max(0.0, gathers - forward) + max(0.0, gathers + reduction - backward)
