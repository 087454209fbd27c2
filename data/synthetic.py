"""Noise of any size, for timing and for tests of shapes. A model learns nothing from it."""

from __future__ import annotations

from typing import Any

import torch

from accel.kernels.counter_noise import Purpose, counter_normal
from data.loader import InMemoryLatents, LatentSpec, LatentTensors, LoaderArgs, refuse_below


class SyntheticLatents(InMemoryLatents):
    """`count` standard normal latents (bf16) and a tenth more to hold out; labels 0, 1, …,
    num_classes - 1, 0, …"""

    def __init__(
        self,
        *,
        channels: int = 4,
        height: int = 32,
        width: int = 32,
        num_classes: int = 1000,
        count: int = 1024,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        sizes: dict[str, Any] = {
            "channels": channels,
            "height": height,
            "width": width,
            "num_classes": num_classes,
            "count": count,
        }
        refuse_below(1, **sizes)

        # The draw of a sample is a function of its number, at any count.
        total = count + max(1, count // 10)
        position = torch.arange(total, device=device)
        shape = (channels, height, width)
        draws = [
            counter_normal(seed, Purpose.SYNTHETIC, some, shape).bfloat16()
            for some in position.split(256)
        ]
        latents = torch.cat(draws)
        labels = position % num_classes
        spec = LatentSpec(
            **sizes,  # pyright: ignore[reportArgumentType]
            class_names=[str(label) for label in range(num_classes)],
            mean=[0.0] * channels,
            std=[1.0] * channels,
            encoder={"_target_": "models.autoencoders.PixelAutoencoder"},
            fingerprint=f"synthetic-{channels}x{height}x{width}-{num_classes}-{count}-{seed}",
        )
        super().__init__(
            spec,
            LatentTensors(latents[:count], labels[:count]),
            LatentTensors(latents[count:], labels[count:]),
            LoaderArgs(batch_size, seed, device, rank, world_size),
        )
