"""Losses over several seeds, of precisions and of measures against too little memory.

    python -m scripts.bench precision setting=tiny data=digits steps=500 seeds=[0,1,2]
    python -m scripts.bench memory setting=tiny data=digits model=mamba_xs batch_size=64 steps=500

`precision`: fp32, bf16 and fp16: speed, loss on the training stream, loss held out, steps lost to
scaling. Guides disagree on which 16-bit type is better; this shows it for one model and data set,
with the spread over seeds.

`memory`: each optimizer, bf16 weights with both roundings, fp8 and both offloads, beside AdamW:
also bytes a parameter, counted from the tensors. Those of `SEEDED` from every seed, the others from
the first. `pretend=true` trains on a CPU what only a GPU gains from: its losses and bytes hold, its
times say nothing.

On data=synthetic there is nothing to learn but the classes' means: choose real latents for a
verdict on quality.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from accel.stack import TECHNIQUES
from common.errors import UserError
from scripts.bench.report import entries_table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig
from scripts.bench.variants import PRECISIONS, Variant, rows_of, unavailable
from scripts.capabilities import pretended
from scripts.timing import Spread
from training.components import runtime_values
from training.config.compose import compose

SMALL_STATES = ("adamw_8bit", "adamw_4bit", "adamw_fp8", "adafactor", "muon", "sgd")
MEASURES = {
    "adamw": [],
    **{name: [f"optim={name}"] for name in SMALL_STATES},
    "bf16 weights, stochastic": ["runtime.weights=bf16"],
    "bf16 weights, kahan": ["runtime.weights=bf16", "runtime.rounding=kahan"],
    "bf16 weights, adamw_8bit": ["runtime.weights=bf16", "optim=adamw_8bit"],
    "fp8": ["runtime.precision=fp8"],
    "offload_optimizer": ["runtime.offload_optimizer=true"],
    "offload_activations": ["runtime.offload_activations=true"],
}
"""Name -> overrides."""
SEEDED = ("adamw", "adamw_8bit", "muon", "bf16 weights, stochastic", "bf16 weights, kahan")


@dataclass(frozen=True)
class SeedsConfig(BenchConfig):
    """Keys of both; each run trains `steps` steps, and a round of its timing is a tenth of that."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])


@dataclass(frozen=True)
class MemoryConfig(SeedsConfig):
    """Keys of `memory`."""

    pretend: bool = False
    """Measures what this machine cannot have, too."""


def seeded(cfg: SeedsConfig, variants: list[Variant]) -> Iterator[Row]:
    """A row for each variant and seed; ValueError for too few of either."""
    if cfg.steps < 2 or not cfg.seeds:
        raise UserError(
            f"steps={cfg.steps} and seeds={cfg.seeds} must be at least 2 steps and one seed."
        )
    durations = replace(cfg, loss_steps=cfg.steps, steps=max(1, cfg.steps // 10))
    for row in rows_of(variants, durations, held_out=True):
        yield row._replace(seconds=row.seconds + cfg.steps / 20)


def plan_precision(cfg: SeedsConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    """Each precision from each seed, with fp32 from the same seed as its baseline."""
    variants = []
    for seed in cfg.seeds:
        models = {
            name: [*overrides, f"seed={seed}", f"runtime.precision={name}"] for name in PRECISIONS
        }
        for name, own in models.items():
            labels = {"precision": name, "seed": seed}
            reason = unavailable(name, device)
            variants.append(Variant(f"{name}, seed {seed}", own, models["fp32"], reason, labels))
    yield from seeded(cfg, variants)


def refused(words: list[str], device: torch.device) -> str | None:
    """Why one of the techniques that these words switch on cannot be had on the device."""
    before, after = (runtime_values(compose(some).cfg.runtime) for some in ([], words))
    on = [kind for kind in TECHNIQUES if kind.key in after and after[kind.key] != before[kind.key]]
    return next(filter(None, (kind(after[kind.key], device).unavailable() for kind in on)), None)


def plan_memory(cfg: MemoryConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    """Each measure, with AdamW from the same seed as its baseline."""
    variants = []
    for seed in cfg.seeds:
        base = [*overrides, f"seed={seed}"]
        for name, words in MEASURES.items():
            if seed == cfg.seeds[0] or name in SEEDED:
                reason = None if cfg.pretend else refused(words, device)
                labels = {"measure": name, "seed": seed}
                variants.append(
                    Variant(f"{name}, seed {seed}", [*base, *words], base, reason, labels)
                )
    for row in seeded(cfg, variants):
        yield row._replace(measure=pretended(row.measure)) if cfg.pretend else row


def by(label: str, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for all seeds of a label: median and range of each figure, and the steps lost by
    all together."""
    shown = []
    for name in dict.fromkeys(e[label] for e in entries):
        runs = [e for e in entries if e[label] == name]
        good = [run for run in runs if "speed" in run]
        if not good:
            shown.append(runs[0] | {"name": name})
            continue
        entry: dict[str, Any] = good[0] | {"name": name, "seeds": len(good), "eval_loss": None}
        for figure, key in (
            ("step_ms", "step_ms"),
            ("loss", "final_loss"),
            ("eval_loss", "eval_loss"),
        ):
            if good[0][key] is not None:
                entry |= Spread.of([run[key] for run in good]).as_json(figure)
        shown.append(
            entry
            | {figure: sum(run[figure] for run in good) for figure in ("skipped", "backed_off")}
        )
    return shown


LOSSES = {
    "seeds": "{seeds}",
    "ms/step": "{step_ms:.2f}",
    "loss": "{loss:.4f}",
    "range": "{loss_min:.4f}–{loss_max:.4f}",
    "eval loss": "{eval_loss:.4f}",
    "skipped": "{skipped}",
}


def precision_texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    return [
        "median over "
        f"seeds\n{entries_table({**LOSSES, 'backed off': '{backed_off}'}, by('precision', entries))}"
    ]


def memory_texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    kinds = {
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "on_host": "on the host",
    }
    columns = {title: f"{{{kind}_each:.2f}}" for kind, title in kinds.items()} | LOSSES
    shown = [
        e
        | (
            {f"{kind}_each": e[f"{kind}_bytes"] / e["parameters"] for kind in kinds}
            if "parameters" in e
            else {}
        )
        for e in by("measure", entries)
    ]
    return [
        "bytes a parameter; averages take 4 more; median over "
        f"seeds\n{entries_table(columns, shown)}"
    ]


BENCHMARKS = {
    "precision": Benchmark(SeedsConfig, plan_precision, precision_texts, __doc__ or ""),
    "memory": Benchmark(MemoryConfig, plan_memory, memory_texts, __doc__ or ""),
}
