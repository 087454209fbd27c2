"""Local mixing, the bidirectional scan, its gate and head norm as one operator that keeps its
inputs and y only.

It launches the kernels of local_mix.py, ssd_decays.py and fused_ssd.py one after the other, and in
the backward pass launches the first two again: their results, the mixed x, B and C, steps and sums,
cost less to make than to keep. As one operator, so that the compiler, too, keeps no more.

Letters: B samples, L = rows · columns tokens, K heads, P head dim, N state size, E = K·P + 4·N
mixed channels, W channels of the projection.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from accel.kernels.bidirectional_ssd import MAX_QUADRATIC, bidirectional_ssd
from accel.kernels.fused_ssd import check_sizes, slices_of
from accel.kernels.local_mix import check_shape, local_mix
from accel.kernels.operator import differentiable, keeping_inputs, refuse_empty, register, upcast
from common.errors import UserError


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
) -> Float[Tensor, "B L K P"]:
    """The definition of `fused_mixed_ssd`: `bidirectional_ssd` of what `local_mix` makes of a slice
    of a projection."""
    z, xBC, dt = parts_of(projected, weight, norm_weight)
    x, B_in, C_out = slices_of(local_mix(xBC, weight, bias, grid), *z.shape[2:])
    return bidirectional_ssd(x, dt, dt_bias, A_log, B_in, C_out, D, z, norm_weight, eps)


def parts_of(
    projected: Tensor, weight: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """z (B, L, K, P), xBC (B, L, E) and dt (B, L, 2, K), as they lie side by side in a projection
    or its gradient."""
    heads, head_dim = norm_weight.shape
    z, xBC, dt = projected.split((heads * head_dim, weight.shape[0], 2 * heads), dim=-1)
    return z.unflatten(-1, (heads, head_dim)), xBC, dt.unflatten(-1, (2, heads))


class Inputs(NamedTuple):
    """What both operators take, in this order; rows and columns are those of the grid."""

    projected: Tensor
    weight: Tensor
    bias: Tensor
    rows: int
    columns: int
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    norm_weight: Tensor
    eps: float

    def slices_of(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of `projected`, or of its gradient."""
        return parts_of(projected, self.weight, self.norm_weight)

    def for_scan(self) -> tuple[Tensor, ...]:
        """What the scan takes: mixed x, steps, sums, mixed B and C, and D."""
        z, xBC, dt = self.slices_of(self.projected)
        mixed = torch.ops.fastlatent.local_mix(xBC, *self[1:5])
        decays = torch.ops.fastlatent.ssd_decays(dt, self.dt_bias, self.A_log, dt.shape[1])
        x, *groups = slices_of(mixed, *z.shape[2:])
        return x, *decays, *groups, self.D


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The gated and normed y, and y."""
    given = Inputs(*inputs)
    z = given.slices_of(given.projected)[0]
    return torch.ops.fastlatent.ssd_gated(*given.for_scan(), z, *given[-2:])


def backward(dh: Tensor, y: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of projected, weight, bias, dt_bias, A_log, D and norm_weight; each part of the
    first is written where it belongs."""
    ops = torch.ops.fastlatent
    given = Inputs(*inputs)
    dprojected = torch.empty_like(given.projected)
    z, xBC, dt = given.slices_of(given.projected)
    dz, dxBC, ddt = given.slices_of(dprojected)
    dy, dnorm = ops.gated_norm_backward(dh, y, z, *given[-2:], dz)
    dmixed, dsteps, dsums, dD = ops.ssd_backward(dy, *given.for_scan())
    of_mixing = ops.local_mix_backward(dmixed, xBC, *given[1:5], dxBC)
    of_decays = ops.ssd_decays_backward(dsteps, dsums, dt, given.dt_bias, given.A_log, ddt)
    return dprojected, *of_mixing, *of_decays, dD, dnorm


INPUTS = (
    "Tensor projected, Tensor weight, Tensor bias, int rows, int columns, Tensor dt_bias, Tensor "
    "A_log, Tensor D, Tensor norm_weight, float eps"
)
operator = register(f"ssd_mixed({INPUTS}) -> (Tensor, Tensor)", forward)
backward_operator = register(
    f"ssd_mixed_backward(Tensor dh, Tensor y, {INPUTS}) -> ({', '.join(['Tensor'] * 7)})", backward
)


def gradients(dh: Tensor, *needed: Any) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs; rows and columns have none."""
    found = backward_operator(dh.contiguous(), *needed)
    return *found[:3], None, None, *found[3:]


differentiable_ssd = differentiable(keeping_inputs(operator, made=True), gradients)


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
    """`bidirectional_ssd` of the x, B and C that `local_mix` makes of a slice of a projection; up
    to 512 tokens.

    The projection holds the gate z, then x, B and C, then dt: W = K·P + E + 2·K; its gradient is
    made in one piece. ValueError for a head dim or state size that the matrix units do not take, or
    for more tokens.
    """
    refuse_empty("bidirectional_ssd", projected)
    if (length := projected.shape[1]) > MAX_QUADRATIC:
        raise UserError(
            f"fused_mixed_ssd takes up to {MAX_QUADRATIC} tokens, and got {length}; use "
            "fused_local_mix and fused_bidirectional_ssd."
        )
    heads, head_dim = norm_weight.shape
    check_shape(projected, weight, grid)
    check_sizes(head_dim, (weight.shape[0] - heads * head_dim) // 4)
    mixing = (projected.contiguous(), weight.contiguous(), bias.contiguous())
    scan = [t.contiguous() for t in (dt_bias, A_log, upcast(D), norm_weight)]
    return differentiable_ssd(*mixing, *grid, *scan, eps)
