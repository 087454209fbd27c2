"""The loader of everything that fits into the device's memory: a batch is one gather, on the device.

Letters: N samples of the set, B samples of a batch, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from accel.kernels.counter_noise import Purpose, counter_normal, counter_uniform
from data.loader import Batch, LatentSpec
from data.order import EpochOrder


@dataclass
class LatentTensors:
    """One split of a latent set, raw. `mirrored` holds the latents of the flipped images, `std` the posterior's."""

    latents: Float[Tensor, "N C H W"]
    labels: Int[Tensor, "N"]
    std: Float[Tensor, "N C H W"] | None = None
    mirrored: Float[Tensor, "N C H W"] | None = None
    mirrored_std: Float[Tensor, "N C H W"] | None = None

    def to(self, device: torch.device) -> LatentTensors:
        return LatentTensors(*(None if t is None else t.to(device) for t in vars(self).values()))  # pyright: ignore[reportArgumentType]


class InMemoryLatents:
    """A `LatentLoader` over tensors that lie on `device`.

    `batch_size` is this rank's share of one micro-batch: rank r takes positions r·batch_size … of each stretch of
    world_size·batch_size. Mirroring and posterior noise are drawn from (seed, position).
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
    ) -> None:
        self.spec, self.seed, self.device = spec, seed, device
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.train, self.held_out_split = train.to(device), held_out.to(device)
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
        raw = self.gather(ids, position)
        return Batch(self.normalise(raw), self.train.labels[ids], ids, position)

    def gather(self, ids: Tensor, position: Tensor) -> Float[Tensor, "B C H W"]:
        """Raw latents of one batch, mirrored and sampled from their posterior where the set provides for it."""
        split = self.train
        raw, std = split.latents[ids], None if split.std is None else split.std[ids]
        if split.mirrored is not None:
            flip = counter_uniform(self.seed, Purpose.MIRROR, position).view(-1, 1, 1, 1) < 0.5
            raw = torch.where(flip, split.mirrored[ids], raw)
            if std is not None and split.mirrored_std is not None:
                std = torch.where(flip, split.mirrored_std[ids], std)
        if std is not None:
            noise = counter_normal(self.seed, Purpose.POSTERIOR, position, raw.shape[1:])
            raw = raw.float() + std.float() * noise
        return raw

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
