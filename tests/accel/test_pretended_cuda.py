"""Whole training steps on fake CUDA tensors, and Inductor's code for CUDA, on a machine that
pretends to have an H100.

Nothing is computed: devices, shapes, what the host waits for, graphs and generated code are real.
The cases are in tests/harness/pretended_cuda_worker.py, which runs in processes of its own; `-s`
shows what each gave.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.files import ROOT
from tests.harness.pretended_cuda_worker import COMPILED, STEP_COUNT, STEPS

Results = dict[str, dict[str, Any]]
SOURCES = ROOT / "tests" / "assets" / "pretended_cuda"
LACKING = [name for name in ("g++", "gcc") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="a library that is loaded first, by LD_PRELOAD, needs Linux"
    ),
    pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch was built without CUDA"),
    pytest.mark.skipif(bool(LACKING), reason=f"there is no {' and no '.join(LACKING)} on the PATH"),
]


def built(compiler: str, source: str, library: Path) -> Path:
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCES / source], check=True)
    return library


def results(kind: str, folder: Path) -> Results:
    """Runs all cases of a kind in a process that pretends; prints a line for each."""
    shim = built("g++", "shim.cpp", folder / "libpretended.so")
    built("gcc", "libcuda.c", folder / "libcuda.so.1")
    places = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {
        "PRETENDED_CUDA": str(shim),
        "LD_PRELOAD": str(shim),
        "LD_LIBRARY_PATH": os.pathsep.join(places),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.pretended_cuda_worker", kind],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    found: Results = {}
    print(f"\n{kind}:")
    for line in done.stdout.splitlines():
        result = json.loads(line)
        name = result.pop("case")
        found[name] = result
        print(
            f"{name:32}",
            *(f"{key}={value}" for key, value in result.items() if key not in ("failed", "waits")),
        )
    found[""] = {"failed": f"the process ended with {done.returncode}:\n{done.stderr[-3000:]}"}
    return found


def of(found: Results, name: str) -> dict[str, Any]:
    """A case's result; without one the process died, and its last words are shown."""
    result = found.get(name, found[""])
    assert "failed" not in result, result["failed"]
    return result


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results("steps", tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results("compiled", tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_on_the_device_and_the_host_never_waits(name, steps):
    """An unfused optimizer's step waits for one flag; PyTorch's Adafactor also for norms of its
    own."""
    result = of(steps, name)
    assert result["steps"] == STEP_COUNT
    if name == "parameters on the host":  # whose step waits by nature
        assert result["state"] == ["cpu"]
        return
    waits = [
        where
        for where in result["waits"]
        if name != "adafactor" or "torch/optim/_adafactor.py" not in where
    ]
    assert waits == ([] if result["fused"] else ["training/step.py reads a value"] * STEP_COUNT)
    assert result["fused"] is not (name.endswith("eager") or name in ("muon", "adafactor", "sgd"))
    if result["fused"] and name != "optimizer's state on the host":
        assert result["state"] == ["cuda"]


OPERATORS = {
    "mamba": {"add_norm", "ssd_mixed"},
    "zigzag": {"add_norm", "ssd_mixed"},
    "mamba1": {"add_norm", "selective_scan"},
    "ssd_mlp": {"add_norm", "ssd_mixed", "swiglu"},
    "conv": {"add_norm", "local_mix", "swiglu"},
    "dit": {"add_norm", "qk_rope", "swiglu"},
}


@pytest.mark.parametrize("name", COMPILED)
def test_blocks_become_one_or_two_graphs_that_call_our_operators(name, compiled):
    result = of(compiled, name)
    assert result["steps"] == STEP_COUNT
    assert result["breaks"] == {}
    assert 1 <= result["forward"] <= 2
    assert 1 <= result["backward"] <= 2
    assert result["kernels"] > 0
    expected = OPERATORS[COMPILED[name].split()[0]]
    assert expected | {f"{operator}_backward" for operator in expected} <= set(result["operators"])
