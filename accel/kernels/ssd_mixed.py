"""Local mixing, the bidirectional scan, its gate and head norm as one operator that keeps its inputs and y only.

It launches the kernels of local_mix.py, ssd_decays.py and fused_ssd.py one after the other, and in the backward pass
launches the first two again: their results, the mixed x, B and C, steps and sums, cost less to make than to keep.
As one operator, so that the compiler, too, keeps no more.

Letters: B samples, L = rows · columns tokens, K heads, P head dim, N state size, E = K·P + 4·N mixed channels.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from accel.kernels.checks import refuse_empty, refuse_second_order
from accel.kernels.fused_ssd import check_sizes, ssd_backward_flops, ssd_flops
from accel.kernels.local_mix import check_shape, local_mix_flops
from accel.kernels.operator import heads_together, register
from accel.kernels.upcast import upcast


def prepared(
    z: Tensor,
    xBC: Tensor,
    weight: Tensor,
    bias: Tensor,
    rows: int,
    columns: int,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
) -> tuple[Tensor, ...]:
    """Mixed x, steps, sums, and mixed B and C."""
    mixed = torch.ops.fastlatent.local_mix(xBC, weight, bias, rows, columns)
    inner = z.shape[2] * z.shape[3]
    x, B_in, C_out = mixed.split((inner, *2 * ((mixed.shape[2] - inner) // 2,)), dim=-1)
    steps, sums = torch.ops.fastlatent.ssd_decays(dt, dt_bias, A_log, dt.shape[1])
    B_in, C_out = (t.unflatten(-1, (2, -1)) for t in (B_in, C_out))
    return x.unflatten(-1, z.shape[2:]), steps, sums, B_in, C_out


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The gated and normed y, and y."""
    D, z, norm_weight, eps = arguments[8:]
    return torch.ops.fastlatent.ssd_gated(*prepared(z, *arguments[:8]), D, z, norm_weight, eps)


def backward(dh: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of xBC, weight, bias, dt, dt_bias, A_log, D, z and norm_weight."""
    xBC, weight, bias, rows, columns, dt, dt_bias, A_log, D, z, norm_weight, eps = arguments
    ops = torch.ops.fastlatent
    dy, dz, dnorm = ops.gated_norm_backward(dh, y, z, norm_weight, eps)
    x, steps, sums, B_in, C_out = prepared(z, *arguments[:8])
    dmixed, dsteps, dsums, dD = ops.ssd_backward(dy, x, steps, sums, B_in, C_out, D)
    of_mixing = ops.local_mix_backward(dmixed, xBC, weight, bias, rows, columns)
    return *of_mixing, *ops.ssd_decays_backward(dsteps, dsums, dt, dt_bias, A_log), dD, dz, dnorm


def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    z = arguments[9]
    return z.new_empty(z.shape), z.new_empty(z.shape)


def backward_fake(dh: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    xBC, weight, bias, _, _, dt, dt_bias, A_log, D, z, norm_weight, _ = arguments

    def wide(t: Tensor) -> Tensor:
        return t.new_empty(t.shape, dtype=torch.promote_types(t.dtype, torch.float32))

    narrow = [t.new_empty(t.shape) for t in (xBC, dt, z)]
    sums = [wide(t) for t in (weight, bias, dt_bias, A_log, norm_weight)]
    return narrow[0], *sums[:2], narrow[1], *sums[2:4], D.new_empty(D.shape), narrow[2], sums[4]


INPUTS = (
    "Tensor xBC, Tensor weight, Tensor bias, int rows, int columns, Tensor dt, Tensor dt_bias, Tensor A_log, Tensor D, "
    "Tensor z, Tensor norm_weight, float eps"
)
register(f"ssd_mixed({INPUTS}) -> (Tensor, Tensor)", forward, forward_fake)
register(f"ssd_mixed_backward(Tensor dh, Tensor y, {INPUTS}) -> ({', '.join(['Tensor'] * 9)})", backward, backward_fake)


@register_flop_formula(torch.ops.fastlatent.ssd_mixed)
def forward_flops(xBC: Any, weight: Any, *rest: Any, **kwargs: Any) -> int:
    """FLOPs of the operator on tensors of these shapes."""
    z = rest[7]
    state = (xBC[2] - z[2] * z[3]) // 4
    return xBC[0] * local_mix_flops(xBC[1], xBC[2], weight[2] * weight[3]) + ssd_flops(z, None, None, (0, 0, 0, state))


@register_flop_formula(torch.ops.fastlatent.ssd_mixed_backward)
def backward_flops(dh: Any, y: Any, *arguments: Any, **kwargs: Any) -> int:
    """Twice the mixing and the backward pass of the scan; recomputation is not counted."""
    xBC, weight, z = arguments[0], arguments[1], arguments[9]
    mixing = xBC[0] * local_mix_flops(xBC[1], xBC[2], weight[2] * weight[3])
    state = (xBC[2] - z[2] * z[3]) // 4
    return 2 * mixing + ssd_backward_flops(None, z, None, None, (0, 0, 0, state))


class FusedMixedSSD(torch.autograd.Function):
    """The operators as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, rows: int, columns: int, eps: float, *inputs: Tensor) -> Tensor:
        xBC, weight, bias, *rest = inputs
        h, y = torch.ops.fastlatent.ssd_mixed(xBC, weight, bias, rows, columns, *rest, eps)
        ctx.save_for_backward(y, *inputs)
        ctx.constants = (rows, columns, eps)
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        y, xBC, weight, bias, *rest = ctx.saved_tensors
        rows, columns, eps = ctx.constants
        found = torch.ops.fastlatent.ssd_mixed_backward(
            grads[0].contiguous(), y, xBC, weight, bias, rows, columns, *rest, eps
        )
        inputs = (xBC, weight, bias, *rest)
        return None, None, None, *(g.to(t.dtype) for g, t in zip(found, inputs, strict=True))


def fused_mixed_ssd(
    xBC: Float[Tensor, "B L E"],
    weight: Float[Tensor, "E 1 R C"],
    bias: Float[Tensor, "E"],
    grid: tuple[int, int],
    dt: Float[Tensor, "B L 2 K"],
    dt_bias: Float[Tensor, "2 K"],
    A_log: Float[Tensor, "2 K"],
    D: Float[Tensor, "K"],
    z: Float[Tensor, "B L K P"],
    norm_weight: Float[Tensor, "K P"],
    eps: float = 1e-6,
) -> Float[Tensor, "B L K P"]:
    """`bidirectional_ssd` of the x, B and C that `local_mix` makes of `xBC`; up to 512 tokens.

    ValueError for a head dim or state size that the matrix units do not take. Slices of one projection are taken as
    they lie.
    """
    refuse_empty("bidirectional_ssd", z)
    check_shape(xBC, weight, grid)
    check_sizes(z.shape[3], (xBC.shape[2] - z.shape[2] * z.shape[3]) // 4)
    xBC = xBC if xBC.stride(2) == 1 else xBC.contiguous()
    of_mixing = (xBC, weight.contiguous(), bias.contiguous())
    of_steps = (heads_together(dt), dt_bias.contiguous(), A_log.contiguous())
    of_gate = (upcast(D).contiguous(), heads_together(z), norm_weight.contiguous())
    return FusedMixedSSD.apply(*grid, eps, *of_mixing, *of_steps, *of_gate)
