"""The sizes of a denoiser."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import UserError
from models.layers import refuse_below_one

Grid = tuple[int, int]
"""Numbers of rows and of columns of tokens."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a denoiser for latents of `height` × `width`; each name is that of a configuration
    key of the model (models/denoiser.py). UserError for a size that no model can have."""

    height: int
    width: int
    dim: int
    head_dim: int
    depth: int
    patch_size: int
    mlp_ratio: float
    drop_path: float
    attention_every: int
    internal_block: int

    def __post_init__(self) -> None:
        sizes = ("dim", "head_dim", "depth", "patch_size")
        refuse_below_one({key: vars(self)[key] for key in sizes})
        if self.height % self.patch_size or self.width % self.patch_size:
            raise UserError(
                f"model.patch_size={self.patch_size} does not divide the latent size "
                f"{self.height}×{self.width}; choose a common divisor of both."
            )
        if self.mlp_ratio < 0.0:
            raise UserError(f"model.mlp_ratio={self.mlp_ratio} must be at least 0.")
        if not 0.0 <= self.drop_path < 1.0:
            raise UserError(f"model.drop_path={self.drop_path} must be at least 0 and below 1.")
        for key in ("attention_every", "internal_block"):
            if not 0 <= vars(self)[key] <= self.depth:
                raise UserError(
                    f"model.{key}={vars(self)[key]} must be at least 0 and at most "
                    f"model.depth={self.depth}; 0: none."
                )

    @property
    def grid(self) -> Grid:
        return self.height // self.patch_size, self.width // self.patch_size

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def modulations(self) -> int:
        """Number of vectors that modulate a block: scale, shift and gate of the mixer, and of the
        MLP if there is one."""
        return 6 if self.hidden else 3

    @property
    def hidden(self) -> int:
        """Hidden width of the MLPs, a multiple of 32; 0 for none."""
        return 32 * round(self.mlp_ratio * self.dim / 32)
