"""The ladder: from what a newcomer writes to runtime=max, one technique more per rung.

    python -m scripts.bench ladder
    python -m scripts.bench ladder setting=s32 model=dit_s

Rung 0 stands in two honest variants: items already in memory, and one npy file per sample
(scripts/bench/naive.py says what they do). Every rung starts from the same weights, sees the same
samples in the same order, and is timed in turn with rung 0 in memory; `×before` divides two of
these ratios. What this machine cannot do is left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.bench.fitting import fitted
from scripts.bench.naive import NaiveLoop
from scripts.bench.report import Bar, entries_table, fits
from scripts.bench.rows import LEFT_OUT, Benchmark, Row
from scripts.bench.settings import BenchConfig, scratch
from scripts.bench.workload import Kept, Runnable, Workload, beside
from scripts.capabilities import capabilities
from scripts.timing import NO_DIFFERENCE, difference, fresh_compiler

RUNG_0 = "0 newcomer, items in memory"
COMPILE = "runtime.compile=true"
TECHNIQUES = (
    ("+ tf32", "runtime.tf32=true"),
    ("+ bf16", "runtime.precision=bf16"),
    ("+ fused AdamW, no host sync", "runtime.fused_adamw=true"),
    ("+ cuDNN autotuner", "runtime.cudnn_benchmark=true"),
    ("+ fused add+norm", "runtime.fused_add_norm=true"),
    ("+ fused scan", "runtime.fused_scan=true"),
    ("+ fused convolution", "runtime.fused_conv=true"),
    ("+ fused SwiGLU", "runtime.fused_swiglu=true"),
    ("+ fused RoPE", "runtime.fused_rope=true"),
    ("+ compiled blocks", COMPILE),
    ("+ CUDA graph = max", "runtime.cuda_graph=true"),
)
"""What each rung above the framework's eager one adds."""


@dataclass(frozen=True)
class LadderConfig(BenchConfig):
    """Keys of the ladder."""

    num_workers: int = 4
    """Workers of the newcomer's DataLoader."""


def newcomer(overrides: list[str], workers: int, item_every_step: bool, storage: Any) -> Runnable:
    return NaiveLoop(
        overrides, storage=storage, item_every_step=item_every_step, num_workers=workers
    )


def ours(words: list[str]) -> Runnable:
    with fresh_compiler():  # so that each rung's warm-up is that of a first start
        return Workload(words)


def climb(
    reference: Kept[tuple[Runnable, float]],
    cfg: LadderConfig,
    rung_0: Callable[[], Runnable],
    make: Callable[[], Runnable],
) -> dict[str, Any]:
    """The figures of a rung beside rung 0, which is built once."""

    def build(rung: Callable[[], Runnable]) -> tuple[Runnable, float]:
        built = rung()
        return built, built.final_loss(cfg.loss_steps)

    base, base_loss = reference.get("rung 0", lambda: build(rung_0))
    own, loss = (base, base_loss) if make is rung_0 else build(make)
    figures = beside(base, own, cfg)
    return figures | {
        "final_loss": loss,
        "ledger": own.ledger.as_dict() or None,
        "loss_deviation": loss / base_loss - 1,
    }


def plan(cfg: LadderConfig, overrides: list[str], device: torch.device) -> list[Row]:
    size, said = fitted([[*overrides, "runtime=eager"], [*overrides, "runtime=max"]], device)
    overrides = [*overrides, f"batch_size={size}"]
    rung_0 = partial(newcomer, overrides, cfg.num_workers, True, "memory")
    measure = partial(climb, Kept(), cfg, rung_0)

    def from_files() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=scratch(cfg)) as folder:
            return measure(partial(newcomer, overrides, cfg.num_workers, True, Path(folder)))

    found: list[tuple[str, Callable[[], dict[str, Any]], float]] = [
        ("0 newcomer, a file per sample", from_files, 60),
        (RUNG_0, partial(measure, rung_0), 20),
        (
            "+ latents on the device",
            partial(measure, partial(newcomer, overrides, 0, True, "resident")),
            20,
        ),
        (
            "+ no loss.item() each step",
            partial(measure, partial(newcomer, overrides, 0, False, "resident")),
            20,
        ),
    ]
    cannot = {c.word: c.reason for c in capabilities(device)}
    words = [*overrides, "runtime=eager"]
    compiles = False
    for name, added in (("+ this framework, eager", ""), *TECHNIQUES):
        reason = cannot.get(added) or (None if cfg.inductor or added != COMPILE else LEFT_OUT)
        compiles |= added == COMPILE
        if reason is None:
            words = [*words, added] if added else words
            found.append((name, partial(measure, partial(ours, words)), 90 if compiles else 40))
        else:
            found.append((name, partial(dict[str, Any], reason=reason), 0))
    return [Row(*row, {"fit": said} if said else {}) for row in found]


def rungs(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with its ratio to the rung before, and what the ledger and that ratio's quartiles say of
    it."""
    found = []
    before = None
    for e in entries:
        if "speed" in e:
            ends = (("", ""), ("_q1", "_q3"), ("_q3", "_q1"))
            steps = {
                f"times_before{a}": e[f"speed{a}"] / before[f"speed{b}"] if before else None
                for a, b in ends
            }
            missing = f"not on: {', '.join(e['not_on'])}" if e["not_on"] else None
            before = e
            e = e | steps
            same = e["times_before"] is not None and difference(e, "times_before") == NO_DIFFERENCE
            e["remark"] = missing or (NO_DIFFERENCE if same else None)
        found.append(e)
    return found


COLUMNS = {
    "ms/step": "{step_ms:.2f}",
    "quartiles": "{step_ms_q1:.2f}–{step_ms_q3:.2f}",
    "samples/s": "{samples_per_s:.1f}",
    "×before": "{times_before:.2f}",
    "×rung 0": "{speed:.2f}",
    "its quartiles": "{speed_q1:.2f}–{speed_q3:.2f}",
    "MFU": "{mfu:.1%}",
    "GiB": "{memory_reserved_peak:GiB}",
    "warm-up s": "{warm_up_s:.1f}",
    "loss": "{loss_deviation:+.0e}",
}


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    return [*fits(entries), entries_table(COLUMNS, rungs(entries))]


def bars(entries: Sequence[dict[str, Any]]) -> tuple[str, list[Bar]]:
    """The rungs that were on."""
    on = [e for e in entries if "speed" in e and not e["not_on"]]
    drawn = [
        Bar(e["name"], e["speed"], f"x{e['speed']:.2f}  {e['samples_per_s']:.1f}/s") for e in on
    ]
    return "times rung 0, and samples/s", drawn


BENCHMARKS = {"ladder": Benchmark(LadderConfig, plan, texts, __doc__ or "", bars)}
