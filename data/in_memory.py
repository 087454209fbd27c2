"""The loader of everything that fits into the device's memory: a batch is one gather, on the device.

Letters: N samples of the set, B samples of a batch, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from accel.kernels.counter_noise import Purpose, counter_normal, counter_uniform
from data.loader import Batch, LatentSpec
from data.order import EpochOrder


class Int8Latents:
    """Latents in 8 bits, with one scale a sample and channel: half the memory of 16 bits.

    `latents[ids]` gives them back in fp32. Rounding moves a value by at most half of 1/127 of the largest one of its
    channel in its sample.
    """

    def __init__(self, values: Int8[Tensor, "N C H W"], scale: Float[Tensor, "N C 1 1"]) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def of(cls, latents: Float[Tensor, "N C H W"]) -> Int8Latents:
        scale = latents.float().abs().amax((2, 3), keepdim=True).clamp(min=1e-30) / 127.0
        return cls((latents.float() / scale).round().to(torch.int8), scale)

    def __getitem__(self, ids: Any) -> Float[Tensor, "B C H W"]:
        return self.values[ids].float() * self.scale[ids]

    def __setitem__(self, ids: Any, latents: Int8Latents) -> None:
        self.values[ids], self.scale[ids] = latents.values, latents.scale

    def to(self, device: torch.device) -> Int8Latents:
        return Int8Latents(self.values.to(device), self.scale.to(device))


@dataclass
class LatentTensors:
    """One split of a latent set, raw. `mirrored` holds the latents of the flipped images, `std` the posterior's."""

    latents: Float[Tensor, "N C H W"] | Int8Latents
    labels: Int[Tensor, "N"]
    std: Float[Tensor, "N C H W"] | Int8Latents | None = None
    mirrored: Float[Tensor, "N C H W"] | Int8Latents | None = None
    mirrored_std: Float[Tensor, "N C H W"] | Int8Latents | None = None

    def to(self, device: torch.device) -> LatentTensors:
        return LatentTensors(*(None if t is None else t.to(device) for t in vars(self).values()))  # pyright: ignore[reportArgumentType]

    def floating(self) -> Float[Tensor, "N C H W"]:
        """The latents of what `rows` gave."""
        assert isinstance(self.latents, Tensor)
        return self.latents

    def rows(self, ids: Tensor) -> LatentTensors:
        """Some samples, as floating-point tensors."""
        return LatentTensors(*(None if t is None else t[ids] for t in vars(self).values()))  # pyright: ignore[reportArgumentType]


def sampled(rows: LatentTensors, seed: int, position: Int[Tensor, "B"]) -> Float[Tensor, "B C H W"]:
    """Raw latents of one batch, mirrored and sampled from their posterior where the set provides for it.

    Both are drawn from (seed, position), so they do not depend on who draws them or when.
    """
    raw, std = rows.floating(), rows.std
    if rows.mirrored is not None:
        flip = counter_uniform(seed, Purpose.MIRROR, position).view(-1, 1, 1, 1) < 0.5
        raw = torch.where(flip, rows.mirrored, raw)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if std is not None and rows.mirrored_std is not None:
            std = torch.where(flip, rows.mirrored_std, std)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if isinstance(std, Tensor):
        noise = counter_normal(seed, Purpose.POSTERIOR, position, raw.shape[1:])
        raw = raw.float() + std.float() * noise
    return raw


class InMemoryLatents:
    """A `LatentLoader` over tensors that lie on `device`.

    `batch_size` is this rank's share of one micro-batch: rank r takes positions r·batch_size … of each stretch of
    world_size·batch_size. `ids` are what a batch calls its samples: their numbers, unless others stand in for them.
    """

    def __init__(
        self,
        spec: LatentSpec,
        train: LatentTensors,
        held_out: LatentTensors,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        ids: Int[Tensor, "N"] | None = None,
    ) -> None:
        self.spec, self.seed, self.device = spec, seed, device
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.train, self.held_out_split = train.to(device), held_out.to(device)
        self.known_as = None if ids is None else ids.to(device)
        self.normalise = spec.normaliser(device)
        self.order = EpochOrder(len(train.labels), seed, device)
        self.samples_seen = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = self.samples_seen + self.rank * self.batch_size
        self.samples_seen += self.world_size * self.batch_size
        ids = self.order.ids(start, self.batch_size)
        position = torch.arange(start, start + self.batch_size, device=self.device)
        rows = self.train.rows(ids)
        named = ids if self.known_as is None else self.known_as[ids]
        return Batch(self.normalise(sampled(rows, self.seed, position)), rows.labels, named, position)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        split = self.held_out_split
        if not len(split.labels):  # an empty tensor would split into one empty batch
            return
        for ids in torch.arange(len(split.labels), device=self.device).split(batch_size):
            yield Batch(self.normalise(split.latents[ids]), split.labels[ids], ids, ids)

    def state_dict(self) -> dict[str, int]:
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples_seen = state["samples_seen"]
