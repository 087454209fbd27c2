"""Reference ops against independent definitions, in fp64 where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from accel.kernels import bidirectional_ssd as ssd
from accel.kernels.add_norm import add_norm
from accel.kernels.counter_noise import Purpose, counter_normal, counter_uniform, draw, philox
from accel.kernels.fused_ssd import fused_bidirectional_ssd
from accel.kernels.local_mix import local_mix
from accel.kernels.ssd_decays import prefix_sums_by_doubling

# Known answers of Philox4x32-10 from the Random123 distribution's kat_vectors: counter, key,
# result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_integers(counter, key, expected):
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_draws_depend_on_seed_purpose_and_position_only():
    position = torch.tensor([5, 2**33 + 5, 7])
    bits = draw("bits", 3, Purpose.NOISE, position, 6)
    assert torch.equal(bits[2:], draw("bits", 3, Purpose.NOISE, position[2:], 6))
    assert torch.equal(bits[:, :3], draw("bits", 3, Purpose.NOISE, position, 3))
    assert not torch.equal(bits[0], bits[1])  # the upper half of the position counts
    assert not torch.equal(bits, draw("bits", 4, Purpose.NOISE, position, 6))
    assert not torch.equal(bits, draw("bits", 3 + 2**32, Purpose.NOISE, position, 6))
    assert not torch.equal(bits, draw("bits", 3, Purpose.TIME, position, 6))


def test_uniform_and_normal_have_their_moments():
    position = torch.arange(4000)
    u = counter_uniform(0, Purpose.NOISE, position, 50).double()
    assert 0.0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1.0
    assert abs(u.mean() - 0.5) < 3e-3
    assert abs(u.var() - 1 / 12) < 1e-3
    n = counter_normal(0, Purpose.NOISE, position, (5, 10)).double()
    assert n.shape == (4000, 5, 10)
    assert abs(n.mean()) < 1e-2
    assert abs(n.var() - 1) < 1e-2
    assert abs(n.pow(4).mean() - 3) < 0.1
    flat = n.flatten(1)
    correlation = torch.corrcoef(flat.T) - torch.eye(50)
    assert correlation.abs().max() < 0.1


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2)])
def test_normal_has_any_shape(shape):
    assert counter_normal(0, Purpose.NOISE, torch.arange(2), shape).shape == (2, *shape)


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


def ssd_inputs(length, dtype=torch.float64, batch=2, heads=3, head_dim=4, state_dim=5, decay=3.0):
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = (
        normal(batch, length, heads, head_dim),
        normal(batch, length, 2, heads),
        normal(2, heads),
        (decay * torch.rand(2, heads, generator=generator, dtype=torch.float64)).log(),
        normal(batch, length, 2, state_dim),
        normal(batch, length, 2, state_dim),
        normal(heads),
    )
    return tuple(t.to(dtype).requires_grad_() for t in inputs)


@pytest.mark.parametrize(
    ("length", "piece"), [(1, 64), (7, 64), (64, 64), (64, 16), (50, 16), (129, 64), (64, 1)]
)
def test_ssd_equals_the_recurrence_forward_and_backward(length, piece, monkeypatch):
    monkeypatch.setattr(ssd, "MIN_PIECE_TOKENS", piece)
    inputs = ssd_inputs(length)
    expected = recurrence(*inputs)
    actual = ssd.bidirectional_ssd(*inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for e, a in zip(
        torch.autograd.grad((expected * weight).sum(), inputs),
        torch.autograd.grad((actual * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("scan", [ssd.bidirectional_ssd, fused_bidirectional_ssd])
@pytest.mark.parametrize("length", [64, 512])
def test_large_decays_do_not_round_off_the_small_ones_after_them(length, scan):
    """A token may step by 30 with A = 1e3; the next by 1e-3. In fp32, values and gradients keep
    three digits."""
    inputs = [t.detach() for t in ssd_inputs(length, batch=1, heads=2, head_dim=16, state_dim=16)]
    large = torch.rand(inputs[1].shape, generator=torch.Generator().manual_seed(1)) < 0.1
    inputs[1] = torch.where(large, 30.0, -7.0) + inputs[1]
    inputs[3] = inputs[3].abs().clamp(max=1.0) * torch.tensor(1e3).log()
    exact = [t.requires_grad_() for t in inputs]
    found = [t.detach().float().requires_grad_() for t in inputs]
    expected = recurrence(*exact)
    actual = scan(*found)
    pairs = [(expected, actual)]
    pairs += zip(
        torch.autograd.grad(expected.square().sum(), exact),
        torch.autograd.grad(actual.square().sum(), found),
        strict=True,
    )
    for e, a in pairs:
        assert (a - e).norm() <= 1e-3 * e.norm()


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_sums_by_doubling_equal_cumsum(length):
    a = torch.randn(2, 2, 3, length, dtype=torch.float64, requires_grad=True)
    doubled = prefix_sums_by_doubling(a)
    torch.testing.assert_close(doubled, a.cumsum(-1))
    weight = torch.randn_like(doubled)
    torch.testing.assert_close(
        torch.autograd.grad((doubled * weight).sum(), a),
        torch.autograd.grad((a.cumsum(-1) * weight).sum(), a),
    )


def test_ssd_survives_very_strong_decay_in_fp32():
    inputs = ssd_inputs(64, torch.float32, decay=500.0)
    y = ssd.bidirectional_ssd(*inputs)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs)
    expected = recurrence(*(t.detach().double() for t in inputs))
    torch.testing.assert_close(y.detach().double(), expected, rtol=1e-4, atol=1e-4)


def test_ssd_keeps_the_dtype_of_x_and_is_close_in_bf16():
    inputs = [t.detach() for t in ssd_inputs(64, torch.float32)]
    expected = ssd.bidirectional_ssd(*inputs)
    low = [t.bfloat16() if i in (0, 4, 5) else t for i, t in enumerate(inputs)]
    y = ssd.bidirectional_ssd(*low)
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).norm() < 0.02 * expected.norm()


def test_add_norm_is_its_formula_and_never_writes_in_place():
    generator = torch.Generator().manual_seed(0)
    branch, residual = (
        torch.randn(2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    gate, scale, shift = (
        torch.randn(2, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    before = residual.clone()
    h, z = add_norm(branch, gate, residual, scale, shift)
    expected = residual + gate[:, None] * branch
    torch.testing.assert_close(z, expected)
    normed = F.rms_norm(expected, (8,), eps=1e-6)
    torch.testing.assert_close(h, normed * (1 + scale[:, None]) + shift[:, None])
    assert torch.equal(residual, before)
    assert z.data_ptr() != residual.data_ptr()


@pytest.mark.parametrize("in_fp32", [True, False])
def test_add_norm_dtypes(in_fp32):
    branch = torch.randn(1, 3, 8).bfloat16()
    h, z = add_norm(
        branch,
        torch.ones(1, 8),
        torch.zeros(1, 3, 8),
        torch.zeros(1, 8),
        torch.zeros(1, 8),
        1e-6,
        in_fp32,
    )
    assert h.dtype == torch.bfloat16
    assert z.dtype == (torch.float32 if in_fp32 else torch.bfloat16)


def test_add_norm_gradients_are_right():
    inputs = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in [(1, 2, 4), (1, 4), (1, 2, 4), (1, 4), (1, 4)]
    ]
    assert torch.autograd.gradcheck(lambda *a: add_norm(*a), inputs)


def test_local_mix_with_the_identity_kernel_is_silu():
    x = torch.randn(2, 12, 6)
    weight = torch.zeros(6, 1, 3, 3)
    weight[:, 0, 1, 1] = 1.0
    torch.testing.assert_close(local_mix(x, weight, torch.zeros(6), (3, 4)), F.silu(x))


def test_local_mix_sees_its_eight_neighbours_and_no_one_else():
    x = torch.zeros(1, 20, 1, requires_grad=True)
    # row 1, column 2
    local_mix(x, torch.ones(1, 1, 3, 3), torch.zeros(1), (4, 5))[0, 7].sum().backward()
    seen = {divmod(int(i), 5) for i in x.grad.flatten().nonzero()}
    assert seen == {(r, c) for r in (0, 1, 2) for c in (1, 2, 3)}
