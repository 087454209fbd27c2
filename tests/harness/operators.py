"""Every operator of accel/kernels: its fused form, its definition, and random inputs for both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels.add_norm.operator import add_norm, fused_add_norm
from accel.kernels.attention.qk_rope import fused_qk_rope, qk_rope
from accel.kernels.gated_norm.operator import fused_gated_norm, gated_norm
from accel.kernels.local_mix.operator import fused_local_mix, local_mix
from accel.kernels.selective_scan.operator import fused_selective_scan, selective_scan
from accel.kernels.ssd import definition as ssd
from accel.kernels.ssd.decays import fused_ssd_decays, ssd_decays
from accel.kernels.ssd.mixed import fused_mixed_ssd, mixed_ssd
from accel.kernels.ssd.operator import fused_bidirectional_ssd
from accel.kernels.swiglu.operator import fused_swiglu, silu_product
from models.mixers.attention import axial_rotations


@dataclass(frozen=True)
class Sizes:
    """Shape and kind of the inputs of an operator; D = heads · head_dim channels."""

    grid: tuple[int, int] = (3, 4)
    batch: int = 2
    heads: int = 3
    head_dim: int = 16
    state_dim: int = 16
    taps: tuple[int, int] = (3, 3)
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    padding: int = 0
    """Values between the tokens of an activation, as in a slice of a projection."""

    @property
    def tokens(self):
        return self.grid[0] * self.grid[1]

    def draw(self, *shape):
        """A parameter: normal values in fp32 at least."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.randn(shape, dtype=wide, device=self.device).requires_grad_()

    def draw_tokens(self, *shape):
        """An activation (B, L, *shape) in `dtype`."""
        width = torch.Size(shape).numel()
        joined = self.draw(self.batch, self.tokens, self.padding + width).detach().to(self.dtype)
        return joined[..., self.padding :].unflatten(-1, shape).requires_grad_()

    def draw_vectors(self, *shape):
        """One value in `dtype` for all tokens of a sample (B, *shape)."""
        return self.draw(self.batch, *shape).detach().to(self.dtype).requires_grad_()


class Case(NamedTuple):
    """Two functions that compute the same from `inputs`."""

    fused: Callable[..., Any]
    definition: Callable[..., Any]
    inputs: list[Tensor]
    cancelling: tuple[int, ...] = ()
    """Results of `run_both_ways` that are differences of sums which cancel, so that they lose
    digits: the gradients of dt, its bias and A, and under a norm that of D."""


def make_add_norm(sizes, **rows):
    channels = sizes.heads * sizes.head_dim
    gate, scale, shift = (sizes.draw_vectors(channels) for _ in range(3))
    residual = sizes.draw(sizes.batch, sizes.tokens, channels)
    inputs = [sizes.draw_tokens(channels), gate, residual, scale, shift]
    return Case(lambda *t: fused_add_norm(*t, **rows), lambda *t: add_norm(*t, **rows), inputs)


def make_add_norm_with_rows(sizes):
    rows = torch.randperm(sizes.tokens, device=sizes.device).int()
    return make_add_norm(sizes, branch_rows=rows, h_rows=rows.roll(1))


def draw_decays(sizes):
    """dt_bias and A_log: steps around 0.02, decays between 0 and 16."""
    dt_bias = sizes.draw(2, sizes.heads).detach() - 4.0
    A_log = (16.0 * torch.rand_like(dt_bias)).log()
    return [dt_bias.requires_grad_(), A_log.requires_grad_()]


def make_ssd(sizes):
    """Inputs: x, dt, dt_bias, A_log, B, C and D."""
    x = sizes.draw_tokens(sizes.heads, sizes.head_dim)
    dt = sizes.draw_tokens(2, sizes.heads)
    groups = [sizes.draw_tokens(2, sizes.state_dim) for _ in range(2)]
    inputs = [x, dt, *draw_decays(sizes), *groups, sizes.draw(sizes.heads)]
    return Case(fused_bidirectional_ssd, ssd.bidirectional_ssd, inputs, (2, 3, 4))


def shorten_chunks(monkeypatch, tokens):
    """From here on the scan takes sequences of more than `tokens` tokens in chunks of as many."""
    monkeypatch.setattr(ssd, "MAX_QUADRATIC_TOKENS", tokens)
    monkeypatch.setattr(ssd, "CHUNK_TOKENS", tokens)


def make_gated_ssd(sizes):
    case = make_ssd(sizes)
    inputs = [*case.inputs, *make_gated_norm(sizes).inputs[1:]]
    return case._replace(inputs=inputs, cancelling=(2, 3, 4, 7))


def make_decays(sizes, piece=9):
    inputs = [sizes.draw_tokens(2, sizes.heads), *draw_decays(sizes)]
    return Case(
        lambda *t: fused_ssd_decays(*t, piece), lambda *t: ssd_decays(*t, piece), inputs, (2, 3, 4)
    )


def make_mixed_ssd(sizes):
    """Inputs: the projection (z, xBC and dt), weight and bias of the convolution, dt_bias, A_log,
    D, and the weight of the head norm."""
    inner = sizes.heads * sizes.head_dim
    mixed = inner + 4 * sizes.state_dim
    projection = sizes.draw_tokens(inner + mixed + 2 * sizes.heads)
    inputs = [projection, sizes.draw(mixed, 1, *sizes.taps), sizes.draw(mixed)]
    inputs += draw_decays(sizes)
    inputs += [sizes.draw(sizes.heads), sizes.draw(sizes.heads, sizes.head_dim)]

    def on_grid(function):
        return lambda *t: function(*t[:3], sizes.grid, *t[3:])

    return Case(on_grid(fused_mixed_ssd), on_grid(mixed_ssd), inputs, (4, 5, 6))


def make_gated_norm(sizes):
    shape = (sizes.heads, sizes.head_dim)
    inputs = [sizes.draw_tokens(*shape), sizes.draw_tokens(*shape), sizes.draw(*shape)]
    return Case(fused_gated_norm, gated_norm, inputs)


def make_local_mix(sizes):
    channels = sizes.heads * sizes.head_dim
    inputs = [
        sizes.draw_tokens(channels),
        sizes.draw(channels, 1, *sizes.taps),
        sizes.draw(channels),
    ]
    grid = sizes.grid
    return Case(lambda *t: fused_local_mix(*t, grid), lambda *t: local_mix(*t, grid), inputs)


def make_swiglu(sizes):
    joined = sizes.draw_tokens(2 * sizes.heads * sizes.head_dim)
    return Case(fused_swiglu, lambda joined: silu_product(*joined.chunk(2, -1)), [joined])


def make_qk_rope(sizes, normed=True, rotated=True):
    """Inputs: q, k and v side by side; with `normed` also the weights of both norms."""
    inputs = [sizes.draw_tokens(3, sizes.heads, sizes.head_dim)]
    if normed:
        inputs += [sizes.draw(sizes.head_dim), sizes.draw(sizes.head_dim)]
    rotations = None
    if rotated:
        rotations = axial_rotations(sizes.grid, sizes.head_dim).to(inputs[-1])

    def placed(function):
        return lambda qkv, *weights: function(qkv, *(weights or (None, None)), rotations)

    return Case(placed(fused_qk_rope), placed(qk_rope), inputs)


def make_selective_scan(sizes):
    """Inputs: x, dt, dt_bias, A_log, B, C and D; x with channels before tokens, as the package's
    kernel wants it."""
    channels = sizes.heads * sizes.head_dim
    x = sizes.draw_tokens(channels).detach().mT.contiguous().mT.requires_grad_()
    decays = [sizes.draw_tokens(channels), sizes.draw(channels)]
    decays.append(sizes.draw(channels, sizes.state_dim))
    groups = [sizes.draw_tokens(sizes.state_dim) for _ in range(2)]
    return Case(fused_selective_scan, selective_scan, [x, *decays, *groups, sizes.draw(channels)])


CASES = {
    "add_norm": make_add_norm,
    "add_norm, rows": make_add_norm_with_rows,
    "ssd": make_ssd,
    "ssd, gated": make_gated_ssd,
    "ssd_decays": make_decays,
    "ssd_mixed": make_mixed_ssd,
    "gated_norm": make_gated_norm,
    "local_mix": make_local_mix,
    "swiglu": make_swiglu,
    "qk_rope": make_qk_rope,
    "qk_rope, not rotated": lambda sizes: make_qk_rope(sizes, rotated=False),
    "qk_rope, not normed": lambda sizes: make_qk_rope(sizes, normed=False),
    "selective_scan": make_selective_scan,
}
OF_TRITON = [name for name in CASES if name != "selective_scan"]
"""Operators whose kernels are part of this project."""


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def run_both_ways(function, inputs):
    """Outputs and the gradients of all inputs, from always the same gradients of the outputs."""
    outputs = as_tuple(function(*inputs))
    draw = torch.Generator().manual_seed(0)
    # bf16 holds these values, so they are the same in every dtype
    weights = [torch.randn(t.shape, generator=draw).bfloat16().to(t) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, weights)]


def assert_all_close(actual, expected, rtol=1e-9):
    torch.testing.assert_close(list(actual), list(expected), rtol=rtol, atol=rtol)


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
"""Norm of the error over the norm of the answer."""
