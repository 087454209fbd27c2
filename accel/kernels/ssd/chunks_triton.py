"""Triton kernels that pass states between the chunks of a long scan (chunks.py). They use no
atomics, so equal runs give equal bits.

Letters: S chunks of T tokens, K heads, P head dim, N state size; direction 0 is forward, 1 is
backward.
"""

# Switch the checks below off in this file. Pyright does not know that the launch of a kernel turns
# numbers into tl.constexpr. Nor does it know that Triton decides an `if` over constants when it
# compiles the kernel, so that a name assigned under such an `if` exists wherever it is used.
# pyright: reportArgumentType=false
# pyright: reportReturnType=false
# pyright: reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.loads_triton import load_fp32, load_or_zero
from accel.kernels.ssd.forward_triton import precision_of


@triton.jit
def ssd_states_kernel(
    X,
    GROUPS,
    WEIGHTS,
    STATES,
    x_batch: tl.constexpr,
    x_token: tl.constexpr,
    g_batch: tl.constexpr,
    g_token: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the state (N, P) that one chunk adds, for one head and direction: a program computes
    BLOCK_N of the N rows."""
    k = tl.program_id(0) // (N // BLOCK_N)
    direction = tl.program_id(1)
    s = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, BLOCK)
    p = tl.arange(0, P)
    n = tl.program_id(0) % (N // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    X += s * x_batch + k * P
    GROUPS += s * g_batch + direction * N
    head = (s * 2 + direction) * K + k
    state = tl.zeros([BLOCK_N, P], tl.float32)
    for start in range(0, T, BLOCK):
        t = start + r
        inside = (t < T) | (T % BLOCK == 0)
        g_t = load_or_zero(GROUPS + t[None, :] * g_token + n[:, None], inside[None, :])
        x = load_or_zero(X + t[:, None] * x_token + p[None, :], inside[:, None])
        weight = load_or_zero(WEIGHTS + head * T + t, inside)
        xw = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        state = tl.dot(g_t, xw, state, input_precision=PRECISION)
    tl.store(STATES + head * (N * P) + n[:, None] * P + p[None, :], state)


@triton.jit
def ssd_read_kernel(
    STATES,
    GROUPS,
    WEIGHTS,
    INSIDE,
    OTHER,
    OUT,
    DOTS,
    g_batch: tl.constexpr,
    g_token: tl.constexpr,
    o_batch: tl.constexpr,
    o_token: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k = tl.program_id(1)
    s = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, P)
    inside = (t < T) | (T % BLOCK == 0)
    GROUPS += s * g_batch
    here = s * T * K * P + k * P
    out = tl.zeros([BLOCK, P], tl.float32)

    # If INSIDE (the contributions of the chunk's own tokens) is given, start the output from it. If
    # OTHER is given, load it: DOTS receives the dot product of each token's OTHER with the value
    # that the token reads from the state.
    if INSIDE is not None:
        out += load_fp32(INSIDE + here + t[:, None] * (K * P) + p[None, :], inside[:, None])
    if OTHER is not None:
        other_at = s * o_batch + k * P + t[:, None] * o_token + p[None, :]
        other = load_fp32(OTHER + other_at, inside[:, None])

    for direction in range(0, 2):
        head = (s * 2 + direction) * K + k
        read = tl.zeros([BLOCK, P], tl.float32)
        for start in range(0, N, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            g = load_or_zero(
                GROUPS + direction * N + t[:, None] * g_token + n[None, :], inside[:, None]
            )
            state = tl.load(STATES + head * (N * P) + n[:, None] * P + p[None, :]).to(g.dtype)
            read = tl.dot(g, state, read, input_precision=PRECISION)
        out += read * load_or_zero(WEIGHTS + head * T + t, inside)[:, None]
        if OTHER is not None:
            tl.store(DOTS + head * T + t, tl.sum(read * other, 1), mask=inside)
    tl.store(OUT + here + t[:, None] * (K * P) + p[None, :], out, mask=inside[:, None])


@triton.jit
def ssd_groups_kernel(
    STATES,
    X,
    WEIGHTS,
    OUT,
    x_batch: tl.constexpr,
    x_token: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    direction = tl.program_id(1) // (N // BLOCK_N)
    s = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, P)
    n = tl.program_id(1) % (N // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (t < T) | (T % BLOCK == 0)
    X += s * x_batch
    out = tl.zeros([BLOCK, BLOCK_N], tl.float32)
    for k in range(0, K):
        head = (s * 2 + direction) * K + k
        x = load_or_zero(X + t[:, None] * x_token + k * P + p[None, :], inside[:, None])
        weight = load_or_zero(WEIGHTS + head * T + t, inside)
        state_t = tl.load(STATES + head * (N * P) + n[None, :] * P + p[:, None]).to(x.dtype)
        xw = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        out = tl.dot(xw, state_t, out, input_precision=PRECISION)
    here = OUT + s * T * 2 * N + direction * N
    tl.store(here + t[:, None] * (2 * N) + n[None, :], out, mask=inside[:, None])


def choose_configuration(head_dim: int, state_dim: int, fp32: bool = False) -> tuple[int, int, int]:
    """Returns (BLOCK, BLOCK_N, warps): the tokens per tile, the rows (of N) of a state that a
    program processes at a time, and the warps per program."""
    large = max(head_dim, state_dim) > 64
    return (16, min(32, state_dim), 8) if fp32 else (64, state_dim, 8 if large else 4)


def choose_constants(
    like: Tensor, length: int, heads: int, state_dim: int, head_dim: int
) -> dict[str, Any]:
    """Returns the compile-time constants and the launch options of the kernels; tile sizes and
    precision depend on the dtype of `like`."""
    block, block_n, warps = choose_configuration(head_dim, state_dim, like.dtype == torch.float32)
    sizes = {
        "T": length,
        "K": heads,
        "N": state_dim,
        "P": head_dim,
        "BLOCK": block,
        "BLOCK_N": block_n,
    }
    return sizes | {"PRECISION": precision_of(like), "num_warps": warps, "num_stages": 2}


def launch_states(x: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """Launches the kernel of `ssd_states` (chunks.py); returns the states (S, 2, K, N, P)."""
    pieces, length, heads, head_dim = x.shape
    states = weights.new_empty(pieces, 2, heads, groups.shape[3], head_dim)
    constants = choose_constants(x, length, heads, groups.shape[3], head_dim)
    strides = (*x.stride()[:2], *groups.stride()[:2])
    ssd_states_kernel[(heads * (constants["N"] // constants["BLOCK_N"]), 2, pieces)](
        x, groups, weights, states, *strides, **constants
    )
    return states


def launch_read(
    states: Tensor, groups: Tensor, weights: Tensor, inside: Tensor | None, other: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launches the kernel of `ssd_read` (chunks.py); returns the output (S, T, K, P), and the dot
    products with `other` (S, 2, K, T), or an empty tensor if `other` is None."""
    pieces, _, heads, state_dim, head_dim = states.shape
    length = groups.shape[1]
    out = groups.new_empty(pieces, length, heads, head_dim)
    dots = weights.new_empty(0 if other is None else weights.shape)
    constants = choose_constants(groups, length, heads, state_dim, head_dim)
    strides = (*groups.stride()[:2], *((0, 0) if other is None else other.stride()[:2]))
    grid = (triton.cdiv(length, constants["BLOCK"]), heads, pieces)
    ssd_read_kernel[grid](states, groups, weights, inside, other, out, dots, *strides, **constants)
    return out, dots


def launch_groups(states: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Launches the kernel of `ssd_groups` (chunks.py); returns the gradient of B_in or C_out (S, T,
    2, N)."""
    pieces, length, heads, head_dim = x.shape
    out = x.new_empty(pieces, length, 2, states.shape[3])
    constants = choose_constants(x, length, heads, states.shape[3], head_dim)
    grid = (
        triton.cdiv(length, constants["BLOCK"]),
        2 * (constants["N"] // constants["BLOCK_N"]),
        pieces,
    )
    ssd_groups_kernel[grid](states, x, weights, out, *x.stride()[:2], **constants)
    return out
