"""The kernels of the bidirectional scan against their definition in fp64, forward and backward."""

from __future__ import annotations

import pytest
import torch

from accel.kernels import bidirectional_ssd as definition
from accel.kernels import bidirectional_ssd_triton as kernels
from accel.kernels import chunked_ssd_triton as between
from accel.kernels import ssd_decays_triton as decays
from accel.kernels.bidirectional_ssd_backward_triton import launch_backward
from accel.kernels.chunked_ssd import groups_reference, read_reference, states_reference
from accel.kernels.fused_ssd import split_channels
from accel.kernels.ssd_decays import ssd_decays
from tests.interpreted.conftest import assert_near


def inputs(length, dtype=torch.float32, batch=2, heads=3, head_dim=32, state_dim=16, decay=1.0):
    """x, dt, dt_bias, A_log, B, C, D, z and its weight; what depends on the token as slices of one
    projection."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    groups = ((heads, head_dim), (2, state_dim), (2, state_dim), (heads, head_dim), (2, heads))
    sizes = [a * b for a, b in groups]
    parts = normal(batch, length, sum(sizes)).to(dtype).split(sizes, -1)
    x, B_in, C_out, z, dt = (t.unflatten(-1, shape) for t, shape in zip(parts, groups, strict=True))
    A_log = (decay * torch.rand(2, heads, generator=generator)).log()
    return x, dt, normal(2, heads), A_log, B_in, C_out, normal(heads), z, normal(heads, head_dim)


def check(values, poison, dtype=torch.float32, factor=1.0, skip=()):
    """The whole chain of launches. Gradients of dt, its bias and A are differences of sums that
    cancel, so they are allowed more."""
    x, dt, dt_bias, A_log, B_in, C_out, D = values[:7]
    exact = [t.detach().double().requires_grad_() for t in values[:7]]
    expected = definition.bidirectional_ssd(*exact)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    poison()
    steps, sums = decays.launch_forward(dt, dt_bias, A_log, x.shape[1])
    assert_near(
        kernels.launch_forward(x, steps, sums, B_in, C_out, D),
        expected.to(dtype),
        dtype,
        2.0 * factor,
    )
    joined, dsteps, dsums, dD = launch_backward(dy, x, steps, sums, B_in, C_out, D)
    dx, dB, dC = split_channels(joined, *x.shape[2:])
    ddt = torch.full_like(dt, float("nan"))
    dbias, dA_log = decays.launch_backward(dsteps, dsums, dt, dt_bias, A_log, ddt)
    found = {"x": dx, "dt": ddt, "dt_bias": dbias, "A_log": dA_log, "B": dB, "C": dC, "D": dD}
    for (name, a), e in zip(found.items(), gradients, strict=True):
        if name not in skip:
            slack = 20.0 if name in ("dt", "dt_bias", "A_log") else 2.0
            assert_near(a.float(), e.float(), dtype, slack * factor)


LONG = [pytest.param(length, marks=pytest.mark.slow) for length in (256, 512)]


@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 100, 300, *LONG])
def test_any_length(length, poison):
    long = length > 256  # running sums in fp32 lose a digit
    values = inputs(length, batch=1 if length > 100 else 2)
    check(values, poison, factor=4.0 if long else 1.0, skip=("A_log",) if length == 1 else ())


@pytest.mark.parametrize(("head_dim", "state_dim"), [(16, 16), (64, 64), (128, 32), (32, 128)])
def test_any_size(head_dim, state_dim, poison):
    check(inputs(70, batch=1, heads=2, head_dim=head_dim, state_dim=state_dim), poison)


@pytest.mark.parametrize("block", [32, 64])
def test_other_tiles(block, poison, monkeypatch):
    monkeypatch.setattr(kernels, "choose_configuration", lambda *a: (block, 4, None))
    check(inputs(100), poison)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 50.0, 1e4])
def test_extreme_decays(decay, poison):
    """Nothing overflows. The gradient of A cancels to nothing where everything decays at once, or
    nothing does."""
    cancels = decay == 0.0 or decay > 10.0
    check(
        inputs(100, decay=decay),
        poison,
        factor=10.0,
        skip=("A_log", "dt", "dt_bias") if cancels else (),
    )


def test_large_decays_do_not_round_off_the_small_ones_after_them(poison):
    """Steps of 30 and of 1e-3 with A = 1e3, over 256 tokens: three digits."""
    values = list(inputs(256, batch=1, heads=1, decay=1e3))
    values[1] = values[1] + torch.where(values[1] > 1.2, 30.0, -7.0)
    check(values, poison, factor=100.0)


def test_16_bits(poison):
    check(inputs(100, torch.float16), poison, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("length", "head_dim"), [(1, 32), (100, 64), (64, 128)])
def test_gate_and_norm_while_the_result_is_in_registers(length, head_dim, dtype, poison):
    values = inputs(length, dtype, batch=1, heads=2, head_dim=head_dim)
    exact = definition.bidirectional_ssd(*(t.double() for t in values))
    x, dt, dt_bias, A_log, *rest = values
    poison()
    steps, sums = decays.launch_forward(dt, dt_bias, A_log, length)
    h, y = kernels.launch_gated(x, steps, sums, *rest, 1e-6)
    assert_near(h, exact.to(dtype), dtype, 2.0)
    assert torch.equal(y, kernels.launch_forward(x, steps, sums, *rest[:3]))


def test_tokens_far_apart(poison):
    """Only each token's own values have to lie together."""
    values = list(inputs(40))
    values[0] = values[0].repeat_interleave(2, dim=1)[:, ::2]
    check(values, poison)


SIZES = [(256, 2, 64, 64), (100, 3, 16, 32), (7, 1, 32, 16)]


@pytest.mark.parametrize(("length", "heads", "head_dim", "state_dim"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_between_chunks(length, heads, head_dim, state_dim, dtype, poison):
    """What chunks leave, what is read of it, and the gradient of B and C; x and B are slices."""
    torch.manual_seed(0)
    inner = heads * head_dim
    joined = torch.randn(3, length, inner + 2 * state_dim).to(dtype)
    x = joined[..., :inner].unflatten(-1, (heads, -1))
    groups = joined[..., inner:].unflatten(-1, (2, -1))
    weights = torch.rand(3, 2, heads, length)
    inside = torch.randn(3, length, heads, head_dim).to(dtype)
    given = torch.randn(3, 2, heads, state_dim, head_dim)
    exact = {
        name: t.double()
        for name, t in (("x", x), ("g", groups), ("w", weights), ("i", inside), ("s", given))
    }
    poison()
    states = between.launch_states(x, groups, weights)
    assert_near(states, states_reference(exact["x"], exact["g"], exact["w"]).float(), dtype)
    for more in ((inside, None), (None, x)):
        out, dots = between.launch_read(given, groups, weights, *more)
        arguments = (
            exact["s"],
            exact["g"],
            exact["w"],
            *(None if t is None else t.double() for t in more),
        )
        expected, expected_dots = read_reference(*arguments)
        assert_near(out, expected.to(dtype), dtype)
        assert_near(dots, expected_dots.float(), dtype)
    found = between.launch_groups(given, x, weights)
    assert_near(found, groups_reference(exact["s"], exact["x"], exact["w"]).to(dtype), dtype)


@pytest.mark.parametrize(("length", "piece"), [(1, 1), (100, 100), (300, 256), (513, 256)])
@pytest.mark.parametrize("heads", [1, 5, 24])
def test_the_prelude_and_its_gradients(length, piece, heads, poison):
    """Also where softplus is far from both of its limits, and where it is at them."""
    generator = torch.Generator().manual_seed(length)
    dt = 30.0 * torch.randn(2, length, 2 * heads + 3, generator=generator)[
        ..., : 2 * heads
    ].unflatten(-1, (2, heads))
    dt_bias, A_log = torch.randn(2, 2, heads, generator=generator)
    exact = [t.double().requires_grad_() for t in (dt, dt_bias, A_log)]
    expected = ssd_decays(*exact, piece)
    weights = [torch.rand(t.shape, generator=generator) for t in expected]
    gradients = torch.autograd.grad(expected, exact, [w.double() for w in weights])
    poison()
    for a, e in zip(decays.launch_forward(dt, dt_bias, A_log, piece), expected, strict=True):
        assert_near(a, e.float())
    ddt = torch.full_like(dt, float("nan"))
    found = (ddt, *decays.launch_backward(*weights, dt, dt_bias, A_log, ddt))
    for a, e in zip(found, gradients, strict=True):
        assert_near(a, e.float())


def test_small_steps_keep_their_digits(poison):
    """softplus(-15) is 3e-7: log(1 + exp) would lose it."""
    dt = torch.full((1, 4, 2, 1), -15.0)
    zero = torch.zeros(2, 1)
    poison()
    steps, _ = decays.launch_forward(dt, zero, zero, 4)
    torch.testing.assert_close(steps, torch.full_like(steps, 3.0590227e-7), rtol=1e-5, atol=0.0)
