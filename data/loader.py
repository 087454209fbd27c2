"""What a loader is. Letters: B samples, C channels, H W latent height and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Batch(NamedTuple):
    """Samples on the device, normalised."""

    latents: Float[Tensor, "B C H W"]
    labels: Int[Tensor, "B"]
    ids: Int[Tensor, "B"]
    """Index of each sample in its latent set."""
    position: Int[Tensor, "B"]
    """Stream position: samples seen before the batch plus the index in the global batch. Seeds all randomness."""


@dataclass(frozen=True)
class LatentSpec:
    """All that a model, a sampler and a checkpoint need to know of a latent set."""

    channels: int
    height: int
    width: int
    num_classes: int
    count: int
    """Training samples; held-out ones are not counted."""
    class_names: list[str]
    mean: list[float]
    """Per channel: what was subtracted from raw latents."""
    std: list[float]
    """Per channel: what raw latents were divided by, after the mean was subtracted."""
    encoder: dict[str, Any] = field(default_factory=dict)
    """`_target_` and arguments of the autoencoder that decodes the latents."""
    encoder_sha256: str | None = None
    """Hash of the autoencoder's weights; decoding with others is refused."""
    fingerprint: str = ""
    """Identifies the data set, so that a run is not resumed on another one."""

    def normaliser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """The function raw -> (raw - mean) / std in fp32; its constants lie on `device`, so a call copies nothing."""
        mean, std = self.channel_statistics(device)
        return lambda raw: (raw.float() - mean) / std

    def denormalise(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Raw latents, as an autoencoder decodes them."""
        mean, std = self.channel_statistics(latents.device)
        return latents.float() * std + mean

    def channel_statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and std as fp32 tensors of shape (C, 1, 1)."""
        mean, std = (torch.tensor(v, dtype=torch.float32, device=device).view(-1, 1, 1) for v in (self.mean, self.std))
        return mean, std

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class LatentLoader(Protocol):
    """Endless batches of one rank's share of the stream.

    The order is a pure function of (seed, epoch, samples seen): the n-th sample of the stream is the same one at any
    batch size, world size and after any resume. Batches run across the ends of epochs; every sample comes once in each.
    """

    spec: LatentSpec

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        """The held-out split, once, in a fixed order and without augmentation; the last batch may be smaller."""
        ...

    def state_dict(self) -> dict[str, int]:
        """A few integers from which `load_state_dict` continues exactly."""
        ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...
