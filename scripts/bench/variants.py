"""Variants of a training configuration, each trained, and timed in turn with its baseline.

    python -m scripts.bench techniques setting=s256
    python -m scripts.bench techniques setting=s256 model=dit_s out=docs/benchmarks/techniques_dit_s_h200_2026-11.json
    python -m scripts.bench mixers size=s batch_size=256 runtime=production
    python -m scripts.bench mixers size=b batch_size=64 data.height=64 data.width=64 runtime=production
    python -m scripts.bench precision setting=s256 steps=500
    python -m scripts.bench precision setting=tiny data=digits steps=500 seeds=[0,1,2]

`techniques`: each technique alone over eager, and removed from max: speed, memory, loss. A technique that cannot be had
on this machine is listed with the reason and not measured. `python -m scripts.bench readme` makes the README's table
from the result.

`mixers`: a whole training step of each mixer at equal parameters. 32×32 latents are 256 tokens, 64×64 latents 1,024.
Ratios are to attention (`dit`), round by round.

`precision`: fp32, bf16 and fp16 over several seeds: speed, loss on the training stream, loss held out, steps lost to
scaling. Guides disagree on which 16-bit type is better; this shows it for one model and data set, with the spread over
seeds. On data=synthetic there is nothing to learn but the classes' means: choose real latents for a verdict on quality.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from accel.ledger import UNUSED
from accel.precision import Precision
from accel.stack import TECHNIQUES
from scripts.bench.report import entries_table, publish
from scripts.bench.settings import BenchConfig, device_of, parse
from scripts.bench.timing import Spread, times_as_fast
from scripts.bench.workload import Workload, attempt, second_half, time_steps
from scripts.capabilities import override
from training.config.compose import CONF, compose
from training.evaluate import evaluate

MORE_WAYS = {"compile": ({"compile": True, "compile_mode": "max-autotune-no-cudagraphs"},)}
"""Technique -> ways in which it is measured beside those that it states itself."""
BASELINES = {"residual_in_fp32": ["runtime.precision=bf16", "runtime.residual_in_fp32=false"]}
"""Technique -> how its baseline differs from eager, where the residual is fp32 already and no block has 16 bits."""
ATTENTION = "dit"
PRECISIONS = ("fp32", "bf16", "fp16")
Trained = tuple[Workload, dict[str, Any]]
"""A workload after the steps that its losses are measured in, and the figures of these."""


@dataclass(frozen=True)
class MixersConfig(BenchConfig):
    """Keys of `mixers`."""

    size: str | None = None
    """xs, s, b, l or xl; null: s on a GPU, xs without one."""


@dataclass(frozen=True)
class PrecisionConfig(BenchConfig):
    """Keys of `precision`; each run trains `steps` steps, and a round of its timing is a tenth of that."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])


class Variant(NamedTuple):
    """A configuration, and the one that it is compared with; where both are the same, it is the baseline itself."""

    name: str
    overrides: list[str]
    baseline: list[str]
    reason: str | None
    """Why it cannot be had on this machine; then it is listed and not measured."""
    labels: dict[str, Any]
    """What else its entry says of it."""


def compare(variants: Iterable[Variant], cfg: BenchConfig, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """An entry for each variant: both are trained from the same seed on the same samples, then timed in turn.

    Variants in a row with the same baseline share it, so no more than two models are in memory. `held_out` evaluates
    each after `loss_steps` steps.
    """
    torch._dynamo.config.recompile_limit = 64  # many models pass through the same code
    words: list[str] = []
    baseline: Any = None
    for variant in variants:
        if variant.reason is None and variant.baseline != words:
            baseline, words = None, variant.baseline  # frees the last one before the next is built
            baseline = attempt(lambda words=words: trained(words, cfg.loss_steps, held_out))
        figures = {"reason": variant.reason} if variant.reason else measured(variant, baseline, cfg, held_out)
        shown = figures["reason"] if "reason" in figures else f"{figures['step_ms']:.2f} ms/step"
        print(f"{variant.name}: {shown}", flush=True)
        yield {"name": variant.name} | variant.labels | figures


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


def measured(variant: Variant, baseline: Trained | str, cfg: BenchConfig, held_out: bool) -> dict[str, Any]:
    """The figures of a variant beside its baseline, or the reason why one of them could not be built."""
    if isinstance(baseline, str):
        return {"reason": f"the baseline: {baseline}"}
    itself = variant.overrides == variant.baseline
    made = baseline if itself else attempt(lambda: trained(variant.overrides, cfg.loss_steps, held_out))
    if isinstance(made, str):
        return {"reason": made}
    (workload, figures), (other, other_figures) = made, baseline
    pair = {"own": workload} if itself else {"base": other, "own": workload}
    times = time_steps(pair, cfg.steps, cfg.repeats)
    own, base = times["own"], times.get("base", times["own"])
    return {
        **Spread.of(base).as_json("baseline_step_ms"),
        **workload.figures(own),
        "speed": times_as_fast(base, own),
        "parameters": sum(p.numel() for p in workload.model.parameters()),
        "tokens": workload.model.tokens,
        "baseline_memory_reserved_peak": other.memory_peak,
        **figures,
        "loss_deviation": figures["final_loss"] / other_figures["final_loss"] - 1.0,
        "baseline_not_on": other.missing(),
        "lost": [key for key in workload.missing() if key not in other.missing()],
        "ledger": {row.key: row.active for row in workload.ledger},
    }


def alone(overrides: list[str], device: torch.device) -> Iterator[Variant]:
    """Each technique in each of its ways over eager; what it cannot do without is in its baseline too."""
    for kind in TECHNIQUES:
        for way in (*kind.ways(), *MORE_WAYS.get(kind.key, ())):
            added = [override(key, value) for key, value in way.items() if key in (kind.key, *kind.options)]
            needed = [word for word in (override(*item) for item in way.items()) if word not in added]
            differs = ["runtime=eager", *BASELINES.get(kind.key, []), *needed]
            base = [*overrides, *differs]
            value = way[kind.key]
            labels = {"key": kind.key, "value": value, "baseline": differs}
            yield Variant(" ".join(added), [*base, *added], base, kind(value, device).unavailable(), labels)


def removed(overrides: list[str], device: torch.device) -> Iterator[Variant]:
    """max without each technique that it has and eager has not."""
    full = [*overrides, "runtime=max"]
    then, now = (compose([*overrides, f"runtime={name}"]).cfg.runtime for name in ("eager", "max"))
    for kind in TECHNIQUES:
        old, new = (getattr(value, "value", value) for value in (getattr(then, kind.key), getattr(now, kind.key)))
        if old != new:
            word = override(kind.key, old)
            yield Variant(f"max {word}", [*full, word], full, kind(new, device).unavailable(), {"key": kind.key})


def remark(entry: dict[str, Any]) -> str | None:
    """What the ledger says against the figures of a technique, if anything."""
    if "reason" in entry:
        return None
    if entry["lost"]:
        return f"not on: {', '.join(entry['lost'])}"
    if entry["key"] in entry["baseline_not_on"]:
        return "not on in the baseline"
    return "the model has no use for it" if entry["ledger"].get(entry["key"]) == UNUSED else None


def techniques(words: list[str]) -> None:
    """Each alone over eager, and each removed from max."""
    cfg, overrides = parse(BenchConfig, "techniques", words, __doc__ or "")
    device = device_of(overrides)
    columns = {
        "ms/step": "{step_ms:.2f}",
        "baseline": "{baseline_step_ms:.2f}",
        "speed": "×{speed:.2f}",
        "GiB": "{memory_reserved_peak:GiB}",
        "baseline GiB": "{baseline_memory_reserved_peak:GiB}",
        "loss": "{loss_deviation:+.0e}",
    }
    found = {
        "alone": list(compare(alone(overrides, device), cfg)),
        "removed": list(compare(removed(overrides, device), cfg)),
    }
    for e in (*found["alone"], *found["removed"]):
        e["remark"] = remark(e)
    texts = [f"each {name}\n{entries_table(columns, entries)}" for name, entries in found.items()]
    publish(cfg, overrides, device, found, *texts)


def families(size: str) -> list[str]:
    """All families that have the size, attention first."""
    found = sorted(file.stem.rpartition("_")[0] for file in (CONF / "model").glob(f"*_{size}.yaml"))
    if not found:
        raise ValueError(f"size={size}: there is no such size; choose xs, s, b, l or xl.")
    return [ATTENTION, *(name for name in found if name != ATTENTION)]


def mixers(words: list[str]) -> None:
    """One model of each family, with attention as the baseline of all."""
    cfg, overrides = parse(MixersConfig, "mixers", words, __doc__ or "")
    own = [word for word in overrides if not word.startswith("model")]
    device = device_of(own)
    cfg = replace(cfg, size=cfg.size or ("s" if device.type == "cuda" else "xs"))
    models = {family: [*own, f"model={family}_{cfg.size}"] for family in families(str(cfg.size))}
    variants = [Variant(family, model, models[ATTENTION], None, {}) for family, model in models.items()]
    columns = {
        "parameters": "{parameters}",
        "tokens": "{tokens}",
        "ms/step": "{step_ms:.2f}",
        "range": "{step_ms_min:.2f}–{step_ms_max:.2f}",
        "samples/s": "{samples_per_s:.0f}",
        "×attention": "{times_attention:.2f}",
        "MFU": "{mfu:.1%}",
        "GiB": "{memory_reserved_peak:GiB}",
    }
    entries = list(compare(variants, cfg))
    for e in entries:
        e["times_attention"] = e.get("speed")
        e["remark"] = f"not on: {', '.join(e['not_on'])}" if e.get("not_on") else None
    publish(cfg, overrides, device, {"mixers": entries}, entries_table(columns, entries))


def over_seeds(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry for all runs of a precision: median and range of each figure, and the steps lost by all together."""
    for run in runs:
        if "reason" in run:
            return {"name": name, "reason": run["reason"]}
        run["loss"] = run["final_loss"]
    entry: dict[str, Any] = {"name": name}
    for figure in ("step_ms", "loss", "eval_loss"):
        if runs[0][figure] is not None:
            entry |= Spread.of([run[figure] for run in runs]).as_json(figure)
    lost = {figure: sum(run[figure] for run in runs) for figure in ("skipped", "backed_off")}
    return {"eval_loss": None} | entry | lost | {"runs": runs}


def precision(words: list[str]) -> None:
    """Each precision from each seed, with fp32 from the same seed as its baseline."""
    cfg, overrides = parse(PrecisionConfig, "precision", words, __doc__ or "")
    if cfg.steps < 2 or not cfg.seeds:
        raise ValueError(f"steps={cfg.steps} and seeds={cfg.seeds} must be at least 2 steps and one seed.")
    device = device_of(overrides)
    variants = []
    for seed in cfg.seeds:
        models = {name: [*overrides, f"seed={seed}", f"runtime.precision={name}"] for name in PRECISIONS}
        for name, own in models.items():
            reason = None if name == "fp32" else Precision(name, device).unavailable()
            variants.append(Variant(name, own, models["fp32"], reason, {"seed": seed}))
    durations = replace(cfg, loss_steps=cfg.steps, steps=max(1, cfg.steps // 10))
    runs = list(compare(variants, durations, held_out=True))
    entries = [over_seeds(name, [run for run in runs if run["name"] == name]) for name in PRECISIONS]
    columns = {
        "ms/step": "{step_ms:.2f}",
        "loss": "{loss:.4f}",
        "range": "{loss_min:.4f}–{loss_max:.4f}",
        "eval loss": "{eval_loss:.4f}",
        "skipped": "{skipped}",
        "backed off": "{backed_off}",
    }
    text = f"median of {len(cfg.seeds)} seeds, {cfg.steps} steps\n{entries_table(columns, entries)}"
    publish(cfg, overrides, device, {"precisions": entries}, text)
