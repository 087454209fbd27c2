"""The mixer of Mamba-1 (Gu & Dao 2023, https://arxiv.org/abs/2312.00752), which scans in one
direction in each layer, as in ZigMa (Hu et al. 2024, https://arxiv.org/abs/2403.13802).

Letters: B samples, L tokens, D width, E inner width, N state size, R rank of the steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from accel.kernels.local_mix.operator import with_contiguous_strides
from accel.kernels.selective_scan.operator import fused_selective_scan, selective_scan
from accel.kernels.swiglu.operator import silu_product
from models.layers import Layer, Ranges, cut_rows, refuse_below_one
from models.mixers.bidirectional_ssd import init_steps
from models.mixers.zigzag_ssd import make_zigzag_path
from models.shape import Grid

TAPS = 4
"""Number of taps of the convolution: a token and its three predecessors on the path."""


class SelectiveScan(Layer):
    """Gated selective scan along a zigzag path: `out_proj(silu(z)·scan(silu(conv(x))))`, where
    `in_proj` computes z and x from the tokens.

    The eight paths are the four of models/mixers/zigzag_ssd.py and their reverses, each path
    followed by its reverse in the next layer, so that a token sees its predecessors on the path in
    one layer and its successors in the next. `order[i]` is the index of the i-th token on the path;
    the block reorders the tokens by it (models/block.py).

    Linear layers compute step sizes, B and C from the convolved x; the step sizes go through a
    bottleneck of R = D / 16 channels. `expand` is E / D. Initially -A is 1 … N in each channel,
    step sizes are log-uniform in [0.001, 0.1], and the convolution is the identity, as in all
    mixers here. This mixer has no heads: it accepts `head_dim`, as every mixer must, and ignores
    it.
    """

    def __init__(
        self, dim: int, head_dim: int, grid: Grid, layer: int, expand: int = 2, state_dim: int = 16
    ) -> None:
        super().__init__()
        refuse_below_one({"mixer.expand": expand, "mixer.state_dim": state_dim})
        path = make_zigzag_path(grid, layer // 2)
        self.order = path.flip(0) if layer % 2 else path
        self.inner = expand * dim
        self.state_dim = state_dim
        self.rank = -(-dim // 16)
        self.fused_scan = False
        self.in_proj = nn.Linear(dim, 2 * self.inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.inner, 1, 1, TAPS))
        self.conv_bias = nn.Parameter(torch.empty(self.inner))
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * state_dim, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.inner))
        self.A_log = nn.Parameter(torch.empty(self.inner, state_dim))
        self.D = nn.Parameter(torch.empty(self.inner))
        self.out_proj = nn.Linear(self.inner, dim, bias=False)

    def init_weights(self) -> None:
        super().init_weights()
        bound = self.rank**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        nn.init.zeros_(self.conv_weight)
        nn.init.zeros_(self.conv_bias)
        nn.init.ones_(self.D)
        with torch.no_grad():
            self.conv_weight[..., -1] = 1.0
            nn.init.ones_(self.A_log).cumsum_(1).log_()
            init_steps(self.dt_bias)

    def forward(self, h: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        x, z = self.in_proj(h).chunk(2, dim=-1)
        weight = with_contiguous_strides(self.conv_weight).to(x.dtype)
        past = F.pad(x.mT.unsqueeze(2), (TAPS - 1, 0))
        mixed = F.conv2d(past, weight, self.conv_bias.to(x.dtype), groups=self.inner)
        x = F.silu(mixed).squeeze(2).mT

        dt, B_in, C_out = self.x_proj(x).split((self.rank, *2 * (self.state_dim,)), dim=-1)
        scan = fused_selective_scan if self.fused_scan else selective_scan
        y = scan(x, self.dt_proj(dt), self.dt_bias, self.A_log, B_in, C_out, self.D)
        return self.out_proj(silu_product(z, y))

    def list_matrices(self) -> dict[Tensor, Ranges]:
        """Returns the matrices; those of `x_proj` compute B and C. AdamW updates the bottleneck
        through which the step sizes go."""
        matrices = super().list_matrices()
        matrices[self.in_proj.weight] = cut_rows(self.inner, self.inner)
        matrices[self.x_proj.weight] = cut_rows(self.state_dim, self.state_dim, start=self.rank)
        matrices.pop(self.dt_proj.weight, None)
        return matrices

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of one forward pass of one sample of `tokens` tokens: linear layers;
        per token and channel one multiply-add for each tap of the convolution, and three for each
        of the N elements of the state: two update the element, one reads it."""
        multiply_adds = tokens * self.inner * (TAPS + 3 * self.state_dim)
        return super().flops(tokens) + 2 * multiply_adds
