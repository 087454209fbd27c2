"""The scan along a zigzag path, another one in each layer (ZigMa, Hu et al. 2024,
https://arxiv.org/abs/2403.13802).

Letters: L tokens, D width.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from models.mixers.bidirectional_ssd import BidirectionalSSD

PATHS = 4
"""A path and its reverse are one to a scan in both directions, so the eight of the paper are four
here."""


def make_zigzag_path(grid: tuple[int, int], layer: int) -> Int[Tensor, "L"]:
    """Token at each step of the path of `layer`: by rows and by columns in turn, first from the one
    and then from the other end of its first row, each row of the path running against the one
    before, so that neighbours on the path are neighbours on the grid."""
    path = torch.arange(grid[0] * grid[1], device="cpu").view(grid)
    path = path.T if layer % 2 else path
    path = path.flip(1) if layer // 2 % 2 else path
    path = path.clone()
    path[1::2] = path[1::2].flip(1)
    return path.flatten()


class ZigzagSSD(BidirectionalSSD):
    """`BidirectionalSSD` over tokens in the order of path number `layer` modulo 4, mixing locally
    along the path.

    `order` tells the block which token comes at each step; the norm before it and the sum after it
    apply the order, so nothing is gathered here (models/block.py). No parameters more than the
    plain scan has; fewer, with 1-D taps.
    """

    taps = (1, 7)

    def __init__(
        self,
        dim: int,
        head_dim: int,
        grid: tuple[int, int],
        layer: int,
        expand: int = 2,
        state_dim: int = 64,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, head_dim, (1, grid[0] * grid[1]), expand, state_dim, eps)
        self.order = make_zigzag_path(grid, layer % PATHS)
