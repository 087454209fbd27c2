"""The Triton kernels on a GPU, in bf16, against their definitions in fp64; run by `pytest -m
gpu`."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from accel.kernels.counter_noise.draws import counter_normal, counter_uniform, draw
from accel.trial.parity import ComparingMode, compare_output
from common.files import ROOT
from common.libraries import disable_tf32
from models.mixers.attention import Attention
from tests.harness.operators import (
    CASES,
    OF_TRITON,
    ROWS,
    Row,
    Sizes,
    as_tuple,
    make_row,
    make_selective_scan,
    make_ssd,
    name_rows,
    run_both_ways,
)

DTYPES = [torch.bfloat16, torch.float32]
LARGE = [
    Row(operator, Sizes(*sizes))
    for operator, *sizes in (
        ("add_norm", (1, 300), 32, 6, 192),
        ("add_norm, rows", (16, 16), 3, 6, 128),
        ("gated_norm", (16, 16), 3, 24, 128),
        ("local_mix", (16, 16), 3, 1, 1792),
        ("qk_rope", (16, 16), 3, 12, 128),
        ("ssd", (16, 16), 3, 24, 64, 64),
        ("ssd", (32, 32), 3, 6, 128, 128),
        ("ssd, gated", (1, 512), 1, 24, 32),
        ("ssd_decays", (16, 16), 3, 24),
        ("ssd_mixed", (16, 16), 3, 12, 64),
        ("swiglu", (16, 16), 3, 1, 2736),
    )
]
"""Sizes of models, beside the small ones of the table."""
ON_A_GPU = [row for row in ROWS + LARGE if row.operator in OF_TRITON]


def assert_near_the_definition(row, dtype, device, monkeypatch):
    """The bound is that of a run's own trial, but results that cancel may be a single value, whose
    rounding is a matter of luck, and the definition's may be lucky: they may lose a digit more."""
    sized = row._replace(sizes=replace(row.sizes, device=device))
    fused, definition, inputs, cancelling = make_row(sized, dtype, monkeypatch)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    with disable_tf32():
        results = [run_both_ways(f, inputs) for f in (fused, fused, definition)]
        exact = run_both_ways(definition, wide)
    for i, tensors in enumerate(zip(*results, exact, strict=True)):
        compared = compare_output(f"output {i}", *tensors)
        limit = 10.0 if i in cancelling else 1.0
        assert i in row.skip or compared.excess <= limit, compared


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ON_A_GPU, ids=name_rows(ON_A_GPU))
def test_near_the_definition_and_the_same_twice(row, dtype, monkeypatch):
    assert_near_the_definition(row, dtype, "cuda", monkeypatch)


@pytest.mark.parametrize("row", ROWS, ids=name_rows(ROWS))
def test_on_a_cpu_the_bound_admits_the_definitions_own_rounding(row, monkeypatch):
    assert_near_the_definition(row, torch.bfloat16, "cpu", monkeypatch)


def make_case(operator):
    return CASES[operator](Sizes((7, 9), 3, 6, 64, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OF_TRITON)
def test_operators_compile_and_replay_in_a_graph(operator):
    fused, _, inputs, _ = make_case(operator)
    with torch.no_grad():
        expected = fused(*inputs)
        compiled = torch.compile(fused, fullgraph=True)(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fused(*inputs)
        graph.replay()
    for results in (compiled, captured):
        for a, b in zip(as_tuple(results), as_tuple(expected), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5, 2**40 + 1])
def test_draws_are_those_of_the_definition(seed):
    position = torch.tensor([0, 5, 2**33 + 5])
    for make in (lambda p: draw("bits", seed, 3, p, 50), lambda p: counter_uniform(seed, 3, p, 50)):
        assert torch.equal(make(position.cuda()).cpu(), make(position))
    torch.testing.assert_close(
        counter_normal(seed, 3, position.cuda(), (3, 17)).cpu(),
        counter_normal(seed, 3, position, (3, 17)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.gpu
def test_the_scan_agrees_with_mamba_ssm():
    """Compares the forward direction; needs that package."""
    package = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    fused, _, inputs, _ = make_ssd(
        Sizes((16, 16), 2, 8, 64, 64, dtype=torch.float32, device="cuda")
    )
    with torch.no_grad():
        inputs[4][:, :, 1] = 0.0
        x, dt, dt_bias, A_log, B_in, C_out, D = inputs
        groups = [t[:, :, 0, None] for t in (B_in, C_out)]
        options = {"chunk_size": 256, "D": D, "dt_bias": dt_bias[0], "dt_softplus": True}
        scan = package.mamba_chunk_scan_combined
        expected = scan(x, dt[:, :, 0], -A_log[0].exp(), *groups, **options)
        assert (fused(*inputs) - expected).norm() / expected.norm() < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [0, 1])
def test_flex_attends_within_windows_forward_and_backward(layer):
    mixer = Attention(64, 32, (16, 16), window=8, layer=layer).cuda()
    mixer.init_weights()
    h = torch.randn(2, 256, 64, device="cuda", requires_grad=True)
    results = []
    for backend in ("flex", "math"):
        mixer.attention_backend = backend
        y = mixer(h)
        results.append([y, *torch.autograd.grad(y.square().sum(), (h, mixer.qkv.weight))])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() / expected.norm() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_mamba_ssm_s_selective_scan_passes_its_parity_test(dtype):
    """Needs that package."""
    pytest.importorskip("mamba_ssm.ops.selective_scan_interface")
    fused, _, inputs, _ = make_selective_scan(Sizes((16, 16), heads=4, dtype=dtype, device="cuda"))
    with ComparingMode() as comparing:
        fused(*inputs).sum().backward()
    assert [c.describe_refusal() for c in comparing.comparisons] == [None] * 8


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("operator", [*OF_TRITON, "draws"])
def test_a_small_case_passes_the_sanitizer(operator, tool):
    """Finds accesses out of range or unaligned, and races in shared memory."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    command += ["--kernel-name", "kernel_substring=_kernel", sys.executable, "-m", __name__]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, operator], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def run_once(operator):
    """Runs an operator on odd sizes, forward and backward."""
    if operator == "draws":
        counter_normal(0, 3, torch.arange(3, device="cuda"), (3, 17))
    else:
        fused, _, inputs, _ = make_case(operator)
        run_both_ways(fused, inputs)
    torch.cuda.synchronize()


if __name__ == "__main__":
    run_once(sys.argv[1])
