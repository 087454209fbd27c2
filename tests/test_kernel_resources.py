"""Every Triton kernel is compiled ahead of time, without a GPU: no stack, no spills, no fp64, wide loads."""

from __future__ import annotations

import json
import os

import pytest

from scripts.kernel_resources import ARCHITECTURES, cases, measure
from training.config.compose import ROOT

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets", allow_module_level=True)

ALL = [(case, architecture) for architecture in ARCHITECTURES for case in cases(architecture)]
QUICK = [(case, architecture) for case, architecture in ALL if architecture == 90 and case.quick]


TABLE = json.loads((ROOT / "docs" / "benchmarks" / "kernel_resources.json").read_text())


def check(case, architecture):
    found = measure(case, architecture)
    if TABLE["triton"] == triton.__version__:  # the same compiler gives the same code
        assert found._asdict() == TABLE["kernels"][f"{case.name} sm_{architecture}"]
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


def test_the_committed_table_has_every_shipped_kernel():
    assert set(TABLE["kernels"]) == {f"{case.name} sm_{architecture}" for case, architecture in ALL}
    assert all(row["spills"] == row["stack"] == row["fp64"] == 0 for row in TABLE["kernels"].values())
