"""The machine itself: what it can do and how fast, and which fused kernels win on it.

    python -m scripts.bench doctor
    python -m scripts.bench calibration setting=s256 runtime=production

`doctor` is `python -m scripts.doctor --measure`, kept. `calibration` tries the fused kernels as a
run of each model would before its first step, and keeps what it would choose; the run that follows
finds it in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from scripts import doctor
from scripts.bench.report import entries_table, table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig
from scripts.timing import rates

FAMILIES = ("mamba", "ssd_mlp", "zigzag", "conv", "dit")


def plan_doctor(cfg: BenchConfig, overrides: list[str], device: torch.device) -> list[Row]:
    return [
        Row("machine", lambda: {"found": doctor.examine()}, 5),
        Row("rates", lambda: {"rates": rates(device)}, 15),
    ]


def doctor_texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    found = [doctor.as_text(e["found"]) for e in entries if "found" in e]
    measured = [
        ("median of 10", ""),
        *((name, f"{rate:.1f}") for e in entries for name, rate in e.get("rates", {}).items()),
    ]
    failed = [e for e in entries if "error" in e]
    return [
        *found,
        *([table(measured)] if len(measured) > 1 else []),
        *([entries_table({}, failed)] if failed else []),
    ]


def plan_calibration(cfg: BenchConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    """The setting's model in each family, at its size and batch."""
    size = next(word for word in overrides if word.startswith("model=")).rpartition("_")[2]
    for family in FAMILIES:
        words = [
            f"model={family}_{size}" if word.startswith("model=") else word for word in overrides
        ]
        yield Row(family, partial(calibrate, words, device), 60)


def calibrate(words: list[str], device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"reason": "the fused kernels need an NVIDIA GPU"}
    return {"kernels": doctor.kernels(words)}


def calibration_texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    rows: list[Sequence[object]] = [("model", "key", "chosen", "")]
    for e in entries:
        rows += [
            (e["name"], k["key"], "on" if k["on"] else "off", k["why"])
            for k in e.get("kernels", ())
        ]
        rows += (
            [(e["name"], "", "", e.get("error") or e["reason"])]
            if {"error", "reason"} & e.keys()
            else []
        )
    return [table(rows)]


BENCHMARKS = {
    "doctor": Benchmark(BenchConfig, plan_doctor, doctor_texts, __doc__ or ""),
    "calibration": Benchmark(BenchConfig, plan_calibration, calibration_texts, __doc__ or ""),
}
