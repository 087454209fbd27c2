"""scikit-learn's handwritten digits: 1,797 real 8×8 images of 10 classes, shipped with the package.

Alpaydin & Kaynak 1998, https://archive.ics.uci.edu/dataset/80. The default data set: no download, no encoder.
"""

from __future__ import annotations

import torch

from data.loader import InMemoryLatents, LatentSpec, LatentTensors, LoaderArgs

HELD_OUT = 180


class DigitLatents(InMemoryLatents):
    """Pixels in [-1, 1] as latents of shape (1, 8, 8); the held-out split has 180 of the 1,797 images."""

    def __init__(self, *, batch_size: int, seed: int, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        from sklearn.datasets import load_digits

        values, targets = load_digits(return_X_y=True)  # 0 … 16
        pixels = torch.from_numpy(values).float().view(-1, 1, 8, 8) / 8.0 - 1.0
        labels = torch.from_numpy(targets).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same split for every seed
        held_out, train = order[:HELD_OUT], order[HELD_OUT:]
        spec = LatentSpec(
            channels=1,
            height=8,
            width=8,
            num_classes=10,
            count=len(train),
            class_names=[str(digit) for digit in range(10)],
            mean=[float(pixels[train].mean())],
            std=[float(pixels[train].std())],
            encoder={"_target_": "models.autoencoders.PixelAutoencoder"},
            fingerprint="sklearn-digits",
        )
        super().__init__(
            spec,
            LatentTensors(pixels[train], labels[train]),
            LatentTensors(pixels[held_out], labels[held_out]),
            LoaderArgs(batch_size, seed, device, rank, world_size),
        )
