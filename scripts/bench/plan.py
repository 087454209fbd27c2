"""What `scripts.plan` predicts beside what is measured: memory and step time over a grid of
configurations.

    python -m scripts.bench plan setting=b256

Memory is the most that the allocator reserved, on a GPU; the prediction leaves the driver's context
out. Times of a GPU are predicted from the rates of `python -m scripts.doctor --measure`, or a data
sheet's where that never ran.
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
from training.components import latents_of
from training.forecast import Forecast
from training.hardware import this_card
from training.memory import memory_of

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
    """One configuration: bytes and milliseconds, predicted and measured."""
    workload = Workload(overrides)
    device = workload.device
    spec = workload.loader.spec
    step_ms = time_steps({"own": workload}, cfg.steps, cfg.repeats)["own"]
    figures = workload.figures(step_ms)
    memory = memory_of(device)
    resident = latents_of(workload.cfg.data, workload.cfg.seed, memory)[1]
    found = Forecast(workload.cfg, spec, resident=resident, gpu=device.type == "cuda")
    card = this_card(device, memory)
    time = found.time(card) if card else None
    bytes_predicted = found.needs.total - found.needs.context
    measured = workload.memory_peak
    return figures | {
        "predicted_bytes": bytes_predicted,
        "phase": found.phase,
        "memory_error": bytes_predicted / measured - 1.0 if measured else None,
        "predicted_ms_best": 1e3 * time.best if time else None,
        "predicted_ms_worst": 1e3 * time.worst if time else None,
        "time_error": 1e3 * time.middle / figures["step_ms"] - 1.0 if time else None,
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
        "in": "{phase}",
        "predicted ms": "{predicted_ms_best:.2f}–{predicted_ms_worst:.2f}",
        "measured ms": "{step_ms:.2f}",
        "middle off by": "{time_error:+.0%}",
    }
    return [entries_table(columns, entries)]


BENCHMARKS = {"plan": Benchmark(BenchConfig, plan, texts, __doc__ or "")}
