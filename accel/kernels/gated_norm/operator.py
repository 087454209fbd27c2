"""Gate and norm after the scan: `rms_norm(y·silu(z))·weight`, with a separate norm for each head.

`gated_norm` is the definition in PyTorch. `fused_gated_norm` computes it as one operator whose
backward pass keeps only y and z: Triton on a GPU (kernels_triton.py), PyTorch elsewhere.

Letters: B samples, L tokens, K heads, P head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from accel.kernels.registry import (
    keep_inputs,
    make_differentiable,
    pack_heads,
    refuse_empty,
    register,
    upcast,
)


def gated_norm(
    y: Float[Tensor, "B L K P"],
    z: Float[Tensor, "B L K P"],
    weight: Float[Tensor, "K P"],
    eps: float = 1e-6,
) -> Float[Tensor, "B L K P"]:
    """Returns `rms_norm(y·silu(z))·weight` in the dtype of y, computed in fp32; the RMSNorm (Zhang
    & Sennrich 2019) is over the P channels of each head."""
    gated = upcast(y) * F.silu(upcast(z))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (normed * upcast(weight)).to(y.dtype)


def compute_backward(
    dh: Tensor, y: Tensor, z: Tensor, weight: Tensor, eps: float, dz: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of y (in the dtype of y) and weight (at least fp32); writes the
    gradient of z to `dz`, which may be a slice of a larger tensor."""
    wide = upcast(y)
    gate = upcast(z)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    gated = wide * silu
    rstd = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    normed = gated * rstd
    dh = upcast(dh)
    dnormed = dh * upcast(weight)
    dgated = rstd * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    dz.copy_(dgated * wide * sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    return (dgated * silu).to(y.dtype), (dh * normed).sum((0, 1))


operator = register(
    "gated_norm(Tensor y, Tensor z, Tensor weight, float eps) -> Tensor",
    gated_norm,
    "accel.kernels.gated_norm.kernels_triton.launch_forward",
)
backward_operator = register(
    "gated_norm_backward(Tensor dh, Tensor y, Tensor z, Tensor weight, float eps, Tensor(a!) dz) "
    "-> (Tensor, Tensor)",
    compute_backward,
    "accel.kernels.gated_norm.kernels_triton.launch_backward",
)


def compute_gradients(dh: Tensor, y: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Returns the gradients of y, z and weight."""
    dz = z.new_empty(z.shape)
    dy, dweight = backward_operator(dh.contiguous(), y, z, *rest, dz)
    return dy, dz, dweight


differentiable_norm = make_differentiable(keep_inputs(operator), compute_gradients)


def fused_gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Computes `gated_norm` as one operator. If z is a slice of a projection, the kernel reads it
    in place; y is copied if it is not contiguous."""
    refuse_empty("gated_norm", y)
    return differentiable_norm(y.contiguous(), pack_heads(z), weight.contiguous(), eps)
