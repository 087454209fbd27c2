"""Resources of every Triton kernel, compiled ahead of time without a GPU: no stack, no spills, no
fp64, wide loads."""

import os

import pytest

from common.config.compose import parse_yaml
from common.files import ROOT
from tests.harness.kernel_resources import (
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
TABLES = read_recorded(ROOT / "docs" / "benchmarks" / "kernel_resources.json")
SPILLS = parse_yaml((ROOT / "tests/assets/spills.yaml").read_text())


def assert_fits(version, name, resources):
    assert [resources.spills, resources.stack] == SPILLS.get(f"{version} {name}", [0, 0])
    assert resources.fp64 == 0
    assert resources.shared <= 1024 * SHARED_MEMORY_KIB[int(name.rpartition("sm_")[2])]


def mark_slow(case, architecture):
    """Leaves the common sizes on Hopper to every run of the tests, and the others to slow runs."""
    marks = () if case.quick and architecture == 90 else pytest.mark.slow
    return pytest.param(case, architecture, id=f"{case.name} sm_{architecture}", marks=marks)


@pytest.mark.parametrize(("case", "architecture"), [mark_slow(*pair) for pair in ALL])
def test_every_shipped_kernel_fits(case, architecture):
    name = f"{case.name} sm_{architecture}"
    resources = measure(case, architecture)
    if triton.__version__ in TABLES:  # the same compiler gives the same code
        assert resources == TABLES[triton.__version__][name]
    assert_fits(triton.__version__, name, resources)
    assert case.narrow_loads or resources.loads_128 > 0
    if case.pipelined:
        assert resources.async_copies > 0
    if case.multiplies:
        assert resources.products > 0


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0", "3.9.0"])
def test_the_committed_table_has_every_shipped_kernel(version):
    table = TABLES[version]
    assert set(table) == {f"{case.name} sm_{architecture}" for case, architecture in ALL}
    for name, resources in table.items():
        assert_fits(version, name, resources)
    # Two programs of `ds` share a processor off the diagonal: half of its 65,536 registers are 8
    # warps of 128 a thread.
    for name, warps in (("ssd ds L=256 P=64 N=64 sm_90", 4), ("ssd ds L=300 P=64 N=64 sm_90", 8)):
        assert warps * table[name].registers <= 8 * 128


def test_the_scan_loses_no_nan():
    """A GPU's plain minimum of NaN and 0 is 0: a NaN in A_log would end as finite nonsense, and the
    interpreter does not show it."""
    scans = [case for case in cases(90) if case.name.startswith("ssd forward L=256 P=64 N=64")]
    for case in scans:
        code = compile_kernel(case, 90).asm["ptx"]
        assert "min.NaN.f32" in code
        assert "min.f32" not in code
