"""A profiler trace of a few steps, to be opened in https://ui.perfetto.dev.

    python -m scripts.bench trace setting=s32 runtime=fast steps=3

Prints the ops that took most of the time.
"""

from __future__ import annotations

from pathlib import Path

import torch

from scripts.bench.settings import BenchConfig, parse
from scripts.bench.workload import Workload
from scripts.timing import profiler_activities, synchronise


def main(words: list[str]) -> None:
    cfg, overrides = parse(BenchConfig, "trace", words, __doc__ or "")
    workload = Workload(overrides)
    with torch.profiler.profile(
        activities=profiler_activities(), record_shapes=True, acc_events=True
    ) as profiler:
        workload.run(cfg.steps)
        synchronise(workload.device)
    order = "self_cuda_time_total" if workload.device.type == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=50))
    folder = Path(cfg.out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{cfg.name}.json"
    profiler.export_chrome_trace(str(file))
    print(file)
