"""Embeddings of time and class. Letters: B samples, D width, F frequencies."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class TimestepEmbedding(nn.Module):
    """Sinusoids of scale·t through a two-layer MLP (Nichol & Dhariwal 2021), in fp32 up to the
    MLP."""

    def __init__(self, dim: int, frequencies: int = 128, scale: float = 1000.0) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.scale = scale
        self.fc1 = nn.Linear(2 * frequencies, dim)
        self.fc2 = nn.Linear(dim, dim)

    def init_weights(self) -> None:
        for layer in (self.fc1, self.fc2):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B D"]:
        exponents = (
            torch.arange(self.frequencies, device=t.device, dtype=torch.float32) / self.frequencies
        )
        angles = self.scale * t.float().unsqueeze(1) * torch.exp(-math.log(10_000.0) * exponents)
        return self.fc2(F.silu(self.fc1(torch.cat((angles.cos(), angles.sin()), dim=1))))


class LabelEmbedding(nn.Module):
    """One vector a class, and one for the null label `num_classes` that classifier-free guidance
    needs."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, dim)

    def init_weights(self) -> None:
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, y: Int[Tensor, "B"]) -> Float[Tensor, "B D"]:
        return self.table(y)


def sincos_positions(grid: tuple[int, int], dim: int) -> Float[Tensor, "1 L D"]:
    """Fixed 2-D sinusoids: half of the channels follow the row, half the column."""
    quarter = -(-dim // 4)
    frequencies = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = torch.meshgrid(
        *(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij"
    )
    angles = [axis.reshape(-1, 1) * frequencies for axis in (rows, columns)]
    return (
        torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)[:, :dim]
        .float()
        .unsqueeze(0)
    )
