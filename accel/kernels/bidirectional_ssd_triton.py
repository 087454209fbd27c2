"""Triton kernels of `bidirectional_ssd` up to 512 tokens: every token with every other, both directions in one mask.

With a the log decays in units of log2, s⁺ their prefix sums (direction 0) and s⁻ their suffix sums (direction 1):

    M_ij = exp2(s⁺_i - s⁺_j)·(C⁺_i·B⁺_j)·dt⁺_j for i ≥ j, exp2(s⁻_i - s⁻_j)·(C⁻_i·B⁻_j)·dt⁻_j for i < j;  y = M x + D x

Exponents are split at a pivot between the tiles, exp2(s_i - p)·exp2(p - s_j): both are ≤ 0 and clamped, nothing
overflows, and a tile needs one exp2 a row and one a column. Only the tile on the diagonal takes one an element.

Backward: dx by the transposed mask; dS = Σ_heads dy·xᵀ·E·dt in one kernel, reduced over heads in registers, with row
and column sums of dS∘S taken from the same fp32 tile for the gradients of the decays; plain matrix products turn dS
into dB and dC. No atomics: equal runs give equal bits.

Letters: B samples, L tokens, K heads, P head dim, N state size; T tiles of BLOCK tokens.
"""

# A launch turns plain numbers into constexpr:
# pyright: reportArgumentType=false, reportReturnType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


@triton.jit
def ssd_sums_kernel(
    DT_IN, A_IN, DT, SUMS, L, K: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, LOG2: tl.constexpr
):
    """(B, L, 2, K) to (B, 2, K, L): dt as it is, a as running sums from the start or from the end."""
    b, direction = tl.program_id(1).to(tl.int64), tl.program_id(2)
    t = tl.arange(0, BLOCK_L)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (t < L)[:, None] & (k < K)[None, :]
    source = ((b * L + t[:, None]) * 2 + direction) * K + k[None, :]
    target = ((b * 2 + direction) * K + k[None, :]) * L + t[:, None]
    tl.store(DT + target, tl.load(DT_IN + source, mask=mask, other=0.0), mask=mask)
    a = tl.load(A_IN + source, mask=mask, other=0.0) * LOG2
    if direction == 0:
        tl.store(SUMS + target, tl.cumsum(a, 0), mask=mask)
    else:
        tl.store(SUMS + target, tl.cumsum(a, 0, reverse=True), mask=mask)


@triton.jit
def ssd_kernel(
    X,
    B_IN,
    C_OUT,
    DT,
    SUMS,
    D,
    Y,
    x_batch,
    x_token,
    b_batch,
    b_token,
    c_batch,
    c_token,
    L: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i0, k, b = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, n, p = tl.arange(0, BLOCK), tl.arange(0, N), tl.arange(0, P)
    i = i0 + r
    inside = i < L
    X += b * x_batch + k * P
    B_IN += b * b_batch
    C_OUT += b * c_batch
    ahead = (b * 2 * K + k) * L
    behind = ahead + K * L
    sum_ahead = tl.load(SUMS + ahead + i, mask=inside, other=0.0)
    c_ahead = tl.load(C_OUT + i[:, None] * c_token + n[None, :], mask=inside[:, None], other=0.0)
    y = tl.zeros([BLOCK, P], tl.float32)
    if i0 > 0:
        pivot = tl.load(SUMS + ahead + i0 - 1)
        for j0 in range(0, i0, BLOCK):
            j = j0 + r
            b_t = tl.load(B_IN + j[None, :] * b_token + n[:, None])
            x = tl.load(X + j[:, None] * x_token + p[None, :])
            weight = tl.exp2(tl.minimum(pivot - tl.load(SUMS + ahead + j), 0.0)) * tl.load(DT + ahead + j)
            m = tl.dot(c_ahead, b_t, input_precision=PRECISION) * weight[None, :]
            y = tl.dot(m.to(x.dtype), x, y, input_precision=PRECISION)
        y = y * tl.exp2(tl.minimum(sum_ahead - pivot, 0.0))[:, None]
    # What the second half needs is loaded only here: fewer registers in the first.
    sum_behind = tl.load(SUMS + behind + i, mask=inside, other=0.0)
    c_behind = tl.load(C_OUT + N + i[:, None] * c_token + n[None, :], mask=inside[:, None], other=0.0)
    if i0 + BLOCK < L:
        pivot = tl.load(SUMS + behind + i0 + BLOCK)
        u = tl.zeros([BLOCK, P], tl.float32)
        for j0 in range(i0 + BLOCK, L, BLOCK):
            j = j0 + r
            there = j < L
            b_t = tl.load(B_IN + N + j[None, :] * b_token + n[:, None], mask=there[None, :], other=0.0)
            x = tl.load(X + j[:, None] * x_token + p[None, :], mask=there[:, None], other=0.0)
            sums = tl.load(SUMS + behind + j, mask=there, other=0.0)
            weight = tl.exp2(tl.minimum(pivot - sums, 0.0)) * tl.load(DT + behind + j, mask=there, other=0.0)
            m = tl.dot(c_behind, b_t, input_precision=PRECISION) * weight[None, :]
            u = tl.dot(m.to(x.dtype), x, u, input_precision=PRECISION)
        y += u * tl.exp2(tl.minimum(sum_behind - pivot, 0.0))[:, None]
    b_ahead = tl.load(B_IN + i[None, :] * b_token + n[:, None], mask=inside[None, :], other=0.0)
    b_behind = tl.load(B_IN + N + i[None, :] * b_token + n[:, None], mask=inside[None, :], other=0.0)
    x = tl.load(X + i[:, None] * x_token + p[None, :], mask=inside[:, None], other=0.0)
    dt_ahead = tl.load(DT + ahead + i, mask=inside, other=0.0)
    dt_behind = tl.load(DT + behind + i, mask=inside, other=0.0)
    lower = r[:, None] >= r[None, :]
    exponent = tl.where(lower, sum_ahead[:, None] - sum_ahead[None, :], sum_behind[:, None] - sum_behind[None, :])
    m = tl.where(
        lower,
        tl.dot(c_ahead, b_ahead, input_precision=PRECISION) * dt_ahead[None, :],
        tl.dot(c_behind, b_behind, input_precision=PRECISION) * dt_behind[None, :],
    )
    m = m * tl.exp2(tl.minimum(exponent, 0.0))
    y = tl.dot(m.to(x.dtype), x, y, input_precision=PRECISION)
    y += x.to(tl.float32) * tl.load(D + k)
    out = (b * L + i[:, None]) * (K * P) + k * P + p[None, :]
    tl.store(Y + out, y.to(Y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def ssd_dx_kernel(
    DY,
    X,
    B_IN,
    C_OUT,
    DT,
    SUMS,
    D,
    DX,
    DD,
    x_batch,
    x_token,
    b_batch,
    b_token,
    c_batch,
    c_token,
    L: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dx_j = Σ_i M_ij dy_i + D dy_j. S is computed transposed: turning an accumulator is wrong before Triton 3.7.1."""
    tile, k, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    j0 = tile * BLOCK
    r, n, p = tl.arange(0, BLOCK), tl.arange(0, N), tl.arange(0, P)
    j = j0 + r
    inside = j < L
    X += b * x_batch + k * P
    DY += b * L * K * P + k * P
    B_IN += b * b_batch
    C_OUT += b * c_batch
    ahead = (b * 2 * K + k) * L
    behind = ahead + K * L
    sum_ahead = tl.load(SUMS + ahead + j, mask=inside, other=0.0)
    sum_behind = tl.load(SUMS + behind + j, mask=inside, other=0.0)
    dt_ahead = tl.load(DT + ahead + j, mask=inside, other=0.0)
    dt_behind = tl.load(DT + behind + j, mask=inside, other=0.0)
    b_ahead = tl.load(B_IN + j[:, None] * b_token + n[None, :], mask=inside[:, None], other=0.0)
    b_behind = tl.load(B_IN + N + j[:, None] * b_token + n[None, :], mask=inside[:, None], other=0.0)
    g = tl.zeros([BLOCK, P], tl.float32)
    if j0 + BLOCK < L:
        pivot = tl.load(SUMS + ahead + j0 + BLOCK - 1)
        for i0 in range(j0 + BLOCK, L, BLOCK):
            i = i0 + r
            there = i < L
            c_t = tl.load(C_OUT + i[None, :] * c_token + n[:, None], mask=there[None, :], other=0.0)
            dy = tl.load(DY + i[:, None] * (K * P) + p[None, :], mask=there[:, None], other=0.0)
            weight = tl.exp2(tl.minimum(tl.load(SUMS + ahead + i, mask=there, other=0.0) - pivot, 0.0))
            m = tl.dot(b_ahead, c_t, input_precision=PRECISION) * weight[None, :]
            g = tl.dot(m.to(dy.dtype), dy, g, input_precision=PRECISION)
        g = g * (tl.exp2(tl.minimum(pivot - sum_ahead, 0.0)) * dt_ahead)[:, None]
    if j0 > 0:
        pivot = tl.load(SUMS + behind + j0)
        u = tl.zeros([BLOCK, P], tl.float32)
        for i0 in range(0, j0, BLOCK):
            i = i0 + r
            c_t = tl.load(C_OUT + N + i[None, :] * c_token + n[:, None])
            dy = tl.load(DY + i[:, None] * (K * P) + p[None, :])
            weight = tl.exp2(tl.minimum(tl.load(SUMS + behind + i) - pivot, 0.0))
            m = tl.dot(b_behind, c_t, input_precision=PRECISION) * weight[None, :]
            u = tl.dot(m.to(dy.dtype), dy, u, input_precision=PRECISION)
        g += u * (tl.exp2(tl.minimum(pivot - sum_behind, 0.0)) * dt_behind)[:, None]
    c_ahead = tl.load(C_OUT + j[None, :] * c_token + n[:, None], mask=inside[None, :], other=0.0)
    c_behind = tl.load(C_OUT + N + j[None, :] * c_token + n[:, None], mask=inside[None, :], other=0.0)
    dy = tl.load(DY + j[:, None] * (K * P) + p[None, :], mask=inside[:, None], other=0.0)
    lower = r[None, :] >= r[:, None]  # [j, i]: i ≥ j
    exponent = tl.where(lower, sum_ahead[None, :] - sum_ahead[:, None], sum_behind[None, :] - sum_behind[:, None])
    m = tl.where(
        lower,
        tl.dot(b_ahead, c_ahead, input_precision=PRECISION) * dt_ahead[:, None],
        tl.dot(b_behind, c_behind, input_precision=PRECISION) * dt_behind[:, None],
    )
    m = m * tl.exp2(tl.minimum(exponent, 0.0))
    g = tl.dot(m.to(dy.dtype), dy, g, input_precision=PRECISION)
    g += dy.to(tl.float32) * tl.load(D + k)
    out = (b * L + j[:, None]) * (K * P) + k * P + p[None, :]
    tl.store(DX + out, g.to(DX.dtype.element_ty), mask=inside[:, None])
    x = tl.load(X + j[:, None] * x_token + p[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(DD + (b * K + k) * tl.num_programs(0) + tile, tl.sum(x * dy.to(tl.float32)))


@triton.jit
def ssd_ds_kernel(
    DY,
    X,
    B_IN,
    C_OUT,
    DT,
    SUMS,
    DS,
    ROWS,
    COLUMNS,
    ROWS_BEHIND,
    COLUMNS_BEHIND,
    x_batch,
    x_token,
    b_batch,
    b_token,
    c_batch,
    c_token,
    L: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile (i, j) of dS, all heads in turn. ROWS, COLUMNS (B, K, T, L) hold the sums of the tile's own direction; a
    tile on the diagonal has both, and those of direction 1 go to ROWS_BEHIND, COLUMNS_BEHIND (B, K, L)."""
    i_tile, j_tile, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles = tl.num_programs(0)
    r, n, p = tl.arange(0, BLOCK), tl.arange(0, N), tl.arange(0, P)
    i, j = i_tile * BLOCK + r, j_tile * BLOCK + r
    i_in, j_in = i < L, j < L
    X += b * x_batch
    DY += b * L * K * P
    B_IN += b * b_batch
    C_OUT += b * c_batch
    diagonal = i_tile == j_tile
    direction = tl.where(i_tile >= j_tile, 0, 1)
    lower = i[:, None] >= j[None, :]
    C_OUT += direction * N
    B_IN += direction * N
    c = tl.load(C_OUT + i[:, None] * c_token + n[None, :], mask=i_in[:, None], other=0.0)
    b_t = tl.load(B_IN + j[None, :] * b_token + n[:, None], mask=j_in[None, :], other=0.0)
    scores = tl.dot(c, b_t, input_precision=PRECISION)
    if diagonal:
        c = tl.load(C_OUT + N + i[:, None] * c_token + n[None, :], mask=i_in[:, None], other=0.0)
        b_t = tl.load(B_IN + N + j[None, :] * b_token + n[:, None], mask=j_in[None, :], other=0.0)
        scores = tl.where(lower, scores, tl.dot(c, b_t, input_precision=PRECISION))
    ds = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K):
        dy = tl.load(DY + i[:, None] * (K * P) + k * P + p[None, :], mask=i_in[:, None], other=0.0)
        x_t = tl.load(X + j[None, :] * x_token + k * P + p[:, None], mask=j_in[None, :], other=0.0)
        g = tl.dot(dy, x_t, input_precision=PRECISION)
        head = b * K + k
        own = ((b * 2 + direction) * K + k) * L
        sum_i = tl.load(SUMS + own + i, mask=i_in, other=0.0)
        sum_j = tl.load(SUMS + own + j, mask=j_in, other=0.0)
        dt = tl.load(DT + own + j, mask=j_in, other=0.0)
        if diagonal:
            behind = own + K * L
            other_i = tl.load(SUMS + behind + i, mask=i_in, other=0.0)
            other_dt = tl.load(DT + behind + j, mask=j_in, other=0.0)
            exponent = tl.where(lower, sum_i[:, None] - sum_j[None, :], other_i[:, None] - other_i[None, :])
            g = g * tl.exp2(tl.minimum(exponent, 0.0))
            q = g * scores
            q_ahead = tl.where(lower, q, 0.0)
            q_behind = tl.where(lower, 0.0, q)
            tl.store(ROWS + (head * tiles + j_tile) * L + i, tl.sum(q_ahead * dt[None, :], 1), mask=i_in)
            tl.store(COLUMNS + (head * tiles + i_tile) * L + j, tl.sum(q_ahead, 0), mask=j_in)
            tl.store(ROWS_BEHIND + head * L + i, tl.sum(q_behind * other_dt[None, :], 1), mask=i_in)
            tl.store(COLUMNS_BEHIND + head * L + j, tl.sum(q_behind, 0), mask=j_in)
            ds += g * tl.where(lower, dt[None, :], other_dt[None, :])
        else:
            edge = tl.where(direction == 0, j_tile * BLOCK + BLOCK - 1, j_tile * BLOCK)
            pivot = tl.load(SUMS + own + edge)
            g = g * tl.exp2(tl.minimum(sum_i - pivot, 0.0))[:, None]
            g = g * tl.exp2(tl.minimum(pivot - sum_j, 0.0))[None, :]
            q = g * scores
            tl.store(ROWS + (head * tiles + j_tile) * L + i, tl.sum(q * dt[None, :], 1), mask=i_in)
            tl.store(COLUMNS + (head * tiles + i_tile) * L + j, tl.sum(q, 0), mask=j_in)
            ds += g * dt[None, :]
    # dS of both directions: (B, 2, L, L), each zero where the other one rules.
    out = b * 2 * L * L + i[:, None] * L + j[None, :]
    mask = i_in[:, None] & j_in[None, :]
    kind = DS.dtype.element_ty
    tl.store(DS + out, tl.where(lower, ds, 0.0).to(kind), mask=mask)
    tl.store(DS + out + L * L, tl.where(lower, 0.0, ds).to(kind), mask=mask)


@triton.jit
def ssd_decay_kernel(
    ROWS,
    COLUMNS,
    ROWS_BEHIND,
    COLUMNS_BEHIND,
    DT,
    DDT,
    DA,
    L,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Row and column sums to the gradients of dt and a, both (B, L, 2, K)."""
    k, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK_L)
    inside = t < L
    own = t // BLOCK
    head = b * K + k
    row_ahead = tl.zeros([BLOCK_L], tl.float32)
    row_behind = tl.load(ROWS_BEHIND + head * L + t, mask=inside, other=0.0)
    column_ahead = tl.zeros([BLOCK_L], tl.float32)
    column_behind = tl.load(COLUMNS_BEHIND + head * L + t, mask=inside, other=0.0)
    for tile in range(0, TILES):
        rows = tl.load(ROWS + (head * TILES + tile) * L + t, mask=inside, other=0.0)
        columns = tl.load(COLUMNS + (head * TILES + tile) * L + t, mask=inside, other=0.0)
        row_ahead += tl.where(tile <= own, rows, 0.0)
        row_behind += tl.where(tile > own, rows, 0.0)
        column_ahead += tl.where(tile >= own, columns, 0.0)
        column_behind += tl.where(tile < own, columns, 0.0)
    ahead = (b * 2 * K + k) * L + t
    ds_ahead = row_ahead - column_ahead * tl.load(DT + ahead, mask=inside, other=0.0)
    ds_behind = row_behind - column_behind * tl.load(DT + ahead + K * L, mask=inside, other=0.0)
    out = (b * L + t) * 2 * K + k
    tl.store(DDT + out, column_ahead, mask=inside)
    tl.store(DDT + out + K, column_behind, mask=inside)
    tl.store(DA + out, tl.cumsum(ds_ahead, 0, reverse=True), mask=inside)
    tl.store(DA + out + K, tl.cumsum(ds_behind, 0), mask=inside)


def configuration(part: str, head_dim: int, state_dim: int, capability: int = 90) -> tuple[int, int]:
    """Tokens a tile and warps, by compute capability, so that nothing spills (scripts/kernel_resources.py).

    `part` is forward, dx or ds. Not tuned for speed yet: no GPU was at hand.
    """
    if capability < 90:
        return 32, 4
    if capability >= 100 or part == "ds":
        return 64, 8
    return 64, 4 if max(head_dim, state_dim) <= 64 else 8


def chosen(part: str, x: Tensor, B_in: Tensor) -> dict[str, int | str]:
    """Constants and options of a launch."""
    capability = 90
    if x.is_cuda:
        major, minor = torch.cuda.get_device_capability(x.device)
        capability = 10 * major + minor
    block, warps = configuration(part, x.shape[3], B_in.shape[3], capability)
    highest = not x.is_cuda or torch.get_float32_matmul_precision() == "highest"
    return {
        "L": x.shape[1],
        "K": x.shape[2],
        "N": B_in.shape[3],
        "P": x.shape[3],
        "BLOCK": block,
        "PRECISION": "ieee" if highest else "tf32",
        "num_warps": warps,
        "num_stages": 2,
    }


def strides_of(x: Tensor, B_in: Tensor, C_out: Tensor) -> tuple[int, ...]:
    return (x.stride(0), x.stride(1), B_in.stride(0), B_in.stride(1), C_out.stride(0), C_out.stride(1))


def launch_forward(
    x: Tensor, dt: Tensor, a: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, L, K, P), and dt and the running sums of a as (B, 2, K, L)."""
    batch, length, heads, head_dim = x.shape
    dt_rows = dt.new_empty(batch, 2, heads, length)
    sums = dt.new_empty(batch, 2, heads, length)
    block_l = triton.next_power_of_2(length)
    block_k = max(1, min(triton.next_power_of_2(heads), 2048 // block_l))
    ssd_sums_kernel[(triton.cdiv(heads, block_k), batch, 2)](
        dt, a, dt_rows, sums, length, K=heads, BLOCK_L=block_l, BLOCK_K=block_k, LOG2=LOG2E
    )
    y = x.new_empty(batch, length, heads, head_dim)
    how = chosen("forward", x, B_in)
    ssd_kernel[(triton.cdiv(length, how["BLOCK"]), heads, batch)](
        x,
        B_in,
        C_out,
        dt_rows,
        sums,
        D,
        y,
        *strides_of(x, B_in, C_out),
        **how,
    )
    return y, dt_rows, sums


def launch_backward(
    dy: Tensor, x: Tensor, dt_rows: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, d(dt), da, dS (B, 2, L, L) in the dtype of x, and dD (K)."""
    batch, length, heads, head_dim = x.shape
    strides, how = strides_of(x, B_in, C_out), chosen("dx", x, B_in)
    tiles = triton.cdiv(length, how["BLOCK"])
    dx = x.new_empty(batch, length, heads, head_dim)
    dD = sums.new_empty(batch, heads, tiles)
    ssd_dx_kernel[(tiles, heads, batch)](
        dy,
        x,
        B_in,
        C_out,
        dt_rows,
        sums,
        D,
        dx,
        dD,
        *strides,
        **how,
    )
    how = chosen("ds", x, B_in)
    tiles = triton.cdiv(length, how["BLOCK"])
    dS = x.new_empty(batch, 2, length, length)
    rows, columns = (sums.new_empty(batch, heads, tiles, length) for _ in range(2))
    rows_behind, columns_behind = (sums.new_empty(batch, heads, length) for _ in range(2))
    ssd_ds_kernel[(tiles, tiles, batch)](
        dy,
        x,
        B_in,
        C_out,
        dt_rows,
        sums,
        dS,
        rows,
        columns,
        rows_behind,
        columns_behind,
        *strides,
        **how,
    )
    ddt, da = (sums.new_empty(batch, length, 2, heads) for _ in range(2))
    ssd_decay_kernel[(heads, batch)](
        rows,
        columns,
        rows_behind,
        columns_behind,
        dt_rows,
        ddt,
        da,
        length,
        K=heads,
        BLOCK=how["BLOCK"],
        TILES=tiles,
        BLOCK_L=triton.next_power_of_2(length),
    )
    return dx, ddt, da, dS, dD.sum((0, 2))
