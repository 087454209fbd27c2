"""fp32, bf16 and fp16 over several seeds: speed, loss on the training stream, loss held out, steps lost to scaling.

    python -m scripts.bench precision setting=s256 steps=500
    python -m scripts.bench precision setting=tiny data=digits steps=500 seeds=[0,1,2]

Guides disagree on which 16-bit type is better; this shows it for one model and data set, with the spread over seeds.
On data=synthetic there is nothing to learn but the classes' means: choose real latents for a verdict on quality.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel.precision import Precision
from scripts.bench.report import table, write_result
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.timing import Spread, seconds
from scripts.bench.workload import Workload
from training.config.compose import compose
from training.environment import pick_device
from training.evaluate import evaluate

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class PrecisionConfig(BenchConfig):
    """Keys of the comparison."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])


def one_run(precision: str, seed: int, overrides: list[str], steps: int) -> dict[str, Any]:
    """Trains `steps` steps and evaluates the averages."""
    workload = Workload(precision, [*overrides, f"runtime.precision={precision}", f"seed={seed}"])
    meter, half = workload.state.meter, steps // 2
    meter.restart()

    def train(count: int) -> None:
        for _ in range(count):
            batches = [next(workload.loader) for _ in range(workload.cfg.accumulation_steps)]
            workload.step.schedule(workload.state.samples)
            meter.update(workload.step(batches))
            workload.state.advance(workload.batch_size)

    train(steps - half)
    early = meter.report(workload.step.lr)
    taken = seconds(lambda: train(half), workload.device)
    late = meter.report(workload.step.lr)
    held_out = evaluate(workload.training)
    return {
        "seed": seed,
        "step_ms": 1e3 * taken / half,
        "loss": late["loss"],
        "eval_loss": held_out.get("eval_loss"),
        "skipped": early["skipped"] + late["skipped"],
        "backed_off": early["backed_off"] + late["backed_off"],
    }


def main(words: list[str]) -> None:
    cfg, overrides = parse(PrecisionConfig, "precision", words, __doc__ or "")
    if cfg.steps < 2 or not cfg.seeds:
        raise ValueError(f"steps={cfg.steps} and seeds={cfg.seeds} must be at least 2 steps and one seed.")
    device = pick_device(compose(overrides).cfg.runtime.device.value)
    entries: list[dict[str, Any]] = []
    for precision in PRECISIONS:
        reason = Precision(precision, device).unavailable() if precision != "fp32" else None
        if reason:
            entries.append({"name": precision, "reason": reason})
            continue
        runs = [one_run(precision, seed, overrides, cfg.steps) for seed in cfg.seeds]
        figures: dict[str, Any] = {}
        for name in ("step_ms", "loss", "eval_loss"):
            if all(run[name] is not None for run in runs):
                figures |= Spread.of([run[name] for run in runs]).as_json(name)
        lost = {name: sum(run[name] for run in runs) for name in ("skipped", "backed_off")}
        entries.append({"name": precision, **figures, **lost, "runs": runs})
    rows: list[tuple[object, ...]] = [
        ("precision", "ms/step", "loss", "range", "eval loss", "skipped", "backed off", "")
    ]
    for e in entries:
        if "reason" in e:
            rows.append((e["name"], *[None] * 6, e["reason"]))
            continue
        spread = f"{e['loss_min']:.4f}–{e['loss_max']:.4f}"
        held_out = f"{e['eval_loss']:.4f}" if "eval_loss" in e else None
        lost = (e["skipped"], e["backed_off"])
        rows.append((e["name"], f"{e['step_ms']:.2f}", f"{e['loss']:.4f}", spread, held_out, *lost, ""))
    print(f"\nmedian of {len(cfg.seeds)} seeds, {cfg.steps} steps\n{table(rows)}")
    assert cfg.out is not None
    settings = {"setting": cfg.setting, "overrides": overrides, "steps": cfg.steps, "seeds": cfg.seeds}
    write_result(cfg.out, settings | {"precisions": entries}, device, table(rows))
