"""Every operator of accel/kernels: its fused form, its definition, and random inputs for both."""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    bias: float = -4.0
    """Centre of dt_bias: steps of the scan are around 0.02 at -4, around 1 at 0."""
    most_decay: float = 16.0
    """Limit of the decays exp(A_log) of the scan."""

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


def make_add_norm(sizes, **options):
    channels = sizes.heads * sizes.head_dim
    gate, scale, shift = (sizes.draw_vectors(channels) for _ in range(3))
    residual = sizes.draw(sizes.batch, sizes.tokens, channels)
    inputs = [sizes.draw_tokens(channels), gate, residual, scale, shift]
    return Case(
        lambda *t: fused_add_norm(*t, **options), lambda *t: add_norm(*t, **options), inputs
    )


def make_add_norm_with_rows(sizes):
    rows = torch.randperm(sizes.tokens, device=sizes.device).int()
    return make_add_norm(sizes, branch_rows=rows, h_rows=rows.roll(1))


def draw_decays(sizes):
    """dt_bias and A_log."""
    dt_bias = sizes.draw(2, sizes.heads).detach() + sizes.bias
    A_log = (sizes.most_decay * torch.rand_like(dt_bias)).log()
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
    "add_norm, centred": lambda sizes: make_add_norm(sizes, centred=True),
    "add_norm, 16 bits": lambda sizes: make_add_norm(sizes, residual_in_fp32=False),
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


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
"""dtype -> bound of a kernel's error in the interpreter: its norm over the norm of the answer."""


class Row(NamedTuple):
    """An operator at sizes at which its results are compared with those of its definition."""

    operator: str
    sizes: Sizes
    chunk: int | None = None
    """Tokens of a chunk of the scan, where sequences are to be cut."""
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCE)
    """Dtypes in which the interpreter runs the kernels; in fp64 the operator runs everywhere."""
    factor: float = 2.0
    """Tolerances of the error."""
    skip: tuple[int, ...] = ()
    """Results that are zero but for rounding."""


def make_scan_row(
    length, batch=2, heads=3, head_dim=32, state_dim=16, most_decay=1.0, fp16=True, **how
):
    """A row of the bidirectional scan with steps around 1."""
    sizes = Sizes((1, length), batch, heads, head_dim, state_dim, bias=0.0, most_decay=most_decay)
    dtypes = tuple(TOLERANCE) if fp16 else (torch.float32,)
    return Row("ssd", sizes, dtypes=dtypes, **how)


ADD_NORM = [((1, 1), 16), ((7, 9), 64), ((1, 5), 192)]
QK_ROPE = [Sizes((1, 1), heads=1, head_dim=8), Sizes((5, 9), head_dim=64)]
ROWS = [
    *(
        Row(f"add_norm{kind}", Sizes(grid, heads=7, head_dim=head_dim))
        for kind in ("", ", rows", ", centred", ", 16 bits")
        for grid, head_dim in ADD_NORM
    ),
    *(
        Row(f"qk_rope{kind}", sizes)
        for kind in ("", ", not rotated", ", not normed")
        for sizes in QK_ROPE
    ),
    Row("gated_norm", Sizes((1, 1), head_dim=32)),
    Row("gated_norm", Sizes((1, 31), heads=1, head_dim=48)),
    Row("gated_norm", Sizes((1, 100), heads=2, head_dim=128)),
    Row("local_mix", Sizes((1, 1), heads=1, head_dim=96)),
    Row("local_mix", Sizes((8, 9), 1, heads=1, head_dim=100)),
    Row("local_mix", Sizes((1, 50), 1, heads=1, head_dim=96, taps=(1, 7))),
    Row("local_mix", Sizes((9, 1), heads=1)),
    Row("swiglu", Sizes((1, 1), heads=1)),
    Row("swiglu", Sizes((1, 5), heads=1, head_dim=300)),
    Row("swiglu", Sizes((1, 7), heads=8)),
    Row("ssd_mixed", Sizes((4, 7), heads=2, head_dim=32)),
    Row("ssd_decays", Sizes((1, 20), heads=5)),
    Row("selective_scan", Sizes((1, 1)), dtypes=()),
    Row("selective_scan", Sizes((7, 9)), dtypes=()),
    # The gradient of A of a single token is zero.
    make_scan_row(1, fp16=False, skip=(4,)),
    *(make_scan_row(length, fp16=False) for length in (63, 64, 65)),
    make_scan_row(100, 1),
    # Long sequences lose a digit of their running sums.
    make_scan_row(300, 1, 1, fp16=False, factor=8.0),
    *(
        make_scan_row(70, 1, 2, head_dim, state_dim, fp16=False)
        for head_dim, state_dim in ((16, 16), (64, 64), (128, 32), (32, 128))
    ),
    # Where everything decays at once, or nothing does, the gradients of dt, its bias and A are
    # zero.
    *(
        make_scan_row(100, 1, most_decay=decay, fp16=False, factor=20.0, skip=(2, 3, 4))
        for decay in (0.0, 50.0, 1e4)
    ),
    make_scan_row(100, 1, most_decay=1e-3, fp16=False, factor=20.0),
    *(
        make_scan_row(70, 1, heads, head_dim, state_dim, fp16=heads == 3, chunk=32, factor=4.0)
        for heads, head_dim, state_dim in ((2, 64, 64), (3, 16, 32), (1, 32, 16))
    ),
    # A single token only scales x, which the norm takes out again.
    Row("ssd, gated", Sizes((1, 1), 1, 2, 32), skip=tuple(range(2, 8))),
    Row("ssd, gated", Sizes((1, 100), 1, 2, 64)),
    Row("ssd, gated", Sizes((1, 64), 1, 2, 128)),
    Row("ssd, gated", Sizes((1, 37)), chunk=16, dtypes=()),
]
"""Operators and sizes that every place compares: sequences of one token, of odd lengths, along a
row or a column, and in chunks."""


def name_rows(rows):
    """Names for pytest: operator, and shape of its tokens."""
    return [f"{row.operator}-{'x'.join(map(str, row.sizes.grid))}" for row in rows]


def make_row(row, dtype, monkeypatch):
    """The case of a row, whose activations are slices of a projection: its tokens lie apart."""
    if row.chunk:
        shorten_chunks(monkeypatch, row.chunk)
    return CASES[row.operator](replace(row.sizes, dtype=dtype, padding=24))


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
