"""A mixer that exchanges information between tokens by a convolution alone: the baseline for the
other mixers.

DiCo (Ai et al. 2025, https://arxiv.org/abs/2505.11196) reports that convolution does most of the
work at 256 tokens.
Letters: B samples, L tokens, D width, E inner width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from accel.kernels.local_mix.operator import count_local_mix_flops, fused_local_mix, local_mix
from accel.kernels.swiglu.operator import silu_product
from common.errors import UserError
from models.layers import Layer, Ranges, cut_rows
from models.shape import Grid


class Convolution(Layer):
    """Gated depthwise 3 × 3 convolution: `out_proj(silu(z)·local_mix(x))`, where `in_proj` computes
    z and x from the tokens. The convolution is initialised as the identity.

    The inner width E is `expand`·D, rounded to a multiple of 32; with 4/3 the mixer has about as
    many parameters as attention. This mixer has no heads: it accepts `head_dim`, as every mixer
    must, and ignores it.
    """

    def __init__(self, dim: int, head_dim: int, grid: Grid, expand: float = 4 / 3) -> None:
        super().__init__()
        if expand <= 0.0:
            raise UserError(f"model.mixer.expand={expand} must be above 0.")
        self.inner = max(32, 32 * round(expand * dim / 32))
        self.fused_conv = False
        self.in_proj = nn.Linear(dim, 2 * self.inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.inner, 1, 3, 3))
        self.conv_bias = nn.Parameter(torch.empty(self.inner))
        self.out_proj = nn.Linear(self.inner, dim, bias=False)

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.dirac_(self.conv_weight, groups=self.inner)
        nn.init.zeros_(self.conv_bias)

    def forward(self, h: Float[Tensor, "B L D"], grid: Grid) -> Float[Tensor, "B L D"]:
        z, x = self.in_proj(h).chunk(2, dim=-1)
        mix = fused_local_mix if self.fused_conv else local_mix
        return self.out_proj(silu_product(z, mix(x, self.conv_weight, self.conv_bias, grid)))

    def list_matrices(self) -> dict[Tensor, Ranges]:
        return super().list_matrices() | {self.in_proj.weight: cut_rows(self.inner, self.inner)}

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of one forward pass of one sample of `tokens` tokens."""
        return super().flops(tokens) + count_local_mix_flops(tokens, self.inner)
