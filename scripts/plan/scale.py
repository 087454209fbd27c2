"""`python -m scripts.plan scale`: step time and memory of each way to use N GPUs, and where each
stops paying.

python -m scripts.plan scale model=ssd_mlp_xl data=synthetic
python -m scripts.plan scale model=mamba_b data=synthetic gpus=[1,8,64,1024] batch_per_gpu=64
hardware=a100
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.errors import UserError
from scripts.plan.network import GPUS_A_MACHINE, collectives, exposed
from scripts.tables import table
from training.components import latents_of
from training.forecast import Forecast
from training.hardware import CARDS, GIB, Card
from training.weights.adapter_base import settled

PAYS = 0.8
"""A way to scale pays as long as N GPUs do at least this share of N times the work of one."""
WAYS = ("ddp", "fsdp", "hsdp")


@dataclass(frozen=True)
class ScaleConfig:
    """What to predict; any other word is an override of the training configuration."""

    gpus: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 64, 256, 1024])
    batch_per_gpu: int = 32
    hardware: str = "h200"
    mfu: float | None = None
    """Model FLOPs utilisation of one GPU, from a run (metrics.jsonl) or `bench step`; null: the
    middle of the plan's range."""


class Row(NamedTuple):
    """One way on N GPUs."""

    way: str
    gpus: int
    seconds: float
    memory: float
    efficiency: float


def known_card(hardware: str) -> Card:
    """The card of a name; ValueError for one that is not in the table."""
    if hardware not in CARDS:
        raise UserError(f"hardware={hardware} is not known; choose one of {', '.join(CARDS)}.")
    return CARDS[hardware]


def scale(cfg: ScaleConfig, words: list[str]) -> str:
    """The table of all ways, and what each is good for."""
    card = known_card(cfg.hardware)
    if (
        not cfg.gpus
        or min(cfg.gpus) < 1
        or cfg.batch_per_gpu < 1
        or not (cfg.mfu is None or 0.0 < cfg.mfu <= 1.0)
    ):
        least = f"gpus={cfg.gpus} and batch_per_gpu={cfg.batch_per_gpu} must be at least 1"
        raise UserError(f"{least}, mfu={cfg.mfu} above 0 and at most 1.")
    train = replace(settled(words).cfg, batch_size=cfg.batch_per_gpu, accumulation_steps=1)
    spec, resident = latents_of(train.data, train.seed, card.memory)
    one = Forecast(train, spec, resident=resident)
    model = one.model
    counted_at = max(2, *cfg.gpus)
    parameters = sum(p.numel() for p in model.parameters())
    flops = 3.0 * model.flops_per_sample()
    compute = (
        one.time(card).middle
        if cfg.mfu is None
        else flops * cfg.batch_per_gpu / (card.half * cfg.mfu)
    )
    counts = collectives(model.depth, counted_at)
    narrow = 2 if train.runtime.parallel.reduce_dtype.value == "bf16" else 4
    rows: list[Row] = []
    for way in WAYS:
        for gpus in cfg.gpus:
            if way != "hsdp" or (gpus > GPUS_A_MACHINE and gpus % GPUS_A_MACHINE == 0):
                lost = exposed(
                    way, gpus, compute, parameters, narrow, card, counts["reduce_scatter"]
                )
                memory = one.on(gpus, way).needs.total
                rows.append(Row(way, gpus, compute + lost, memory, compute / (compute + lost)))
    shown: list[tuple[object, ...]] = [
        ("way", "GPUs", "ms/step", "samples/s", "of ideal", "GiB a GPU", "")
    ]
    for way, gpus, seconds, memory, efficiency in rows:
        rate = cfg.batch_per_gpu * gpus / seconds
        fits = "" if memory < card.memory else "does not fit"
        shown.append(
            (
                way,
                gpus,
                f"{1e3 * seconds:.1f}",
                f"{rate:.0f}",
                f"{efficiency:.0%}",
                f"{memory / GIB:.1f}",
                fits,
            )
        )
    mfu = flops * cfg.batch_per_gpu / (compute * card.half)
    lines = [
        f"{parameters / 1e6:.0f} M parameters, {flops / 1e9:.0f} GFLOP a sample and step, "
        f"{one.kept / one.samples / 2**20:.1f} MiB kept a sample",
        f"assumed: {cfg.hardware}, MFU {mfu:.0%} on one GPU{' (predicted)' * (cfg.mfu is None)}, "
        f"{cfg.batch_per_gpu} samples a GPU, {GPUS_A_MACHINE} GPUs a machine; counted at "
        f"{counted_at} GPUs with fsdp: {dict(counts)}",
        "",
        table(shown),
        "",
        *(verdict(way, [row for row in rows if row.way == way], card) for way in WAYS),
    ]
    return "\n".join(lines)


def verdict(way: str, found: list[Row], card: Card) -> str:
    good = [row.gpus for row in found if row.efficiency >= PAYS and row.memory < card.memory]
    bad = [row.gpus for row in found if row.efficiency < PAYS]
    if not good:
        return f"{way}: does not pay, or does not fit, at any of these sizes"
    stops = (
        f"; at {min(g for g in bad if g > good[0])} it is below {PAYS:.0%}"
        if any(g > good[0] for g in bad)
        else ""
    )
    return f"{way}: pays up to {max(good)} GPUs of those asked for{stops}"
