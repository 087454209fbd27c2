"""Adds a gated branch to the residual stream, norms the sum, and scales and shifts the normed sum:
the operation between two layers of a model.

`add_norm` is the definition in PyTorch. `fused_add_norm` computes it as one operator with its own
backward pass: Triton on a GPU (kernels_triton.py), PyTorch elsewhere.

Letters: B samples, L tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from accel.kernels.registry import make_differentiable, refuse_empty, register, upcast
from common.errors import UserError

MAX_CHANNELS = 8192
"""Largest number of channels D: the kernels hold all channels of a token in one tile."""


def add_norm(
    branch: Float[Tensor, "B L D"],
    gate: Float[Tensor, "B D"],
    residual: Float[Tensor, "B L D"],
    scale: Float[Tensor, "B D"],
    shift: Float[Tensor, "B D"],
    eps: float = 1e-6,
    residual_in_fp32: bool = True,
    *,
    branch_rows: Int[Tensor, "L"] | None = None,
    h_rows: Int[Tensor, "L"] | None = None,
    centred: bool = False,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
    """Computes `z = residual + gate·branch; h = norm(z)·(1 + scale) + shift`, and returns (h, z).

    z is a new tensor: if it overwrote `residual`, a backward pass that recomputes the block would
    add the branch twice. z is fp32, or has the dtype of `branch` if `residual_in_fp32` is False;
    the norm's statistics are computed from the stored z, in fp32; h has the dtype of `branch`. norm
    is RMSNorm (Zhang & Sennrich 2019) without a weight: instead, `scale` and `shift` are computed
    from time and label. Adaptive norm: Peebles & Xie 2023, https://arxiv.org/abs/2212.09748.

    `branch_rows` and `h_rows` are permutations for layers that take the tokens in another order:
    token l of the stream adds row `branch_rows[l]` of `branch`, and its normed value becomes row
    `h_rows[l]` of h. The kernels reorder while they load and store, at no cost.

    If `centred`, norm is LayerNorm (Ba et al. 2016): RMSNorm of z minus z's mean over channels.
    """
    rows = (branch_rows, h_rows)
    return compute_forward(
        branch, gate, residual, scale, shift, *rows, eps, residual_in_fp32, centred
    )[:2]


def compute_forward(
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
    """Returns h and z as `add_norm` does, and for the backward pass 1/rms(z) of each token, or
    1/std(z) if `centred`, (B, L)."""
    stream_branch = branch if branch_rows is None else branch.index_select(1, branch_rows)
    z = torch.addcmul(upcast(residual), upcast(gate).unsqueeze(1), upcast(stream_branch))
    if not residual_in_fp32:
        z = z.to(branch.dtype)

    x = upcast(z)
    if centred:
        x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    x = x * rstd.unsqueeze(-1)
    h = torch.addcmul(upcast(shift).unsqueeze(1), x, 1.0 + upcast(scale).unsqueeze(1)).to(
        branch.dtype
    )
    return h if h_rows is None else torch.empty_like(h).index_copy(1, h_rows.long(), h), z, rstd


def compute_backward(
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
    """Returns the gradient of branch, the gradient of residual, and the gradients of gate, scale
    and shift stacked in one tensor (B, 3, D). The gradient of gate is the sum over tokens of
    d·branch, that of scale the sum of dh·normed, and that of shift the sum of dh. Here dh is the
    gradient of h, d the whole gradient of z, and `normed` is norm(z)."""
    dh = upcast(dh if h_rows is None else dh.index_select(1, h_rows))
    stream_branch = branch if branch_rows is None else branch.index_select(1, branch_rows)
    x = upcast(z)
    w = dh * (1.0 + upcast(scale)).unsqueeze(1)
    if centred:
        x = x - x.mean(-1, keepdim=True)
        w = w - w.mean(-1, keepdim=True)

    normed = x * rstd.unsqueeze(-1)
    d = (w - normed * (normed * w).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if dz is not None:
        d = d + upcast(dz)
    dbranch = (d * upcast(gate).unsqueeze(1)).to(branch.dtype)
    if branch_rows is not None:
        dbranch = torch.empty_like(dbranch).index_copy(1, branch_rows.long(), dbranch)
    sums = torch.stack([(d * upcast(stream_branch)).sum(1), (dh * normed).sum(1), dh.sum(1)], dim=1)
    return dbranch, d.to(residual_dtype, copy=True), sums


operator = register(
    "add_norm(Tensor branch, Tensor gate, Tensor residual, Tensor scale, Tensor shift, Tensor? "
    "branch_rows, Tensor? h_rows, float eps, bool residual_in_fp32, bool centred) -> (Tensor, "
    "Tensor, Tensor)",
    compute_forward,
    "accel.kernels.add_norm.kernels_triton.launch_forward",
)
backward_operator = register(
    "add_norm_backward(Tensor dh, Tensor? dz, Tensor z, Tensor branch, Tensor gate, Tensor "
    "scale, Tensor? branch_rows, Tensor? h_rows, Tensor rstd, ScalarType residual_dtype, bool "
    "centred) -> (Tensor, Tensor, Tensor)",
    compute_backward,
    "accel.kernels.add_norm.kernels_triton.launch_backward",
)


def compute(*inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
    """Returns (h, z), and a tuple of the values to save for the backward pass: all arguments of
    `backward_operator` after dh and dz, in the order of its schema."""
    branch, gate, residual, scale, _, *rows, _, _, centred = inputs
    h, z, rstd = operator(*inputs)
    return (h, z), (z, branch, gate, scale, *rows, rstd, residual.dtype, centred)


def compute_gradients(
    dh: Tensor | None, dz: Tensor | None, z: Tensor, branch: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Returns the gradients of branch, gate, residual, scale and shift."""
    dh = torch.zeros_like(branch) if dh is None else dh.contiguous()
    dz = None if dz is None else dz.contiguous()
    dbranch, dresidual, sums = backward_operator(dh, dz, z, branch, *rest)
    dgate, dscale, dshift = sums.unbind(1)
    return dbranch, dgate, dresidual, dscale, dshift


differentiable_add_norm = make_differentiable(compute, compute_gradients, zeros=False)


def fused_add_norm(
    branch: Tensor,
    gate: Tensor,
    residual: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    residual_in_fp32: bool = True,
    *,
    branch_rows: Tensor | None = None,
    h_rows: Tensor | None = None,
    centred: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes `add_norm` as one operator; copies `branch` or `residual` if it is not contiguous.
    Raises UserError if the tensors are empty, if `branch` and `residual` differ in shape, or if
    they have more than 8,192 channels."""
    refuse_empty("add_norm", branch)
    if branch.shape != residual.shape:
        raise UserError(
            f"branch {tuple(branch.shape)} and residual {tuple(residual.shape)} must have one "
            "shape."
        )
    if branch.shape[2] > MAX_CHANNELS:
        raise UserError(
            f"runtime.fused_add_norm=true takes a stream of at most {MAX_CHANNELS} channels, and "
            f"got {branch.shape[2]}; choose a smaller model.dim, or runtime.fused_add_norm=false."
        )
    vectors = [t if t.stride(-1) == 1 else t.contiguous() for t in (gate, scale, shift)]

    # torch.compile (Dynamo) refuses to pass one tensor as two inputs of an operator, so copy it.
    if h_rows is not None and h_rows is branch_rows:
        h_rows = h_rows.clone()
    return differentiable_add_norm(
        branch.contiguous(),
        vectors[0],
        residual.contiguous(),
        *vectors[1:],
        branch_rows,
        h_rows,
        eps,
        residual_in_fp32,
        centred,
    )
