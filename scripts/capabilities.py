"""Finds which techniques this machine supports, and measures how fast it computes and copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import torch

from accel.stack import TECHNIQUES
from accel.technique import Technique, Value
from scripts.timing import measure_device_seconds

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Precision of a timed matrix product -> dtype of the matrices."""


def list_ways() -> dict[str, tuple[type[Technique], Value]]:
    """Returns a dict: override that enables a technique, such as runtime.tf32=true -> (the
    technique's class, the value of its key)."""
    return {
        kind.make_override(way[kind.key]): (kind, way[kind.key])
        for kind in TECHNIQUES
        for way in kind.list_ways()
    }


def find_capabilities(device: torch.device) -> dict[str, str | None]:
    """Returns a dict: override that enables a technique, such as runtime.tf32=true -> the reason
    why this machine does not support the technique, or None if it does."""
    return {
        word: kind(value, device).find_obstacle() for word, (kind, value) in list_ways().items()
    }


@cache
def measure_rates(device: torch.device) -> dict[str, float]:
    """Measures the TFLOP/s of a product of square matrices, in each precision that this device
    supports, and the GB/s of a large copy. Returns a dict: name of the rate -> rate."""
    cuda = device.type == "cuda"
    n = 8192 if cuda else 1024
    words = {word for word, reason in find_capabilities(device).items() if reason is None}
    rates = {}

    def measure_median(run: Callable[[], object]) -> float:
        run()
        return statistics.median(measure_device_seconds(run, device) for _ in range(10))

    before = torch.get_float32_matmul_precision()
    for name, dtype in DTYPES.items():
        if name == "fp32" or {f"runtime.precision={name}", f"runtime.{name}=true"} & words:
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
            rates[f"{name}_product_tflops"] = (
                2 * n**3 / measure_median(lambda a=a, b=b: a @ b) / 1e12
            )
    torch.set_float32_matmul_precision(before)

    # Count every byte twice, because a copy reads and writes it.
    source = torch.randn(2**27 if cuda else 2**24, device=device)
    target = torch.empty_like(source)
    rates["copy_gb_s"] = 2 * source.nbytes / measure_median(lambda: target.copy_(source)) / 1e9
    return rates
