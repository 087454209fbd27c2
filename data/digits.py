"""The loader of scikit-learn's handwritten digits, which is the default data set, because it needs
no download and no encoder.

scikit-learn contains 1,797 real 8×8 images of 10 classes (Alpaydin & Kaynak 1998,
https://archive.ics.uci.edu/dataset/80).
"""

from __future__ import annotations

from typing import Unpack

import torch

from common.errors import UserError
from data.loader import LatentTensors, LoaderArgs
from data.order import draw_permutation
from data.resident import InMemoryLatents
from data.spec import LatentSpec

PIXEL_ENCODER = {"_target_": "models.autoencoders.PixelAutoencoder"}
HELD_OUT_IMAGES = 180


class DigitLatents(InMemoryLatents):
    """Loads the digits' pixels, scaled to [-1, 1], as latents of shape (1, 8, 8). The held-out
    split has 180 of the 1,797 images.

    `classes` lists the digits to keep, e.g. [0,1]; null keeps all ten. Mean and std are computed
    over all ten digits, so the normalisation does not depend on `classes`.
    """

    def __init__(self, *, classes: list[int] | None = None, **args: Unpack[LoaderArgs]) -> None:
        kept_classes = list(range(10)) if classes is None else sorted(classes)
        if not kept_classes or kept_classes != sorted({*kept_classes} & {*range(10)}):
            raise UserError(
                f"data.classes={classes} must be digits from 0 to 9, each once, such as "
                "[0,1,2,3,4]."
            )
        from sklearn.datasets import load_digits

        # Scale the pixels, whose values are 0 … 16, to [-1, 1].
        values, targets = load_digits(return_X_y=True)
        pixels = torch.from_numpy(values).float().view(-1, 1, 8, 8) / 8.0 - 1.0
        digits = torch.from_numpy(targets).long()

        # Split the images with a fixed seed, and take mean and std over all classes, so that runs
        # with different seeds or `classes` are comparable.
        device = args["device"]
        order = draw_permutation(len(digits), 0)
        train_pixels = pixels[order[HELD_OUT_IMAGES:]]
        splits = []
        for part in (order[HELD_OUT_IMAGES:], order[:HELD_OUT_IMAGES]):
            ids = part[torch.isin(digits[part], torch.tensor(kept_classes))]
            labels = torch.searchsorted(torch.tensor(kept_classes), digits[ids])
            splits.append(LatentTensors(pixels[ids].to(device), labels.to(device)))

        suffix = f"-{''.join(map(str, kept_classes))}" if len(kept_classes) < 10 else ""
        spec = LatentSpec(
            channels=1,
            height=8,
            width=8,
            num_classes=len(kept_classes),
            count=len(splits[0].labels),
            class_names=[str(digit) for digit in kept_classes],
            mean=[float(train_pixels.mean())],
            std=[float(train_pixels.std())],
            encoder=PIXEL_ENCODER,
            fingerprint=f"sklearn-digits{suffix}",
        )
        super().__init__(spec, **args)
        self.hold(*splits)
