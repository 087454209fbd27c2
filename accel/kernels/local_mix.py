"""Local mixing: a depthwise 3×3 convolution over the token grid, then SiLU.

Shapes: B samples, L = rows · columns tokens in raster order, D width.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def local_mix(
    x: Float[Tensor, "B L D"], weight: Float[Tensor, "D 1 3 3"], bias: Float[Tensor, "D"], grid: tuple[int, int]
) -> Float[Tensor, "B L D"]:
    """`silu(depthwise_conv(x))` with zero padding; each token sees its eight neighbours on the grid."""
    rows, columns = grid
    image = x.transpose(1, 2).unflatten(2, (rows, columns))
    mixed = F.conv2d(image, weight.to(x.dtype), bias.to(x.dtype), padding=1, groups=x.shape[2])
    return F.silu(mixed).flatten(2).transpose(1, 2)


def local_mix_flops(tokens: int, channels: int) -> int:
    """FLOPs of one forward pass of one sample: nine multiply-adds an element."""
    return 2 * 9 * tokens * channels
