"""The ladder: from what a newcomer writes to runtime=max, one technique more per rung.

    python -m scripts.bench ladder
    python -m scripts.bench ladder setting=s32 model=dit_s out=bench/dit_s32.json

Rung 0 stands in two honest variants: items already in memory, and one npy file per sample (scripts/bench/naive.py says
what they do). Every rung starts from the same weights and sees the same samples in the same order. Writes JSON and a
bar chart beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.naive import NaiveLoop
from scripts.bench.report import Bar, bar_chart, entries_table, publish
from scripts.bench.settings import BenchConfig, device_of, parse
from scripts.bench.timing import Spread, fresh_compiler, times_as_fast
from scripts.bench.workload import Workload, attempt, time_steps
from training.environment import describe_environment

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


class Rung(NamedTuple):
    """One rung: how to build it."""

    name: str
    make: Callable[[], Any]


def rungs(overrides: list[str], num_workers: int, folder: Path) -> Iterator[Rung]:
    """From rung 0 upwards."""

    def naive(name: str, **how: Any) -> Rung:
        return Rung(name, lambda: NaiveLoop(name, overrides, num_workers=num_workers, folder=folder, **how))

    def ours(name: str, added: list[str]) -> Rung:
        def make() -> Workload:
            with fresh_compiler():  # so that each rung's warm-up is that of a first start
                return Workload(name, [*overrides, "runtime=eager", *added])

        return Rung(name, make)

    yield naive("0 newcomer, a file per sample", storage="npy")
    yield naive(RUNG_0, storage="memory")
    yield naive("+ latents on the device", storage="resident")
    yield naive("+ no loss.item() each step", storage="resident", item_every_step=False)
    yield ours("+ this framework, eager", [])
    added: list[str] = []
    for name, words in TECHNIQUES:
        added = [*added, *words]
        yield ours(name, added)


def climb(cfg: LadderConfig, overrides: list[str]) -> list[dict[str, Any]]:
    """Measures every rung; one that runs out of memory is named and left out."""
    built: dict[str, Any] = {}
    failed: dict[str, str] = {}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rung in rungs(overrides, cfg.num_workers, Path(folder)):
            made = attempt(rung.make)
            if isinstance(made, str):
                failed[rung.name] = made
                continue
            print(f"built {rung.name} in {made.warm_up_seconds:.1f} s", flush=True)
            built[rung.name] = made
            losses[rung.name] = made.final_loss(cfg.loss_steps)
        times = time_steps(built, cfg.steps, cfg.repeats)
    entries = [entry(built[name], Spread.of(times[name]), losses[name]) for name in built]
    base = next((e for e in entries if e["name"] == RUNG_0), entries[0])
    before: set[str] = set()
    for i, found in enumerate(entries):
        found["confirmed"] = None if found["ledger"] is None else set(found["not_on"]) <= before
        found["remark"] = {True: "confirms", False: "not on here", None: None}[found["confirmed"]]
        before |= set(found["not_on"])
        own = times[found["name"]]
        found["times_rung_0"] = times_as_fast(times[base["name"]], own)
        found["times_before"] = times_as_fast(times[entries[i - 1]["name"]], own) if i else None
        found["loss_deviation"] = found["final_loss"] / base["final_loss"] - 1.0
    return entries + [{"name": name, "error": error} for name, error in failed.items()]


def entry(workload: Any, spread: Spread, loss: float) -> dict[str, Any]:
    return {
        "name": workload.name,
        **spread.as_json("step_ms"),
        "samples_per_s": 1e3 * workload.batch_size / spread.median,
        "mfu": workload.mfu(spread.median / 1e3),
        "memory_reserved_peak": workload.memory_peak,
        "warm_up_s": workload.warm_up_seconds,
        "final_loss": loss,
        "not_on": workload.missing(),
        "ledger": workload.ledger.as_dict() if isinstance(workload, Workload) else None,
    }


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
    measured = [e for e in entries if "error" not in e]
    bars = [
        Bar(
            e["name"],
            e["samples_per_s"],
            f"{e['samples_per_s']:.0f}  x{e['times_rung_0']:.2f}" + ("" if e["confirmed"] is not False else "  not on"),
            e["confirmed"] is False,
        )
        for e in measured
    ]
    hardware = describe_environment(device)["hardware"]
    print(bar_chart(file.with_suffix(".png"), f"samples/s, and times rung 0; {hardware}", bars))
