"""These tests run the Triton kernels on a CPU, in Triton's interpreter: `TRITON_INTERPRET=1 pytest
tests/interpreted`.

The variable must be set before a kernel is defined, so they have a process of their own. fp32 and
fp16 only: the interpreter's bf16 is wrong.
"""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def assert_near(actual, expected, dtype=torch.float32, factor=1.0):
    """Norm of the error over the norm of the answer; nothing left unwritten."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.isfinite().all()
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error < factor * TOLERANCE[dtype], f"relative error {error:.1e}"


@pytest.fixture
def poison(monkeypatch):
    """Called, it fills fresh memory with NaN from then on, so that an element that no program
    writes is seen."""

    def fill(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    def start():
        for name in ("empty", "empty_like"):
            make = getattr(torch, name)
            monkeypatch.setattr(torch, name, lambda *a, make=make, **k: fill(make(*a, **k)))
        new = torch.Tensor.new_empty
        monkeypatch.setattr(
            torch.Tensor, "new_empty", lambda self, *a, **k: fill(new(self, *a, **k))
        )

    return start
