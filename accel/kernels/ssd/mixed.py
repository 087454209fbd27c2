"""Computes local mixing, the bidirectional scan, its gate and its norm per head as one operator,
which saves only its inputs and y for the backward pass.

It launches the kernels of accel/kernels/local_mix/operator.py, decays.py and operator.py one after
the other, and in the backward pass launches the first two again: their results (mixed x, B and C;
steps and sums) are cheaper to compute again than to keep. The whole is one operator, so that
torch.compile cannot decide to save more tensors.

Letters: B samples, L = rows · columns tokens, K heads, P head dim, N state size, E = K·P + 4·N
mixed channels, W channels of the projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from accel.kernels.local_mix.operator import check_shape, local_mix
from accel.kernels.registry import keep_inputs, make_differentiable, refuse_empty, register, upcast
from accel.kernels.ssd.definition import MAX_QUADRATIC_TOKENS, bidirectional_ssd
from accel.kernels.ssd.operator import check_sizes, split_channels
from common.errors import UserError

FASTLATENT_OPS = torch.ops.fastlatent


def mixed_ssd(
    projected: Float[Tensor, "B L W"],
    weight: Float[Tensor, "E 1 R C"],
    bias: Float[Tensor, "E"],
    grid: tuple[int, int],
    dt_bias: Float[Tensor, "2 K"],
    A_log: Float[Tensor, "2 K"],
    D: Float[Tensor, "K"],
    norm_weight: Float[Tensor, "K P"],
    eps: float = 1e-6,
    mix: Callable[..., Tensor] = local_mix,
    scan: Callable[..., Tensor] = bidirectional_ssd,
) -> Float[Tensor, "B L K P"]:
    """Defines what `fused_mixed_ssd` computes: `local_mix` of a slice of a projection, then
    `bidirectional_ssd`. `mix` and `scan` may be the fused versions of these two functions."""
    z, xBC, dt = split_projection(projected, weight, norm_weight)
    x, B_in, C_out = split_channels(mix(xBC, weight, bias, grid), *z.shape[2:])
    return scan(x, dt, dt_bias, A_log, B_in, C_out, D, z, norm_weight, eps)


def split_projection(
    projected: Tensor, weight: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a projection, or its gradient, into three views: z (B, L, K, P), xBC (B, L, E), which
    is x, B_in and C_out side by side, and dt (B, L, 2, K)."""
    heads, head_dim = norm_weight.shape
    z, xBC, dt = projected.split((heads * head_dim, weight.shape[0], 2 * heads), dim=-1)
    return z.unflatten(-1, (heads, head_dim)), xBC, dt.unflatten(-1, (2, heads))


def prepare_scan(
    parts: tuple[Tensor, ...], weight: Tensor, bias: Tensor, rows: int, columns: int, *rest: Tensor
) -> tuple[Tensor, ...]:
    """Returns the inputs of the scan: x after local mixing, steps, running sums, B_in and C_out
    after local mixing, and D. `parts` is the result of `split_projection`; the arguments in `rest`
    begin with dt_bias, A_log and D."""
    z, xBC, dt = parts
    mixed = FASTLATENT_OPS.local_mix(xBC, weight, bias, rows, columns)
    decays = FASTLATENT_OPS.ssd_decays(dt, *rest[:2], dt.shape[1])
    x, *groups = split_channels(mixed, *z.shape[2:])
    return x, *decays, *groups, rest[2]


def forward(projected: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Returns the gated and normed y, and y itself, both (B, L, K, P)."""
    *_, norm_weight, eps = rest
    parts = split_projection(projected, weight, norm_weight)
    return FASTLATENT_OPS.ssd_gated(*prepare_scan(parts, weight, *rest), parts[0], norm_weight, eps)


def backward(
    dh: Tensor, y: Tensor, projected: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Returns the gradients of `projected`, `weight` and `bias`, then those of dt_bias, A_log, D
    and norm_weight."""
    *mixing, dt_bias, A_log, _, norm_weight, eps = rest
    parts = split_projection(projected, weight, norm_weight)
    z, xBC, dt = parts

    # Allocate the projection's gradient as one tensor; each of three operators then writes its own
    # slice of it (dz, dxBC, ddt), so nothing has to be joined by a copy.
    dprojected = torch.empty_like(projected)
    dz, dxBC, ddt = split_projection(dprojected, weight, norm_weight)
    dy, dnorm = FASTLATENT_OPS.gated_norm_backward(dh, y, z, norm_weight, eps, dz)
    scan_inputs = prepare_scan(parts, weight, *rest)
    dmixed, dsteps, dsums, dD = FASTLATENT_OPS.ssd_backward(dy, *scan_inputs)
    mix_grads = FASTLATENT_OPS.local_mix_backward(dmixed, xBC, weight, *mixing, dxBC)
    decay_grads = FASTLATENT_OPS.ssd_decays_backward(dsteps, dsums, dt, dt_bias, A_log, ddt)
    return dprojected, *mix_grads, *decay_grads, dD, dnorm


INPUTS = (
    "Tensor projected, Tensor weight, Tensor bias, int rows, int columns, Tensor dt_bias, Tensor "
    "A_log, Tensor D, Tensor norm_weight, float eps"
)
operator = register(f"ssd_mixed({INPUTS}) -> (Tensor, Tensor)", forward)
backward_operator = register(
    f"ssd_mixed_backward(Tensor dh, Tensor y, {INPUTS}) -> ({', '.join(['Tensor'] * 7)})", backward
)


def compute_gradients(dh: Tensor, *needed: Any) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the operator's inputs: None for rows and columns, which are
    integers."""
    grads = backward_operator(dh.contiguous(), *needed)
    return *grads[:3], None, None, *grads[3:]


differentiable_ssd = make_differentiable(keep_inputs(operator, keep_second=True), compute_gradients)


def fused_mixed_ssd(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor,
    grid: tuple[int, int],
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
) -> Tensor:
    """Computes `local_mix` of a slice of a projection, then `bidirectional_ssd`, as one operator
    for up to 512 tokens.

    The projection holds the gate z, then x, B_in and C_out, then dt: W = K·P + E + 2·K; its
    gradient is one tensor. Raises UserError for a head dim or state size that the matrix units do
    not support, or for more than 512 tokens.
    """
    refuse_empty("bidirectional_ssd", projected)
    length = projected.shape[1]
    if length > MAX_QUADRATIC_TOKENS:
        raise UserError(
            f"fused_mixed_ssd takes up to {MAX_QUADRATIC_TOKENS} tokens, and got {length}; use "
            "fused_local_mix and fused_bidirectional_ssd."
        )

    heads, head_dim = norm_weight.shape
    check_shape(projected, weight, grid)
    check_sizes(head_dim, (weight.shape[0] - heads * head_dim) // 4)
    mixing = (projected.contiguous(), weight.contiguous(), bias.contiguous())
    scan = [t.contiguous() for t in (dt_bias, A_log, upcast(D), norm_weight)]
    return differentiable_ssd(*mixing, *grid, *scan, eps)
