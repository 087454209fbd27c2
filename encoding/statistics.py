"""Mean and std per channel of a latent set, summed shard by shard in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ChannelSums:
    """Sums values and squares per channel in fp64, as training sees them (the posterior's variance
    included)."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Adds a batch of the tensors that a block holds."""
        for name, std_name in (("latents", "std"), ("mirrored", "mirrored_std")):
            if name in tensors:
                values = tensors[name].double()
                self.count += values.numel() // values.shape[1]
                self.total = self.total + values.sum((0, 2, 3))
                self.squares = self.squares + values.square().sum((0, 2, 3))
                if std_name in tensors:
                    self.squares = self.squares + tensors[std_name].double().square().sum((0, 2, 3))

    def as_dict(self) -> dict[str, Any]:
        total, squares = (
            v.tolist() if isinstance(v, Tensor) else [] for v in (self.total, self.squares)
        )
        return {"count": self.count, "total": total, "squares": squares}


def channel_statistics(sums: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Mean and std per channel over all that was added to several `ChannelSums`, each given as its
    dict."""
    sums = [s for s in sums if s["count"]]
    count = sum(s["count"] for s in sums)
    mean = torch.tensor([s["total"] for s in sums], dtype=torch.float64).sum(0) / count
    square = torch.tensor([s["squares"] for s in sums], dtype=torch.float64).sum(0) / count
    return mean.tolist(), (square - mean.square()).clamp(min=1e-12).sqrt().tolist()
