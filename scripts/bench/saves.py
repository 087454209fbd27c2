"""What saving costs: the same steps with no checkpoint, with one written in the background, and in the foreground.

    python -m scripts.bench saves setting=b256 runtime=production

A round is `steps` steps with one save before the first. `stall_ms` is how long the call of `save` took; what a
background save costs the steps beside it shows in `step_ms`. The first save of each way, which makes its buffers, is
not counted.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.bench.report import entries_table, publish
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.timing import Spread, synchronise, times_as_fast
from scripts.bench.workload import Workload
from training.assemble import describe_run
from training.checkpoint.find import complete
from training.checkpoint.save import Checkpoints


def one_round(
    workload: Workload, checkpoints: Checkpoints | None, described: dict[str, Any], steps: int
) -> list[float]:
    """Seconds of the whole round, of the call of `save`, and of what was still to be written after the last step."""
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


def main(words: list[str]) -> None:
    cfg, overrides = parse(BenchConfig, "saves", words, __doc__ or "")
    workload = Workload(overrides)
    described = describe_run(workload.composed, workload.loader.spec, workload.ledger)
    parent = Path(tempfile.mkdtemp(prefix="saves-", dir="."))
    try:
        ways: dict[str, Checkpoints | None] = {
            "no save": None,
            "background": Checkpoints(parent / "background", in_background=True),
            "foreground": Checkpoints(parent / "foreground"),
        }
        rounds: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(cfg.repeats + 1):
            for name in list(ways) if number % 2 else reversed(ways):
                found = one_round(workload, ways[name], described, cfg.steps)
                rounds[name] += [found] if number else []
        size = sum(file.stat().st_size for file in complete(parent / "background")[-1].iterdir())
    finally:
        shutil.rmtree(parent)
    entries: list[dict[str, Any]] = []
    base = [taken for taken, _, _ in rounds["no save"]]
    for name, found in rounds.items():
        taken, stalled, rest = (list(column) for column in zip(*found, strict=True))
        figures = Spread.of([1e3 * s for s in stalled]).as_json("stall_ms")
        figures |= Spread.of([1e3 * t / cfg.steps for t in taken]).as_json("step_ms")
        figures |= {"times_as_long": times_as_fast(taken, base), "written_after_s": Spread.of(rest).median}
        entries.append({"name": name, **figures})
    columns = {
        "stall ms": "{stall_ms:.1f}",
        "ms/step": "{step_ms:.2f}",
        "slower": "×{times_as_long:.3f}",
        "written after": "{written_after_s:.2f} s",
    }
    head = f"{size / 2**20:.1f} MiB a checkpoint, one in {cfg.steps} steps, median of {cfg.repeats}"
    found = {"bytes": size, "ways": entries}
    publish(cfg, overrides, workload.device, found, f"{head}\n{entries_table(columns, entries)}")
