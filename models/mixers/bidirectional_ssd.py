"""The main mixer: local mixing, then Mamba-2's state-space scan in both directions, gated.

Letters: B samples, L tokens, D width, K heads, P head dim, N state size, E = K·P inner width.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from accel.kernels.local_mix.operator import count_local_mix_flops, fused_local_mix, local_mix
from accel.kernels.ssd.definition import (
    MAX_QUADRATIC_TOKENS,
    bidirectional_ssd,
    count_bidirectional_ssd_flops,
)
from accel.kernels.ssd.mixed import fused_mixed_ssd, mixed_ssd
from accel.kernels.ssd.operator import fused_bidirectional_ssd
from models.layers import Layer, Ranges, count_heads, cut_rows, refuse_below_one
from models.shape import Grid


def init_steps(dt_bias: Tensor) -> None:
    """Fills `dt_bias` with random values whose softplus, the initial step size, is log-uniform in
    [0.001, 0.1], as in Mamba-1 and Mamba-2."""
    dt = dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
    # `dt` holds step sizes. Set the bias to the inverse of softplus, so that softplus(bias) = dt.
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


class BidirectionalSSD(Layer):
    """Gated bidirectional SSD: `out_proj(headwise_norm(silu(z)·ssd(local_mix(x, B, C))))`, where
    `in_proj` computes z, x, B and C, and the raw step sizes of the scan, from the tokens.

    `expand` is E / D (2 in the Mamba recipe, 1 if a SwiGLU follows). The convolution starts as the
    identity, because a random start cost a published model 30 FID points (DiG,
    https://arxiv.org/abs/2405.18428). Initial step sizes are log-uniform in [0.001, 0.1], and -A is
    uniform in [1, 16], as in Mamba-2.

    If `columns`, layers with an odd number `layer` visit the tokens column by column, and all
    others row by row: so each token is near its neighbours in both directions of the grid in one of
    two layers. `order` then permutes the tokens (models/block.py), and the layer works on the
    transposed grid.
    """

    taps = (3, 3)
    """Numbers of rows and of columns of the convolution's kernel."""

    def __init__(
        self,
        dim: int,
        head_dim: int,
        grid: Grid,
        expand: int = 2,
        state_dim: int = 64,
        eps: float = 1e-6,
        *,
        columns: bool = False,
        layer: int = 0,
    ) -> None:
        super().__init__()
        refuse_below_one({"mixer.expand": expand, "mixer.state_dim": state_dim})
        self.inner = expand * dim
        self.heads = count_heads(self.inner, head_dim, name="expand·dim")
        self.head_dim = head_dim
        self.state_dim = state_dim
        self.by_columns = columns and layer % 2 == 1
        if self.by_columns:
            # Models are built on the meta device, and the order needs values.
            raster = torch.arange(grid[0] * grid[1], device="cpu").view(grid)
            self.order = raster.T.flatten()
        self.eps = eps
        self.fused_scan = False
        self.fused_conv = False
        # Number of channels that the convolution mixes: x, and the scan's B and C of both
        # directions.
        self.mixed = self.inner + 4 * state_dim
        self.in_proj = nn.Linear(dim, self.inner + self.mixed + 2 * self.heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.mixed, 1, *self.taps))
        self.conv_bias = nn.Parameter(torch.empty(self.mixed))
        self.A_log = nn.Parameter(torch.empty(2, self.heads))
        self.dt_bias = nn.Parameter(torch.empty(2, self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm_weight = nn.Parameter(torch.empty(self.heads, head_dim))
        self.out_proj = nn.Linear(self.inner, dim, bias=False)

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.dirac_(self.conv_weight, groups=self.mixed)
        nn.init.zeros_(self.conv_bias)
        with torch.no_grad():
            self.A_log.uniform_(1.0, 16.0).log_()
            init_steps(self.dt_bias)
        nn.init.ones_(self.D)
        nn.init.ones_(self.norm_weight)

    def orient(self, grid: Grid) -> Grid:
        """Returns the grid on which the tokens lie in this layer's order."""
        return (grid[1], grid[0]) if self.by_columns else grid

    def forward(self, h: Float[Tensor, "B L D"], grid: Grid) -> Float[Tensor, "B L D"]:
        projected = self.in_proj(h)
        mix_inputs = (projected, self.conv_weight, self.conv_bias, self.orient(grid))
        scan_inputs = (self.dt_bias, self.A_log, self.D, self.norm_weight, self.eps)
        if self.fused_scan and self.fused_conv and h.shape[1] <= MAX_QUADRATIC_TOKENS:
            y = fused_mixed_ssd(*mix_inputs, *scan_inputs)
        else:
            mix = fused_local_mix if self.fused_conv else local_mix
            scan = fused_bidirectional_ssd if self.fused_scan else bidirectional_ssd
            y = mixed_ssd(*mix_inputs, *scan_inputs, mix, scan)
        return self.out_proj(y.flatten(2))

    def list_matrices(self) -> dict[Tensor, Ranges]:
        """Returns the matrices; those of `in_proj` compute z, x, and B and C of both directions.
        The rows that compute dt, one number for each head, are no matrix."""
        ranges = cut_rows(self.inner, self.inner, *4 * (self.state_dim,))
        return super().list_matrices() | {self.in_proj.weight: ranges}

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of one forward pass of one sample of `tokens` tokens."""
        return (
            super().flops(tokens)
            + count_bidirectional_ssd_flops(tokens, self.heads, self.head_dim, self.state_dim)
            + count_local_mix_flops(tokens, self.mixed, math.prod(self.taps))
        )
