"""Triton kernels of `qk_rope`: one for the forward pass, and one for the backward pass, which
computes the norm's statistics again.

A program takes some tokens of one sample, of queries or of keys (backward also of values), and
loops over their heads, so that it loads the tokens' rotations once. In the backward pass each
program stores its own sums for the weights' gradients, and PyTorch adds these sums afterwards, so
there are no atomics.

Letters: B samples, L tokens, K heads, P head dim.
"""

# Switch the checks below off in this file. Pyright does not know that the launch of a kernel turns
# numbers into tl.constexpr. Nor does it know that Triton decides an `if` over constants when it
# compiles the kernel, so that a name assigned under such an `if` exists wherever it is used.
# pyright: reportArgumentType=false
# pyright: reportReturnType=false
# pyright: reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.loads_triton import load_fp32, load_or_zero

TILE_ELEMENTS = 2048
WARPS = 4


@triton.jit
def rotate_pairs(x, cosine, sine, BLOCK_L: tl.constexpr, P: tl.constexpr):
    """Rotates each pair of neighbouring channels of x by an angle; `cosine` and `sine` (BLOCK_L, P
    / 2) hold the cosine and the sine of each token's and pair's angle."""
    first, second = tl.split(tl.reshape(x, [BLOCK_L, P // 2, 2]))
    return tl.reshape(
        tl.join(first * cosine - second * sine, second * cosine + first * sine), [BLOCK_L, P]
    )


@triton.jit
def load_angles(ROTATIONS, t, L: tl.constexpr, P: tl.constexpr):
    """Loads the cosines and sines of tokens t, each (BLOCK_L, P / 2): one for each pair of
    channels."""
    pairs = ROTATIONS + t[:, None] * P + 2 * tl.arange(0, P // 2)[None, :]
    inside = (t < L)[:, None]
    return load_or_zero(pairs, inside), load_or_zero(pairs + L * P, inside)


@triton.jit
def qk_rope_kernel(
    QKV,
    Q_WEIGHT,
    K_WEIGHT,
    ROTATIONS,
    Q,
    KEYS,
    L: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    is_key = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    p = tl.arange(0, P)
    mask = (t < L)[:, None] & (p < P)[None, :]
    source = QKV + ((b * L + t[:, None]) * 3 + is_key) * (K * P) + p[None, :]
    here = (b * L + t[:, None]) * (K * P) + p[None, :]

    # Load weight and rotations once, before the loop over heads, because all heads share them.
    if Q_WEIGHT is not None:
        weight = tl.load(Q_WEIGHT + p).to(tl.float32)
        if is_key == 1:
            weight = tl.load(K_WEIGHT + p).to(tl.float32)
    if ROTATIONS is not None:
        cosine, sine = load_angles(ROTATIONS, t, L, P)

    for k in tl.range(0, K, num_stages=2):
        x = load_fp32(source + k * P, mask)
        if Q_WEIGHT is not None:
            x = x * tl.rsqrt(tl.sum(x * x, 1) / P + EPS)[:, None] * weight[None, :]
        if ROTATIONS is not None:
            x = rotate_pairs(x, cosine, sine, BLOCK_L, P)
        x = x.to(Q.dtype.element_ty)
        if is_key == 1:
            tl.store(KEYS + here + k * P, x, mask=mask)
        else:
            tl.store(Q + here + k * P, x, mask=mask)


@triton.jit
def store_gradient(
    D,
    WEIGHT,
    ROTATIONS,
    SUMS,
    source,
    target,
    b,
    t,
    d_batch: tl.constexpr,
    d_token: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Stores the gradient of all heads of either queries, keys or values, for tokens t. Values are
    neither normed nor rotated, so for them WEIGHT and ROTATIONS are None. `source` points into qkv,
    `target` into the gradient of qkv. SUMS (P) receives this program's part of the weight's
    gradient."""
    p = tl.arange(0, P)
    mask = (t < L)[:, None] & (p < P)[None, :]
    D += b * d_batch + t[:, None] * d_token + p[None, :]
    if WEIGHT is not None:
        weight = tl.load(WEIGHT + p).to(tl.float32)
        dweight = tl.zeros([P], tl.float32)
    if ROTATIONS is not None:
        cosine, sine = load_angles(ROTATIONS, t, L, P)

    # Compute the gradient backward through the rotation, then through the norm.
    for k in tl.range(0, K, num_stages=2):
        d = load_fp32(D + k * P, mask)
        if ROTATIONS is not None:
            d = rotate_pairs(d, cosine, -sine, BLOCK_L, P)
        if WEIGHT is not None:
            x = load_fp32(source + k * P, mask)
            rstd = tl.rsqrt(tl.sum(x * x, 1) / P + EPS)[:, None]
            normed = x * rstd
            dweight += tl.sum(d * normed, 0)
            d = d * weight[None, :]
            d = rstd * (d - normed * (tl.sum(d * normed, 1) / P)[:, None])
        tl.store(target + k * P, d, mask=mask)
    if WEIGHT is not None:
        tl.store(SUMS + p, dweight)


@triton.jit
def qk_rope_backward_kernel(
    DQ,
    DK,
    DV,
    QKV,
    Q_WEIGHT,
    K_WEIGHT,
    ROTATIONS,
    DQKV,
    SUMS,
    q_batch: tl.constexpr,
    q_token: tl.constexpr,
    k_batch: tl.constexpr,
    k_token: tl.constexpr,
    v_batch: tl.constexpr,
    v_token: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Stores the gradient of qkv, and in SUMS (B, tiles, 2, P) each program's part of the gradients
    of q_weight (index 0) and k_weight (index 1)."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    t = tile * BLOCK_L + tl.arange(0, BLOCK_L)
    p = tl.arange(0, P)
    here = ((b * L + t[:, None]) * 3 + part) * (K * P) + p[None, :]
    source = QKV + here
    target = DQKV + here
    sums = SUMS + ((b * tl.num_programs(0) + tile) * 2 + part) * P

    # The second index of the grid selects queries (0), keys (1) or values (2).
    if part == 0:
        store_gradient(
            DQ,
            Q_WEIGHT,
            ROTATIONS,
            sums,
            source,
            target,
            b,
            t,
            q_batch,
            q_token,
            L,
            K,
            P,
            EPS,
            BLOCK_L,
        )
    elif part == 1:
        store_gradient(
            DK,
            K_WEIGHT,
            ROTATIONS,
            sums,
            source,
            target,
            b,
            t,
            k_batch,
            k_token,
            L,
            K,
            P,
            EPS,
            BLOCK_L,
        )
    else:
        store_gradient(
            DV, None, None, sums, source, target, b, t, v_batch, v_token, L, K, P, EPS, BLOCK_L
        )


def choose_constants(qkv: Tensor, eps: float) -> dict[str, float | int]:
    """Returns the compile-time constants of the kernels, together with the launch options such as
    num_warps."""
    _, length, _, heads, head_dim = qkv.shape
    block = max(1, TILE_ELEMENTS // head_dim)
    return {
        "L": length,
        "K": heads,
        "P": head_dim,
        "EPS": eps,
        "BLOCK_L": block,
        "num_warps": WARPS,
    }


def launch_forward(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rotations: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Launches the forward kernel; returns normed and rotated queries and keys, both (B, L, K,
    P)."""
    constants = choose_constants(qkv, eps)
    q, k = (qkv.new_empty(qkv.shape[0], qkv.shape[1], *qkv.shape[3:]) for _ in range(2))
    grid = (triton.cdiv(qkv.shape[1], constants["BLOCK_L"]), 2, qkv.shape[0])
    qk_rope_kernel[grid](qkv, q_weight, k_weight, rotations, q, k, **constants)
    return q, k


def launch_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rotations: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Launches the backward kernel; returns the gradient of qkv, and the gradients of q_weight and
    k_weight stacked, (2, P) in fp32."""
    constants = choose_constants(qkv, eps)
    dqkv = qkv.new_empty(qkv.shape)
    tiles = triton.cdiv(qkv.shape[1], constants["BLOCK_L"])
    make = qkv.new_zeros if q_weight is None else qkv.new_empty
    sums = make(qkv.shape[0], tiles, 2, qkv.shape[4], dtype=torch.float32)
    strides = [stride for d in (dq, dk, dv) for stride in d.stride()[:2]]
    qk_rope_backward_kernel[(tiles, 3, qkv.shape[0])](
        dq, dk, dv, qkv, q_weight, k_weight, rotations, dqkv, sums, *strides, **constants
    )
    return dqkv, sums.sum((0, 1))
