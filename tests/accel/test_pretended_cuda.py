"""Whole training steps on fake CUDA tensors, and Inductor's code for CUDA, on a machine that
pretends to have an H100.

Nothing is computed, but devices, shapes, waits of the host, graphs and generated code are real.
tests/harness/pretended_cuda_worker.py holds the cases and runs them in processes of its own; `-s`
shows their results.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from common.files import ROOT
from tests.harness.pretended_cuda_worker import COMPILED, STEP_COUNT, STEPS

SOURCES = ROOT / "tests" / "assets" / "pretended_cuda"
MISSING = [name for name in ("g++", "gcc") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="a library that is loaded first, by LD_PRELOAD, needs Linux"
    ),
    pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch was built without CUDA"),
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {' and no '.join(MISSING)} on the PATH"),
]


def compile_library(compiler, source, library):
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCES / source], check=True)
    return library


def run_worker(kind, folder):
    """Runs all cases of a kind in a process that pretends; prints a line for each."""
    shim = compile_library("g++", "shim.cpp", folder / "libpretended.so")
    compile_library("gcc", "libcuda.c", folder / "libcuda.so.1")
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
    print(f"\n{kind}:\n{done.stdout}")
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {result["case"]: result for result in results}


def get_result(results, name):
    result = results[name]
    assert "failed" not in result, result["failed"]
    return result


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return run_worker("steps", tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return run_worker("compiled", tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_on_the_device_and_the_host_never_waits(name, steps):
    """A step waits for one flag where the optimizer is not fused; PyTorch's Adafactor also waits
    for its norms."""
    result = get_result(steps, name)
    waits = [place for place in result["waits"] if "torch/optim/_adafactor.py" not in place]
    assert waits == ([] if result["fused"] else ["training/step.py reads a value"] * STEP_COUNT)
    assert result["fused"] is not (name.endswith("eager") or name in ("muon", "adafactor", "sgd"))
    if result["fused"] and name != "optimizer's state on the host":
        assert result["state"] == ["cuda"]


OPERATORS = {
    "mamba": {"add_norm", "ssd_mixed"},
    "zigzag": {"add_norm", "ssd_mixed"},
    "mamba1": {"add_norm", "selective_scan"},
    "ssd_mlp": {"add_norm", "ssd_mixed", "swiglu"},
    "hybrid": {"add_norm", "ssd_mixed", "qk_rope", "swiglu"},
    "conv": {"add_norm", "local_mix", "swiglu"},
    "dit": {"add_norm", "qk_rope", "swiglu"},
}


@pytest.mark.parametrize("name", COMPILED)
def test_blocks_become_at_most_three_graphs_that_call_our_operators(name, compiled):
    """A third one where blocks of rows and of columns take turns."""
    result = get_result(compiled, name)
    assert result["breaks"] == {}
    assert 1 <= result["forward"] <= 3
    assert 1 <= result["backward"] <= 3
    assert result["kernels"] > 0
    expected = OPERATORS[COMPILED[name].split()[0]]
    assert expected | {f"{operator}_backward" for operator in expected} <= set(result["operators"])
