"""The selective scan against the plain recurrence, and mamba-ssm's kernel by a stand-in."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel.evidence import BlockEvidence, Evidence
from accel.kernels import selective_scan_cuda
from accel.kernels.selective_scan import fused_selective_scan, scan_forward, selective_scan
from accel.parity import ComparingMode
from accel.proof import Proof
from accel.techniques.compilation import PARTITIONER
from accel.techniques.fused_kernels import FusedScan
from common.errors import UserError
from models.mixers.selective_scan import SelectiveScan
from tests.harness.pretended_gpu import Launching
from tests.harness.words import CPU


def scan_inputs(
    length: int, dtype: torch.dtype = torch.float64, batch: int = 2, channels: int = 6
) -> list[Tensor]:
    """x, dt, dt_bias, A_log, B, C and D; x, B and C as slices, as a projection leaves them."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(batch, channels, length).mT
    groups = normal(batch, length, 8)
    values = (x, normal(batch, length, channels), normal(channels), normal(channels, 4))
    values = (*values, groups[..., :4], groups[..., 4:], normal(channels))
    return [t.to(dtype).requires_grad_() for t in values]


def recurrence(
    x: Tensor, dt: Tensor, dt_bias: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """The scan token by token, with A itself."""
    steps = F.softplus(dt + dt_bias)
    state = torch.zeros(len(x), *A.shape, dtype=A.dtype)
    y = []
    for t in range(x.shape[1]):
        added = torch.einsum("be,bn->ben", steps[:, t] * x[:, t], B[:, t])
        state = (steps[:, t].unsqueeze(-1) * A).exp() * state + added
        y.append(torch.einsum("ben,bn->be", state, C[:, t]) + D * x[:, t])
    return torch.stack(y, 1)


def both_ways(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Value and gradients, from the same random gradient of the value."""
    y = function(*inputs)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, inputs, weight.to(y.dtype))]


def assert_equal(found: list[Tensor], expected: list[Tensor], rtol: float) -> None:
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("scan", [selective_scan, fused_selective_scan])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 129])
def test_the_scan_equals_the_recurrence_forward_and_backward(scan, length):
    """A decay for each channel and each number of a state: no two are the same here."""
    inputs = scan_inputs(length)
    x, dt, dt_bias, A_log, *rest = inputs
    expected = both_ways(lambda *_: recurrence(x, dt, dt_bias, -A_log.exp(), *rest), inputs)
    assert_equal(both_ways(scan, inputs), expected, rtol=1e-10)


def test_steep_decays_and_1024_tokens_stay_finite_and_right():
    """Steps of 30 with A = -1e3 after steps of 1e-3: a sum of exponents would overflow, or round
    off what follows."""
    inputs = [t.detach() for t in scan_inputs(1024, batch=1, channels=2)]
    steep = torch.rand(inputs[1].shape, generator=torch.Generator().manual_seed(1)) < 0.1
    inputs[1] = torch.where(steep, 30.0, -7.0) + inputs[1]
    inputs[3] = inputs[3].abs().clamp(max=1.0) * torch.tensor(1e3).log()
    exact = both_ways(selective_scan, [t.clone().requires_grad_() for t in inputs])
    found = both_ways(selective_scan, [t.float().requires_grad_() for t in inputs])
    for a, e in zip(found, exact, strict=True):
        assert (a - e).norm() <= 1e-4 * e.norm()


@pytest.mark.parametrize("scan", [selective_scan, fused_selective_scan])
def test_it_compiles_without_a_break(scan):
    inputs = scan_inputs(12, torch.float32)
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    assert_equal(both_ways(compiled, inputs), both_ways(scan, inputs), rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_state_is_kept_for_the_backward_pass(fused, compiled):
    """A compiler that saw the states made twice would keep them."""
    mixer = SelectiveScan(16, 8, (4, 4), 0, state_dim=8)
    mixer.init_weights()
    mixer.fused_scan = fused
    forward = torch.compile(mixer, fullgraph=True, backend=PARTITIONER) if compiled else mixer
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        forward(torch.randn(2, 16, 16, requires_grad=True))
    assert max(kept) < 2 * 16 * mixer.A_log.numel()


class Kernel(torch.autograd.Function):
    """Computes what mamba-ssm's kernel does, channels before tokens, with its conditions."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, *rest: Tensor) -> Tensor:
        A, B, C, D, bias = rest
        assert u.shape == delta.shape
        assert B.shape == C.shape == (u.shape[0], A.shape[1], u.shape[2])
        assert A.shape[0] == u.shape[1] == len(D) == len(bias)
        assert {t.dtype for t in (u, delta, B, C)} == {u.dtype}
        assert {t.dtype for t in (A, D, bias)} == {torch.float32}
        ctx.save_for_backward(u, delta, *rest)
        return Kernel.computed(u, delta, *rest)

    @staticmethod
    def computed(u: Tensor, delta: Tensor, *rest: Tensor) -> Tensor:
        A, B, C, D, bias = rest
        x, dt, B, C = (t.mT.float() for t in (u, delta, B, C))
        return recurrence(x, dt, bias, A, B, C, D).mT.to(u.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(Kernel.computed(*inputs), inputs, grads)


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, *_more
):
    """The package's function, by its signature."""
    assert z is None
    assert delta_softplus
    return Kernel.apply(u, delta, A, B, C, D, delta_bias)


@pytest.fixture
def package(monkeypatch):
    name = "mamba_ssm.ops.selective_scan_interface"
    for part in ("mamba_ssm", "mamba_ssm.ops"):
        monkeypatch.setitem(sys.modules, part, SimpleNamespace())
    interface = SimpleNamespace(selective_scan_fn=selective_scan_fn)
    monkeypatch.setitem(sys.modules, name, interface)
    return interface


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_mamba_ssm_is_called_as_it_asks_and_passes_its_parity_test(dtype, package):
    inputs = scan_inputs(9, torch.float32)
    inputs = [t.detach().to(dtype if t.ndim == 3 else t.dtype).requires_grad_() for t in inputs]
    comparing = ComparingMode()
    with comparing:
        both_ways(fused_selective_scan, inputs)
    assert [c.refusal() for c in comparing.comparisons] == [None] * 8


def test_a_kernel_with_one_decay_a_channel_is_refused(package, monkeypatch):
    def per_channel(*inputs: Any) -> Tensor:
        return selective_scan_fn(*inputs[:2], inputs[2][:, :1].expand_as(inputs[2]), *inputs[3:])

    monkeypatch.setattr(package, "selective_scan_fn", per_channel)
    comparing = ComparingMode()
    with comparing:
        both_ways(fused_selective_scan, scan_inputs(9, torch.float32))
    assert comparing.comparisons[0].refusal()


def test_the_launchers_say_what_is_missing(package, monkeypatch):
    inputs = [t.detach() for t in scan_inputs(3, torch.float32)]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(UserError, match=r"deterministic=true .* runtime.fused_scan=false"):
        selective_scan_cuda.launch_backward(inputs[0], *inputs)
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.selective_scan_interface", None)
    with pytest.raises(UserError, match=r"pip install mamba-ssm, or use runtime.fused_scan=false"):
        selective_scan_cuda.launch_forward(*inputs)


def test_the_step_of_a_model_is_the_same_on_the_package_s_kernel(package):
    """As a GPU would run it, forward and backward."""
    inputs = scan_inputs(9, torch.float32)
    launching = Launching()
    with launching:
        y = fused_selective_scan(*inputs)
    assert [name for name, *_ in launching.calls] == ["selective_scan"]
    found = selective_scan_cuda.launch_backward(torch.ones_like(y), *inputs)
    expected = torch.autograd.grad(scan_forward(*inputs), inputs, torch.ones_like(y))
    assert_equal([y, *found], [scan_forward(*inputs), *expected], rtol=1e-4)


@pytest.mark.parametrize(
    ("launched", "active"), [("void selective_scan_fwd_kernel<X>", True), ("x", False)]
)
def test_the_ledger_counts_launches_of_the_package_s_kernels(launched, active):
    technique = FusedScan(True, CPU)
    technique.settle(Proof(True, "proved"))
    technique.switches = [torch.nn.Identity()]
    ops = Counter({"fastlatent::selective_scan": 1})
    call = BlockEvidence(
        1, 1, torch.float32, torch.float32, fine=(True, True), cached=frozenset(), ops=ops
    )
    evidence = Evidence(ops=ops + Counter({launched: 2}), blocks=[[call]])
    assert technique.observe(evidence).active is active


def test_the_operators_are_well_formed():
    ops = torch.ops.fastlatent
    inputs = tuple(t.detach() for t in scan_inputs(5, torch.float32))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.selective_scan.default, inputs, test_utils=checks)
    both = (inputs[0], *inputs)
    torch.library.opcheck(ops.selective_scan_backward.default, both, test_utils=checks)
