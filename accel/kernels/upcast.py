"""Arithmetic in at least fp32."""

import torch
from torch import Tensor


def upcast(tensor: Tensor) -> Tensor:
    """`tensor` in fp32 if it is narrower, else as it is (so that fp64 inputs give an fp64
    reference)."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
