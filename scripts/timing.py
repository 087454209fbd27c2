"""Clocks. A GPU works asynchronously, so a host clock is read only after the device has
finished."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch._inductor.config


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds from an idle device to an idle device."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def summarise(name: str, values: Sequence[float]) -> dict[str, float]:
    """Repeated measurements in figures: `name` (the median), `name_min`, `name_max`, `name_q1`,
    `name_q3`, and how many they are, `n`."""
    low, q1, median, q3, high = np.quantile(values, (0.0, 0.25, 0.5, 0.75, 1.0)).tolist()
    ends = {"min": low, "max": high, "q1": q1, "q3": q3}
    return {name: median, **{f"{name}_{e}": value for e, value in ends.items()}, "n": len(values)}


def compute_ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """How many times as fast as `base` `other` was, round by round: drift hits both of a round
    alike."""
    return [a / b for a, b in zip(base, other, strict=True)]


def shows_no_difference(entry: Mapping[str, Any], name: str) -> bool:
    """Whether the quartiles of the ratio `name` of an entry straddle 1."""
    return entry[f"{name}_q1"] <= 1 <= entry[f"{name}_q3"]


def time_in_turn(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of each run, `repeats` times, taken in turn and every other round backwards, so that
    drift hits all.

    `prepare(name)` comes before each and is not timed.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            prepare(name)
            taken[name].append(measure_seconds(runs[name], device))
    return taken


@contextmanager
def disable_compiler_caches() -> Iterator[None]:
    """Nothing that was compiled before is used inside, neither from this process nor from the
    disk."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")  # it is meant
        yield


class MemoryPeak:
    """Bytes that the allocator reserved at most since this was built, beyond those then; None
    without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_reserved()

    def read(self) -> int | None:
        return torch.cuda.max_memory_reserved() - self.before if self.cuda else None
