"""The kernels of the bidirectional scan against their definition in fp64, forward and backward."""

import pytest
import torch

from accel.kernels.ssd import decays_triton
from accel.kernels.ssd import forward_triton as kernels
from tests.harness.operators import (
    TOLERANCE,
    Sizes,
    make_decays,
    make_gated_ssd,
    make_ssd,
    shorten_chunks,
)

CANCELLING = (2, 3, 4)
"""Gradients of dt, its bias and A."""


def make_case(length, dtype=torch.float32, **sizes):
    """A case with steps around 1 and decays below 1, whose tokens lie apart in memory."""
    shape = {"head_dim": 32, "padding": 16} | sizes
    case = make_ssd(Sizes((1, length), dtype=dtype, **shape))
    with torch.no_grad():
        case.inputs[2] += 4.0  # steps around 1
        case.inputs[3] -= torch.tensor(16.0).log()  # A below 1
    return case


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_any_length(length, compare):
    # the gradient of A of a single token is zero
    compare(make_case(length), skip=(4,) if length == 1 else ())


@pytest.mark.parametrize("length", [300, pytest.param(512, marks=pytest.mark.slow)])
def test_long_sequences_lose_a_digit_of_their_running_sums(length, compare):
    compare(make_case(length, batch=1), factor=8.0)


@pytest.mark.parametrize(("head_dim", "state_dim"), [(16, 16), (64, 64), (128, 32), (32, 128)])
def test_any_size(head_dim, state_dim, compare):
    compare(make_case(70, batch=1, heads=2, head_dim=head_dim, state_dim=state_dim))


@pytest.mark.parametrize("block", [32, 64])
def test_other_tiles(block, compare, monkeypatch):
    monkeypatch.setattr(kernels, "choose_configuration", lambda *a, **k: (block, 4, None, 2))
    compare(make_case(100))


@pytest.mark.parametrize("decay", [0.0, 1e-3, 50.0, 1e4])
def test_extreme_decays(decay, compare):
    """Nothing overflows. The gradient of A is zero where everything decays at once, or nothing
    does."""
    case = make_case(100)
    with torch.no_grad():
        case.inputs[3].copy_((decay * torch.rand(2, 3)).log())
    cancels = decay == 0.0 or decay > 10.0
    compare(case, factor=20.0, skip=CANCELLING if cancels else ())


def test_large_decays_do_not_round_off_the_small_ones_after_them(compare):
    """Steps of 30 and of 1e-3 with A = 1e3, over 256 tokens: three digits."""
    case = make_case(256, batch=1, heads=1)
    with torch.no_grad():
        case.inputs[1] += torch.where(case.inputs[1] > 1.2, 30.0, -7.0)
        case.inputs[3] += torch.tensor(1e3).log()
    compare(case, factor=200.0)


def test_16_bits(compare):
    compare(make_case(100, torch.float16))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("length", "head_dim"), [(1, 32), (100, 64), (64, 128)])
def test_gate_and_norm_while_the_result_is_in_registers(length, head_dim, dtype, compare):
    sizes = Sizes((1, length), batch=1, heads=2, head_dim=head_dim, dtype=dtype, padding=16)
    # A single token only scales x, which the norm takes out again, so most gradients are zero.
    compare(make_gated_ssd(sizes), skip=range(2, 8) if length == 1 else ())


@pytest.mark.parametrize(
    ("heads", "head_dim", "state_dim"), [(2, 64, 64), (3, 16, 32), (1, 32, 16)]
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_between_chunks(heads, head_dim, state_dim, dtype, compare, monkeypatch):
    shorten_chunks(monkeypatch, 32)
    case = make_case(70, dtype, batch=1, heads=heads, head_dim=head_dim, state_dim=state_dim)
    compare(case, factor=4.0)


@pytest.mark.parametrize(("length", "piece"), [(1, 1), (100, 100), (300, 256), (513, 256)])
@pytest.mark.parametrize("heads", [1, 5, 24])
def test_the_prelude_and_its_gradients(length, piece, heads, compare):
    """With steps far from both limits of softplus, and at them."""
    case = make_decays(Sizes((1, length), heads=heads, dtype=torch.float32, padding=3), piece)
    with torch.no_grad():
        case.inputs[1] += 4.0
        case.inputs[0] *= 30.0
    compare(case)


def test_small_steps_keep_their_digits(poison):
    """softplus(-15) is 3e-7: log(1 + exp) would lose it."""
    dt = torch.full((1, 4, 2, 1), -15.0)
    zero = torch.zeros(2, 1)
    poison()
    steps, _ = decays_triton.launch_forward(dt, zero, zero, 4)
    torch.testing.assert_close(steps, torch.full_like(steps, 3.0590227e-7), rtol=1e-5, atol=0.0)
