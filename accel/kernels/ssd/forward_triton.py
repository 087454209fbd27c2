"""Triton kernel of `bidirectional_ssd` for up to 512 tokens: one masked product of all pairs of
tokens covers both directions.

s⁺ are the running sums of log decays from the start (direction 0), s⁻ those from the end (direction
1), all as base-2 logarithms (decays.py):

    y = M x + D x,   M_ij = exp2(s⁺_i - s⁺_j)·(C⁺_i·B⁺_j)·step⁺_j  for i ≥ j,
                            exp2(s⁻_i - s⁻_j)·(C⁻_i·B⁻_j)·step⁻_j  for i < j

A tile of M off the diagonal splits each decay at a pivot, a token between the tile's rows and its
columns: with p the running sum at the pivot, exp2(s_i - s_j) = exp2(s_i - p)·exp2(p - s_j). Both
exponents are ≤ 0 and clamped, so nothing overflows, and the tile needs only one exp2 per row and
one per column. A tile on the diagonal has no pivot and needs one exp2 per element and direction.
All tiles of a row add their products with x to one accumulator, because two accumulators, one per
direction, take a quarter more registers.

The backward pass is in backward_triton.py.

Letters: B samples, L tokens, K heads, P head dim, N state size.
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

OLDER_THAN_3_8 = [int(number) for number in triton.__version__.split(".")[:2]] < [3, 8]
THIRD_PROGRAM_REGISTERS = 168 if OLDER_THAN_3_8 else None
"""Limit of registers per thread under which three programs of four warps share a multiprocessor of
Hopper; None: no limit. From Triton 3.8 on no limit is set, because with 3.8 and 3.9 the forward
kernel spills at 168 registers (12 stores per thread); then only two programs share a
multiprocessor."""


@triton.jit
def decay_of(exponent):
    """Computes the decay exp2(`exponent`), where `exponent` is a difference of running sums of log
    decays. Clamps `exponent` to ≤ 0 first, because only rounding can make it positive. A NaN stays
    NaN; a plain `tl.minimum` may replace it by 0."""
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def ssd_kernel(
    X,
    B_IN,
    C_OUT,
    STEPS,
    SUMS,
    D,
    Z,
    NORM,
    Y,
    H,
    x_batch: tl.constexpr,
    x_token: tl.constexpr,
    b_batch: tl.constexpr,
    b_token: tl.constexpr,
    c_batch: tl.constexpr,
    c_token: tl.constexpr,
    z_batch: tl.constexpr,
    z_token: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    EPS: tl.constexpr,
):
    """Computes a tile of y for one head, and stores it in Y. If Z, NORM and H are given, it also
    stores `rms_norm(y·silu(z))·norm` in H, while y is still in registers."""
    i0 = tl.program_id(0) * BLOCK
    k = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    p = tl.arange(0, P)
    i = i0 + r

    # L is known at compile time: if L is a multiple of BLOCK, `inside` is always true, and the
    # compiler drops the masks.
    inside = (i < L) | (L % BLOCK == 0)
    X += b * x_batch + k * P
    B_IN += b * b_batch
    C_OUT += b * c_batch
    ahead = (b * 2 * K + k) * L
    behind = ahead + K * L
    sum_ahead = load_or_zero(SUMS + ahead + i, inside)
    c_ahead = load_or_zero(C_OUT + i[:, None] * c_token + n[None, :], inside[:, None])
    y = tl.zeros([BLOCK, P], tl.float32)

    # Direction 0: add the contributions of the tokens j in the tiles before this tile.
    if i0 > 0:
        pivot = tl.load(SUMS + ahead + i0 - 1)
        row_decay = decay_of(sum_ahead - pivot)
        for j0 in range(0, i0, BLOCK):
            j = j0 + r
            b_t = tl.load(B_IN + j[None, :] * b_token + n[:, None])
            x = tl.load(X + j[:, None] * x_token + p[None, :])
            weight = decay_of(pivot - tl.load(SUMS + ahead + j)) * tl.load(STEPS + ahead + j)
            m = (
                tl.dot(c_ahead, b_t, input_precision=PRECISION)
                * weight[None, :]
                * row_decay[:, None]
            )
            y = tl.dot(m.to(x.dtype), x, y, input_precision=PRECISION)

    # Direction 1: add the contributions of the tokens j in the tiles after this tile. Load the
    # values of direction 1 only here, so that they occupy no registers in the loop above.
    sum_behind = load_or_zero(SUMS + behind + i, inside)
    c_behind = load_or_zero(C_OUT + N + i[:, None] * c_token + n[None, :], inside[:, None])
    if i0 + BLOCK < L:
        pivot = tl.load(SUMS + behind + i0 + BLOCK)
        row_decay = decay_of(sum_behind - pivot)
        for j0 in range(i0 + BLOCK, L, BLOCK):
            j = j0 + r
            there = (j < L) | (L % BLOCK == 0)
            b_t = load_or_zero(B_IN + N + j[None, :] * b_token + n[:, None], there[None, :])
            x = load_or_zero(X + j[:, None] * x_token + p[None, :], there[:, None])
            sums = load_or_zero(SUMS + behind + j, there)
            weight = decay_of(pivot - sums) * load_or_zero(STEPS + behind + j, there)
            m = (
                tl.dot(c_behind, b_t, input_precision=PRECISION)
                * weight[None, :]
                * row_decay[:, None]
            )
            y = tl.dot(m.to(x.dtype), x, y, input_precision=PRECISION)

    # Add the contributions of this tile's own tokens (the tile of M on the diagonal), in both
    # directions.
    x = load_or_zero(X + i[:, None] * x_token + p[None, :], inside[:, None])
    lower = r[:, None] >= r[None, :]
    b_t = load_or_zero(B_IN + i[None, :] * b_token + n[:, None], inside[None, :])
    step = load_or_zero(STEPS + ahead + i, inside)
    decay = decay_of(sum_ahead[:, None] - sum_ahead[None, :]) * step[None, :]
    m_ahead = tl.where(lower, tl.dot(c_ahead, b_t, input_precision=PRECISION) * decay, 0.0).to(
        x.dtype
    )
    b_t = load_or_zero(B_IN + N + i[None, :] * b_token + n[:, None], inside[None, :])
    step = load_or_zero(STEPS + behind + i, inside)
    decay = decay_of(sum_behind[:, None] - sum_behind[None, :]) * step[None, :]
    m_behind = tl.where(lower, 0.0, tl.dot(c_behind, b_t, input_precision=PRECISION) * decay).to(
        x.dtype
    )
    y = tl.dot(m_ahead + m_behind, x, y, input_precision=PRECISION)

    y += x.to(tl.float32) * tl.load(D + k)
    out = i[:, None] * (K * P) + p[None, :]
    tl.store(Y + b * L * K * P + k * P + out, y, mask=inside[:, None])

    # If a gate is given, apply gate and norm while y is still in registers.
    if H is not None:
        z_at = i[:, None] * z_token + p[None, :]
        gate = load_fp32(Z + b * z_batch + k * P + z_at, inside[:, None])
        gated = y * gate * tl.sigmoid(gate)
        rstd = tl.rsqrt(tl.sum(gated * gated, 1) / P + EPS)
        norm = tl.load(NORM + k * P + p).to(tl.float32)
        h = (gated * rstd[:, None] * norm[None, :]).to(H.dtype.element_ty)
        tl.store(H + b * L * K * P + k * P + out, h, mask=inside[:, None])


def choose_configuration(
    part: str, length: int, head_dim: int, state_dim: int, capability: int = 90, fp32: bool = False
) -> tuple[int, int, int | None, int]:
    """Returns tokens per tile, number of warps, limit of registers per thread (None: the compiler
    decides) and number of stages for the kernel `part`: "forward", "dx" or "ds". `capability` is 90
    for compute capability 9.0.

    The choice lets as many programs as possible share a multiprocessor of that capability without
    spilling, but for the rows that tests/accel/kernels/test_kernel_resources.py lists. For 9.0 and
    16 bits it is the fastest of those tried on an H100, at 256 tokens and 64 channels per head
    (docs/LOG.md, 2026-11-27). If `fp32`, tiles are smaller, because fp32 products take far more
    registers.
    """
    small_shared_memory = capability < 90 or capability >= 120
    large = max(head_dim, state_dim) > 64
    if fp32:
        block = 32 if part == "ds" and not small_shared_memory else 16
        warps = 8 if block == 32 or large or part == "forward" else 4

        # With at most 128 registers per thread, two programs of eight warps share a multiprocessor;
        # a limit low enough for a third program makes the kernel spill.
        return block, warps, 128 if warps == 8 and part != "forward" else None, 2
    if small_shared_memory:
        return 32, 8 if part == "ds" and large else 4, None, 2
    whole = length % 64 == 0
    if capability >= 100 or large or (part == "ds" and not whole):
        return 64, 8, None, 2
    stages = {"forward": 2, "dx": 1, "ds": 3}[part]
    return 64, 4, THIRD_PROGRAM_REGISTERS if part == "forward" and whole else None, stages


def precision_of(x: Tensor) -> str:
    """Returns Triton's name of the precision of fp32 products, "ieee" or "tf32", that matches
    `torch.get_float32_matmul_precision()`; "ieee" if x is on the CPU."""
    return "ieee" if not x.is_cuda or torch.get_float32_matmul_precision() == "highest" else "tf32"


def choose_constants(part: str, x: Tensor, B_in: Tensor) -> dict[str, int | str | None]:
    """Returns the compile-time constants (sizes, precision) and the launch options (warps, stages,
    registers) of the kernel `part`: "forward", "dx" or "ds"."""
    capability = 90
    if x.is_cuda:
        major, minor = torch.cuda.get_device_capability(x.device)
        capability = 10 * major + minor
    sizes = (x.shape[1], x.shape[3])
    block, warps, registers, stages = choose_configuration(
        part, *sizes, B_in.shape[3], capability, x.dtype == torch.float32
    )
    return {
        "L": x.shape[1],
        "K": x.shape[2],
        "N": B_in.shape[3],
        "P": x.shape[3],
        "BLOCK": block,
        "PRECISION": precision_of(x),
        "num_warps": warps,
        "num_stages": stages,
        "maxnreg": registers,
    }


def collect_strides(x: Tensor, B_in: Tensor, C_out: Tensor) -> tuple[int, ...]:
    """Returns the strides of the sample and token dimensions of x, B_in and C_out, in elements; the
    kernels take all other dimensions as contiguous."""
    return (*x.stride()[:2], *B_in.stride()[:2], *C_out.stride()[:2])


def launch_forward(
    x: Tensor, steps: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> Tensor:
    """Launches the forward kernel without gate and norm; returns y (B, L, K, P)."""
    return launch_gated(x, steps, sums, B_in, C_out, D, None, None, 0.0)[1]


def launch_gated(
    x: Tensor,
    steps: Tensor,
    sums: Tensor,
    B_in: Tensor,
    C_out: Tensor,
    D: Tensor,
    z: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor | None, Tensor]:
    """Launches the forward kernel with gate and norm; returns the gated and normed y (None if z is
    None), and y itself, each (B, L, K, P)."""
    y = x.new_empty(x.shape)
    h = None if z is None else x.new_empty(x.shape)
    z_strides = (0, 0) if z is None else z.stride()[:2]

    constants = choose_constants("forward", x, B_in)
    ssd_kernel[(triton.cdiv(x.shape[1], constants["BLOCK"]), x.shape[2], x.shape[0])](
        x,
        B_in,
        C_out,
        steps,
        sums,
        D,
        z,
        norm_weight,
        y,
        h,
        *collect_strides(x, B_in, C_out),
        *z_strides,
        **constants,
        EPS=eps,
    )
    return h, y
