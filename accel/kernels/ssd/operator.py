"""Computes `bidirectional_ssd` as one operator with its own backward pass: Triton on a GPU
(forward_triton.py), PyTorch elsewhere.

Letters: B samples, L tokens, K heads, P head dim, N state size. The samples together are cut into S
pieces of T tokens each. `B_in` and `C_out` are the matrices B and C of the SSD paper. E = K·P + 4·N
is the number of channels of x, B_in and C_out side by side: x has K·P, B_in and C_out have 2·N each
(N for each scan direction).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from accel.kernels.gated_norm.operator import compute_gradients as compute_norm_gradients
from accel.kernels.gated_norm.operator import fused_gated_norm, gated_norm
from accel.kernels.registry import (
    keep_inputs,
    make_differentiable,
    pack_heads,
    refuse_empty,
    register,
    upcast,
)
from accel.kernels.ssd import definition
from accel.kernels.ssd.chunks import add_between_chunks
from accel.kernels.ssd.decays import fused_ssd_decays
from common.errors import UserError

LN2 = math.log(2.0)
MATRIX_UNIT_SIZES = (16, 32, 64, 128)
"""Supported head dims and state sizes: sides of the tiles that the GPU's matrix units multiply."""


def compute_plain(*inputs: Tensor) -> Tensor:
    """Returns the scan's output y (S, T, K, P), contiguous, without a gate. The inputs are x, the
    step sizes Δ, the running sums of their log-decays, B_in, C_out and D."""
    return definition.scan_within_pieces(*inputs).contiguous()


def compute_gated(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Returns the output after gate and norm, and the scan's output y before them, both (S, T, K,
    P). The inputs are those of `compute_plain`, then z, norm_weight and eps."""
    y = compute_plain(*inputs[:6])
    return gated_norm(y, *inputs[6:]), y


def compute_backward(
    dy: Tensor, x: Tensor, steps: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four tensors: the gradients of x, B_in and C_out side by side (S, T, E), and the
    gradients of steps, sums and D."""
    decay, scores, step, lower = definition.compute_masks(x, steps, sums, B_in, C_out)

    # Compute the gradient of x. `rows` (dy) and `columns` (x) have the shape (S, K, T, P), at least
    # in fp32: in y = M x, dy_i belongs to row i of M, and x_j to column j.
    rows = upcast(dy).transpose(1, 2)
    columns = upcast(x).transpose(1, 2)
    dx = (decay * scores * step).mT @ rows + upcast(D)[:, None, None] * rows

    # Compute the gradients of steps and sums: for each direction, take the pairs of tokens of this
    # direction (`mask`), and sum them over rows and over columns.
    g = (rows @ columns.mT) * decay
    dS = (g * step).sum(1)
    q = g * scores
    dsteps = []
    dsums = []
    for mask, direction_steps in ((lower, steps[:, 0]), (~lower, steps[:, 1])):
        part = torch.where(mask, q, 0.0)
        dsteps.append(part.sum(2))
        dsums.append(LN2 * ((part * step).sum(3) - dsteps[-1] * direction_steps))

    # Write the gradients of x, B_in and C_out side by side in one tensor, because the backward pass
    # of the convolution before the scan reads them as one tensor.
    joined = x.new_empty(*x.shape[:2], count_channels(x, B_in))
    dx_out, dB, dC = split_channels(joined, *x.shape[2:])
    dx_out.copy_(dx.transpose(1, 2))
    dS = torch.stack((torch.where(lower, dS, 0.0), torch.where(lower, 0.0, dS)), dim=1).to(x.dtype)
    write_group_gradients(dS, B_in, C_out, dB, dC)
    return (
        joined,
        torch.stack(dsteps, dim=1),
        torch.stack(dsums, dim=1),
        (rows * columns).sum((0, 2, 3)),
    )


def count_channels(x: Tensor, B_in: Tensor) -> int:
    """Returns E, the number of channels of x, B_in and C_out together."""
    return x.shape[2] * x.shape[3] + 4 * B_in.shape[3]


def split_channels(joined: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits `joined` (S, T, E) into three views: x (S, T, K, P), B_in and C_out (both S, T, 2,
    N)."""
    inner = heads * head_dim
    x, B_in, C_out = joined.split((inner, *2 * ((joined.shape[-1] - inner) // 2,)), dim=-1)
    return (
        x.unflatten(-1, (heads, head_dim)),
        B_in.unflatten(-1, (2, -1)),
        C_out.unflatten(-1, (2, -1)),
    )


def write_group_gradients(dS: Tensor, B_in: Tensor, C_out: Tensor, dB: Tensor, dC: Tensor) -> None:
    """Writes the gradients of B_in and C_out to `dB` and `dC`. dS (S, 2, T, T) is the gradient of
    the scores C_i·B_j; for each direction it is 0 at pairs of the other direction. The matrix
    products read and write strided rows, so nothing is copied."""
    for i in (0, 1):
        torch.bmm(dS[:, i], B_in[:, :, i], out=dC[:, :, i])
        torch.bmm(dS[:, i].mT, C_out[:, :, i], out=dB[:, :, i])


INPUTS = "Tensor x, Tensor steps, Tensor sums, Tensor B_in, Tensor C_out, Tensor D"
ssd = register(
    f"ssd({INPUTS}) -> Tensor", compute_plain, "accel.kernels.ssd.forward_triton.launch_forward"
)
ssd_gated = register(
    f"ssd_gated({INPUTS}, Tensor z, Tensor norm_weight, float eps) -> (Tensor, Tensor)",
    compute_gated,
    "accel.kernels.ssd.forward_triton.launch_gated",
)
ssd_backward = register(
    f"ssd_backward(Tensor dy, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    compute_backward,
    "accel.kernels.ssd.backward_triton.launch_backward",
)


def compute_gradients(dy: Tensor, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of x, steps, sums, B_in, C_out and D."""
    joined, dsteps, dsums, dD = ssd_backward(dy.contiguous(), x, *rest)
    dx, dB, dC = split_channels(joined, *x.shape[2:])
    return dx, dsteps, dsums, dB, dC, dD


def compute_gated_gradients(dh: Tensor, y: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Returns the gradients of x, steps, sums, B_in, C_out, D, z and norm_weight."""
    *scan_inputs, z, norm_weight, eps = inputs
    dy, *gate_grads = compute_norm_gradients(dh, y, z, norm_weight, eps)
    return *compute_gradients(dy, *scan_inputs), *gate_grads


differentiable_ssd = make_differentiable(keep_inputs(ssd), compute_gradients)
differentiable_gated_ssd = make_differentiable(
    keep_inputs(ssd_gated, keep_second=True), compute_gated_gradients
)


def fused_bidirectional_ssd(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    B_in: Tensor,
    C_out: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Computes `bidirectional_ssd`. Up to 512 tokens take two kernel launches: one for steps and
    decays, one for the scan with gate and norm. A longer sequence is cut into chunks of 256 tokens;
    after the launch for steps and decays, one launch scans inside the chunks, one writes states,
    one reads them, and one applies gate and norm.

    Raises UserError for a head dim or state size that the matrix units do not support. If the
    inputs are slices of one projection, the kernels read them in place.
    """
    refuse_empty("bidirectional_ssd", x)
    check_sizes(x.shape[3], B_in.shape[3])
    batch, length = x.shape[:2]

    # Compute the step sizes, and the running sums of log decays within each piece; a sequence of up
    # to MAX_QUADRATIC_TOKENS tokens is one piece.
    whole = length <= definition.MAX_QUADRATIC_TOKENS
    steps, sums = fused_ssd_decays(dt, dt_bias, A_log, length if whole else definition.CHUNK_TOKENS)
    if not whole:
        x, B_in, C_out = (
            definition.cut_chunks(t, definition.CHUNK_TOKENS).flatten(0, 1)
            for t in (x, B_in, C_out)
        )
    x, B_in, C_out = (pack_heads(t) for t in (x, B_in, C_out))
    inputs = (x, steps, sums, B_in, C_out)
    wide = upcast(D).contiguous()
    if whole and z is not None:
        weight = definition.require_norm_weight(norm_weight).contiguous()
        return differentiable_gated_ssd(*inputs, wide, pack_heads(z), weight, eps)

    # For a long sequence, add the contributions of the other chunks first, and only then apply gate
    # and norm.
    y = differentiable_ssd(*inputs, wide)
    if not whole:
        y = add_between_chunks(y, *inputs, batch)
        y = y.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]
    if z is None:
        return y
    return fused_gated_norm(y, z, definition.require_norm_weight(norm_weight), eps)


def check_sizes(head_dim: int, state_dim: int) -> None:
    """Raises UserError for a head dim or state size that the GPU's matrix units do not support."""
    if head_dim not in MATRIX_UNIT_SIZES or state_dim not in MATRIX_UNIT_SIZES:
        raise UserError(
            "runtime.fused_scan=true takes head_dim and state_dim of "
            f"{', '.join(map(str, MATRIX_UNIT_SIZES))}, and got {head_dim} and {state_dim}; choose "
            "such sizes, or runtime.fused_scan=false."
        )
