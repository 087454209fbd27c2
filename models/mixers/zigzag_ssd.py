"""The bidirectional scan along a zigzag path, which changes from layer to layer (ZigMa, Hu et al.
2024, https://arxiv.org/abs/2403.13802).

Letters: L tokens, D width.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from models.mixers.bidirectional_ssd import BidirectionalSSD
from models.shape import Grid

PATHS = 4
"""Number of paths. The paper has eight paths; four suffice here, because a scan in both directions
covers a path and its reverse."""


def make_zigzag_path(grid: Grid, layer: int) -> Int[Tensor, "L"]:
    """Returns the path of a layer: element i is the index of the i-th token on it.

    Layer l takes path l mod 4. Even layers scan row by row, odd layers column by column. Paths 0
    and 1 begin at the first token of the first row or column, paths 2 and 3 at its last token. Each
    row or column runs in the direction opposite to the one before, so neighbours on the path are
    neighbours on the grid.
    """
    path = torch.arange(grid[0] * grid[1], device="cpu").view(grid)
    path = path.T if layer % 2 else path
    path = path.flip(1) if layer // 2 % 2 else path
    path = path.clone()
    path[1::2] = path[1::2].flip(1)
    return path.flatten()


class ZigzagSSD(BidirectionalSSD):
    """`BidirectionalSSD` that visits the tokens along zigzag path number `layer` modulo 4, and
    mixes neighbours on the path by a 1-D convolution, which has fewer parameters than the 2-D one.

    `order[i]` is the index of the i-th token on the path. This layer permutes nothing: the block
    reorders the tokens in the norm before it, and back in the residual sum after it
    (models/block.py).
    """

    taps = (1, 7)

    def __init__(
        self,
        dim: int,
        head_dim: int,
        grid: Grid,
        layer: int,
        expand: int = 2,
        state_dim: int = 64,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, head_dim, grid, expand, state_dim, eps)
        self.order = make_zigzag_path(grid, layer % PATHS)

    def orient(self, grid: Grid) -> Grid:
        return 1, grid[0] * grid[1]
