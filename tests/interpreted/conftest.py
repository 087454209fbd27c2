"""These tests run the Triton kernels on a CPU, in Triton's interpreter: `TRITON_INTERPRET=1 pytest
tests/interpreted`.

The variable must be set before a kernel is defined, so they have a process of their own. fp32 and
fp16 only: the interpreter's bf16 is wrong.
"""

import os

import pytest
import torch

from tests.harness.operators import assert_near, run_both_ways
from tests.harness.pretended_gpu import Launching

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch):
    """Call it to fill fresh memory with NaN from then on: it shows an element that no program
    writes."""

    def fill(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    def start():
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            make = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, make=make, **k: fill(make(*a, **k)))

    return start


@pytest.fixture
def compare(poison):
    """`compare(case)` runs the kernels of an operator forward and backward, and compares outputs
    and gradients with those of its definition in fp64; `skip` numbers the ones left out."""

    def run(case, factor=2.0, skip=()):
        dtype = case.inputs[0].dtype
        exact = [t.detach().double().requires_grad_() for t in case.inputs]
        expected = run_both_ways(case.definition, exact)
        poison()
        with Launching() as launching:
            actual = run_both_ways(case.fused, case.inputs)
        assert launching.calls
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            if i not in skip:
                allowed = 10.0 * factor if i in case.cancelling else factor
                assert_near(a, e.to(a.dtype), dtype, allowed)

    return run
