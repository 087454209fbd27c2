"""Triton kernels of `local_mix`. Tokens lie in raster order, each with its channels side by side,
so the token that a tap reads lies at a fixed distance.

The forward pass is one kernel, which reads neighbouring tokens from the cache. The backward pass
has two. The first computes the convolution again, the gradient of the convolution's output (before
SiLU), and the sums for the gradients of weight and bias; each program stores the sums of its
tokens, so there are no atomics. The second convolves the gradient before SiLU with the reversed
taps, which gives the gradient of x.

Letters: B samples, D width, R × C taps.
"""

# Switch the checks below off in this file. Pyright does not know that the launch of a kernel turns
# numbers into tl.constexpr. Nor does it know that Triton decides an `if` over constants when it
# compiles the kernel, so that a name assigned under such an `if` exists wherever it is used.
# pyright: reportArgumentType=false
# pyright: reportReturnType=false
# pyright: reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.loads_triton import load_fp32

BLOCK_L = 16
BLOCK_C = 64
WARPS = 2
SUMMING = {"STRETCH": 64, "BLOCK_L": 2, "num_warps": 1}
"""Sizes of `local_mix_backward_kernel`: tokens a program, and tokens a tile, so few that the sums
of all taps stay in registers. All sizes in this file were the fastest on an H100, but for STRETCH,
of which 256 took 603 µs and 64 610 µs (docs/LOG.md, 2026-11-27)."""


@triton.jit
def load_tap(
    X,
    t,
    c,
    mask,
    x_token: tl.constexpr,
    TAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Loads for each token t the neighbour that tap number TAP reads, or 0 if this neighbour is
    outside the grid."""
    row = t // COLUMNS + TAP // C - R // 2
    column = t % COLUMNS + TAP % C - C // 2
    seen = mask & ((row >= 0) & (row < ROWS) & (column >= 0) & (column < COLUMNS))[:, None]
    return load_fp32(X + (row * COLUMNS + column)[:, None] * x_token + c[None, :], seen)


@triton.jit
def local_mix_kernel(
    X,
    WEIGHT,
    BIAS,
    Y,
    x_batch: tl.constexpr,
    x_token: tl.constexpr,
    y_batch: tl.constexpr,
    y_token: tl.constexpr,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BACKWARDS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolves the tokens and applies SiLU. If BACKWARDS, X holds the gradient before SiLU; the
    kernel then reverses the taps and leaves out bias and SiLU, which gives the gradient of the
    layer's input."""
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (t < ROWS * COLUMNS)[:, None] & (c < D)[None, :]
    X += b * x_batch
    u = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
    for tap in tl.static_range(R * C):
        weight = load_fp32(WEIGHT + c * (R * C) + (R * C - 1 - tap if BACKWARDS else tap), c < D)
        u += weight[None, :] * load_tap(X, t, c, mask, x_token, tap, ROWS, COLUMNS, R, C)
    if not BACKWARDS:
        u += load_fp32(BIAS + c, c < D)[None, :]
        u = u * tl.sigmoid(u)
    out = b * y_batch + t[:, None] * y_token + c[None, :]
    tl.store(Y + out, u, mask=mask)


@triton.jit
def local_mix_backward_kernel(
    DY,
    X,
    WEIGHT,
    BIAS,
    DU,
    SUMS,
    x_batch: tl.constexpr,
    x_token: tl.constexpr,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Stores in DU the gradient of the convolution's output, before SiLU, and in SUMS (B,
    stretches, R·C + 1, D) the part of STRETCH tokens in the gradients of the R·C taps and of the
    bias."""
    stretch = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = c < D
    X += b * x_batch
    bias = load_fp32(BIAS + c, channel)
    weights = ()
    dweights = ()
    for tap in tl.static_range(R * C):
        weights += (load_fp32(WEIGHT + c * (R * C) + tap, channel),)
        dweights += (tl.zeros([BLOCK_L, BLOCK_C], tl.float32),)
    dbias = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)

    for start in range(0, STRETCH, BLOCK_L):
        t = stretch * STRETCH + start + tl.arange(0, BLOCK_L)
        mask = (t < ROWS * COLUMNS)[:, None] & channel[None, :]
        u = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
        for tap in tl.static_range(R * C):
            x = load_tap(X, t, c, mask, x_token, tap, ROWS, COLUMNS, R, C)
            u += weights[tap][None, :] * x
        u += bias[None, :]

        # Multiply the incoming gradient by the derivative of SiLU.
        here = (b * ROWS * COLUMNS + t)[:, None] * D + c[None, :]
        gate = tl.sigmoid(u)
        dy = load_fp32(DY + here, mask)
        du = dy * gate * (1.0 + u * (1.0 - gate))
        tl.store(DU + here, du, mask=mask)
        dbias += du

        # The gradient of a tap is the sum over tokens of du times the neighbour that the tap reads.
        # Keep tiles of it in registers: a sum over a tile's tokens exchanges values between
        # threads, so it is taken once, at the end.
        totals = ()
        for tap in tl.static_range(R * C):
            x = load_tap(X, t, c, mask, x_token, tap, ROWS, COLUMNS, R, C)
            totals += (dweights[tap] + du * x,)
        dweights = totals

    sums = SUMS + (b * tl.num_programs(0) + stretch) * (R * C + 1) * D + c
    for tap in tl.static_range(R * C):
        tl.store(sums + tap * D, tl.sum(dweights[tap], 0), mask=channel)
    tl.store(sums + R * C * D, tl.sum(dbias, 0), mask=channel)


def choose_grid(x: Tensor, tokens: int) -> tuple[int, int, int]:
    """Returns the grid of a launch whose programs take `tokens` tokens each: (programs along the
    tokens, tiles of channels, samples)."""
    return triton.cdiv(x.shape[1], tokens), triton.cdiv(x.shape[2], BLOCK_C), x.shape[0]


def choose_constants(weight: Tensor, rows: int, columns: int) -> dict[str, int]:
    """Returns the compile-time constants of the kernels and launch options such as num_warps;
    `SUMMING` replaces some of them in the backward kernel."""
    taps = {"R": weight.shape[2], "C": weight.shape[3]}
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        **taps,
        "BLOCK_L": BLOCK_L,
        "BLOCK_C": BLOCK_C,
        "num_warps": WARPS,
    }


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int) -> Tensor:
    y = x.new_empty(x.shape)
    launch(x, weight, bias, y, choose_constants(weight, rows, columns), backwards=False)
    return y


def launch(
    x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, constants: dict[str, int], backwards: bool
) -> None:
    strides = (*x.stride()[:2], *y.stride()[:2])
    local_mix_kernel[choose_grid(x, BLOCK_L)](
        x, weight, bias, y, *strides, x.shape[2], BACKWARDS=backwards, **constants
    )


def launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int, dx: Tensor
) -> tuple[Tensor, Tensor]:
    """Launches the backward kernels. Returns the gradients of weight and bias (fp32); writes the
    gradient of x to `dx`."""
    batch, _, dim = x.shape
    grid = choose_grid(x, SUMMING["STRETCH"])
    constants = choose_constants(weight, rows, columns)
    du = x.new_empty(x.shape)
    taps = weight.shape[2] * weight.shape[3]
    sums = x.new_empty(batch, grid[0], taps + 1, dim, dtype=torch.float32)
    local_mix_backward_kernel[grid](
        dy, x, weight, bias, du, sums, *x.stride()[:2], dim, **(constants | SUMMING)
    )
    launch(du, weight, bias, dx, constants, backwards=True)
    total = sums.sum((0, 1))
    return total[:taps].t().reshape(weight.shape).contiguous(), total[taps].clone()
