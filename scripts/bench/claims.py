"""What guides to fast training promise, and what is measured here.

    python -m scripts.bench claims setting=s256
    python -m scripts.bench claims setting=s256 model=dit_s out=docs/benchmarks/claims_dit_s_h200_2026-11.json

A claim is confirmed where the measured figure lies in the claimed range or beyond it, refuted where it falls short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.bench.antipatterns import each_step
from scripts.bench.naive import PREFETCHED, ItemsInMemory, StreamOrder
from scripts.bench.report import table, write_result
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.step import phases_of
from scripts.bench.timing import fresh_compiler, interleaved, rates, times_as_fast
from scripts.bench.workload import Workload, time_steps
from scripts.capabilities import capabilities
from training.config.compose import compose
from training.environment import pick_device


class Bench(NamedTuple):
    """What a claim is measured with."""

    overrides: list[str]
    cfg: BenchConfig
    device: torch.device

    def workload(self, *words: str) -> Workload:
        return Workload(" ".join(words), [*self.overrides, *words])

    def speed(self, base: list[str], added: list[str]) -> float:
        """How many times as fast a step is with `added`."""
        pair = {"base": self.workload(*base), "added": self.workload(*base, *added)}
        times = time_steps(pair, self.cfg.steps, self.cfg.repeats)
        return times_as_fast(times["base"], times["added"])


def resident_over_dataloader(bench: Bench) -> float:
    """Batches a second: indexing on the device, against a DataLoader of samples in memory and a copy."""
    loader: Any = bench.workload("runtime=eager").loader
    items = ItemsInMemory(loader.train.latents.cpu().float(), loader.train.labels.cpu())
    workers = 4 if bench.device.type == "cuda" else 0
    order = StreamOrder(len(items), seed=0)
    other = iter(torch.utils.data.DataLoader(items, loader.batch_size, sampler=order, num_workers=workers))

    def use_up(name: str) -> None:
        for _ in range(PREFETCHED * workers if name == "items" else 0):
            next(other)

    def read_resident() -> None:
        for _ in range(20):
            next(loader)

    def read_items() -> None:
        for _ in range(20):
            for tensor in next(other):
                tensor.to(bench.device)

    read_items()
    runs = {"items": read_items, "resident": read_resident}
    taken = interleaved(runs, bench.cfg.repeats, bench.device, prepare=use_up)
    return times_as_fast(taken["items"], taken["resident"])


def bf16_over_fp32_products(bench: Bench) -> float:
    found = rates(bench.device)
    return found["bf16_product_tflops"] / found["fp32_product_tflops"]


def fused_adamw_saves(bench: Bench) -> float:
    """Per cent of the optimizer phase: norm, clipping, decision, update."""
    pair = [bench.workload("runtime=eager", f"runtime.fused_adamw={on}") for on in ("false", "true")]
    rounds = [[phases_of(w, bench.cfg.steps)[0]["optimizer"] for w in pair] for _ in range(bench.cfg.repeats)]
    return 100.0 * (1.0 - 1.0 / times_as_fast(*zip(*rounds, strict=True)))


def checkpointing_slows(bench: Bench) -> float:
    """Per cent of the step."""
    return 100.0 * (1.0 / bench.speed(["runtime=fast"], ["runtime.gradient_checkpointing=true"]) - 1.0)


def checkpointing_saves(bench: Bench) -> float:
    """Per cent of the reserved memory."""
    on, off = (bench.workload("runtime=fast", f"runtime.gradient_checkpointing={on}") for on in ("true", "false"))
    assert on.memory_peak is not None
    assert off.memory_peak is not None
    return 100.0 * (1.0 - on.memory_peak / off.memory_peak)


def regional_compiles(bench: Bench) -> float:
    """Warm-up of the whole model as one graph over that of its blocks, nothing cached."""
    seconds = []
    for scope in ("model", "blocks"):
        with fresh_compiler():
            seconds.append(bench.workload("runtime=production", f"runtime.compile_scope={scope}").warm_up_seconds)
    return seconds[0] / seconds[1]


def empty_cache_slows(bench: Bench) -> float:
    workload = bench.workload("runtime=fast")
    runs = {
        "wrong": each_step(workload, bench.cfg.steps, lambda loss: torch.cuda.empty_cache()),
        "right": each_step(workload, bench.cfg.steps, lambda loss: None),
    }
    taken = interleaved(runs, bench.cfg.repeats, bench.device)
    return times_as_fast(taken["wrong"], taken["right"])


class Claim(NamedTuple):
    """What is promised: from `low` to `high`, in `unit`."""

    text: str
    low: float
    high: float
    unit: str
    measure: Callable[[Bench], float]
    needs: str | None = None
    """The override of the technique without which it cannot be measured."""
    cuda: bool = False


CLAIMS = (
    Claim("resident indexing over a DataLoader", 10, 50, "×", resident_over_dataloader),
    Claim("TF32, a step", 2, 3, "×", lambda b: b.speed(["runtime=eager"], ["runtime.tf32=true"]), "runtime.tf32=true"),
    Claim("bf16 over fp32, matrix products", 8, 16, "×", bf16_over_fp32_products, "runtime.precision=bf16"),
    Claim("fused AdamW saves of norm, clipping and update", 10, 20, "%", fused_adamw_saves),
    Claim("checkpointing slows a step by", 10, 10, "%", checkpointing_slows),
    Claim("checkpointing saves memory", 50, 50, "%", checkpointing_saves, cuda=True),
    Claim(
        "compiling makes a step faster by",
        10,
        30,
        "%",
        lambda b: 100.0 * (b.speed(["runtime=fast"], ["runtime.compile=true"]) - 1.0),
    ),
    Claim("compiling blocks, not the model, is quicker to start", 7, 7, "×", regional_compiles),
    Claim(
        "a CUDA graph at a small batch",
        5,
        5,
        "×",
        lambda b: b.speed(["runtime=fast", "batch_size=8"], ["runtime.cuda_graph=true"]),
        "runtime.cuda_graph=true",
    ),
    Claim("empty_cache() every step slows a step", 1, 2, "×", empty_cache_slows, cuda=True),
)


def judged(claim: Claim, measured: float) -> str:
    """The verdict, with a fifth of tolerance; of a cost, less is said as such and refutes nothing."""
    low, high = claim.low / 1.2, claim.high * 1.2
    if "slows" in claim.text:
        return "costs less" if measured < low else "costs more" if measured > high else "confirmed"
    return "refuted: less" if measured < low else "confirmed: more" if measured > high else "confirmed"


def main(words: list[str]) -> None:
    cfg, overrides = parse(BenchConfig, "claims", words, __doc__ or "")
    device = pick_device(compose(overrides).cfg.runtime.device.value)
    torch._dynamo.config.recompile_limit = 64
    bench = Bench(overrides, cfg, device)
    cannot = {c.word: c.reason for c in capabilities(device)}
    entries: list[dict[str, Any]] = []
    for claim in CLAIMS:
        reason = cannot.get(claim.needs or "") or (
            "needs an NVIDIA GPU" if claim.cuda and device.type != "cuda" else None
        )
        claimed = f"{claim.low}–{claim.high} {claim.unit}" if claim.low != claim.high else f"{claim.low} {claim.unit}"
        found: dict[str, Any] = {"name": claim.text, "claimed": claimed}
        if reason:
            entries.append(found | {"reason": f"not measured: {reason}"})
            continue
        measured = claim.measure(bench)
        entries.append(found | {"measured": measured, "unit": claim.unit, "verdict": judged(claim, measured)})
        print(f"{claim.text}: {measured:.2f} {claim.unit}", flush=True)
    rows: list[tuple[object, ...]] = [("claim", "claimed", "measured here", "")]
    for e in entries:
        value = f"{e['measured']:.2f} {e['unit']}" if "measured" in e else None
        rows.append((e["name"], e["claimed"], value, e.get("verdict") or e["reason"]))
    print(f"\n{table(rows)}")
    assert cfg.out is not None
    settings = {"setting": cfg.setting, "overrides": overrides, "steps": cfg.steps}
    write_result(Path(cfg.out), settings | {"claims": entries}, device, table(rows))
