"""Every Triton kernel is compiled ahead of time, without a GPU: no stack, no spills, no fp64, wide loads."""

from __future__ import annotations

import os

import pytest

from scripts.kernel_resources import ARCHITECTURES, cases, measure

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets", allow_module_level=True)

ALL = [(case, architecture) for architecture in ARCHITECTURES for case in cases(architecture)]
QUICK = [(case, architecture) for case, architecture in ALL if architecture == 90 and case.quick]


def check(case, architecture):
    found = measure(case, architecture)
    assert found.stack == 0
    assert found.spills == 0
    assert found.fp64 == 0
    assert case.narrow_loads or found.loads_128 > 0
    if case.pipelined:
        assert found.async_copies > 0
    if case.multiplies:
        assert found.products > 0


@pytest.mark.parametrize(("case", "architecture"), QUICK, ids=lambda value: getattr(value, "name", value))
def test_the_kernels_of_a_common_size_fit(case, architecture):
    check(case, architecture)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "architecture"), ALL, ids=lambda value: getattr(value, "name", value))
def test_every_shipped_kernel_fits(case, architecture):
    check(case, architecture)
