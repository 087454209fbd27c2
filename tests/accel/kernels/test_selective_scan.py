"""The selective scan against the plain recurrence, and mamba-ssm's kernel by a stand-in."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from accel.evidence import Evidence
from accel.kernels.selective_scan import kernels_cuda
from accel.kernels.selective_scan.operator import fused_selective_scan, selective_scan
from accel.saved_tensors import count_saved
from accel.techniques.compilation import PARTITION_BACKEND
from accel.techniques.fused_kernels import FusedScan, Proof
from accel.trial.parity import ComparingMode
from models.mixers.selective_scan import SelectiveScan
from tests.harness.operators import Sizes, assert_all_close, make_selective_scan, run_both_ways
from tests.harness.refusals import expect_refusal
from tests.harness.steps import make_call
from tests.harness.words import CPU


def make_inputs(length, dtype=torch.float32, **sizes):
    torch.manual_seed(length)
    shape = {"heads": 1, "head_dim": 6, "state_dim": 4} | sizes
    return make_selective_scan(Sizes(grid=(1, length), dtype=dtype, **shape)).inputs


def recur(x, dt, dt_bias, A, B, C, D):
    """The scan token by token, with A itself."""
    steps = F.softplus(dt + dt_bias)
    state = torch.zeros(len(x), *A.shape, dtype=A.dtype)
    y = []
    for t in range(x.shape[1]):
        arriving = torch.einsum("be,bn->ben", steps[:, t] * x[:, t], B[:, t])
        state = (steps[:, t].unsqueeze(-1) * A).exp() * state + arriving
        y.append(torch.einsum("ben,bn->be", state, C[:, t]) + D * x[:, t])
    return torch.stack(y, 1)


@pytest.mark.parametrize("length", [1, 7, 129])
def test_the_scan_equals_the_recurrence_forward_and_backward(length):
    """A decay for each channel and each number of a state: no two are the same here."""
    inputs = make_inputs(length, torch.float64)
    expected = run_both_ways(lambda *t: recur(*t[:3], -t[3].exp(), *t[4:]), inputs)
    assert_all_close(run_both_ways(selective_scan, inputs), expected, rtol=1e-10)


def test_steep_decays_and_1024_tokens_stay_finite_and_right():
    """Steps of 30 with A = -1e3 after steps of 1e-3: a sum of exponents would overflow, or round
    off what follows."""
    inputs = [t.detach() for t in make_inputs(1024, torch.float64, batch=1, head_dim=2)]
    steep = torch.rand(inputs[1].shape) < 0.1
    inputs[1] += torch.where(steep, 30.0, -7.0)
    inputs[3] = inputs[3].abs().clamp(max=1.0) * torch.tensor(1e3).log()
    expected = run_both_ways(selective_scan, [t.requires_grad_() for t in inputs])
    narrow = [t.detach().float().requires_grad_() for t in inputs]
    for a, e in zip(run_both_ways(selective_scan, narrow), expected, strict=True):
        assert (a - e).norm() <= 1e-4 * e.norm()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_state_is_kept_for_the_backward_pass(fused, compiled):
    """A compiler that sees the states computed twice would keep them."""
    mixer = SelectiveScan(16, 8, (4, 4), 0, state_dim=8)
    mixer.init_weights()
    mixer.fused_scan = fused
    forward = torch.compile(mixer, fullgraph=True, backend=PARTITION_BACKEND) if compiled else mixer
    with count_saved(mixer) as saved:
        forward(torch.randn(2, 16, 16, requires_grad=True))
    states_bytes = 4 * 2 * 16 * mixer.A_log.numel()
    assert max(saved.storages.values()) < states_bytes


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """Computes what the package's function does, channels before tokens, with its conditions."""
    assert z is None
    assert delta_softplus
    assert u.shape == delta.shape
    assert B.shape == C.shape == (u.shape[0], A.shape[1], u.shape[2])
    assert A.shape[0] == u.shape[1] == len(D) == len(delta_bias)
    assert {t.dtype for t in (u, delta, B, C)} == {u.dtype}
    assert {t.dtype for t in (A, D, delta_bias)} == {torch.float32}
    x, dt, B, C = (t.mT.float() for t in (u, delta, B, C))
    return recur(x, dt, delta_bias, A, B, C, D).mT.to(u.dtype)


INTERFACE = "mamba_ssm.ops.selective_scan_interface"


@pytest.fixture
def package(monkeypatch):
    interface = SimpleNamespace(selective_scan_fn=selective_scan_fn)
    monkeypatch.setitem(sys.modules, INTERFACE, interface)
    return interface


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_mamba_ssm_is_called_as_it_asks_and_passes_its_parity_test(dtype, package):
    with ComparingMode() as comparing:
        run_both_ways(fused_selective_scan, make_inputs(9, dtype))
    assert [c.describe_refusal() for c in comparing.comparisons] == [None] * 8


def test_a_kernel_with_one_decay_a_channel_is_refused(package, monkeypatch):
    def per_channel(*inputs):
        return selective_scan_fn(*inputs[:2], inputs[2][:, :1].expand_as(inputs[2]), *inputs[3:])

    monkeypatch.setattr(package, "selective_scan_fn", per_channel)
    with ComparingMode() as comparing:
        run_both_ways(fused_selective_scan, make_inputs(9))
    assert comparing.comparisons[0].describe_refusal()


def test_the_launchers_say_what_is_missing(package, monkeypatch):
    inputs = [t.detach() for t in make_inputs(3)]
    torch.use_deterministic_algorithms(True)
    with expect_refusal(r"deterministic=true .* runtime.fused_scan=false"):
        kernels_cuda.launch_backward(inputs[0], *inputs)
    monkeypatch.setitem(sys.modules, INTERFACE, None)
    with expect_refusal(r"pip install mamba-ssm, or use runtime.fused_scan=false"):
        kernels_cuda.launch_forward(*inputs)


@pytest.mark.parametrize(
    ("launched", "active"), [("void selective_scan_fwd_kernel<X>", True), ("x", False)]
)
def test_the_ledger_counts_launches_of_the_package_s_kernels(launched, active):
    technique = FusedScan(True, CPU)
    technique.settle(Proof(True, "proved"))
    technique.switches = [torch.nn.Identity()]
    ops = Counter({"fastlatent::selective_scan": 1})
    backward = "fastlatent::selective_scan_backward"
    evidence = Evidence(Counter({launched: 2, backward: 1}), blocks=[[make_call(ops=ops)]])
    assert technique.observe(evidence).active is active
