"""Scikit-learn's handwritten digits, the default data: no download and no encoder.

1,797 real 8×8 images of 10 classes come with that package (Alpaydin & Kaynak 1998,
https://archive.ics.uci.edu/dataset/80).
"""

from __future__ import annotations

from typing import Unpack

import torch

from common.errors import UserError
from data.loader import LatentSpec, LatentTensors, LoaderArgs
from data.resident import InMemoryLatents

PIXEL_ENCODER = {"_target_": "models.autoencoders.PixelAutoencoder"}
HELD_OUT_IMAGES = 180


class DigitLatents(InMemoryLatents):
    """Pixels in [-1, 1] as latents of shape (1, 8, 8); the held-out split has 180 of the 1,797
    images.

    `classes` are the digits to keep, null all; they are normalised as all of them together.
    """

    def __init__(self, *, classes: list[int] | None = None, **args: Unpack[LoaderArgs]) -> None:
        kept = list(range(10)) if classes is None else sorted(classes)
        if not kept or kept != sorted({*kept} & {*range(10)}):
            raise UserError(
                f"data.classes={classes} must be digits from 0 to 9, each once, such as "
                "[0,1,2,3,4]."
            )
        from sklearn.datasets import load_digits

        values, targets = load_digits(return_X_y=True)  # 0 … 16
        pixels = torch.from_numpy(values).float().view(-1, 1, 8, 8) / 8.0 - 1.0
        digits = torch.from_numpy(targets).long()

        device = args["device"]

        # The split is the same for every seed, and mean and std for any choice of classes.
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        known = pixels[order[HELD_OUT_IMAGES:]]
        splits = []
        for part in (order[HELD_OUT_IMAGES:], order[:HELD_OUT_IMAGES]):
            ids = part[torch.isin(digits[part], torch.tensor(kept))]
            labels = torch.searchsorted(torch.tensor(kept), digits[ids])
            splits.append(LatentTensors(pixels[ids].to(device), labels.to(device)))
        spec = LatentSpec(
            channels=1,
            height=8,
            width=8,
            num_classes=len(kept),
            count=len(splits[0].labels),
            class_names=[str(digit) for digit in kept],
            mean=[float(known.mean())],
            std=[float(known.std())],
            encoder=PIXEL_ENCODER,
            fingerprint="sklearn-digits"
            + (f"-{''.join(map(str, kept))}" if len(kept) < 10 else ""),
        )
        super().__init__(spec, *splits, **args)
