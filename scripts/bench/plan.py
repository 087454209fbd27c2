"""What `scripts.plan` predicts beside what is measured: memory over a grid of configurations.

    python -m scripts.bench plan setting=b256

Memory is the most that the allocator reserved, on a GPU; the prediction leaves the driver's context
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from scripts.bench.report import entries_table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig
from scripts.bench.workload import Workload, time_steps
from scripts.plan.memory import planned_bytes

LOWMEM = "runtime=lowmem"
GRID = {
    "eager": ["runtime=eager"],
    "eager bf16": ["runtime=eager", "runtime.precision=bf16"],
    "fast": ["runtime=fast"],
    "fast, 4 micro-batches": ["runtime=fast", "accumulation_steps=4"],
    "lowmem": [LOWMEM],
    "lowmem, every second block": [LOWMEM, "runtime.checkpoint_policy=every_2"],
    "lowmem, selective": [LOWMEM, "runtime.checkpoint_policy=selective"],
    "fast, Muon": ["runtime=fast", "optim=muon"],
    "fast, bf16 weights": ["runtime=fast", "runtime.weights=bf16"],
    "fast, offload": [
        "runtime=fast",
        "runtime.offload_optimizer=true",
        "runtime.offload_activations=true",
    ],
    "production": ["runtime=production"],
    "max": ["runtime=max"],
}


def measure(cfg: BenchConfig, overrides: list[str]) -> dict[str, Any]:
    """One configuration: bytes predicted and measured, and milliseconds."""
    workload = Workload(overrides)
    step_ms = time_steps({"own": workload}, cfg.steps, cfg.repeats)["own"]
    predicted = planned_bytes(workload.cfg, gpu=workload.device.type == "cuda")
    measured = workload.memory_peak
    return workload.figures(step_ms) | {
        "predicted_bytes": predicted,
        "memory_error": predicted / measured - 1.0 if measured else None,
    }


def plan(cfg: BenchConfig, overrides: list[str], device: torch.device) -> list[Row]:
    """A row for each configuration of the grid; those that compile with Inductor only where that is
    wanted."""
    wanted = {
        name: words
        for name, words in GRID.items()
        if cfg.inductor or words[0][8:] not in ("production", "max")
    }
    return [
        Row(name, partial(measure, cfg, [*overrides, *words]), 30) for name, words in wanted.items()
    ]


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    columns = {
        "predicted GiB": "{predicted_bytes:GiB}",
        "measured GiB": "{memory_reserved_peak:GiB}",
        "off by": "{memory_error:+.1%}",
        "measured ms": "{step_ms:.2f}",
    }
    return [entries_table(columns, entries)]


BENCHMARKS = {"plan": Benchmark(BenchConfig, plan, texts, __doc__ or "")}
