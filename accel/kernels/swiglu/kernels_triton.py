"""Triton kernels of `swiglu`: one for the forward pass, one for the backward pass; a program takes
a tile of rows and channels.

Letters: H hidden channels; rows are the tokens of all samples.
"""

# Switch the checks below off in this file. Pyright does not know that the launch of a kernel turns
# numbers into tl.constexpr. Nor does it know that Triton decides an `if` over constants when it
# compiles the kernel, so that a name assigned under such an `if` exists wherever it is used.
# pyright: reportArgumentType=false
# pyright: reportReturnType=false
# pyright: reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.loads_triton import load_fp32

BLOCK_R = 8
BLOCK_H = 256
WARPS = 4


@triton.jit
def locate_tile(rows, H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    """Returns the row indices and the channel indices of this program's tile, and the mask of the
    tile's elements that lie inside the tensor. Consecutive programs take the tiles along a row."""
    across = tl.cdiv(H, BLOCK_H)
    r = (tl.program_id(0) // across).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tl.program_id(0) % across) * BLOCK_H + tl.arange(0, BLOCK_H)
    return r[:, None], c[None, :], (r < rows)[:, None] & (c < H)[None, :]


@triton.jit
def swiglu_kernel(JOINED, OUT, rows, H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    r, c, mask = locate_tile(rows, H, BLOCK_R, BLOCK_H)
    gate = load_fp32(JOINED + r * (2 * H) + c, mask)
    value = load_fp32(JOINED + r * (2 * H) + H + c, mask)
    tl.store(OUT + r * H + c, gate * tl.sigmoid(gate) * value, mask=mask)


@triton.jit
def swiglu_backward_kernel(
    DH, JOINED, DJOINED, rows, H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr
):
    r, c, mask = locate_tile(rows, H, BLOCK_R, BLOCK_H)
    gate = load_fp32(JOINED + r * (2 * H) + c, mask)
    value = load_fp32(JOINED + r * (2 * H) + H + c, mask)
    dh = load_fp32(DH + r * H + c, mask)
    sigmoid = tl.sigmoid(gate)
    dgate = dh * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(DJOINED + r * (2 * H) + c, dgate, mask=mask)
    tl.store(DJOINED + r * (2 * H) + H + c, dh * gate * sigmoid, mask=mask)


def plan_launch(joined: Tensor) -> tuple[int, dict[str, int], tuple[int]]:
    """Returns the number of rows, the compile-time constants together with launch options, and the
    grid of a launch."""
    hidden = joined.shape[-1] // 2
    rows = joined.numel() // (2 * hidden)
    constants = {"H": hidden, "BLOCK_R": BLOCK_R, "BLOCK_H": BLOCK_H, "num_warps": WARPS}
    return rows, constants, (triton.cdiv(rows, BLOCK_R) * triton.cdiv(hidden, BLOCK_H),)


def launch_forward(joined: Tensor) -> Tensor:
    rows, constants, grid = plan_launch(joined)
    out = joined.new_empty(*joined.shape[:-1], constants["H"])
    swiglu_kernel[grid](joined, out, rows, **constants)
    return out


def launch_backward(dh: Tensor, joined: Tensor) -> Tensor:
    rows, constants, grid = plan_launch(joined)
    djoined = joined.new_empty(joined.shape)
    swiglu_backward_kernel[grid](dh, joined, djoined, rows, **constants)
    return djoined
