"""Variants of a training configuration, each trained, and timed in turn with its baseline.

    python -m scripts.bench techniques setting=s256
    python -m scripts.bench techniques setting=s32 model=mamba_s precisions=[bf16]
    python -m scripts.bench mixers size=s batch_size=256 runtime=production
    python -m scripts.bench mixers size=b batch_size=64 data.height=64 data.width=64
    runtime=production

`techniques`: each technique alone over eager, in fp32 and in bf16, and removed from max: speed,
memory, loss. Attention is measured in an attention model. A technique that cannot be had on this
machine is listed with the reason.

`mixers`: a whole training step of each mixer, with attention (`dit`) as the baseline: at equal
parameters as measured, and at equal FLOPs, where both are taken to slow down in proportion. 32×32
latents are 256 tokens, 64×64 latents 1,024.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from accel.ledger import UNUSED
from accel.stack import TECHNIQUES
from accel.techniques.precision import Precision
from common.errors import UserError
from scripts.bench.fitting import fitted_pairs
from scripts.bench.report import entries_table, fits
from scripts.bench.rows import LEFT_OUT, Benchmark, Row
from scripts.bench.settings import BenchConfig
from scripts.bench.workload import Kept, Workload, beside, second_half
from scripts.capabilities import override
from scripts.timing import NO_DIFFERENCE, difference
from training.config.compose import CONF, compose
from training.evaluate import evaluate
from training.memory import lasting_bytes

MORE_WAYS = {"compile": ({"compile": True, "compile_mode": "max-autotune-no-cudagraphs"},)}
"""Technique -> ways in which it is measured beside those that it states itself."""
MORE_BASELINE = {"residual_in_fp32": ["runtime.residual_in_fp32=false"]}
"""Technique -> how its baseline differs from eager, where the residual is fp32 already."""
ONLY_OVER = {"residual_in_fp32": "bf16", "precision": "fp32"}
"""Technique -> the only baseline over which it means something."""
ATTENTION = "dit"
PRECISIONS = ("fp32", "bf16", "fp16")
Trained = tuple[Workload, dict[str, Any]]
"""A workload after the steps that its losses are measured in, and the figures of these."""


@dataclass(frozen=True)
class TechniquesConfig(BenchConfig):
    """Keys of `techniques`."""

    precisions: list[str] = field(default_factory=lambda: ["fp32", "bf16"])
    """Of the eager baselines; each technique removed from max is measured with the last."""


@dataclass(frozen=True)
class MixersConfig(BenchConfig):
    """Keys of `mixers`."""

    size: str | None = None
    """xs, s, b, l or xl; null: s on a GPU, xs without one."""
    families: list[str] = field(default_factory=list)
    """Those that are compared with attention; empty: all."""


class Variant(NamedTuple):
    """A configuration, and the one that it is compared with; where both are the same, it is the
    baseline itself."""

    name: str
    overrides: list[str]
    baseline: list[str]
    reason: str | None
    """Why it cannot be had on this machine; then it is listed and not measured."""
    labels: dict[str, Any]
    """What else its entry says of it."""


def rows_of(
    variants: Iterator[Variant] | list[Variant], cfg: BenchConfig, held_out: bool = False
) -> Iterator[Row]:
    """A row for each variant: both are trained from the same seed on the same samples, then timed
    in turn.

    Variants in a row with the same baseline share it, so no more than two models are in memory.
    `held_out` evaluates each after `loss_steps` steps.
    """
    kept: Kept[Trained] = Kept()
    for variant in variants:
        compiles = bool(
            {"runtime.compile=true", "runtime=max", "runtime=production"} & {*variant.overrides}
        )
        reason = variant.reason or (LEFT_OUT if compiles and not cfg.inductor else None)
        if reason:
            yield Row(variant.name, partial(dict[str, Any], reason=reason), 0, variant.labels)
        else:
            seconds = 90 if compiles else 15
            yield Row(
                variant.name,
                partial(measured, variant, kept, cfg, held_out),
                seconds,
                variant.labels,
            )


def trained(overrides: list[str], steps: int, held_out: bool) -> Trained:
    """Builds a workload and trains `steps` steps; the loss is the mean of their second half."""
    workload = Workload(overrides)
    workload.prepare()
    outputs = [workload.training.take_step() for _ in range(steps)]
    figures: dict[str, Any] = {
        "final_loss": second_half([output.loss for output in outputs]),
        "skipped": sum(int(output.skipped) for output in outputs),
        "backed_off": sum(int(output.backed_off) for output in outputs),
    }
    if held_out:
        figures["eval_loss"] = evaluate(workload.training).get("eval_loss")
    return workload, figures


def measured(
    variant: Variant, kept: Kept[Trained], cfg: BenchConfig, held_out: bool
) -> dict[str, Any]:
    """The figures of a variant beside its baseline."""
    other, other_figures = kept.get(
        variant.baseline, lambda: trained(variant.baseline, cfg.loss_steps, held_out)
    )
    itself = variant.overrides == variant.baseline
    workload, figures = (
        (other, other_figures) if itself else trained(variant.overrides, cfg.loss_steps, held_out)
    )
    return {
        **beside(other, workload, cfg),
        "parameters": sum(p.numel() for p in workload.model.parameters()),
        "tokens": workload.model.tokens,
        "flops_a_sample": workload.state.meter.train_flops,
        **figures,
        "loss_deviation": figures["final_loss"] / other_figures["final_loss"] - 1.0,
        "lost": [key for key in workload.missing() if key not in other.missing()],
        "ledger": {row.key: row.active for row in workload.ledger},
        **{
            f"{kind}_bytes": size
            for kind, size in lasting_bytes(workload.training)._asdict().items()
        },
    }


def unavailable(precision: str, device: torch.device) -> str | None:
    """Why a precision cannot be had on the device."""
    return None if precision == "fp32" else Precision(precision, device).unavailable()


def with_attention(overrides: list[str]) -> list[str]:
    """The overrides with an attention model of the same size where theirs has no attention."""
    if "Attention" in str(compose(overrides).cfg.model):
        return overrides
    return [
        f"model={ATTENTION}_{word.rpartition('_')[2]}" if word.startswith("model=") else word
        for word in overrides
    ]


def alone(cfg: TechniquesConfig, overrides: list[str], device: torch.device) -> Iterator[Variant]:
    """Each technique in each of its ways over eager; what it cannot do without is in its baseline
    too."""
    for kind in TECHNIQUES:
        own = with_attention(overrides) if kind.key == "attention" else overrides
        wanted = (ONLY_OVER[kind.key],) if kind.key in ONLY_OVER else PRECISIONS
        for precision in (p for p in cfg.precisions if p in wanted):
            eager = [
                "runtime=eager",
                override("precision", precision),
                *MORE_BASELINE.get(kind.key, []),
            ]
            for way in (*kind.ways(), *MORE_WAYS.get(kind.key, ())):
                added = [
                    override(key, value)
                    for key, value in way.items()
                    if key in (kind.key, *kind.options)
                ]
                needed = [
                    word for word in (override(*item) for item in way.items()) if word not in added
                ]
                base = [*own, *eager, *needed]
                labels = {
                    "part": "alone",
                    "key": kind.key,
                    "over": precision,
                    "baseline": [*eager, *needed],
                }
                reason = kind(way[kind.key], device).unavailable() or unavailable(precision, device)
                yield Variant(
                    f"{' '.join(added)} over {precision}", [*base, *added], base, reason, labels
                )


def removed(cfg: TechniquesConfig, overrides: list[str], device: torch.device) -> Iterator[Variant]:
    """max without each technique that it has and eager has not."""
    full = [*overrides, "runtime=max"]
    then, now = (compose([*overrides, f"runtime={name}"]).cfg.runtime for name in ("eager", "max"))
    for kind in TECHNIQUES if "bf16" in cfg.precisions else ():  # max is in bf16
        old, new = (
            getattr(value, "value", value)
            for value in (getattr(then, kind.key), getattr(now, kind.key))
        )
        if old != new:
            word = override(kind.key, old)
            reason = kind(new, device).unavailable()
            yield Variant(
                f"max {word}", [*full, word], full, reason, {"part": "removed", "key": kind.key}
            )


def plan_techniques(
    cfg: TechniquesConfig, overrides: list[str], device: torch.device
) -> Iterator[Row]:
    if not cfg.precisions or not {*cfg.precisions} <= {*PRECISIONS}:
        raise UserError(
            f"precisions=[{','.join(cfg.precisions)}]: choose some of {', '.join(PRECISIONS)}."
        )
    eager = [
        [*overrides, "runtime=eager", override("precision", precision)]
        for precision in cfg.precisions
    ]
    size, said = fitted_pairs([*overrides, "runtime=max"], eager, device)
    overrides = [*overrides, f"batch_size={size}"]
    for row in rows_of([*alone(cfg, overrides, device), *removed(cfg, overrides, device)], cfg):
        yield row._replace(labels=row.labels | ({"fit": said} if said else {}))


def remark(entry: dict[str, Any]) -> str | None:
    """What the ledger says against the figures of a technique, if anything; then, whether there is
    a difference."""
    if "speed" not in entry:
        return None
    if entry["lost"]:
        return f"not on: {', '.join(entry['lost'])}"
    if entry["key"] in entry["baseline_not_on"]:
        return "not on in the baseline"
    if entry["ledger"].get(entry["key"]) == UNUSED:
        return "the model has no use for it"
    return NO_DIFFERENCE if difference(entry, "speed") == NO_DIFFERENCE else None


def techniques_texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    columns = {
        "ms/step": "{step_ms:.2f}",
        "baseline": "{baseline_step_ms:.2f}",
        "speed": "×{speed:.2f}",
        "quartiles": "{speed_q1:.2f}–{speed_q3:.2f}",
        "GiB": "{memory_reserved_peak:GiB}",
        "baseline GiB": "{baseline_memory_reserved_peak:GiB}",
        "loss": "{loss_deviation:+.0e}",
    }
    parts = {
        part: [e | {"remark": remark(e)} for e in entries if e["part"] == part]
        for part in ("alone", "removed")
    }
    return [
        *fits(entries),
        *(
            f"each {part}\n{entries_table(columns, found)}"
            for part, found in parts.items()
            if found
        ),
    ]


def models_of(size: str, families: Sequence[str]) -> dict[str, str]:
    """Family -> its model of the size, attention first; ValueError for what there is not."""
    found = sorted(file.stem.rpartition("_")[0] for file in (CONF / "model").glob(f"*_{size}.yaml"))
    if not found:
        raise UserError(f"size={size}: there is no such size; choose xs, s, b, l or xl.")
    if not {*families} <= {*found}:
        raise UserError(f"families=[{','.join(families)}]: choose some of {', '.join(found)}.")
    others = [name for name in found if name != ATTENTION and (not families or name in families)]
    return {family: f"model={family}_{size}" for family in (ATTENTION, *others)}


def plan_mixers(cfg: MixersConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    """One model of each family, with attention as the baseline of all."""
    own = [word for word in overrides if not word.startswith("model")]
    models = models_of(cfg.size or ("s" if device.type == "cuda" else "xs"), cfg.families)
    size, said = fitted_pairs(
        [*own, models[ATTENTION]], [[*own, model] for model in models.values()], device
    )
    own = [*own, f"batch_size={size}"]
    labels = {"fit": said} if said else {}
    base = [*own, models[ATTENTION]]
    yield from rows_of(
        [Variant(name, [*own, model], base, None, labels) for name, model in models.items()], cfg
    )


def mixers_texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    columns = {
        "parameters": "{parameters}",
        "tokens": "{tokens}",
        "GFLOP a sample": "{gflop:.3g}",
        "ms/step": "{step_ms:.2f}",
        "samples/s": "{samples_per_s:.1f}",
        "×attention": "{speed:.2f}",
        "quartiles": "{speed_q1:.2f}–{speed_q3:.2f}",
        "at equal FLOPs": "{at_equal_flops:.2f}",
        "MFU": "{mfu:.1%}",
        "GiB": "{memory_reserved_peak:GiB}",
    }
    base = next(
        (e["flops_a_sample"] for e in entries if e["name"] == ATTENTION and "speed" in e), None
    )
    shown = []
    for e in entries:
        if "speed" in e:
            more = {"gflop": e["flops_a_sample"] / 1e9, "at_equal_flops": None}
            if base:
                more["at_equal_flops"] = e["speed"] * e["flops_a_sample"] / base
            missing = f"not on: {', '.join(e['not_on'])}" if e["not_on"] else None
            same = e["name"] != ATTENTION and difference(e, "speed") == NO_DIFFERENCE
            e = e | more | {"remark": missing or (NO_DIFFERENCE if same else None)}
        shown.append(e)
    return [*fits(entries), entries_table(columns, shown)]


BENCHMARKS = {
    "techniques": Benchmark(TechniquesConfig, plan_techniques, techniques_texts, __doc__ or ""),
    "mixers": Benchmark(MixersConfig, plan_mixers, mixers_texts, __doc__ or ""),
}
