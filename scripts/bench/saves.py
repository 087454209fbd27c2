"""What saving costs: the same steps with no checkpoint, with one written in the background, and in
the foreground.

    python -m scripts.bench saves setting=b256 runtime=production

A round is `steps` steps with one save before the first. `stall_ms` is how long the call of `save`
took; what a background save costs the steps beside it shows in `step_ms`. The first save of each
way, which makes its buffers, is not counted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from scripts.bench.report import entries_table, with_difference
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig, scratch
from scripts.bench.workload import Kept, Workload
from scripts.timing import Spread, synchronise
from training.assemble import describe_run
from training.checkpoint.find import complete
from training.checkpoint.save import Checkpoints


def one_round(
    workload: Workload, checkpoints: Checkpoints | None, described: dict[str, Any], steps: int
) -> list[float]:
    """Seconds of the whole round, of the call of `save`, and of what was still to be written after
    the last step."""
    synchronise(workload.device)
    began = time.perf_counter()
    if checkpoints is not None:
        checkpoints.save(workload.state, described)
    stalled = time.perf_counter() - began
    workload.run(steps)
    synchronise(workload.device)
    taken = time.perf_counter() - began
    if checkpoints is not None:
        checkpoints.finish()
    return [taken, stalled, time.perf_counter() - began - taken]


def measure(
    cfg: BenchConfig, kept: Kept[Workload], overrides: list[str], in_background: bool
) -> dict[str, Any]:
    """Rounds of steps that begin with a save, in turn with rounds without."""
    workload = kept.get("workload", lambda: Workload(overrides))
    described = describe_run(workload.composed, workload.loader.spec, workload.ledger)
    parent = scratch(cfg)
    try:
        ways = {"own": Checkpoints(parent, in_background=in_background), "no save": None}
        rounds: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(cfg.repeats + 1):
            for name in list(ways) if number % 2 else reversed(ways):
                found = one_round(workload, ways[name], described, cfg.steps)
                rounds[name] += [found] if number else []
        size = sum(file.stat().st_size for file in complete(parent)[-1].iterdir())
    finally:
        shutil.rmtree(parent)
    base = [taken for taken, _, _ in rounds["no save"]]
    taken, stalled, rest = (list(column) for column in zip(*rounds["own"], strict=True))
    return {
        **Spread.of([1e3 * s for s in stalled]).as_json("stall_ms"),
        **Spread.of([1e3 * t / cfg.steps for t in base]).as_json("baseline_step_ms"),
        **Spread.of([1e3 * t / cfg.steps for t in taken]).as_json("step_ms"),
        **Spread.of_ratio(taken, base).as_json("times_as_long"),
        "written_after_s": Spread.of(rest).median,
        "bytes": size,
        "steps": cfg.steps,
    }


def plan(cfg: BenchConfig, overrides: list[str], device: torch.device) -> list[Row]:
    kept: Kept[Workload] = Kept()
    ways = {"background": True, "foreground": False}
    return [
        Row(name, partial(measure, cfg, kept, overrides, way), 40) for name, way in ways.items()
    ]


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    columns = {
        "MiB": "{mib:.1f}",
        "stall ms": "{stall_ms:.1f}",
        "one in steps": "{steps}",
        "ms/step": "{step_ms:.2f}",
        "without": "{baseline_step_ms:.2f}",
        "slower": "×{times_as_long:.3f}",
        "quartiles": "{times_as_long_q1:.3f}–{times_as_long_q3:.3f}",
        "written after": "{written_after_s:.2f} s",
    }
    measured = [e | {"mib": e["bytes"] / 2**20} if "bytes" in e else e for e in entries]
    return [entries_table(columns, with_difference(measured, "times_as_long"))]


BENCHMARKS = {"saves": Benchmark(BenchConfig, plan, texts, __doc__ or "")}
