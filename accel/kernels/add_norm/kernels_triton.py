"""Triton kernels of `add_norm`: z = residual + gate·branch, h = norm(z)·(1 + scale) + shift
(operator.py). Only code that launches or compiles the kernels imports this module, because it needs
Triton.

The kernels read and write each element of the tensors (B, L, D) once. With a 16-bit branch and an
fp32 residual, they move 12 bytes per token and channel in the forward pass, and 18 in the backward
pass. The norm is computed from z after z is rounded to the dtype in which it is stored. A program
of the backward pass takes consecutive tokens of one sample, and sums their parts of the gradients
of gate, scale and shift in registers. So there are no atomics, and equal runs give equal bits.

Letters: B samples, L tokens, D width. A row is a token, a column is a channel. A tile has BLOCK_L
rows of one sample with all D columns. Triton needs sizes that are powers of two, so the columns are
split into BLOCK_D and REST: 768 = 512 + 256.
"""

# Switch the checks below off in this file. Pyright does not know that the launch of a kernel turns
# numbers into tl.constexpr. Nor does it know that Triton decides an `if` over constants when it
# compiles the kernel, so that a name assigned under such an `if` exists wherever it is used.
# pyright: reportArgumentType=false
# pyright: reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel.kernels.loads_triton import load_fp32, load_or_zero


@triton.jit
def add_branch(BRANCH, GATE, RESIDUAL, Z, rows, branch_rows, row, c, D: tl.constexpr):
    """Computes columns c of z = residual + gate·branch and stores them in the dtype of Z; returns
    the stored, rounded values as fp32."""
    column = c < D
    mask = row[:, None] & column[None, :]
    branch = load_fp32(BRANCH + branch_rows[:, None] * D + c[None, :], mask)
    residual = load_fp32(RESIDUAL + rows[:, None] * D + c[None, :], mask)
    gate = load_fp32(GATE + c, column)
    z = (residual + gate[None, :] * branch).to(Z.dtype.element_ty)
    tl.store(Z + rows[:, None] * D + c[None, :], z, mask=mask)
    return z.to(tl.float32)


@triton.jit
def subtract_mean(z, total, c, D: tl.constexpr):
    """Subtracts from columns c of z the mean of each row, `total` / D; returns 0 in columns past
    D."""
    return tl.where((c < D)[None, :], z - (total / D)[:, None], 0.0)


@triton.jit
def store_modulated(H, SCALE, SHIFT, normed, h_rows, row, c, D: tl.constexpr):
    """Computes columns c of h = normed·(1 + scale) + shift, and stores them in H; `normed` is the
    normed z."""
    column = c < D
    scale = load_fp32(SCALE + c, column)
    shift = load_fp32(SHIFT + c, column)
    h = normed * (1.0 + scale)[None, :] + shift[None, :]
    mask = row[:, None] & column[None, :]
    tl.store(H + h_rows[:, None] * D + c[None, :], h, mask=mask)


@triton.jit
def add_norm_kernel(
    BRANCH,
    GATE,
    RESIDUAL,
    SCALE,
    SHIFT,
    BRANCH_ROWS,
    H_ROWS,
    H,
    Z,
    RSTD,
    L,
    gate_stride,
    scale_stride,
    shift_stride,
    D: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    c = tl.arange(0, BLOCK_D)
    row = t < L
    rows = b * L + t
    branch_rows = rows if BRANCH_ROWS is None else b * L + load_or_zero(BRANCH_ROWS + t, row)
    h_rows = rows if H_ROWS is None else b * L + load_or_zero(H_ROWS + t, row)
    GATE += b * gate_stride
    SCALE += b * scale_stride
    SHIFT += b * shift_stride

    # Add the gated branch to the residual stream, z = residual + gate·branch, first in the BLOCK_D
    # columns, then in the REST columns.
    z = add_branch(BRANCH, GATE, RESIDUAL, Z, rows, branch_rows, row, c, D)
    if REST > 0:
        c_rest = BLOCK_D + tl.arange(0, REST)
        z_rest = add_branch(BRANCH, GATE, RESIDUAL, Z, rows, branch_rows, row, c_rest, D)

    # For LayerNorm (CENTRED), subtract from each row of z its mean over all columns first.
    if CENTRED:
        total = tl.sum(z, 1)
        if REST > 0:
            total += tl.sum(z_rest, 1)
            z_rest = subtract_mean(z_rest, total, c_rest, D)
        z = subtract_mean(z, total, c, D)

    squares = tl.sum(z * z, 1)
    if REST > 0:
        squares += tl.sum(z_rest * z_rest, 1)
    rstd = tl.rsqrt(squares / D + EPS)
    tl.store(RSTD + rows, rstd, mask=row)
    store_modulated(H, SCALE, SHIFT, z * rstd[:, None], h_rows, row, c, D)
    if REST > 0:
        store_modulated(H, SCALE, SHIFT, z_rest * rstd[:, None], h_rows, row, c_rest, D)


@triton.jit
def load_dh_and_z(DH, Z, rows, h_rows, row, c, D: tl.constexpr):
    """Loads columns c of dh, the gradient of h, and of z; returns both as fp32."""
    mask = row[:, None] & (c < D)[None, :]
    z = load_fp32(Z + rows[:, None] * D + c[None, :], mask)
    dh = load_fp32(DH + h_rows[:, None] * D + c[None, :], mask)
    return dh, z


@triton.jit
def store_gradients(
    DZ, BRANCH, DBRANCH, DRESIDUAL, dz, gate, rows, branch_rows, row, c, D: tl.constexpr
):
    """Stores columns c of the gradients of residual and branch; returns a tile whose sum over rows
    is the gate's gradient. `dz` is the gradient that reaches z through h. DZ is the gradient that
    reaches z as an output of the operator, or None if nothing uses that output."""
    mask = row[:, None] & (c < D)[None, :]
    here = rows[:, None] * D + c[None, :]
    branch_at = branch_rows[:, None] * D + c[None, :]
    if DZ is not None:
        dz += load_fp32(DZ + here, mask)
    branch = load_fp32(BRANCH + branch_at, mask)
    tl.store(DRESIDUAL + here, dz, mask=mask)
    tl.store(DBRANCH + branch_at, dz * gate[None, :], mask=mask)
    return dz * branch


@triton.jit
def add_norm_backward_kernel(
    DH,
    DZ,
    Z,
    BRANCH,
    GATE,
    SCALE,
    BRANCH_ROWS,
    H_ROWS,
    RSTD,
    DBRANCH,
    DRESIDUAL,
    SUMS,
    L,
    gate_stride,
    scale_stride,
    D: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    split = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    GATE += b * gate_stride
    SCALE += b * scale_stride

    # Load gate and scale once, and start the sums for the gradients of gate, scale and shift with
    # 0: they stay in registers, as tiles, while the program passes over its rows. A sum over
    # the rows of a tile would go through shared memory, so it is taken once, at the end.
    c = tl.arange(0, BLOCK_D)
    gate = load_fp32(GATE + c, c < D)
    slope = 1.0 + load_fp32(SCALE + c, c < D)
    dgate = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    dscale = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    dshift = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    if REST > 0:
        c_rest = BLOCK_D + tl.arange(0, REST)
        gate_rest = load_fp32(GATE + c_rest, c_rest < D)
        slope_rest = 1.0 + load_fp32(SCALE + c_rest, c_rest < D)
        dgate_rest = tl.zeros([BLOCK_L, REST], tl.float32)
        dscale_rest = tl.zeros([BLOCK_L, REST], tl.float32)
        dshift_rest = tl.zeros([BLOCK_L, REST], tl.float32)

    for start in tl.range(0, ROWS, BLOCK_L, num_stages=2):
        t = split * ROWS + start + tl.arange(0, BLOCK_L)
        row = t < L
        rows = b * L + t
        branch_rows = rows if BRANCH_ROWS is None else b * L + load_or_zero(BRANCH_ROWS + t, row)
        h_rows = rows if H_ROWS is None else b * L + load_or_zero(H_ROWS + t, row)
        rstd = load_or_zero(RSTD + rows, row)

        # Compute w = dh·(1 + scale), the gradient of the normed z.
        dh, z = load_dh_and_z(DH, Z, rows, h_rows, row, c, D)
        w = dh * slope[None, :]
        if REST > 0:
            dh_rest, z_rest = load_dh_and_z(DH, Z, rows, h_rows, row, c_rest, D)
            w_rest = dh_rest * slope_rest[None, :]

        # For LayerNorm (CENTRED), subtract from each row of z, and of w (the gradient of the normed
        # z), its mean over the D channels.
        if CENTRED:
            total = tl.sum(z, 1)
            w_total = tl.sum(w, 1)
            if REST > 0:
                total += tl.sum(z_rest, 1)
                w_total += tl.sum(w_rest, 1)
                z_rest = subtract_mean(z_rest, total, c_rest, D)
                w_rest = subtract_mean(w_rest, w_total, c_rest, D)
            z = subtract_mean(z, total, c, D)
            w = subtract_mean(w, w_total, c, D)

        # Compute the gradient d of z. Only the part of w that is orthogonal to the normed z reaches
        # z, so subtract the other part, normed·along, where `along` is the mean of normed·w over
        # the D channels.
        normed = z * rstd[:, None]
        along = tl.sum(normed * w, 1)
        if REST > 0:
            normed_rest = z_rest * rstd[:, None]
            along += tl.sum(normed_rest * w_rest, 1)
        along = (along / D)[:, None]

        d = (w - normed * along) * rstd[:, None]
        dgate += store_gradients(
            DZ, BRANCH, DBRANCH, DRESIDUAL, d, gate, rows, branch_rows, row, c, D
        )
        dscale += dh * normed
        dshift += dh
        if REST > 0:
            d_rest = (w_rest - normed_rest * along) * rstd[:, None]
            dgate_rest += store_gradients(
                DZ, BRANCH, DBRANCH, DRESIDUAL, d_rest, gate_rest, rows, branch_rows, row, c_rest, D
            )
            dscale_rest += dh_rest * normed_rest
            dshift_rest += dh_rest

    SUMS += ((b * tl.num_programs(0) + split) * 3) * D
    tl.store(SUMS + c, tl.sum(dgate, 0), mask=c < D)
    tl.store(SUMS + D + c, tl.sum(dscale, 0), mask=c < D)
    tl.store(SUMS + 2 * D + c, tl.sum(dshift, 0), mask=c < D)
    if REST > 0:
        tl.store(SUMS + c_rest, tl.sum(dgate_rest, 0), mask=c_rest < D)
        tl.store(SUMS + D + c_rest, tl.sum(dscale_rest, 0), mask=c_rest < D)
        tl.store(SUMS + 2 * D + c_rest, tl.sum(dshift_rest, 0), mask=c_rest < D)


def choose_tile(dim: int, backward: bool = False) -> dict[str, int]:
    """Chooses the tile of a kernel for D = `dim` columns; returns the tile's sizes and the number
    of warps as keyword arguments of the launch.

    The columns are split into BLOCK_D, the largest power of two up to `dim`, and REST, the
    remaining columns rounded up to a power of two. So with 384, 768 or 1,152 columns (1,152 = 1,024
    + 128) no column is masked. BLOCK_L is the number of rows.

    A forward tile has about 2,048 elements in its BLOCK_D columns. A backward tile has 512
    elements in its BLOCK_D columns, or one row if that is more, and two warps below 1,024 columns:
    at 768 columns larger tiles were slower on an H100 (docs/LOG.md, 2026-11-27).
    """
    block_d = 1 << (dim.bit_length() - 1)
    rest = max(16, triton.next_power_of_2(dim - block_d)) if dim > block_d else 0
    rows = max(1, (512 if backward else 2048) // block_d)
    warps = 2 if backward and dim < 1024 else 4 if dim <= 2048 else 8
    return {"BLOCK_D": block_d, "REST": rest, "BLOCK_L": rows, "num_warps": warps}


def launch_forward(
    branch: Tensor,
    gate: Tensor,
    residual: Tensor,
    scale: Tensor,
    shift: Tensor,
    branch_rows: Tensor | None,
    h_rows: Tensor | None,
    eps: float,
    residual_in_fp32: bool,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the forward kernel. Returns h and z as `add_norm` does, and 1/rms(z) of each token,
    or 1/std(z) if `centred`, (B, L). `branch` and `residual` must be contiguous; gate, scale and
    shift must have stride 1 along D."""
    batch, length, dim = branch.shape
    h = torch.empty_like(branch)
    z = torch.empty_like(residual, dtype=torch.float32 if residual_in_fp32 else branch.dtype)
    rstd = branch.new_empty(batch, length, dtype=torch.float32)

    shape = choose_tile(dim)
    add_norm_kernel[(triton.cdiv(length, shape["BLOCK_L"]), batch)](
        branch,
        gate,
        residual,
        scale,
        shift,
        branch_rows,
        h_rows,
        h,
        z,
        rstd,
        length,
        gate.stride(0),
        scale.stride(0),
        shift.stride(0),
        D=dim,
        EPS=eps,
        CENTRED=centred,
        **shape,
    )
    return h, z, rstd


def choose_splits(batch: int, length: int, block: int, processors: int) -> tuple[int, int]:
    """Splits each sample into stretches of consecutive tokens, one for each program, so that each
    of the GPU's `processors` (streaming multiprocessors) gets about eight programs. Returns the
    number of stretches per sample, and the number of tokens per stretch, a multiple of `block`, the
    tokens in a tile."""
    wanted = max(1, min(triton.cdiv(8 * processors, batch), triton.cdiv(length, block)))
    rows = triton.cdiv(triton.cdiv(length, wanted), block) * block
    return triton.cdiv(length, rows), rows


def launch_backward(
    dh: Tensor,
    dz: Tensor | None,
    z: Tensor,
    branch: Tensor,
    gate: Tensor,
    scale: Tensor,
    branch_rows: Tensor | None,
    h_rows: Tensor | None,
    rstd: Tensor,
    residual_dtype: torch.dtype,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the backward kernel. Returns the gradient of branch, the gradient of residual, and
    the gradients of gate, scale and shift stacked in one tensor (B, 3, D)."""
    batch, length, dim = branch.shape
    dbranch = torch.empty_like(branch)
    dresidual = torch.empty_like(z, dtype=residual_dtype)
    shape = choose_tile(dim, backward=True)

    # Triton's interpreter runs the kernel on the CPU, which has no streaming multiprocessors, so
    # assume one.
    processors = 1
    if branch.is_cuda:
        processors = torch.cuda.get_device_properties(branch.device).multi_processor_count
    splits, rows = choose_splits(batch, length, shape["BLOCK_L"], processors)
    sums = branch.new_empty(batch, splits, 3, dim, dtype=torch.float32)
    add_norm_backward_kernel[(splits, batch)](
        dh,
        dz,
        z,
        branch,
        gate,
        scale,
        branch_rows,
        h_rows,
        rstd,
        dbranch,
        dresidual,
        sums,
        length,
        gate.stride(0),
        scale.stride(0),
        D=dim,
        CENTRED=centred,
        ROWS=rows,
        **shape,
    )
    return dbranch, dresidual, sums.sum(1)
