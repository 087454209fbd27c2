"""The interface of data loaders: the class of a batch, and the base class of all loaders.

Letters: N samples of the set, B samples of a batch, M captions of a sample, C channels, H W latent
height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from accel.kernels.counter_noise.draws import Purpose, counter_normal, counter_uniform
from common.condition import Condition, EncodedText
from common.errors import UserError
from data.caption_table import CaptionTable
from data.spec import LatentSpec


class Batch(NamedTuple):
    """A batch of samples, with normalised latents; all tensors are on the device."""

    latents: Float[Tensor, "B C H W"]
    condition: Condition
    ids: Int[Tensor, "B"]
    """Number of each sample within its split of the latent set, from 0."""
    position: Int[Tensor, "B"]
    """For each sample, the number of samples that the run has seen before it. This position seeds
    the sample's noise, time t, mirroring and posterior draw."""


class LoaderArgs(TypedDict):
    """Arguments of a loader that come from the run, not from its configuration."""

    batch_size: int
    """Number of samples that this rank has in one micro-batch."""
    seed: int
    device: torch.device
    rank: NotRequired[int]
    world_size: NotRequired[int]
    text: NotRequired[str]
    """Says what batches carry of their captions: "none" (the default), "pooled" for one vector
    each, or "tokens" for the vectors of the tokens too."""


class LatentLoader:
    """Base of all loaders: an endless iterator over one rank's part of each global batch.

    The order is a pure function of (seed, samples seen): the n-th training sample is the same at
    any batch size, any world size and after any resume. Each epoch has every sample once; a batch
    may span two epochs. A subclass adds `batch_at` and `held_out`.
    """

    held_out_count: int = 0
    """Number of held-out samples; 0 = unknown: the progress bar of an evaluation then shows no time
    left."""
    wait_for_batch_seconds: float = 1800.0
    """Seconds that the loader waits for a batch; if the batch takes longer, the loader raises an
    error."""

    def __init__(self, spec: LatentSpec, **args: Unpack[LoaderArgs]) -> None:
        self.spec = spec
        self.skipped: dict[str, int] = {}
        """Place of a damaged block that was skipped -> number of its samples, which samples of
        another block replace."""
        self.batch_size = args["batch_size"]
        self.seed = args["seed"]
        self.device = args["device"]
        self.rank = args.get("rank", 0)
        self.world_size = args.get("world_size", 1)
        self.text = args.get("text", "none") if spec.text else "none"
        self.captions: CaptionTable | None = None
        """The captions; a subclass that can read captions sets them unless `text` is "none"."""
        self.statistics = spec.make_channel_statistics(self.device)
        self.samples_seen = 0

    @classmethod
    def foresee(cls, memory: float, **settings: Any) -> tuple[LatentSpec, float] | None:
        """Returns, without building the loader, the spec of the latent set that the loader's
        `settings` describe, and the bytes that the set's latents take on a device with `memory`
        bytes. Returns None if the loader must be built to know both."""
        return None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch_at(self.samples_seen + self.rank * self.batch_size)
        self.samples_seen += self.world_size * self.batch_size
        return batch

    def batch_at(self, start: int) -> Batch:
        """Returns this rank's part of a global batch: the samples at the `batch_size` positions
        from `start` on. A subclass may take other positions of the same global batch, if those of
        the ranks do not overlap."""
        raise NotImplementedError

    def normalise(self, raw: Any) -> Float[Tensor, "B C H W"]:
        """Computes (raw - mean) / std in fp32, by the statistics of the set's channels."""
        mean, std = self.statistics
        return (raw.float() - mean) / std

    def make_batch(
        self, rows: LatentTensors, position: Int[Tensor, "B"], text: EncodedText | None = None
    ) -> Batch:
        """Makes a training batch from raw samples: mirrors some, draws latents from the encoder's
        posterior (both seeded by the sample's position in the run), then normalises the latents. If
        the run uses text and `text` is None, chooses a caption for each sample."""
        latents = self.normalise(draw_samples(rows, self.seed, position))
        if text is None and self.captions is not None and rows.captions is not None:
            epoch = position // self.spec.count
            numbers = choose_captions(rows.captions, rows.ids, self.seed, epoch)
            text = self.captions.columns.select(numbers)
        return Batch(latents, Condition(rows.labels, text), rows.ids, position)

    def make_plain_batch(self, rows: LatentTensors, start: int) -> Batch:
        """Makes a held-out batch from raw samples, at the positions from `start` on: normalises the
        latents, without mirroring or posterior draw, and takes each sample's first caption."""
        position = torch.arange(start, start + len(rows.labels), device=self.device)
        text = None
        if self.captions is not None and rows.captions is not None:
            text = self.captions.columns.select(rows.captions[:, 0].long())
        condition = Condition(rows.labels, text)
        return Batch(self.normalise(rows.latents), condition, rows.ids, position)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        """Yields the held-out split once, in batches of `batch_size`, in a fixed order, without
        augmentation; the last batch may be smaller."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, int]:
        """Returns the loader's state, a few integers. After `load_state_dict` of this state the
        loader continues with the next sample."""
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, value in state.items():
            if type(value) is not int or not 0 <= value < 2**53:
                raise UserError(f"the state of the loader has {name}={value}, which is no count.")
        self.samples_seen = state["samples_seen"]


class Int8Latents:
    """Latents in 8 bits with one scale per sample and channel: half the memory of 16 bits.

    Indexing, `latents[ids]`, returns fp32; assigning, `latents[ids] = …`, rounds to 8 bits. The
    rounding error is at most 1/254 of the largest absolute value in the same sample and channel.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.values = torch.empty(shape, dtype=torch.int8, device=device)
        self.scale = torch.empty((*shape[:2], 1, 1), device=device)

    def __getitem__(self, ids: Any) -> Float[Tensor, "B C H W"]:
        return self.values[ids].float() * self.scale[ids]

    def __setitem__(self, ids: Any, latents: Float[Tensor, "B C H W"]) -> None:
        scale = latents.float().abs().amax((2, 3), keepdim=True).clamp(min=1e-30) / 127.0
        self.values[ids] = (latents.float() / scale).round().to(torch.int8)
        self.scale[ids] = scale


Latents = Float[Tensor, "N C H W"] | Int8Latents


@dataclass
class LatentTensors:
    """Raw samples of a latent set, not normalised. `mirrored` is the latents of the mirrored
    images; `std` and `mirrored_std` are the standard deviations of the encoder's posterior;
    `captions` are the numbers of each sample's captions, from 0, filled up with -1. These four are
    None if the set does not have them."""

    latents: Latents
    labels: Int[Tensor, "N"]
    ids: Int[Tensor, "N"] = None  # pyright: ignore[reportAssignmentType]
    """Number of each sample within its split; 0, 1, 2 … by default."""
    std: Latents | None = None
    mirrored: Latents | None = None
    mirrored_std: Latents | None = None
    captions: Int[Tensor, "N M"] | None = None

    def __post_init__(self) -> None:
        if self.ids is None:
            self.ids = torch.arange(len(self.labels), device=self.labels.device)

    def as_floating(self) -> Float[Tensor, "N C H W"]:
        """Returns the latents as a tensor; the set must not be stored as `Int8Latents`."""
        assert isinstance(self.latents, Tensor)
        return self.latents

    def gather(self, ids: Tensor | slice) -> LatentTensors:
        """Returns the samples at the indices `ids`, with latents as floating-point tensors."""
        columns: Any = [None if tensor is None else tensor[ids] for tensor in vars(self).values()]
        return LatentTensors(*columns)


def draw_samples(
    rows: LatentTensors, seed: int, position: Int[Tensor, "B"]
) -> Float[Tensor, "B C H W"]:
    """Returns raw latents of the samples `rows`, one per sample. If the set has `mirrored`, takes
    the mirrored image for a random half of the samples; if the set has `std`, draws each latent
    from the encoder's posterior.

    Both random choices are functions of (seed, position), so they are the same on any rank and
    worker and after any restart.
    """
    raw: Any = rows.latents
    std: Any = rows.std
    mirrored: Any = (rows.mirrored, rows.mirrored_std)
    if mirrored[0] is not None:
        flip = counter_uniform(seed, Purpose.MIRROR, position).view(-1, 1, 1, 1) < 0.5
        raw = torch.where(flip, mirrored[0], raw)
        std = None if std is None else torch.where(flip, mirrored[1], std)
    if std is None:
        return raw
    noise = counter_normal(seed, Purpose.POSTERIOR, position, raw.shape[1:])
    return raw.float() + std.float() * noise


def choose_captions(
    captions: Int[Tensor, "B M"], ids: Int[Tensor, "B"], seed: int, epoch: Int[Tensor, "B"] | int
) -> Int[Tensor, "B"]:
    """Returns the number of one of its `captions` for each sample, -1 for a sample without any.
    `ids` are the samples' numbers.

    A sample with k captions begins with a random one, a function of (seed, sample), and takes the
    next one in each epoch: so in k epochs each of its captions comes once.
    """
    count = (captions >= 0).sum(1).clamp(min=1)
    first = counter_uniform(seed, Purpose.CAPTION, ids).squeeze(1) * count
    place = (first.long() + epoch) % count
    return captions.gather(1, place.unsqueeze(1)).squeeze(1).long()
