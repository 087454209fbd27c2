"""Loader of random noise of any shape, for timing and for tests; a model can learn nothing from the
noise."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from accel.kernels.counter_noise.draws import Purpose, counter_normal
from data.caption_table import make_blank_table
from data.digits import PIXEL_ENCODER
from data.loader import LatentTensors, LoaderArgs
from data.resident import InMemoryLatents
from data.spec import LatentSpec, Size


class SyntheticLatents(InMemoryLatents):
    """Draws `count` standard normal latents in bf16 for training, and a tenth of `count` more as
    the held-out split. The labels are 0, 1, …, num_classes - 1, 0, 1, …"""

    @classmethod
    def foresee(cls, memory: float, count: int = 1024, **settings: Any) -> tuple[LatentSpec, float]:
        """Returns the spec, and the bytes of the latents on the device (see
        `LatentLoader.foresee`): 2 bytes a value in bf16, and a tenth more for the held-out
        split."""
        sample = cls(count=1, **settings, batch_size=1, seed=0, device=torch.device("cpu"))
        spec = sample.spec
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
        # Draw each sample as a function of the seed and the sample's number, so that a sample does
        # not depend on `count`.
        total = count + max(1, count // 10)
        position = torch.arange(total, device=args["device"])
        shape = (channels, height, width)
        draws = [
            counter_normal(args["seed"], Purpose.SYNTHETIC, part, shape).bfloat16()
            for part in position.split(256)
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
            encoder=PIXEL_ENCODER,
            fingerprint=f"synthetic-{channels}x{height}x{width}-{num_classes}-{count}-{args['seed']}",
        )
        super().__init__(spec, **args)
        self.hold(
            LatentTensors(latents[:count], labels[:count]),
            LatentTensors(latents[count:], labels[count:]),
        )


def imitate_set(spec: LatentSpec, count: int, **args: Unpack[LoaderArgs]) -> SyntheticLatents:
    """Makes a loader of `count` random latents with the shapes of the set `spec`, and with texts of
    zeros if batches carry texts."""
    loader = SyntheticLatents(
        channels=spec.channels,
        height=spec.height,
        width=spec.width,
        num_classes=max(1, spec.num_classes),
        count=count,
        **args,
    )
    loader.spec = spec
    loader.captions = make_blank_table(spec.text, args.get("text", "none"), loader.device)
    if loader.captions is not None:
        for split in (loader.whole.train, loader.whole.held_out):
            split.captions = torch.zeros_like(split.labels, dtype=torch.int32).unsqueeze(1)
    return loader
