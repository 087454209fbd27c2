"""The kernels of the bidirectional scan against their definition in fp64, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from accel.kernels import bidirectional_ssd_triton as kernels
from accel.kernels.bidirectional_ssd import bidirectional_ssd
from accel.kernels.bidirectional_ssd_backward_triton import launch_backward
from tests.interpreted.conftest import assert_near


def inputs(length, dtype=torch.float32, batch=2, heads=3, head_dim=32, state_dim=16, decay=1.0):
    """x, B and C as slices of one projection, as a mixer has them."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    inner = heads * head_dim
    x, B_in, C_out = (
        normal(batch, length, inner + 4 * state_dim).to(dtype).split((inner, 2 * state_dim, 2 * state_dim), -1)
    )
    dt = F.softplus(normal(batch, length, 2, heads))
    A = -decay * torch.rand(2, heads, generator=generator)
    groups = [t.unflatten(-1, (2, state_dim)) for t in (B_in, C_out)]
    return x.unflatten(-1, (heads, head_dim)), dt, A, *groups, normal(heads)


def check(values, poison, dtype=torch.float32, factor=1.0, skip=()):
    """dt and A are differences of sums that cancel, so they are allowed more."""
    x, dt, A, B_in, C_out, D = values
    exact = [t.detach().double().requires_grad_() for t in values]
    expected = bidirectional_ssd(*exact)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    poison()
    y, dt_rows, sums = kernels.launch_forward(x, dt, dt * A, B_in, C_out, D)
    assert_near(y, expected.to(dtype), dtype, 2.0 * factor)
    dx, ddt, da, dS, dD = launch_backward(dy, x, dt_rows, sums, B_in, C_out, D)
    dC = (dS.float() @ B_in.float().transpose(1, 2)).transpose(1, 2)
    dB = (dS.float().mT @ C_out.float().transpose(1, 2)).transpose(1, 2)
    found = {"x": dx.float(), "dt": ddt + da * A, "A": (da * dt).sum((0, 1)), "B": dB, "C": dC, "D": dD}
    for (name, a), e in zip(found.items(), gradients, strict=True):
        if name not in skip:
            assert_near(a, e.float(), dtype, (20.0 if name in ("dt", "A") else 2.0) * factor)


@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 100, 256, 300, 512])
def test_any_length(length, poison):
    long = length > 256  # running sums in fp32 lose a digit
    values = inputs(length, batch=1 if long else 2)
    check(values, poison, factor=4.0 if long else 1.0, skip=("A",) if length == 1 else ())


@pytest.mark.parametrize(("head_dim", "state_dim"), [(16, 16), (64, 64), (128, 32), (32, 128)])
def test_any_size(head_dim, state_dim, poison):
    check(inputs(70, batch=1, heads=2, head_dim=head_dim, state_dim=state_dim), poison)


@pytest.mark.parametrize("block", [32, 64])
def test_other_tiles(block, poison, monkeypatch):
    monkeypatch.setattr(kernels, "configuration", lambda *a: (block, 4))
    check(inputs(100), poison)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 50.0, 1e4])
def test_extreme_decays(decay, poison):
    """Nothing overflows. d(A) cancels to nothing where everything decays at once, or nothing does."""
    check(inputs(100, decay=decay), poison, factor=10.0, skip=("A", "dt") if decay > 10.0 else ())


def test_16_bits(poison):
    check(inputs(100, torch.float16), poison, torch.float16)


def test_tokens_far_apart(poison):
    """Only each token's own values have to lie together."""
    values = list(inputs(40))
    values[0] = values[0].repeat_interleave(2, dim=1)[:, ::2]
    check(values, poison)
