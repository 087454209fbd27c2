"""Times functions and measures their memory. A GPU works asynchronously, so these clocks wait for
the device before they read the host's time."""

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

from accel.machine import time_on_gpu


def synchronise(device: torch.device) -> None:
    """Waits until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_seconds(
    run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measures the seconds of `run` by `clock`, including all work that it starts on the device;
    waits until the device is idle before the clock starts."""
    synchronise(device)
    start = clock()
    run()
    synchronise(device)
    return clock() - start


def measure_device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Measures the seconds of `run` on a GPU without the host's launches of kernels; on a CPU, as
    `measure_seconds` does."""
    return time_on_gpu(run) / 1e3 if device.type == "cuda" else measure_seconds(run, device)


def summarise(name: str, values: Sequence[float]) -> dict[str, float]:
    """Summarises repeated measurements in a dict: `name` (the median), `name_min`, `name_max`,
    `name_q1`, `name_q3` (the quartiles), and their number `n`."""
    low, q1, median, q3, high = np.quantile(values, (0.0, 0.25, 0.5, 0.75, 1.0)).tolist()
    return {
        name: median,
        f"{name}_min": low,
        f"{name}_max": high,
        f"{name}_q1": q1,
        f"{name}_q3": q3,
        "n": len(values),
    }


def compute_ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Returns for each round the speed of `other` relative to `base`, both given as seconds per
    round. A drift of the machine's speed affects both times of a round alike, so it cancels in the
    ratio."""
    return [a / b for a, b in zip(base, other, strict=True)]


def judge_ratio(entry: Mapping[str, Any], name: str) -> str:
    """Returns "no difference" if a ratio within 2 % of 1 lies between the quartiles `name`_q1 and
    `name`_q3 of a result, "unsettled" if these quartiles are also more than 5 % apart, else "". Of
    fewer than five rounds the quartiles say little, so they are taken five times as far apart."""
    low = entry[f"{name}_q1"]
    high = entry[f"{name}_q3"]
    margin = 2 * (high - low) if entry.get("n", 5) < 5 else 0.0
    if low - margin > 1.02 or high + margin < 0.98:
        return ""
    return "no difference" if high / low < 1.05 else "unsettled"


def time_in_turn(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    prepare: Callable[[str], object] = lambda name: None,
    measure: Callable[[Callable[[], object], torch.device], float] = measure_seconds,
) -> dict[str, list[float]]:
    """Measures the seconds of each run by `measure`, `repeats` times. Returns a dict: name of a run
    -> list of its seconds. The runs take turns, in reverse order in every other round, so that
    drift of the machine's speed affects all runs alike.

    It calls `prepare(name)` before each run, outside the measured time.
    """
    seconds = {name: [] for name in runs}
    for turn in range(repeats):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            prepare(name)
            seconds[name].append(measure(runs[name], device))
    return seconds


@contextmanager
def disable_compiler_caches() -> Iterator[None]:
    """Inside the `with` block, PyTorch compiles everything again: it uses no code compiled earlier
    by this process or stored on disk."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), warnings.catch_warnings():
        # Suppress the warning that PyTorch prints because `force_disable_caches` is set.
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        yield


class MemoryPeak:
    """Measures the peak of the bytes that PyTorch's GPU allocator reserves, less the bytes reserved
    when this object is made."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_reserved()

    def read(self) -> int | None:
        """Returns the peak in bytes; None if the device is no GPU."""
        return torch.cuda.max_memory_reserved() - self.before if self.cuda else None
