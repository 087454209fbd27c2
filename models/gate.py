"""The product of a gated unit, which keeps its two factors only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class SiluProduct(torch.autograd.Function):
    """`silu(gate)·value`; autograd itself would keep silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * value, gate), grads[0] * F.silu(gate)


def silu_product(gate: Tensor, value: Tensor) -> Tensor:
    """`silu(gate)·value`, of equal shapes (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    A compiler decides itself what to keep; PyTorch 2.11 would not recompute the function under checkpointing.
    """
    return F.silu(gate) * value if torch.compiler.is_compiling() else SiluProduct.apply(gate, value)
