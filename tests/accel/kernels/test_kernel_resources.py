"""Every Triton kernel is compiled ahead of time, without a GPU: no stack, no spills, no fp64, wide
loads."""

from __future__ import annotations

import os

import pytest

from common.files import ROOT
from scripts.kernel_resources import (
    ARCHITECTURES,
    SHARED_MEMORY_KIB,
    cases,
    compile_kernel,
    measure,
    read_recorded,
)

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets", allow_module_level=True)

ALL = [(case, architecture) for architecture in ARCHITECTURES for case in cases(architecture)]
QUICK = [(case, architecture) for case, architecture in ALL if architecture == 90 and case.quick]


TABLES = read_recorded(ROOT / "docs" / "benchmarks" / "kernel_resources.json")
SPILLS = {
    ("3.6.0", "add_norm D=384, row maps sm_90"): (1, 8),
    ("3.6.0", "add_norm D=768, row maps sm_90"): (1, 8),
    ("3.6.0", "add_norm D=768, row maps, backward sm_120"): (1, 8),
    ("3.6.0", "ssd forward L=256 P=64 N=64 sm_90"): (1, 8),
    ("3.6.0", "ssd forward L=256 P=64 N=64 sm_120"): (2, 8),
    ("3.6.0", "ssd read T=256 P=64 N=64 fp32 sm_86"): (2, 8),
    ("3.6.0", "ssd read T=256 P=64 N=64 fp32 sm_89"): (2, 8),
    ("3.8.0", "add_norm D=96, row maps sm_90"): (1, 8),
    ("3.8.0", "add_norm D=768, row maps sm_90"): (1, 8),
    ("3.8.0", "qk_rope P=32 sm_100"): (6, 24),
    ("3.8.0", "qk_rope P=128, backward sm_100"): (2, 8),
    ("3.8.0", "ssd ds L=256 P=64 N=64 fp32, diagonal sm_100"): (1, 8),
    ("3.8.0", "ssd ds L=256 P=128 N=128 fp32, diagonal sm_120"): (1, 8),
    ("3.9.0", "ssd ds L=256 P=64 N=64 fp32, diagonal sm_90"): (1, 8),
    ("3.9.0", "ssd ds L=256 P=64 N=64 fp32, diagonal sm_100"): (1, 8),
    ("3.9.0", "ssd ds L=256 P=128 N=128 fp32, diagonal sm_120"): (1, 8),
}
"""Version of Triton and case -> spills and bytes of stack, where they are not 0."""


def fits(version, name, found):
    assert (found.spills, found.stack) == SPILLS.get((version, name), (0, 0))
    assert found.fp64 == 0
    assert found.shared <= 1024 * SHARED_MEMORY_KIB[int(name.rpartition("sm_")[2])]


def check(case, architecture):
    name = f"{case.name} sm_{architecture}"
    found = measure(case, architecture)
    if triton.__version__ in TABLES:  # the same compiler gives the same code
        assert found == TABLES[triton.__version__][name]
    fits(triton.__version__, name, found)
    assert case.narrow_loads or found.loads_128 > 0
    if case.pipelined:
        assert found.async_copies > 0
    if case.multiplies:
        assert found.products > 0


@pytest.mark.parametrize(
    ("case", "architecture"), QUICK, ids=lambda value: getattr(value, "name", value)
)
def test_the_kernels_of_a_common_size_fit(case, architecture):
    check(case, architecture)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "architecture"), ALL, ids=lambda value: getattr(value, "name", value)
)
def test_every_shipped_kernel_fits(case, architecture):
    check(case, architecture)


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0", "3.9.0"])
def test_the_committed_table_has_every_shipped_kernel(version):
    assert set(TABLES[version]) == {f"{case.name} sm_{architecture}" for case, architecture in ALL}
    for name, found in TABLES[version].items():
        fits(version, name, found)


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0", "3.9.0"])
def test_two_programs_a_processor_share_the_tiles_of_ds_off_the_diagonal_on_hopper(version):
    """8 warps of at most 128 registers a thread are half of a processor's 65,536."""
    found = [
        row
        for name, row in TABLES[version].items()
        if name.startswith("ssd ds") and name.endswith("N=64 sm_90")
    ]
    assert len(found) == 2
    assert all(row.registers <= 128 for row in found)


def test_the_scan_loses_no_nan():
    """A GPU's plain minimum of NaN and 0 is 0: a NaN in A_log would end as finite nonsense.
    Interpreted it stays."""
    scans = [case for case, _ in QUICK if case.name.startswith("ssd forward L=256 P=64 N=64")]
    for case in scans:
        code = compile_kernel(case, 90).asm["ptx"]
        assert "min.NaN.f32" in code
        assert "min.f32" not in code
