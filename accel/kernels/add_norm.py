"""add + gate + norm + modulate: what stands between two branches of a residual stream.

`add_norm` is the definition, in PyTorch; `fused_add_norm` the same as one operator with its own backward pass: Triton
on a GPU (add_norm_triton.py), the definition elsewhere.

Letters: B samples, L tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from accel.kernels.operator import register
from accel.kernels.upcast import upcast


def add_norm(
    branch: Float[Tensor, "B L D"],
    gate: Float[Tensor, "B D"],
    residual: Float[Tensor, "B L D"],
    scale: Float[Tensor, "B D"],
    shift: Float[Tensor, "B D"],
    eps: float = 1e-6,
    residual_in_fp32: bool = True,
    *,
    layer_norm: bool = False,
    weight: Float[Tensor, "D"] | None = None,
    bias: Float[Tensor, "D"] | None = None,
    branch_rows: Int[Tensor, "L"] | None = None,
    h_rows: Int[Tensor, "L"] | None = None,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
    """`z = residual + gate·branch; h = norm(z)·(1 + scale) + shift`; returns (h, z).

    z is a new tensor, never `residual` written in place: a recomputing backward pass would then see the sum twice.
    z is fp32, or the dtype of `branch` with `residual_in_fp32=False`; statistics are taken in fp32 from z as it is
    stored; h has the dtype of `branch`. norm is RMSNorm, or LayerNorm with `layer_norm`, then `weight` and `bias`.
    Adaptive norm: Peebles & Xie 2023, https://arxiv.org/abs/2212.09748.

    A branch in another order of tokens costs nothing: token l of the stream takes row `branch_rows[l]` of `branch`, and
    row `h_rows[l]` of h is its normed value. Both are permutations.
    """
    h, z, _, _ = forward_reference(
        branch, gate, residual, scale, shift, weight, bias, branch_rows, h_rows, eps, layer_norm, residual_in_fp32
    )
    return h, z


def forward_reference(
    branch: Tensor,
    gate: Tensor,
    residual: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    branch_rows: Tensor | None,
    h_rows: Tensor | None,
    eps: float,
    layer_norm: bool,
    residual_in_fp32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, z, 1/σ (B, L), and the mean (B, L; empty for RMSNorm)."""
    arriving = branch if branch_rows is None else branch.index_select(1, branch_rows)
    z = torch.addcmul(upcast(residual), upcast(gate).unsqueeze(1), upcast(arriving))
    if not residual_in_fp32:
        z = z.to(branch.dtype)
    x = upcast(z)
    mean = x.new_empty(0)
    if layer_norm:
        mean = x.mean(-1)
        x = x - mean.unsqueeze(-1)
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    x = x * rstd.unsqueeze(-1)
    if weight is not None:
        x = x * upcast(weight)
    if bias is not None:
        x = x + upcast(bias)
    h = torch.addcmul(upcast(shift).unsqueeze(1), x, 1.0 + upcast(scale).unsqueeze(1)).to(branch.dtype)
    return h if h_rows is None else torch.empty_like(h).index_copy(1, h_rows.long(), h), z, rstd, mean


def backward_reference(
    dh: Tensor,
    dz: Tensor | None,
    z: Tensor,
    branch: Tensor,
    gate: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    branch_rows: Tensor | None,
    h_rows: Tensor | None,
    rstd: Tensor,
    mean: Tensor,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of branch and residual, and three sums over tokens (B, 3, D): d·branch, dh·normed, dh."""
    dh = upcast(dh if h_rows is None else dh.index_select(1, h_rows))
    arriving = branch if branch_rows is None else branch.index_select(1, branch_rows)
    slope = (1.0 + upcast(scale)) * (1.0 if weight is None else upcast(weight))
    x = upcast(z) - mean.unsqueeze(-1) if mean.numel() else upcast(z)
    normed = x * rstd.unsqueeze(-1)
    w = dh * slope.unsqueeze(1)
    d = w - normed * (normed * w).mean(-1, keepdim=True)
    if mean.numel():
        d = d - w.mean(-1, keepdim=True)
    d = d * rstd.unsqueeze(-1)
    if dz is not None:
        d = d + upcast(dz)
    dbranch = (d * upcast(gate).unsqueeze(1)).to(branch.dtype)
    if branch_rows is not None:
        dbranch = torch.empty_like(dbranch).index_copy(1, branch_rows.long(), dbranch)
    sums = torch.stack([(d * upcast(arriving)).sum(1), (dh * normed).sum(1), dh.sum(1)], dim=1)
    return dbranch, d.to(residual_dtype, copy=True), sums


def forward_fake(
    branch: Tensor,
    gate: Tensor,
    residual: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    branch_rows: Tensor | None,
    h_rows: Tensor | None,
    eps: float,
    layer_norm: bool,
    residual_in_fp32: bool,
) -> tuple[Tensor, ...]:
    statistics = torch.promote_types(branch.dtype, torch.float32)
    z = residual.new_empty(residual.shape, dtype=statistics if residual_in_fp32 else branch.dtype)
    rstd = branch.new_empty(branch.shape[:2], dtype=statistics)
    return torch.empty_like(branch), z, rstd, rstd.new_empty(branch.shape[:2] if layer_norm else (0,))


def backward_fake(dh: Tensor, dz: Any, z: Tensor, branch: Tensor, gate: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rstd, _, residual_dtype = rest[-3:]
    sums = rstd.new_empty(branch.shape[0], 3, branch.shape[2])
    return torch.empty_like(branch), z.new_empty(z.shape, dtype=residual_dtype), sums


register(
    "add_norm(Tensor branch, Tensor gate, Tensor residual, Tensor scale, Tensor shift, Tensor? weight, Tensor? bias, "
    "Tensor? branch_rows, Tensor? h_rows, float eps, bool layer_norm, bool residual_in_fp32) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    forward_reference,
    forward_fake,
    "add_norm_triton.launch_forward",
)
register(
    "add_norm_backward(Tensor dh, Tensor? dz, Tensor z, Tensor branch, Tensor gate, Tensor scale, Tensor? weight, "
    "Tensor? branch_rows, Tensor? h_rows, Tensor rstd, Tensor mean, ScalarType residual_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    backward_reference,
    backward_fake,
    "add_norm_triton.launch_backward",
)


class FusedAddNorm(torch.autograd.Function):
    """The operators as one differentiable function. No autocast rule: that would cast the fp32 residual too."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        branch, gate, _, scale, _, weight, bias, branch_rows, h_rows, *_ = arguments
        h, z, rstd, mean = torch.ops.fastlatent.add_norm(*arguments)
        ctx.save_for_backward(z, branch, gate, scale, weight, bias, branch_rows, h_rows, rstd, mean)
        ctx.dtypes = [None if t is None else t.dtype for t in arguments[:7]]
        ctx.set_materialize_grads(False)
        return h, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dh, dz = grads
        z, branch, gate, scale, weight, bias, branch_rows, h_rows, rstd, mean = ctx.saved_tensors
        dh = torch.zeros_like(branch) if dh is None else dh.contiguous()
        dz = None if dz is None else dz.contiguous()
        dbranch, dresidual, sums = torch.ops.fastlatent.add_norm_backward(
            dh, dz, z, branch, gate, scale, weight, branch_rows, h_rows, rstd, mean, ctx.dtypes[2]
        )
        dgate, dslope, dshift = sums.unbind(1)
        dscale = dslope if weight is None else dslope * upcast(weight)
        dscale = dscale if bias is None else dscale + dshift * upcast(bias)
        slope = 1.0 + upcast(scale)
        dweight = None if weight is None else (dslope * slope).sum(0)
        dbias = None if bias is None else (dshift * slope).sum(0)
        found = (dbranch, dgate, dresidual, dscale, dshift, dweight, dbias)
        cast = (None if g is None else g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True))
        return (*cast, *[None] * 5)


def fused_add_norm(
    branch: Float[Tensor, "B L D"],
    gate: Float[Tensor, "B D"],
    residual: Float[Tensor, "B L D"],
    scale: Float[Tensor, "B D"],
    shift: Float[Tensor, "B D"],
    eps: float = 1e-6,
    residual_in_fp32: bool = True,
    *,
    layer_norm: bool = False,
    weight: Float[Tensor, "D"] | None = None,
    bias: Float[Tensor, "D"] | None = None,
    branch_rows: Int[Tensor, "L"] | None = None,
    h_rows: Int[Tensor, "L"] | None = None,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
    """`add_norm` as one operator. Branch and residual that are not contiguous are copied; D is at most 8,192."""
    assert branch.shape == residual.shape, "branch and residual have one shape"
    assert branch.shape[2] <= 8192, "a row of the stream is at most 8,192 channels wide"
    vectors = [t if t.stride(-1) == 1 else t.contiguous() for t in (gate, scale, shift)]
    return FusedAddNorm.apply(
        branch.contiguous(),
        vectors[0],
        residual.contiguous(),
        *vectors[1:],
        weight,
        bias,
        branch_rows,
        h_rows.clone() if h_rows is not None and h_rows is branch_rows else h_rows,  # Dynamo refuses one tensor twice
        eps,
        layer_norm,
        residual_in_fp32,
    )
