"""`bidirectional_ssd` as one operator with its own backward pass: Triton on a GPU (bidirectional_ssd_triton.py), plain
PyTorch elsewhere.

Letters: B samples, L tokens, K heads, P head dim, N state size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from accel.kernels import bidirectional_ssd as definition
from accel.kernels.operator import register
from accel.kernels.upcast import upcast

LOG2E = 1.0 / math.log(2.0)
SIZES = (16, 32, 64, 128)
"""What head dim and state size may be: the matrix units' shapes."""


def forward_reference(
    x: Tensor, dt: Tensor, a: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and what the backward pass needs: dt, and the running sums of a in units of log2, both (B, 2, K, L)."""
    y = definition.with_skip(definition.within(x, dt, a, B_in, C_out), x, D)
    ahead = definition.prefix_sums(a[:, :, 0], dim=1)
    behind = definition.prefix_sums(a[:, :, 1].flip(1), dim=1).flip(1)
    sums = LOG2E * torch.stack((ahead, behind), dim=1).transpose(2, 3)
    return y.contiguous(), dt.permute(0, 2, 3, 1).contiguous(), sums.contiguous()


def backward_reference(
    dy: Tensor, x: Tensor, dt_rows: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, d(dt), da, dS (B, 2, L, L), dD; S_ij = C_i·B_j, each direction zero where the other rules."""
    length = x.shape[1]
    lower = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    exponent = torch.where(lower, *(s.unsqueeze(3) - s.unsqueeze(2) for s in sums.unbind(1)))
    decay = torch.exp2(exponent.clamp(max=0.0))  # (B, K, L, L)
    step = torch.where(lower, *(part.unsqueeze(2) for part in dt_rows.unbind(1)))
    scores = upcast(torch.where(lower, *(C_out[:, :, i] @ B_in[:, :, i].mT for i in (0, 1)))).unsqueeze(1)
    rows, columns = upcast(dy).transpose(1, 2), upcast(x).transpose(1, 2)  # (B, K, L, P)
    dx = (decay * scores * step).mT @ rows + upcast(D)[:, None, None] * rows
    g = (rows @ columns.mT) * decay
    dS = (g * step).sum(1)
    q = g * scores
    of_rows, of_columns = [], []
    for mask in (lower, ~lower):
        own = torch.where(mask, q, 0.0)
        of_rows.append((own * step).sum(3))
        of_columns.append(own.sum(2))
    ddt = torch.stack(of_columns, dim=1)  # (B, 2, K, L)
    ds = torch.stack(of_rows, dim=1) - ddt * dt_rows
    da = torch.stack((ds[:, 0].flip(2).cumsum(2).flip(2), ds[:, 1].cumsum(2)), dim=1)
    dS = torch.stack((torch.where(lower, dS, 0.0), torch.where(lower, 0.0, dS)), dim=1).to(x.dtype)
    dD = (rows * columns).sum((0, 2, 3))
    ddt, da = (t.permute(0, 3, 1, 2).contiguous() for t in (ddt, da))
    return dx.transpose(1, 2).to(x.dtype).contiguous(), ddt, da, dS, dD


def forward_fake(x: Tensor, dt: Tensor, a: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor) -> tuple[Tensor, ...]:
    rows = dt.new_empty(x.shape[0], 2, x.shape[2], x.shape[1])
    return x.new_empty(x.shape), rows, torch.empty_like(rows)


def backward_fake(
    dy: Tensor, x: Tensor, dt_rows: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> tuple[Tensor, ...]:
    batch, length, heads, _ = x.shape
    ddt = sums.new_empty(batch, length, 2, heads)
    dS = x.new_empty(batch, 2, length, length)
    return x.new_empty(x.shape), ddt, torch.empty_like(ddt), dS, sums.new_empty(heads)


register(
    "ssd(Tensor x, Tensor dt, Tensor a, Tensor B_in, Tensor C_out, Tensor D) -> (Tensor, Tensor, Tensor)",
    forward_reference,
    forward_fake,
    "bidirectional_ssd_triton.launch_forward",
)
register(
    "ssd_backward(Tensor dy, Tensor x, Tensor dt_rows, Tensor sums, Tensor B_in, Tensor C_out, Tensor D) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    backward_reference,
    backward_fake,
    "bidirectional_ssd_backward_triton.launch_backward",
)


@register_flop_formula(torch.ops.fastlatent.ssd)
def ssd_flops(x: Any, dt: Any, a: Any, B_in: Any, *rest: Any, **kwargs: Any) -> int:
    """FLOPs of the operator on tensors of these shapes."""
    batch, length, heads, head_dim = x
    return batch * definition.bidirectional_ssd_flops(length, heads, head_dim, B_in[3])


@register_flop_formula(torch.ops.fastlatent.ssd_backward)
def ssd_backward_flops(dy: Any, x: Any, dt_rows: Any, sums: Any, B_in: Any, *rest: Any, **kwargs: Any) -> int:
    """dx and dS cost a forward pass each; the products for dB and dC are counted where they run."""
    return 2 * ssd_flops(x, None, None, B_in)


class FusedSSD(torch.autograd.Function):
    """The operators as one differentiable function of x, dt, a, B, C, D."""

    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> Tensor:
        x, _, _, B_in, C_out, D = arguments
        y, dt_rows, sums = torch.ops.fastlatent.ssd(*arguments)
        ctx.save_for_backward(x, dt_rows, sums, B_in, C_out, D)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, dt_rows, sums, B_in, C_out, D = ctx.saved_tensors
        dx, ddt, da, dS, dD = torch.ops.fastlatent.ssd_backward(grads[0].contiguous(), x, dt_rows, sums, B_in, C_out, D)
        dC = (dS @ B_in.transpose(1, 2)).transpose(1, 2)
        dB = (dS.mT @ C_out.transpose(1, 2)).transpose(1, 2)
        return dx, ddt, da, dB, dC, dD.to(D.dtype)


def heads_together(t: Tensor) -> Tensor:
    """`t` (B, L, groups, width) with each token's values in one stretch of memory; tokens may be apart."""
    return t if t.stride(3) == 1 and t.stride(2) == t.shape[3] else t.contiguous()


def fused_bidirectional_ssd(
    x: Float[Tensor, "B L K P"],
    dt: Float[Tensor, "B L 2 K"],
    A: Float[Tensor, "2 K"],
    B_in: Float[Tensor, "B L 2 N"],
    C_out: Float[Tensor, "B L 2 N"],
    D: Float[Tensor, "K"],
) -> Float[Tensor, "B L K P"]:
    """`bidirectional_ssd` as one operator: quadratic up to 512 tokens; beyond, the operator inside chunks of 256.

    ValueError for a head dim or state size that the matrix units do not take. Slices of one projection are taken as
    they lie, without a copy.
    """
    if x.shape[3] not in SIZES or B_in.shape[3] not in SIZES:
        raise ValueError(
            f"runtime.fused_scan=true takes head_dim and state_dim of {', '.join(map(str, SIZES))}, and got "
            f"{x.shape[3]} and {B_in.shape[3]}; choose such sizes, or runtime.fused_scan=false."
        )
    a = upcast(dt) * upcast(A)
    if x.shape[1] <= definition.MAX_QUADRATIC:
        return inside(x, dt, a, B_in, C_out, D)
    return definition.with_skip(definition.chunked(x, dt, a, B_in, C_out, inside), x, D)


def inside(x: Tensor, dt: Tensor, a: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor | None = None) -> Tensor:
    """`within`, and the skip D·x where it is given."""
    skip = dt.new_zeros(x.shape[2]) if D is None else upcast(D)
    tensors = (heads_together(x), upcast(dt).contiguous(), a.contiguous(), heads_together(B_in), heads_together(C_out))
    return FusedSSD.apply(*tensors, skip)
