"""The product of a gated unit, `silu(gate)·value` (Shazeer 2020, https://arxiv.org/abs/2002.05202).

`silu_product` is the definition in PyTorch. `fused_swiglu` computes the same for the two halves of
one projection, as one operator whose backward pass writes one gradient for both halves: Triton on a
GPU (kernels_triton.py), PyTorch elsewhere.

Letters: B samples, L tokens, H hidden channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from accel.kernels.registry import keep_inputs, make_differentiable, refuse_empty, register, upcast
from common.errors import UserError


class SiluProduct(torch.autograd.Function):
    """Computes `silu(gate)·value`, and saves only gate and value for the backward pass, not
    silu(gate) as plain operations do."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * value, gate), grads[0] * F.silu(gate)


def silu_product(
    gate: Float[Tensor, "B L H"], value: Float[Tensor, "B L H"]
) -> Float[Tensor, "B L H"]:
    """Computes `silu(gate)·value`, and saves only gate and value for the backward pass.

    Compiled code uses plain operations instead of `SiluProduct`: the compiler itself chooses what
    to save, and in compiled code PyTorch 2.11 does not recompute an autograd function under
    checkpointing.
    """
    return F.silu(gate) * value if torch.compiler.is_compiling() else SiluProduct.apply(gate, value)


def compute_forward(joined: Tensor) -> Tensor:
    """Computes `silu_product` of the two halves of `joined` (B, L, 2·H) in fp32; returns (B, L, H)
    in the dtype of `joined`."""
    gate, value = (upcast(t) for t in joined.chunk(2, dim=-1))
    return (F.silu(gate) * value).to(joined.dtype)


def compute_backward(dh: Tensor, joined: Tensor) -> Tensor:
    """Returns the gradient of `joined`: the gradients of gate and value side by side, (B, L,
    2·H)."""
    gate, value = (upcast(t) for t in joined.chunk(2, dim=-1))
    dgate = torch.ops.aten.silu_backward(upcast(dh) * value, gate)
    return torch.cat((dgate, upcast(dh) * F.silu(gate)), dim=-1).to(joined.dtype)


operator = register(
    "swiglu(Tensor joined) -> Tensor",
    compute_forward,
    "accel.kernels.swiglu.kernels_triton.launch_forward",
)
backward_operator = register(
    "swiglu_backward(Tensor dh, Tensor joined) -> Tensor",
    compute_backward,
    "accel.kernels.swiglu.kernels_triton.launch_backward",
)


differentiable_swiglu = make_differentiable(
    keep_inputs(operator), lambda dh, joined: [backward_operator(dh.contiguous(), joined)]
)


def fused_swiglu(joined: Tensor) -> Tensor:
    """Computes `silu_product` of the first half (gate) and the second half (value) of the channels,
    as one operator. Raises UserError for an empty tensor, or an odd number of channels."""
    refuse_empty("swiglu", joined)
    if joined.shape[-1] % 2:
        raise UserError(
            f"swiglu got {joined.shape[-1]} channels; gate and value need the same number each."
        )
    return differentiable_swiglu(joined.contiguous())
