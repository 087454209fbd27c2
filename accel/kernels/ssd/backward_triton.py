"""Triton kernels of the backward pass of `bidirectional_ssd`; the forward pass is in
forward_triton.py.

S_ij = C_i·B_j are the scores of pairs of tokens, and E_ij their decays. One kernel computes dx, the
gradient of x, as the product of dy with the transposed matrix M of the forward pass, y = M x.
Another kernel computes dS = Σ_heads dy·xᵀ·E·step, the gradient of the scores, summed over heads in
registers. In the same pass that kernel computes for each head the row and column sums of dy·xᵀ·E·S,
from which the gradients of steps and decays follow. PyTorch's matrix products turn dS into dB and
dC, the gradients of the scan's B and C. dx, dB and dC lie side by side in memory, as the backward
pass of the convolution before the scan reads them. There are no atomics, so equal runs give equal
bits.

Letters: B samples, L tokens, K heads, P head dim, N state size; T tiles of BLOCK tokens.
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
from accel.kernels.ssd.forward_triton import choose_constants, collect_strides, decay_of
from accel.kernels.ssd.operator import LN2, count_channels, split_channels, write_group_gradients


@triton.jit
def ssd_dx_kernel(
    DY,
    X,
    B_IN,
    C_OUT,
    STEPS,
    SUMS,
    D,
    DX,
    DD,
    x_batch: tl.constexpr,
    x_token: tl.constexpr,
    b_batch: tl.constexpr,
    b_token: tl.constexpr,
    c_batch: tl.constexpr,
    c_token: tl.constexpr,
    dx_batch: tl.constexpr,
    dx_token: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes for one head a tile of the gradient of x, dx_j = Σ_i M_ij dy_i + D dy_j, and stores
    in DD (B, K, tiles) the tile's part of the gradient of D. M_ij is the weight of x_j in y_i
    (formula in forward_triton.py), and D is the head's weight of the skip term D·x. The kernel
    computes the scores already transposed, as B·Cᵀ, because Triton before 3.7.1 transposes the
    result of a product wrongly."""
    tile = tl.program_id(0)
    k = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    j0 = tile * BLOCK
    r = tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    p = tl.arange(0, P)
    j = j0 + r

    # L is known at compile time: if L is a multiple of BLOCK, `inside` is always true, and the
    # compiler drops the masks.
    inside = (j < L) | (L % BLOCK == 0)
    X += b * x_batch + k * P
    DY += b * L * K * P + k * P
    B_IN += b * b_batch
    C_OUT += b * c_batch
    ahead = (b * 2 * K + k) * L
    behind = ahead + K * L
    sum_ahead = load_or_zero(SUMS + ahead + j, inside)
    sum_behind = load_or_zero(SUMS + behind + j, inside)
    step_ahead = load_or_zero(STEPS + ahead + j, inside)
    step_behind = load_or_zero(STEPS + behind + j, inside)
    b_ahead = load_or_zero(B_IN + j[:, None] * b_token + n[None, :], inside[:, None])
    b_behind = load_or_zero(B_IN + N + j[:, None] * b_token + n[None, :], inside[:, None])
    g = tl.zeros([BLOCK, P], tl.float32)

    # Direction 0: add the contributions of the tokens i in the tiles after this tile.
    if j0 + BLOCK < L:
        pivot = tl.load(SUMS + ahead + j0 + BLOCK - 1)
        row_weight = decay_of(pivot - sum_ahead) * step_ahead
        for i0 in range(j0 + BLOCK, L, BLOCK):
            i = i0 + r
            there = (i < L) | (L % BLOCK == 0)
            c_t = load_or_zero(C_OUT + i[None, :] * c_token + n[:, None], there[None, :])
            dy = load_or_zero(DY + i[:, None] * (K * P) + p[None, :], there[:, None])
            weight = decay_of(load_or_zero(SUMS + ahead + i, there) - pivot)
            m = (
                tl.dot(b_ahead, c_t, input_precision=PRECISION)
                * weight[None, :]
                * row_weight[:, None]
            )
            g = tl.dot(m.to(dy.dtype), dy, g, input_precision=PRECISION)

    # Direction 1: add the contributions of the tokens i in the tiles before this tile.
    if j0 > 0:
        pivot = tl.load(SUMS + behind + j0)
        row_weight = decay_of(pivot - sum_behind) * step_behind
        for i0 in range(0, j0, BLOCK):
            i = i0 + r
            c_t = tl.load(C_OUT + N + i[None, :] * c_token + n[:, None])
            dy = tl.load(DY + i[:, None] * (K * P) + p[None, :])
            weight = decay_of(tl.load(SUMS + behind + i) - pivot)
            m = (
                tl.dot(b_behind, c_t, input_precision=PRECISION)
                * weight[None, :]
                * row_weight[:, None]
            )
            g = tl.dot(m.to(dy.dtype), dy, g, input_precision=PRECISION)

    # Add the contributions of this tile's own tokens (the tile of M on the diagonal), in both
    # directions.
    c_ahead = load_or_zero(C_OUT + j[None, :] * c_token + n[:, None], inside[None, :])
    c_behind = load_or_zero(C_OUT + N + j[None, :] * c_token + n[:, None], inside[None, :])
    dy = load_or_zero(DY + j[:, None] * (K * P) + p[None, :], inside[:, None])

    # Rows of this tile are tokens j, columns are tokens i. Element [j, i] of `lower` is true if i ≥
    # j: such pairs belong to direction 0, the other pairs to direction 1.
    lower = r[None, :] >= r[:, None]
    exponent = tl.where(
        lower, sum_ahead[None, :] - sum_ahead[:, None], sum_behind[None, :] - sum_behind[:, None]
    )
    m = tl.where(
        lower,
        tl.dot(b_ahead, c_ahead, input_precision=PRECISION) * step_ahead[:, None],
        tl.dot(b_behind, c_behind, input_precision=PRECISION) * step_behind[:, None],
    )
    m = m * decay_of(exponent)
    g = tl.dot(m.to(dy.dtype), dy, g, input_precision=PRECISION)

    # Add the part of the gradient that reaches x through the term D·x of y.
    g += dy.to(tl.float32) * tl.load(D + k)
    DX += b * dx_batch + k * P
    tl.store(DX + j[:, None] * dx_token + p[None, :], g, mask=inside[:, None])
    x = load_fp32(X + j[:, None] * x_token + p[None, :], inside[:, None])
    tl.store(DD + (b * K + k) * tl.num_programs(0) + tile, tl.sum(x * dy.to(tl.float32)))


@triton.jit
def ssd_ds_kernel(
    DY,
    X,
    B_IN,
    C_OUT,
    STEPS,
    SUMS,
    DS,
    ROWS,
    COLUMNS,
    ROWS_BEHIND,
    COLUMNS_BEHIND,
    x_batch: tl.constexpr,
    x_token: tl.constexpr,
    b_batch: tl.constexpr,
    b_token: tl.constexpr,
    c_batch: tl.constexpr,
    c_token: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    """Computes tile (i, j) of dS, the gradient of the scores, summed over the heads. For each head
    it also stores sums of the tile's dy·xᵀ·decay·score, from which the gradients of steps and
    decays follow: row sums, multiplied by the step size of j, in ROWS, and column sums, without it,
    in COLUMNS, both (B, K, T, L). A tile on the diagonal contains pairs of both directions (0: j ≤
    i, 1: j > i); its sums of direction 1 go to ROWS_BEHIND and COLUMNS_BEHIND (B, K, L).

    One launch computes the tiles on the diagonal; another launch, whose programs need fewer
    registers, computes the other T - 1 tiles of each row of tiles.
    """
    i_tile = tl.program_id(0)
    j_tile = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    tiles = tl.num_programs(0)
    if DIAGONAL:
        j_tile = i_tile
    else:
        j_tile += (j_tile >= i_tile).to(tl.int32)
    r = tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    p = tl.arange(0, P)
    i = i_tile * BLOCK + r
    j = j_tile * BLOCK + r
    i_in = (i < L) | (L % BLOCK == 0)
    j_in = (j < L) | (L % BLOCK == 0)
    X += b * x_batch
    DY += b * L * K * P
    B_IN += b * b_batch
    C_OUT += b * c_batch

    # Compute the scores C_i·B_j of the tile. A tile on the diagonal takes the scores of direction 0
    # where i ≥ j, and those of direction 1 elsewhere.
    direction = 0 if DIAGONAL else (i_tile < j_tile).to(tl.int32)
    lower = i[:, None] >= j[None, :]
    C_OUT += direction * N
    B_IN += direction * N
    c = load_or_zero(C_OUT + i[:, None] * c_token + n[None, :], i_in[:, None])
    b_t = load_or_zero(B_IN + j[None, :] * b_token + n[:, None], j_in[None, :])
    scores = tl.dot(c, b_t, input_precision=PRECISION)
    if DIAGONAL:
        c = load_or_zero(C_OUT + N + i[:, None] * c_token + n[None, :], i_in[:, None])
        b_t = load_or_zero(B_IN + N + j[None, :] * b_token + n[:, None], j_in[None, :])
        scores = tl.where(lower, scores, tl.dot(c, b_t, input_precision=PRECISION))

    ds = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K):
        dy = load_or_zero(DY + i[:, None] * (K * P) + k * P + p[None, :], i_in[:, None])
        x_t = load_or_zero(X + j[None, :] * x_token + k * P + p[:, None], j_in[None, :])
        g = tl.dot(dy, x_t, input_precision=PRECISION)
        head = b * K + k
        head_at = ((b * 2 + direction) * K + k) * L
        sum_i = load_or_zero(SUMS + head_at + i, i_in)
        sum_j = load_or_zero(SUMS + head_at + j, j_in)
        step = load_or_zero(STEPS + head_at + j, j_in)

        # The decay of a pair is exp2(s_i - s_j), where s are running sums of log decays. On a
        # diagonal tile, compute it for each element. On other tiles, split it into exp2(s_i -
        # pivot)·exp2(pivot - s_j), which takes only one exp2 per row and one per column
        # (forward_triton.py).
        if DIAGONAL:
            behind = head_at + K * L
            other_i = load_or_zero(SUMS + behind + i, i_in)
            other_step = load_or_zero(STEPS + behind + j, j_in)
            exponent = tl.where(
                lower, sum_i[:, None] - sum_j[None, :], other_i[:, None] - other_i[None, :]
            )
            g = g * decay_of(exponent)
            steps = tl.where(lower, step[None, :], other_step[None, :])
            ds += g * steps
            g = g * scores
            tl.store(
                COLUMNS + (head * tiles + i_tile) * L + j,
                tl.sum(tl.where(lower, g, 0.0), 0),
                mask=j_in,
            )
            tl.store(COLUMNS_BEHIND + head * L + j, tl.sum(tl.where(lower, 0.0, g), 0), mask=j_in)
            g = g * steps
            tl.store(
                ROWS + (head * tiles + j_tile) * L + i,
                tl.sum(tl.where(lower, g, 0.0), 1),
                mask=i_in,
            )
            tl.store(ROWS_BEHIND + head * L + i, tl.sum(tl.where(lower, 0.0, g), 1), mask=i_in)
        else:
            edge = tl.where(direction == 0, j_tile * BLOCK + BLOCK - 1, j_tile * BLOCK)
            pivot = tl.load(SUMS + head_at + edge)
            g = g * decay_of(sum_i - pivot)[:, None]
            g = g * decay_of(pivot - sum_j)[None, :]
            q = g * scores
            tl.store(
                ROWS + (head * tiles + j_tile) * L + i, tl.sum(q * step[None, :], 1), mask=i_in
            )
            tl.store(COLUMNS + (head * tiles + i_tile) * L + j, tl.sum(q, 0), mask=j_in)
            ds += g * step[None, :]

    # Store the tile in dS (B, 2, L, L): for direction 0 set pairs with j > i to 0, for direction 1
    # those with j ≤ i.
    DS += b * 2 * L * L
    out = i[:, None] * L + j[None, :]
    mask = i_in[:, None] & j_in[None, :]
    tl.store(DS + out, tl.where(lower, ds, 0.0), mask=mask)
    tl.store(DS + out + L * L, tl.where(lower, 0.0, ds), mask=mask)


@triton.jit
def ssd_decay_kernel(
    ROWS,
    COLUMNS,
    ROWS_BEHIND,
    COLUMNS_BEHIND,
    STEPS,
    DSTEPS,
    DSUMS,
    L,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_L: tl.constexpr,
    LN2: tl.constexpr,
):
    """Computes for one head of one sample the gradients of the step sizes, DSTEPS, and of the
    running sums of log decays, DSUMS, both (B, 2, K, L), from the row and column sums that
    `ssd_ds_kernel` stored."""
    k = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK_L)
    inside = t < L
    own_tile = t // BLOCK
    head = b * K + k
    row_ahead = tl.zeros([BLOCK_L], tl.float32)
    row_behind = load_or_zero(ROWS_BEHIND + head * L + t, inside)
    column_ahead = tl.zeros([BLOCK_L], tl.float32)
    column_behind = load_or_zero(COLUMNS_BEHIND + head * L + t, inside)

    # Add up the sums of all tiles: tiles on or below the diagonal belong to direction 0, tiles
    # above the diagonal to direction 1.
    for tile in range(0, TILES):
        rows = load_or_zero(ROWS + (head * TILES + tile) * L + t, inside)
        columns = load_or_zero(COLUMNS + (head * TILES + tile) * L + t, inside)
        row_ahead += tl.where(tile <= own_tile, rows, 0.0)
        row_behind += tl.where(tile > own_tile, rows, 0.0)
        column_ahead += tl.where(tile >= own_tile, columns, 0.0)
        column_behind += tl.where(tile < own_tile, columns, 0.0)

    ahead = (b * 2 * K + k) * L + t
    behind = ahead + K * L
    sum_ahead = row_ahead - column_ahead * load_or_zero(STEPS + ahead, inside)
    sum_behind = row_behind - column_behind * load_or_zero(STEPS + behind, inside)
    tl.store(DSTEPS + ahead, column_ahead, mask=inside)
    tl.store(DSTEPS + behind, column_behind, mask=inside)
    tl.store(DSUMS + ahead, sum_ahead * LN2, mask=inside)
    tl.store(DSUMS + behind, sum_behind * LN2, mask=inside)


def launch_backward(
    dy: Tensor, x: Tensor, steps: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the backward kernels. Returns four tensors: the gradients of x, B_in and C_out side
    by side (B, L, K·P + 4·N), and the gradients of steps, sums and D."""
    batch, length, heads, _ = x.shape
    strides = collect_strides(x, B_in, C_out)
    joined = x.new_empty(batch, length, count_channels(x, B_in))
    dx, dB, dC = split_channels(joined, *x.shape[2:])

    # Compute the gradient of x, and for each tile its part of the gradient of D.
    constants = choose_constants("dx", x, B_in)
    tiles = triton.cdiv(length, constants["BLOCK"])
    dD = sums.new_empty(batch, heads, tiles)
    ssd_dx_kernel[(tiles, heads, batch)](
        dy, x, B_in, C_out, steps, sums, D, dx, dD, *strides, *dx.stride()[:2], **constants
    )

    # Compute dS, the gradient of the scores, and the row and column sums of each tile.
    constants = choose_constants("ds", x, B_in)
    tiles = triton.cdiv(length, constants["BLOCK"])
    dS = x.new_empty(batch, 2, length, length)
    rows, columns = (sums.new_empty(batch, heads, tiles, length) for _ in range(2))
    rows_behind, columns_behind = (sums.new_empty(batch, heads, length) for _ in range(2))
    tensors = (dy, x, B_in, C_out, steps, sums, dS, rows, columns, rows_behind, columns_behind)
    ssd_ds_kernel[(tiles, 1, batch)](*tensors, *strides, **constants, DIAGONAL=True)
    if tiles > 1:
        ssd_ds_kernel[(tiles, tiles - 1, batch)](*tensors, *strides, **constants, DIAGONAL=False)

    # Compute the gradients of steps and of running sums from the tiles' row and column sums.
    dsteps = torch.empty_like(steps)
    dsums = torch.empty_like(sums)
    ssd_decay_kernel[(heads, batch)](
        rows,
        columns,
        rows_behind,
        columns_behind,
        steps,
        dsteps,
        dsums,
        length,
        K=heads,
        BLOCK=constants["BLOCK"],
        TILES=tiles,
        BLOCK_L=triton.next_power_of_2(length),
        LN2=LN2,
    )
    write_group_gradients(dS, B_in, C_out, dB, dC)
    return joined, dsteps, dsums, dD.sum((0, 2))
