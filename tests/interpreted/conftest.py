"""These tests run the Triton kernels on a CPU, in Triton's interpreter: `TRITON_INTERPRET=1 pytest
tests/interpreted`.

The variable must be set before a kernel is defined, so they have a process of their own. fp32 and
fp16 only: the interpreter's bf16 is wrong.
"""

import os

import pytest
import torch

from tests.harness.operators import TOLERANCE, run_both_ways
from tests.harness.pretended_gpu import Launching

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch):
    """The interpreter takes as long for a small tile as for a large one."""
    from accel.kernels.local_mix.kernels_triton import SUMMING

    for name, size in (("STRETCH", 32), ("BLOCK_L", 16)):
        monkeypatch.setitem(SUMMING, name, size)


@pytest.fixture
def poison():
    """Call it to let PyTorch fill fresh memory with NaN from then on, as it does under
    deterministic algorithms: it shows an element that no program writes."""
    return lambda: torch.use_deterministic_algorithms(True)


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
                assert a.shape == e.shape
                rounded = e.to(a.dtype).double()
                error = (a.double() - rounded).norm() / rounded.norm().clamp(min=1e-30)
                # a NaN is not below
                assert error < TOLERANCE[dtype] * factor * (10.0 if i in case.cancelling else 1.0)

    return run
