"""The sets that need no download and no encoder.

`DigitLatents`, the default, has scikit-learn's handwritten digits: 1,797 real 8×8 images of 10
classes, which come with that package (Alpaydin & Kaynak 1998,
https://archive.ics.uci.edu/dataset/80). `SyntheticLatents` is noise of any size, for timing and for
tests of shapes; a model learns nothing from it.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch

from accel.kernels.counter_noise import Purpose, counter_normal
from common.errors import UserError
from data.loader import LatentSpec, LatentTensors, LoaderArgs, Size
from data.resident import InMemoryLatents

PIXELS = {"_target_": "models.autoencoders.PixelAutoencoder"}
HELD_OUT = 180


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
        known = pixels[order[HELD_OUT:]]
        splits = []
        for part in (order[HELD_OUT:], order[:HELD_OUT]):
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
            encoder=PIXELS,
            fingerprint="sklearn-digits"
            + (f"-{''.join(map(str, kept))}" if len(kept) < 10 else ""),
        )
        super().__init__(spec, *splits, **args)


class SyntheticLatents(InMemoryLatents):
    """`count` standard normal latents (bf16) and a tenth more to hold out; labels 0, 1, …,
    num_classes - 1, 0, …"""

    @classmethod
    def foresee(cls, memory: float, count: int = 1024, **settings: Any) -> tuple[LatentSpec, float]:
        """See `LatentLoader`; all of them lie on the device."""
        one = cls(count=1, **settings, batch_size=1, seed=0, device=torch.device("cpu"))
        spec = one.spec
        return spec, 2.2 * count * spec.channels * spec.height * spec.width

    def __init__(
        self,
        *,
        channels: Size = 4,
        height: Size = 32,
        width: Size = 32,
        num_classes: Size = 1000,
        count: Size = 1024,
        **args: Unpack[LoaderArgs],
    ) -> None:
        # The draw of a sample is a function of its number, at any count.
        total = count + max(1, count // 10)
        position = torch.arange(total, device=args["device"])
        shape = (channels, height, width)
        draws = [
            counter_normal(args["seed"], Purpose.SYNTHETIC, some, shape).bfloat16()
            for some in position.split(256)
        ]
        latents = torch.cat(draws)
        labels = position % num_classes
        spec = LatentSpec(
            channels=channels,
            height=height,
            width=width,
            num_classes=num_classes,
            count=count,
            class_names=[str(label) for label in range(num_classes)],
            mean=[0.0] * channels,
            std=[1.0] * channels,
            encoder=PIXELS,
            fingerprint=f"synthetic-{channels}x{height}x{width}-{num_classes}-{count}-{args['seed']}",
        )
        super().__init__(
            spec,
            LatentTensors(latents[:count], labels[:count]),
            LatentTensors(latents[count:], labels[count:]),
            **args,
        )
