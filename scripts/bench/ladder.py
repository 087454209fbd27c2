"""The ladder: from what a newcomer writes to runtime=max, one technique more per rung.

    python -m scripts.bench ladder
    python -m scripts.bench ladder setting=s32 model=dit_s out=bench/dit_s32.json

Rung 0 stands in two honest variants: items already in memory, and one npy file per sample (scripts/bench/naive.py says
what they do). Every rung starts from the same weights and sees the same samples in the same order. Writes JSON and a
bar chart beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.naive import NaiveLoop
from scripts.bench.report import Bar, bar_chart, entries_table, publish
from scripts.bench.settings import BenchConfig, device_of, parse
from scripts.bench.timing import fresh_compiler, times_as_fast
from scripts.bench.workload import Runnable, Workload, attempt, time_steps

RUNG_0 = "0 newcomer, items in memory"
TECHNIQUES = (
    ("+ tf32", ["runtime.tf32=true"]),
    ("+ bf16", ["runtime.precision=bf16"]),
    ("+ fused AdamW, no host sync", ["runtime.fused_adamw=true"]),
    ("+ cuDNN autotuner", ["runtime.cudnn_benchmark=true"]),
    ("+ fused add+norm", ["runtime.fused_add_norm=true"]),
    ("+ fused scan", ["runtime.fused_scan=true"]),
    ("+ fused convolution", ["runtime.fused_conv=true"]),
    ("+ compiled blocks", ["runtime.compile=true"]),
    ("+ CUDA graph = max", ["runtime.cuda_graph=true"]),
)
"""What each rung above the framework's eager one adds."""


@dataclass(frozen=True)
class LadderConfig(BenchConfig):
    """Keys of the ladder."""

    num_workers: int = 4
    """Workers of the newcomer's DataLoader."""


def rungs(overrides: list[str], num_workers: int, folder: Path) -> dict[str, Callable[[], Runnable]]:
    """What builds each rung, from rung 0 upwards."""

    def ours(words: list[str]) -> Workload:
        with fresh_compiler():  # so that each rung's warm-up is that of a first start
            return Workload(words)

    newcomers: dict[str, dict[str, Any]] = {
        "0 newcomer, a file per sample": {"storage": folder},
        RUNG_0: {"storage": "memory"},
        "+ latents on the device": {"storage": "resident"},
        "+ no loss.item() each step": {"storage": "resident", "item_every_step": False},
    }
    found: dict[str, Callable[[], Runnable]] = {
        name: partial(NaiveLoop, overrides, num_workers=num_workers, **how) for name, how in newcomers.items()
    }
    words = [*overrides, "runtime=eager"]
    for name, added in (("+ this framework, eager", []), *TECHNIQUES):
        words = [*words, *added]
        found[name] = partial(ours, words)
    return found


def climb(cfg: LadderConfig, overrides: list[str]) -> list[dict[str, Any]]:
    """Measures every rung; one that runs out of memory is named and left out."""
    built: dict[str, Runnable] = {}
    failed: list[dict[str, Any]] = []
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in rungs(overrides, cfg.num_workers, Path(folder)).items():
            made = attempt(make)
            if isinstance(made, str):
                failed.append({"name": name, "error": made})
                continue
            print(f"built {name} in {made.warm_up_seconds:.1f} s", flush=True)
            built[name] = made
            losses[name] = made.final_loss(cfg.loss_steps)
        times = time_steps(built, cfg.steps, cfg.repeats)
    base = RUNG_0 if RUNG_0 in built else next(iter(built))
    entries: list[dict[str, Any]] = []
    before: set[str] = set()
    for name, rung in built.items():
        confirmed = set(rung.missing()) <= before if rung.ledger else None
        before |= set(rung.missing())
        entries.append(
            {
                "name": name,
                **rung.figures(times[name]),
                "final_loss": losses[name],
                "ledger": rung.ledger.as_dict() or None,
                "confirmed": confirmed,
                "remark": {True: "confirms", False: "not on here", None: None}[confirmed],
                "times_rung_0": times_as_fast(times[base], times[name]),
                "times_before": times_as_fast(times[entries[-1]["name"]], times[name]) if entries else None,
                "loss_deviation": losses[name] / losses[base] - 1.0,
            }
        )
    return entries + failed


COLUMNS = {
    "ms/step": "{step_ms:.2f}",
    "range": "{step_ms_min:.2f}–{step_ms_max:.2f}",
    "samples/s": "{samples_per_s:.0f}",
    "×before": "{times_before:.2f}",
    "×rung 0": "{times_rung_0:.2f}",
    "MFU": "{mfu:.1%}",
    "GiB": "{memory_reserved_peak:GiB}",
    "warm-up s": "{warm_up_s:.1f}",
    "loss": "{loss_deviation:+.0e}",
}


def main(words: list[str]) -> None:
    cfg, overrides = parse(LadderConfig, "ladder", words, __doc__ or "")
    entries = climb(cfg, overrides)
    device = device_of(overrides)
    file = publish(cfg, overrides, device, {"rungs": entries}, entries_table(COLUMNS, entries))
    bars = []
    for e in (e for e in entries if "error" not in e):
        pale = e["confirmed"] is False
        note = f"{e['samples_per_s']:.0f}  x{e['times_rung_0']:.2f}{'  not on' if pale else ''}"
        bars.append(Bar(e["name"], e["samples_per_s"], note, pale))
    bar_chart(file, "samples/s, and times rung 0", device, bars)
