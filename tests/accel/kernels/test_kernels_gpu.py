"""The Triton kernels on a GPU, in bf16, against their definitions in fp64; run by `pytest -m
gpu`."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from accel.kernels.add_norm import add_norm, fused_add_norm
from accel.kernels.bidirectional_ssd import bidirectional_ssd
from accel.kernels.counter_noise import counter_normal, counter_uniform, draw
from accel.kernels.fused_ssd import fused_bidirectional_ssd
from accel.kernels.gated_norm import fused_gated_norm, gated_norm
from accel.kernels.local_mix import fused_local_mix, local_mix
from accel.kernels.qk_rope import fused_qk_rope, qk_rope
from accel.kernels.selective_scan import fused_selective_scan
from accel.kernels.ssd_mixed import fused_mixed_ssd, mixed_ssd
from accel.kernels.swiglu import fused_swiglu
from accel.parity import ComparingMode
from common.files import ROOT
from models.mixers.attention import Attention, axial_rotations
from scripts.bench.kernels import swiglu
from tests.accel.kernels.test_selective_scan import scan_inputs

pytestmark = pytest.mark.gpu
BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Norm of the error over the norm of the answer."""


def cuda(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def add_norm_case(seed, dtype):
    draw = random.Random(seed)
    B = draw.choice([1, 3, 32])
    L = draw.choice([1, 63, 256, 300])
    D = draw.choice([96, 384, 768, 1152])
    inputs = [cuda(B, L, D, dtype=dtype), cuda(B, D, dtype=dtype), cuda(B, L, D)]
    inputs += [cuda(B, D, dtype=dtype), cuda(B, D, dtype=dtype)]
    rows = (
        {name: torch.randperm(L, device="cuda").int() for name in ("branch_rows", "h_rows")}
        if seed % 2
        else {}
    )
    return inputs, lambda *t: fused_add_norm(*t, **rows), lambda *t: add_norm(*t, **rows)


def ssd_case(seed, dtype):
    draw = random.Random(seed)
    B = draw.choice([1, 3])
    L = draw.choice([63, 64, 100, 256, 300, 512, 1024])
    K = draw.choice([1, 6, 24])
    L = 1 if seed == 0 else L
    P = draw.choice([32, 64, 128])
    N = draw.choice([16, 64, 128])
    dt_bias = (torch.randn(2, K, device="cuda") - 4.0).requires_grad_()
    A_log = (16.0 * torch.rand(2, K, device="cuda")).log().requires_grad_()
    groups = [cuda(B, L, 2, N, dtype=dtype) for _ in range(2)]
    inputs = [
        cuda(B, L, K, P, dtype=dtype),
        cuda(B, L, 2, K, dtype=dtype),
        dt_bias,
        A_log,
        *groups,
        cuda(K),
    ]
    if seed % 2:
        inputs += [cuda(B, L, K, P, dtype=dtype), cuda(K, P)]  # gate and norm
    return inputs, fused_bidirectional_ssd, bidirectional_ssd


def local_mix_case(seed, dtype):
    draw = random.Random(seed)
    grid, taps = draw.choice([((16, 16), (3, 3)), ((7, 5), (3, 3)), ((1, 300), (1, 7))])
    D = draw.choice([96, 768, 1792])
    inputs = [cuda(3, grid[0] * grid[1], D, dtype=dtype), cuda(D, 1, *taps), cuda(D)]
    return inputs, lambda *t: fused_local_mix(*t, grid), lambda *t: local_mix(*t, grid)


def gated_norm_case(seed, dtype):
    draw = random.Random(seed)
    L = draw.choice([1, 63, 256])
    K = draw.choice([1, 6, 24])
    P = draw.choice([32, 64, 128])
    inputs = [cuda(3, L, K, P, dtype=dtype), cuda(3, L, K, P, dtype=dtype), cuda(K, P)]
    return inputs, fused_gated_norm, gated_norm


def swiglu_case(seed, dtype):
    draw = random.Random(seed)
    L = draw.choice([1, 63, 256])
    H = draw.choice([96, 1024, 2736])
    return [cuda(3, L, 2 * H, dtype=dtype)], fused_swiglu, swiglu


def qk_rope_case(seed, dtype):
    draw = random.Random(seed)
    grid = draw.choice([(1, 1), (7, 9), (16, 16)])
    K = draw.choice([1, 6, 12])
    P = draw.choice([16, 64, 128])
    rotations = axial_rotations(grid, P).cuda() if seed % 3 else None
    inputs = [
        cuda(3, grid[0] * grid[1], 3, K, P, dtype=dtype),
        *((cuda(P), cuda(P)) if seed % 2 or not seed % 3 else ()),
    ]

    def placing(function):
        return lambda qkv, *weights: function(qkv, *(weights or (None, None)), rotations)

    return inputs, placing(fused_qk_rope), placing(qk_rope)


def ssd_mixed_case(seed, dtype):
    draw = random.Random(seed)
    grid = draw.choice([(1, 1), (7, 9), (16, 16)])
    K = draw.choice([1, 6, 12])
    P = draw.choice([32, 64])
    mixed = K * P + 4 * 16
    widths = K * P + mixed + 2 * K
    inputs = [cuda(3, grid[0] * grid[1], widths, dtype=dtype), cuda(mixed, 1, 3, 3), cuda(mixed)]
    inputs += [
        (torch.randn(2, K, device="cuda") - 4.0).requires_grad_(),
        cuda(2, K),
        cuda(K),
        cuda(K, P),
    ]

    def on_grid(function):
        return lambda projected, weight, bias, *rest: function(projected, weight, bias, grid, *rest)

    return inputs, on_grid(fused_mixed_ssd), on_grid(mixed_ssd)


CASES = {
    "gated_norm": gated_norm_case,
    "add_norm": add_norm_case,
    "ssd": ssd_case,
    "local_mix": local_mix_case,
}
CASES |= {"swiglu": swiglu_case, "qk_rope": qk_rope_case, "ssd_mixed": ssd_mixed_case}


def outputs(function, inputs, seed):
    found = function(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(seed)
    # the same in every dtype
    weights = [torch.randn(t.shape, generator=generator).bfloat16().to(t) for t in found]
    return [*found, *torch.autograd.grad(found, inputs, weights)]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("op", CASES)
def test_near_the_definition_and_the_same_twice(op, seed, dtype):
    torch.manual_seed(seed)
    inputs, fused, definition = CASES[op](seed, dtype)
    actual = outputs(fused, inputs, seed)
    again = outputs(fused, inputs, seed)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    for i, (a, b, e) in enumerate(
        zip(actual, again, outputs(definition, exact, seed), strict=True)
    ):
        assert torch.equal(a, b), f"output {i} differs from run to run"
        assert a.isfinite().all(), i
        # the gradient of A of a single token is zero
        error = (a.double() - e).norm() / e.norm().clamp(min=1e-3)
        # Gradients of dt, its bias and A are differences of sums that cancel.
        cancels = i in {"ssd": (2, 3, 4), "ssd_mixed": (4, 5)}.get(op, ())
        assert error < BOUND[dtype] * (10.0 if cancels else 1.0), f"output {i}: {error:.1e}"


@pytest.mark.parametrize("op", CASES)
def test_operators_compile_and_replay_in_a_graph(op):
    torch.manual_seed(0)
    inputs, fused, _ = CASES[op](2, torch.bfloat16)
    with torch.no_grad():
        expected = fused(*inputs)
        compiled = torch.compile(fused, fullgraph=True)(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fused(*inputs)
        graph.replay()
    for other in (compiled, captured):
        for a, b in zip(
            *(t if isinstance(t, tuple) else (t,) for t in (other, expected)), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5, 2**40 + 1])
def test_draws_are_those_of_the_definition(seed):
    position = torch.tensor([0, 5, 2**33 + 5])
    assert torch.equal(
        draw("bits", seed, 3, position.cuda(), 50).cpu(), draw("bits", seed, 3, position, 50)
    )
    assert torch.equal(
        counter_uniform(seed, 3, position.cuda(), 50).cpu(), counter_uniform(seed, 3, position, 50)
    )
    normal = counter_normal(seed, 3, position.cuda(), (3, 17))
    torch.testing.assert_close(
        normal.cpu(), counter_normal(seed, 3, position, (3, 17)), rtol=1e-5, atol=1e-6
    )


def test_the_scan_agrees_with_mamba_ssm():
    """Two calls of its scan, one on the reversed sequence, against ours; only where that package is
    installed."""
    scan = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    torch.manual_seed(0)
    B = 2
    L = 256
    K = 8
    P = 64
    N = 64
    x = torch.randn(B, L, K, P, device="cuda")
    dt = torch.randn(B, L, 2, K, device="cuda")
    dt_bias = torch.randn(2, K, device="cuda") - 4.0
    A_log = torch.rand(2, K, device="cuda").log()
    groups = torch.randn(2, B, L, 2, N, device="cuda")
    inputs = (x, dt, dt_bias, A_log, *groups, torch.zeros(K, device="cuda"))
    expected = torch.zeros_like(x)
    for i in range(2):
        given = [x, dt[:, :, i], *(group[:, :, i, None] for group in groups)]
        turned, its_dt, B_in, C_out = (t.flip(1) if i else t for t in given)
        more = {"dt_bias": dt_bias[i], "dt_softplus": True}
        y = scan(turned, its_dt, -A_log[i].exp(), B_in, C_out, 256, **more)
        expected += y.flip(1) if i else y
    step = F.softplus(dt + dt_bias)[:, :, 1, :, None]
    # which that counts twice
    own = (groups[0] * groups[1])[:, :, 1].sum(-1)[..., None, None] * step * x
    actual = fused_bidirectional_ssd(*inputs)
    assert (actual - (expected - own)).norm() / expected.norm() < 5e-3


@pytest.mark.parametrize("layer", [0, 1])
def test_flex_attends_within_windows_forward_and_backward(layer):
    mixer = Attention(64, 32, (16, 16), window=8, layer=layer).cuda()
    mixer.init_weights()
    h = cuda(2, 256, 64)
    found = {}
    for backend in ("math", "flex"):
        mixer.attention_backend = backend
        y = mixer(h)
        found[backend] = [y, *torch.autograd.grad(y.square().sum(), (h, mixer.qkv.weight))]
    for actual, expected in zip(found["flex"], found["math"], strict=True):
        assert (actual - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba_ssm_s_selective_scan_passes_its_parity_test(dtype):
    """Only where that package is installed."""
    pytest.importorskip("mamba_ssm.ops.selective_scan_interface")
    inputs = [t.detach().cuda() for t in scan_inputs(256, torch.float32, channels=64)]
    inputs = [t.to(dtype if t.ndim == 3 else t.dtype).requires_grad_() for t in inputs]
    with ComparingMode() as comparing:
        fused_selective_scan(*inputs).sum().backward()
    assert [c.refusal() for c in comparing.comparisons] == [None] * 8


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_small_case_passes_the_sanitizer(tool):
    """Accesses out of range or unaligned; races in shared memory."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--kernel-name",
        "kernel_substring=_kernel",
    ]
    code = "from tests.accel.kernels.test_kernels_gpu import once; once()"
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def once():
    """Each operator once, on odd sizes, forward and backward."""
    torch.manual_seed(0)
    for case in CASES.values():
        for seed in (0, 3):
            inputs, fused, _ = case(seed, torch.bfloat16)
            outputs(fused, inputs, seed)
    counter_normal(0, 3, torch.arange(3, device="cuda"), (3, 17))
    torch.cuda.synchronize()
