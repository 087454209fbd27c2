"""Triton kernels of `ssd_decays`: softplus, decay and running sums in one launch, and their
gradients in another.

A program takes all tokens of one piece, some heads and one direction. It reads a tile in which the
heads of a token lie side by side in memory, and writes steps and sums with the tokens of a head
side by side. For direction 1, whose sums start at the last token, it reads the tokens in reverse
order, because `tl.cumsum(reverse=True)` is reported to be wrong (triton-lang/triton#4362, open).

Letters: B samples, L tokens, K heads; T tokens a piece, S = B·ceil(L / T) pieces.
"""

# Switch the checks below off in this file. Pyright does not know that the launch of a kernel turns
# numbers into tl.constexpr. Nor does it know that Triton decides an `if` over constants when it
# compiles the kernel, so that a name assigned under such an `if` exists wherever it is used.
# pyright: reportArgumentType=false
# pyright: reportReturnType=false
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.loads_triton import load_fp32, load_or_zero
from accel.kernels.ssd.decays import LOG2E, MIN_LOG2_DECAY

TILE_ELEMENTS = 2048
WARPS = 4


@triton.jit
def softplus(u):
    """Computes log(1 + exp(u)) without overflow; Kahan's correction of log1p keeps small results
    precise."""
    e = tl.exp(-tl.abs(u))
    w = 1.0 + e
    rest = tl.where(w == 1.0, 1.0, w - 1.0)
    return tl.maximum(u, 0.0) + tl.where(w == 1.0, e, tl.log(w) * (e / rest))


@triton.jit
def sigmoid(u):
    """Computes 1 / (1 + exp(-u)) without overflow."""
    e = tl.exp(-tl.abs(u))
    return tl.where(u < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def locate_program(program, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns the index of a program's piece, and the indices of its heads. The first dimension of
    the grid counts pieces and groups of heads together, because CUDA limits the other two
    dimensions to 65,535."""
    blocks: tl.constexpr = tl.cdiv(K, BLOCK_K)
    return program // blocks, program % blocks * BLOCK_K + tl.arange(0, BLOCK_K)


@triton.jit
def ssd_decays_kernel(
    DT,
    BIAS,
    A_LOG,
    STEPS,
    SUMS,
    dt_batch,
    dt_token,
    L,
    K: tl.constexpr,
    T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOG2E: tl.constexpr,
    MIN_LOG2_DECAY: tl.constexpr,
):
    piece, k = locate_program(tl.program_id(0), K, BLOCK_K)
    direction = tl.program_id(1)
    pieces = tl.cdiv(L, T)
    r = tl.arange(0, BLOCK_T)

    # Direction 1 sums from the last token of the piece, so read its tokens in reverse order.
    t = tl.where(direction == 0, r, T - 1 - r)
    token = (piece % pieces) * T + t
    row = (r < T)[:, None] & (k < K)[None, :]
    mask = row & (token < L)[:, None]
    dt_at = (
        (piece // pieces).to(tl.int64) * dt_batch
        + token[:, None] * dt_token
        + direction * K
        + k[None, :]
    )

    # Load the bias and the rate exp(A_log) (negated, in units of log2) of each head, and the raw
    # step sizes with the bias added.
    bias = load_fp32(BIAS + direction * K + k, k < K)
    rate = tl.exp(load_fp32(A_LOG + direction * K + k, k < K)) * -LOG2E
    raw = load_fp32(DT + dt_at, mask) + bias[None, :]

    # Padding gets step size 0, so its log decay is 0 and it leaves the running sums unchanged.
    step = tl.where(mask, softplus(raw), 0.0)
    target = ((piece.to(tl.int64) * 2 + direction) * K + k[None, :]) * T + t[:, None]
    tl.store(STEPS + target, step, mask=row)
    a = tl.maximum(step * rate[None, :], MIN_LOG2_DECAY, propagate_nan=tl.PropagateNan.ALL)
    tl.store(SUMS + target, tl.cumsum(a, 0), mask=row)


@triton.jit
def ssd_decays_backward_kernel(
    DSTEPS,
    DSUMS,
    DT,
    BIAS,
    A_LOG,
    DDT,
    TOTALS,
    dt_batch,
    dt_token,
    ddt_batch,
    ddt_token,
    L,
    K: tl.constexpr,
    T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOG2E: tl.constexpr,
    MIN_LOG2_DECAY: tl.constexpr,
):
    """Stores the gradient of dt in DDT, and in TOTALS (2, S, 2, K) each piece's part of the
    gradients of dt_bias (index 0) and A_log (index 1), a sum over the piece's tokens."""
    piece, k = locate_program(tl.program_id(0), K, BLOCK_K)
    direction = tl.program_id(1)
    pieces = tl.cdiv(L, T)
    r = tl.arange(0, BLOCK_T)

    # The gradient of a running sum is a running sum in the opposite direction, so read the tokens
    # in the order opposite to that of the forward pass.
    t = tl.where(direction == 0, T - 1 - r, r)
    token = (piece % pieces) * T + t
    row = (r < T)[:, None] & (k < K)[None, :]
    mask = row & (token < L)[:, None]
    source = ((piece.to(tl.int64) * 2 + direction) * K + k[None, :]) * T + t[:, None]
    da = tl.cumsum(load_or_zero(DSUMS + source, row), 0) * LOG2E

    # Compute the step sizes again. Where the forward pass clamped a log decay, its gradient is 0.
    b = (piece // pieces).to(tl.int64)
    dt_at = b * dt_batch + token[:, None] * dt_token + direction * K + k[None, :]
    bias = load_fp32(BIAS + direction * K + k, k < K)
    A = -tl.exp(load_fp32(A_LOG + direction * K + k, k < K))
    raw = load_fp32(DT + dt_at, mask) + bias[None, :]
    step = softplus(raw)
    da = tl.where(step * A[None, :] * LOG2E >= MIN_LOG2_DECAY, da, 0.0)
    grad_raw = (load_or_zero(DSTEPS + source, row) + A[None, :] * da) * sigmoid(raw)
    grad_raw = tl.where(mask, grad_raw, 0.0)

    out = b * ddt_batch + token[:, None] * ddt_token + direction * K + k[None, :]
    tl.store(DDT + out, grad_raw, mask=mask)
    dA_log = tl.where(mask, da * A[None, :] * step, 0.0)
    all_pieces = tl.num_programs(0) // tl.cdiv(K, BLOCK_K)
    totals = TOTALS + (piece * 2 + direction) * K + k
    tl.store(totals, tl.sum(grad_raw, 0), mask=k < K)
    tl.store(totals + all_pieces * 2 * K, tl.sum(dA_log, 0), mask=k < K)


def choose_constants(heads: int, piece: int) -> dict[str, float | int]:
    """Returns the compile-time constants of the kernels for `heads` heads and pieces of `piece`
    tokens."""
    block_t = triton.next_power_of_2(piece)
    block_k = max(1, min(triton.next_power_of_2(heads), TILE_ELEMENTS // block_t))
    return {
        "K": heads,
        "T": piece,
        "BLOCK_T": block_t,
        "BLOCK_K": block_k,
        "LOG2E": LOG2E,
        "MIN_LOG2_DECAY": MIN_LOG2_DECAY,
    }


def launch_forward(dt: Tensor, dt_bias: Tensor, A_log: Tensor, piece: int) -> tuple[Tensor, Tensor]:
    """Launches the forward kernel; returns step sizes and running sums of log decays, both (S, 2,
    K, T) in fp32."""
    batch, length, _, heads = dt.shape
    pieces = batch * triton.cdiv(length, piece)
    shape = choose_constants(heads, piece)
    steps, sums = (dt.new_empty(pieces, 2, heads, piece, dtype=torch.float32) for _ in range(2))
    grid = (pieces * triton.cdiv(heads, shape["BLOCK_K"]), 2)
    strides = (*dt.stride()[:2], length)
    ssd_decays_kernel[grid](dt, dt_bias, A_log, steps, sums, *strides, **shape, num_warps=WARPS)
    return steps, sums


def launch_backward(
    dsteps: Tensor, dsums: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, ddt: Tensor
) -> tuple[Tensor, ...]:
    """Launches the backward kernel. Returns the gradients of dt_bias and A_log (fp32); writes the
    gradient of dt to `ddt`."""
    length = dt.shape[1]
    heads = dt.shape[3]
    pieces, _, _, piece = dsteps.shape
    shape = choose_constants(heads, piece)
    totals = dsteps.new_empty(2, pieces, 2, heads)
    grid = (pieces * triton.cdiv(heads, shape["BLOCK_K"]), 2)
    strides = (*dt.stride()[:2], *ddt.stride()[:2], length)
    ssd_decays_backward_kernel[grid](
        dsteps, dsums, dt, dt_bias, A_log, ddt, totals, *strides, **shape, num_warps=WARPS
    )
    # Compute two separate sums: compiled code asserts that each output begins at a multiple of 16
    # bytes, which the second half of one common sum does not if the number of heads is odd.
    return totals[0].sum(0), totals[1].sum(0)
