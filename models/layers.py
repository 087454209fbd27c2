"""Parts that all models share: the base class of layers, embeddings of time and class, and the
initialisation of linear layers.

Letters: B samples, D width, F frequencies, L tokens.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from common.errors import UserError


def count_heads(width: int, head_dim: int, name: str) -> int:
    """Returns the number of heads of size `head_dim` in `width` channels. Raises UserError if
    `head_dim` does not divide `width`; `name` is what the message calls the width."""
    if width % head_dim:
        raise UserError(
            f"model.head_dim={head_dim} does not divide {name}={width}; choose a divisor of "
            f"{width}."
        )
    return width // head_dim


def refuse_below_one(sizes: dict[str, int]) -> None:
    """Raises a UserError if one of `sizes` is below 1; `sizes` maps configuration keys, without
    their prefix `model.`, to values."""
    for key, value in sizes.items():
        if value < 1:
            raise UserError(f"model.{key}={value} must be at least 1.")


def init_linear(layer: nn.Linear) -> None:
    """Initialises a layer with Xavier's uniform weights (Glorot & Bengio 2010) and zero bias."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def init_narrow(layer: nn.Linear) -> None:
    """Initialises a layer with normal weights of std 0.02 and zero bias."""
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)


Ranges = tuple[tuple[int, int], ...]
"""Ranges of a matrix's rows: for each range the index of its first row, and the index after its
last row."""


def cut_rows(*sizes: int, start: int = 0) -> Ranges:
    """Returns adjacent ranges of `sizes` rows each; the first range begins at row `start`."""
    return tuple(pairwise(accumulate(sizes, initial=start)))


class Layer(nn.Module):
    """Base class of mixers and MLPs. Its `init_weights` and `flops` assume that all direct children
    are nn.Linear; a subclass with other parameters or matrix products extends both methods."""

    def init_weights(self) -> None:
        for layer in self.children():
            init_linear(cast("nn.Linear", layer))

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of the linear layers in one forward pass of one sample of `tokens`
        tokens. TypeError for a child that is no linear layer: its class must override this
        method."""
        weights = [cast("nn.Linear", layer).weight for layer in self.children()]
        if any(weight.ndim != 2 for weight in weights):
            raise TypeError(f"{type(self).__name__}.flops must count its layers.")
        return 2 * tokens * sum(weight.numel() for weight in weights)

    def list_matrices(self) -> dict[Tensor, Ranges]:
        """Returns a mapping: weight -> ranges of its rows. The rows of each range are one matrix,
        which the optimizer Muon orthogonalises by itself (training/optim/muon.py). AdamW updates
        the rows in no range, and the parameters that the mapping lacks.

        By default the weight of each linear child is one matrix. A subclass overrides this method
        if one of its linear layers computes several projections in one product.
        """
        return {
            layer.weight: cut_rows(layer.out_features)
            for layer in self.children()
            if isinstance(layer, nn.Linear)
        }


class LowRankEmbedding(Layer):
    """Embeds patches by two linear layers with `rank` channels between them."""

    def __init__(self, patch_values: int, rank: int, dim: int) -> None:
        super().__init__()
        self.down = nn.Linear(patch_values, rank, bias=False)
        self.up = nn.Linear(rank, dim)

    def forward(self, patches: Float[Tensor, "B L E"]) -> Float[Tensor, "B L D"]:
        return self.up(self.down(patches))

    def list_matrices(self) -> dict[Tensor, Ranges]:
        """Returns no matrix: as other embeddings, AdamW updates this one."""
        return {}


def build_patch_embedding(patch_values: int, rank: int, dim: int) -> nn.Linear | LowRankEmbedding:
    """Builds the embedding of patches, of low rank unless `rank` is 0. Raises UserError for a rank
    that saves nothing."""
    if not 0 <= rank < min(patch_values, dim):
        raise UserError(
            f"model.patch_rank={rank} must be 0, or below both model.dim={dim} and the "
            f"{patch_values} values of a patch."
        )
    return LowRankEmbedding(patch_values, rank, dim) if rank else nn.Linear(patch_values, dim)


FREQUENCIES = 128
"""Number of frequencies of the sinusoids that embed the time."""


class TimestepEmbedding(Layer):
    """Embeds the time t by sinusoids of scale·t, computed in fp32, and a two-layer MLP (Nichol &
    Dhariwal 2021)."""

    def __init__(self, dim: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.fc1 = nn.Linear(2 * FREQUENCIES, dim)
        self.fc2 = nn.Linear(dim, dim)

    def init_weights(self) -> None:
        init_narrow(self.fc1)
        init_narrow(self.fc2)

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of one forward pass of one sample, for any number of tokens."""
        return super().flops(1)

    def forward(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B D"]:
        exponents = torch.arange(FREQUENCIES, device=t.device, dtype=torch.float32) / FREQUENCIES
        angles = self.scale * t.float().unsqueeze(1) * torch.exp(-math.log(10_000.0) * exponents)
        return self.fc2(F.silu(self.fc1(torch.cat((angles.cos(), angles.sin()), dim=1))))


class LabelEmbedding(nn.Module):
    """Embeds labels: a trained vector for each class, and one for the null label, `num_classes`,
    which classifier-free guidance needs."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, dim)

    def init_weights(self) -> None:
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, y: Int[Tensor, "B"]) -> Float[Tensor, "B D"]:
        return self.table(y)


class InternalHead(nn.Module):
    """Estimates the velocity from the residual stream between two blocks of a denoiser, as the
    denoiser's last layers do: RMSNorm, scale and shift from the embedding of time and condition,
    and a linear layer to patches of `patch_values` values. It starts at zero.

    The head detaches its inputs, so it does not change what the rest of the denoiser learns.
    """

    def __init__(self, dim: int, patch_values: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.modulation = nn.Linear(dim, 2 * dim)
        self.head = nn.Linear(dim, patch_values)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of one forward pass of one sample of `tokens` tokens."""
        return 2 * (self.modulation.weight.numel() + tokens * self.head.weight.numel())

    def forward(
        self, stream: Float[Tensor, "B L D"], embedded: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B L E"]:
        scale, shift = self.modulation(embedded.detach()).unsqueeze(1).chunk(2, dim=2)
        h = F.rms_norm(stream.detach(), stream.shape[2:], eps=self.eps)
        return self.head(h * (1.0 + scale) + shift)


def axial_angles(grid: tuple[int, int], count: int, base: float) -> list[Tensor]:
    """Returns two tensors of angles, both (L, count) in fp64: the row index of each token times
    `count` frequencies, and its column index times the same frequencies. The frequencies fall from
    1 to nearly 1 / base."""
    frequencies = base ** -(torch.arange(count, dtype=torch.float64) / count)
    sides = [torch.arange(side, dtype=torch.float64) for side in grid]
    return [axis.reshape(-1, 1) * frequencies for axis in torch.meshgrid(*sides, indexing="ij")]


def sincos_positions(grid: tuple[int, int], dim: int) -> Float[Tensor, "1 L D"]:
    """Returns a fixed position embedding of 2-D sinusoids: half of the channels encode a token's
    row, half its column."""
    angles = axial_angles(grid, -(-dim // 4), 10_000.0)
    waves = [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)]
    return torch.cat(waves, dim=1)[:, :dim].float().unsqueeze(0)
