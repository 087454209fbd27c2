"""Each technique alone over eager, and removed from max: speed, memory, loss.

    python -m scripts.bench techniques setting=s256
    python -m scripts.bench techniques setting=s256 model=dit_s out=docs/benchmarks/techniques_dit_s_h200_2026-11.json

Every variant is measured in turn with its own baseline, from the same weights on the same samples. A technique that
cannot be had on this machine is listed with the reason and not measured. `python -m scripts.bench readme` makes the
README's table from the result.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from accel.ledger import UNUSED
from accel.stack import TECHNIQUES
from scripts.bench.report import gib, table, write_result
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.timing import Spread, times_as_fast
from scripts.bench.workload import Workload, attempt, time_steps
from scripts.capabilities import capabilities
from training.config.compose import compose
from training.config.schema import RuntimeConfig
from training.environment import pick_device

WAYS = {
    "gradient_checkpointing": [
        ["runtime.checkpoint_policy=blocks"],
        ["runtime.checkpoint_policy=every_2"],
        ["runtime.checkpoint_policy=selective"],
    ],
    "compile": [
        ["runtime.compile_scope=blocks"],
        ["runtime.compile_scope=model"],
        ["runtime.compile_mode=max-autotune-no-cudagraphs"],
    ],
}
"""Technique -> the ways in which it is measured, where there is more than one."""
NEEDS = {"cuda_graph": ["runtime.fused_adamw=true"]}
"""What a technique cannot do without; its baseline has it too."""


def compare(
    baseline: Workload, baseline_loss: float, name: str, overrides: list[str], cfg: BenchConfig
) -> dict[str, Any]:
    """One variant beside its baseline: both measured now, in turn."""
    variant = attempt(lambda: Workload(name, overrides))
    if isinstance(variant, str):
        return {"name": name, "reason": variant}
    loss = variant.final_loss(cfg.loss_steps)
    times = time_steps({"baseline": baseline, "variant": variant}, cfg.steps, cfg.repeats)
    return {
        "name": name,
        **Spread.of(times["variant"]).as_json("step_ms"),
        **{f"baseline_{k}": v for k, v in Spread.of(times["baseline"]).as_json("step_ms").items()},
        "speed": times_as_fast(times["baseline"], times["variant"]),
        "memory_reserved_peak": variant.memory_peak,
        "baseline_memory_reserved_peak": baseline.memory_peak,
        "final_loss": loss,
        "loss_deviation": loss / baseline_loss - 1.0,
        "not_on": variant.missing(),
        "lost": [key for key in variant.missing() if key not in baseline.missing()],
        "ledger": {row.key: row.active for row in variant.ledger},
    }


def with_loss(name: str, overrides: list[str], cfg: BenchConfig) -> tuple[Workload, float]:
    workload = Workload(name, overrides)
    return workload, workload.final_loss(cfg.loss_steps)


def alone(overrides: list[str], cfg: BenchConfig, device: torch.device) -> list[dict[str, Any]]:
    """Each available technique over eager. `residual_in_fp32` is on in eager: there it is measured off, in bf16."""
    entries = []
    eager = [*overrides, "runtime=eager"]
    baseline, loss = with_loss("eager", eager, cfg)
    for capability in capabilities(device):
        key, word = capability.key, capability.word
        if capability.reason is not None:
            entries.append({"name": word, "key": key, "value": capability.value, "reason": capability.reason})
            continue
        own, own_loss, base = baseline, loss, eager
        if key == "residual_in_fp32":
            base = [*eager, "runtime.precision=bf16", "runtime.residual_in_fp32=false"]
        elif key in NEEDS:
            base = [*eager, *NEEDS[key]]
        if base is not eager:
            own, own_loss = with_loss("baseline", base, cfg)
        for way in WAYS.get(key, [[]]):
            name = " ".join([word, *way])
            found = compare(own, own_loss, name, [*base, word, *way], cfg)
            entries.append({"key": key, "value": capability.value, "baseline": base[len(overrides) :]} | found)
    return entries


def removed(overrides: list[str], cfg: BenchConfig) -> list[dict[str, Any]]:
    """max without each technique that it has and eager has not."""
    full = [*overrides, "runtime=max"]
    baseline, loss = with_loss("max", full, cfg)
    then, now = (compose([*overrides, f"runtime={name}"]).cfg.runtime for name in ("eager", "max"))
    entries = []
    techniques = {kind.key for kind in TECHNIQUES}
    for field in fields(RuntimeConfig):
        old, new = getattr(then, field.name), getattr(now, field.name)
        if field.name not in techniques or old == new or field.name in baseline.missing():
            continue
        word = f"runtime.{field.name}={str(getattr(old, 'value', old)).lower()}"
        entries.append({"key": field.name} | compare(baseline, loss, f"max {word}", [*full, word], cfg))
    return entries


def comment(entry: dict[str, Any]) -> str | None:
    """What the ledger says against the figures of an entry, if anything."""
    if entry["lost"]:
        return f"not on: {', '.join(entry['lost'])}"
    return "the model has no use for it" if entry["ledger"].get(entry["key"]) == UNUSED else None


def shown(entries: list[dict[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = [("variant", "ms/step", "baseline", "speed", "GiB", "baseline", "loss", "ledger")]
    for e in entries:
        if "reason" in e:
            rows.append((e["name"], *[None] * 6, e["reason"]))
            continue
        rows.append(
            (
                e["name"],
                f"{e['step_ms']:.2f}",
                f"{e['baseline_step_ms']:.2f}",
                f"×{e['speed']:.2f}",
                gib(e["memory_reserved_peak"]),
                gib(e["baseline_memory_reserved_peak"]),
                f"{e['loss_deviation']:+.0e}",
                comment(e),
            )
        )
    return table(rows)


def main(words: list[str]) -> None:
    cfg, overrides = parse(BenchConfig, "techniques", words, __doc__ or "")
    torch._dynamo.config.recompile_limit = 64  # many models pass through the same code
    device = pick_device("auto")
    over_eager = alone(overrides, cfg, device)
    texts = [f"each alone, over eager\n{shown(over_eager)}"]
    print(f"\n{texts[0]}", flush=True)
    from_max = removed(overrides, cfg)
    texts.append(f"each removed from max\n{shown(from_max)}")
    print(f"\n{texts[1]}", flush=True)
    assert cfg.out is not None
    settings = {"setting": cfg.setting, "overrides": overrides, "steps": cfg.steps}
    write_result(cfg.out, settings | {"alone": over_eager, "removed": from_max}, device, *texts)
