"""Definitions of the operators against independent ones, in fp64 where there is one."""

import pytest
import torch
import torch.nn.functional as F

from accel.kernels.add_norm.operator import add_norm
from accel.kernels.counter_noise.draws import Purpose, counter_normal, counter_uniform, draw, philox
from accel.kernels.local_mix.operator import local_mix
from accel.kernels.ssd import definition as ssd
from accel.kernels.ssd.decays import prefix_sums_by_doubling
from accel.kernels.ssd.operator import fused_bidirectional_ssd
from tests.harness.operators import Sizes, assert_all_close, make_add_norm, make_ssd, run_both_ways


def test_philox_gives_the_published_integers():
    """A known answer of Philox4x32-10, of the Random123 distribution's kat_vectors."""
    counter = torch.tensor([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344])
    words = philox(counter.unbind(), (0xA4093822, 0x299F31D0))
    assert [*map(int, words)] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_draws_depend_on_seed_purpose_and_position_only():
    position = torch.tensor([5, 2**33 + 5, 7])
    bits = draw("bits", 3, Purpose.NOISE, position, 6)
    assert torch.equal(bits[2:], draw("bits", 3, Purpose.NOISE, position[2:], 6))
    assert torch.equal(bits[:, :3], draw("bits", 3, Purpose.NOISE, position, 3))
    assert not torch.equal(bits[0], bits[1])  # the upper half of the position counts
    for seed, purpose in ((4, Purpose.NOISE), (3 + 2**32, Purpose.NOISE), (3, Purpose.TIME)):
        assert not torch.equal(bits, draw("bits", seed, purpose, position, 6))


def test_uniform_and_normal_have_their_moments():
    position = torch.arange(4000)
    u = counter_uniform(0, Purpose.NOISE, position, 50).double()
    assert u.min() > 0.0
    assert u.max() < 1.0
    assert abs(u.mean() - 0.5) < 3e-3
    assert abs(u.var() - 1 / 12) < 1e-3
    n = counter_normal(0, Purpose.NOISE, position, (5, 10)).double()
    assert n.shape == (4000, 5, 10)
    assert abs(n.mean()) < 1e-2
    assert abs(n.var() - 1) < 1e-2
    assert abs(n.pow(4).mean() - 3) < 0.1
    correlation = torch.corrcoef(n.flatten(1).T) - torch.eye(50)
    assert correlation.abs().max() < 0.1


def recurrence(x, dt, dt_bias, A_log, B_in, C_out, D):
    """The scan token by token: forward over j ≤ i, backward over j > i."""
    batch, length, heads, head_dim = x.shape
    dt = F.softplus(dt + dt_bias)
    A = -A_log.exp()
    y = list((D[:, None] * x).unbind(1))
    decay = (dt * A).exp()[..., None, None]
    arriving = torch.einsum("bldk,bldn,blkp->bldknp", dt, B_in, x)
    state = torch.zeros(batch, heads, B_in.shape[-1], head_dim, dtype=x.dtype)
    for i in range(length):
        state = state * decay[:, i, 0] + arriving[:, i, 0]
        y[i] = y[i] + torch.einsum("bn,bknp->bkp", C_out[:, i, 0], state)
    state = torch.zeros_like(state)
    for i in reversed(range(length)):
        state = state * decay[:, i, 1]
        y[i] = y[i] + torch.einsum("bn,bknp->bkp", C_out[:, i, 1], state)
        state = state + arriving[:, i, 1]
    return torch.stack(y, 1)


@pytest.mark.parametrize(("length", "piece"), [(1, 64), (64, 16), (129, 64), (64, 1)])
def test_ssd_equals_the_recurrence_forward_and_backward(length, piece, monkeypatch):
    monkeypatch.setattr(ssd, "MIN_PIECE_TOKENS", piece)
    inputs = make_ssd(Sizes(grid=(1, length), head_dim=4, state_dim=5)).inputs
    actual, expected = (run_both_ways(scan, inputs) for scan in (ssd.bidirectional_ssd, recurrence))
    assert_all_close(actual, expected, rtol=1e-8)


@pytest.mark.parametrize("scan", [ssd.bidirectional_ssd, fused_bidirectional_ssd])
@pytest.mark.parametrize("length", [64, 256])
def test_large_decays_do_not_round_off_the_small_ones_after_them(length, scan):
    """One token steps by 30 with A = 1e3, the next by 1e-3. In fp32, values and gradients keep
    three digits."""
    inputs = [t.detach() for t in make_ssd(Sizes(grid=(1, length), batch=1, heads=2)).inputs]
    large = torch.rand(inputs[1].shape) < 0.1
    inputs[1] += torch.where(large, 30.0, -7.0) + 4.0
    inputs[3] = torch.rand_like(inputs[3]) * torch.tensor(1e3).log()
    expected = run_both_ways(recurrence, [t.requires_grad_() for t in inputs])
    actual = run_both_ways(scan, [t.detach().float().requires_grad_() for t in inputs])
    for result, exact in zip(actual, expected, strict=True):
        assert (result - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.parametrize("length", [1, 7, 64])
def test_sums_by_doubling_equal_cumsum(length):
    values = torch.randn(3, length, dtype=torch.float64)
    torch.testing.assert_close(prefix_sums_by_doubling(values), values.cumsum(-1))


@pytest.mark.parametrize(("centred", "norm"), [(False, F.rms_norm), (True, F.layer_norm)])
def test_add_norm_is_its_formula_and_never_writes_in_place(centred, norm):
    inputs = [t.detach() for t in make_add_norm(Sizes()).inputs]
    branch, gate, residual, scale, shift = inputs
    before = residual.clone()
    h, z = add_norm(*inputs, centred=centred)
    stream = residual + gate[:, None] * branch
    torch.testing.assert_close(z, stream)
    normed = norm(stream, stream.shape[-1:], eps=1e-6)
    torch.testing.assert_close(h, normed * (1 + scale[:, None]) + shift[:, None])
    assert torch.equal(residual, before)


def test_local_mix_is_silu_of_the_sum_of_a_token_and_its_eight_neighbours():
    x = torch.randn(1, 20, 1)
    mixed = local_mix(x, torch.ones(1, 1, 3, 3), torch.ones(1), (4, 5))
    # row 1, column 2
    torch.testing.assert_close(mixed[0, 7, 0], F.silu(x.view(4, 5)[0:3, 1:4].sum() + 1.0))
