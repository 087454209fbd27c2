"""add + gate + RMSNorm + modulate: what stands between two branches of a residual stream.

Shapes: B samples, L tokens, D width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from accel.kernels.upcast import upcast


def add_norm(
    branch: Float[Tensor, "B L D"],
    gate: Float[Tensor, "B D"],
    residual: Float[Tensor, "B L D"],
    scale: Float[Tensor, "B D"],
    shift: Float[Tensor, "B D"],
    eps: float = 1e-6,
    residual_in_fp32: bool = True,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"]]:
    """`z = residual + gate·branch; h = rms_norm(z)·(1 + scale) + shift`; returns (h, z).

    z is a new tensor, never `residual` written in place: a recomputing backward pass would then see the sum twice.
    z is fp32, or the dtype of `branch` with `residual_in_fp32=False`; statistics are taken in fp32 from z as it is
    stored; h has the dtype of `branch`. Adaptive norm: Peebles & Xie 2023, https://arxiv.org/abs/2212.09748.
    """
    z = torch.addcmul(upcast(residual), upcast(gate).unsqueeze(1), upcast(branch))
    if not residual_in_fp32:
        z = z.to(branch.dtype)
    z32 = upcast(z)
    normed = z32 * torch.rsqrt(z32.square().mean(-1, keepdim=True) + eps)
    h = torch.addcmul(upcast(shift).unsqueeze(1), normed, 1.0 + upcast(scale).unsqueeze(1))
    return h.to(branch.dtype), z
