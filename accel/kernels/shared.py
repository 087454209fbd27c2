"""What all operators share: arithmetic in at least fp32, and what they refuse."""

import torch
from torch import Tensor

from common.errors import UserError


def refuse_empty(operator: str, *inputs: Tensor) -> None:
    """ValueError if one of them has no sample, token or channel."""
    for t in inputs:
        if t.numel() == 0:
            raise UserError(
                f"{operator} got a tensor of shape {tuple(t.shape)}; give it at least one sample, "
                "token and channel."
            )


def refuse_second_order() -> None:
    """Raises a RuntimeError in a backward pass that is to be differentiated itself; each of ours
    begins with this call.

    `create_graph=True` runs backward passes with gradients on. The result of ours would count as a
    constant, and a sum with other terms would get a wrong gradient without a word. A compiled
    backward pass does not come through here:
    PyTorch refuses to differentiate it. Gradients are always on while Dynamo traces, so that does
    not count.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "The fused operators have no second derivative, and create_graph=True asks for one; "
            "set the keys runtime.fused_… of kernels to false for it."
        )


def upcast(tensor: Tensor) -> Tensor:
    """`tensor` in fp32 if it is narrower, else as it is (so that fp64 inputs give an fp64
    reference)."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
