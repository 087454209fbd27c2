"""Triton kernels of `gated_norm`: one for the forward pass, and one for the backward pass, which
computes the norm's statistics again.

A program takes one head of some tokens of one sample. In the backward pass each program stores its
own sums for the weight's gradient, and PyTorch adds these sums afterwards, so there are no atomics.

Letters: B samples, L tokens, K heads, P head dim.
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

from accel.kernels.loads_triton import load_fp32

BLOCK_L = 32
WARPS = 4


@triton.jit
def gated_norm_kernel(
    Y,
    Z,
    WEIGHT,
    H,
    z_batch: tl.constexpr,
    z_token: tl.constexpr,
    L,
    K,
    EPS: tl.constexpr,
    P: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    k = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    p = tl.arange(0, BLOCK_P)
    mask = (t < L)[:, None] & (p < P)[None, :]
    here = ((b * L + t[:, None]) * K + k) * P + p[None, :]
    z = load_fp32(Z + b * z_batch + t[:, None] * z_token + k * P + p[None, :], mask)
    gated = load_fp32(Y + here, mask) * z * tl.sigmoid(z)
    rstd = tl.rsqrt(tl.sum(gated * gated, 1) / P + EPS)
    weight = load_fp32(WEIGHT + k * P + p, p < P)
    tl.store(H + here, gated * rstd[:, None] * weight[None, :], mask=mask)


@triton.jit
def gated_norm_backward_kernel(
    DH,
    Y,
    Z,
    WEIGHT,
    DY,
    DZ,
    SUMS,
    z_batch: tl.constexpr,
    z_token: tl.constexpr,
    dz_batch: tl.constexpr,
    dz_token: tl.constexpr,
    L,
    K,
    EPS: tl.constexpr,
    P: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    tile = tl.program_id(0)
    k = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    t = tile * BLOCK_L + tl.arange(0, BLOCK_L)
    p = tl.arange(0, BLOCK_P)
    mask = (t < L)[:, None] & (p < P)[None, :]
    here = ((b * L + t[:, None]) * K + k) * P + p[None, :]
    z = load_fp32(Z + b * z_batch + t[:, None] * z_token + k * P + p[None, :], mask)
    y = load_fp32(Y + here, mask)
    dh = load_fp32(DH + here, mask)
    weight = load_fp32(WEIGHT + k * P + p, p < P)

    # Compute the forward pass again, because it saved only y and z; then compute the gradients
    # backward through norm and gate.
    sigmoid = tl.sigmoid(z)
    gated = y * z * sigmoid
    rstd = tl.rsqrt(tl.sum(gated * gated, 1) / P + EPS)
    normed = gated * rstd[:, None]
    dnormed = dh * weight[None, :]
    dgated = rstd[:, None] * (dnormed - normed * (tl.sum(dnormed * normed, 1) / P)[:, None])
    tl.store(DY + here, dgated * z * sigmoid, mask=mask)

    dz = dgated * y * sigmoid * (1.0 + z * (1.0 - sigmoid))

    # dz may be a slice of a larger tensor, so compute its addresses from the strides of dz.
    there = b * dz_batch + t[:, None] * dz_token + k * P + p[None, :]
    tl.store(DZ + there, dz, mask=mask)

    sums = SUMS + ((b * tl.num_programs(0) + tile) * K + k) * P + p
    tl.store(sums, tl.sum(dh * normed, 0), mask=p < P)


def choose_grid(y: Tensor) -> tuple[int, int, int]:
    """Returns the grid of a launch: (tiles of tokens, heads, samples)."""
    return triton.cdiv(y.shape[1], BLOCK_L), y.shape[2], y.shape[0]


def choose_constants(y: Tensor, eps: float) -> dict[str, float | int]:
    """Returns the compile-time constants of the kernels, together with the launch options such as
    num_warps."""
    head_dim = y.shape[3]
    block_p = triton.next_power_of_2(head_dim)
    return {"EPS": eps, "P": head_dim, "BLOCK_L": BLOCK_L, "BLOCK_P": block_p, "num_warps": WARPS}


def launch_forward(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = y.new_empty(y.shape)
    strides = (*z.stride()[:2], y.shape[1], y.shape[2])
    gated_norm_kernel[choose_grid(y)](y, z, weight, h, *strides, **choose_constants(y, eps))
    return h


def launch_backward(
    dh: Tensor, y: Tensor, z: Tensor, weight: Tensor, eps: float, dz: Tensor
) -> tuple[Tensor, Tensor]:
    """Launches the backward kernel. Returns the gradients of y (in the dtype of y) and weight
    (fp32); writes the gradient of z to `dz`."""
    grid = choose_grid(y)
    dy = y.new_empty(y.shape)
    sums = y.new_empty(y.shape[0], grid[0], y.shape[2], y.shape[3], dtype=torch.float32)
    strides = (*z.stride()[:2], *dz.stride()[:2], y.shape[1], y.shape[2])
    gated_norm_backward_kernel[grid](
        dh, y, z, weight, dy, dz, sums, *strides, **choose_constants(y, eps)
    )
    return dy, sums.sum((0, 1))
