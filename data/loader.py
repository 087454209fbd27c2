"""The contract of loaders: batches, the facts about a latent set, and the base class of all.

Letters: N samples of the set, B samples of a batch, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict, Unpack

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from accel.kernels.counter_noise import Purpose, counter_normal, counter_uniform
from common.errors import UserError

Size = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(gt=-1e12, lt=1e12, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=1e-12, lt=1e12, allow_inf_nan=False)]
"""Both far inside fp32, so that normalised latents are finite."""


class Batch(NamedTuple):
    """Samples on the device, normalised."""

    latents: Float[Tensor, "B C H W"]
    labels: Int[Tensor, "B"]
    ids: Int[Tensor, "B"]
    """Index of each sample in its latent set."""
    position: Int[Tensor, "B"]
    """Samples that the run saw before this one. It seeds the sample's noise, time, mirroring and
    posterior draw."""


@dataclass(frozen=True)
class LatentSpec:
    """The facts about a latent set that a model, a sampler and a checkpoint need."""

    channels: Size
    height: Size
    width: Size
    num_classes: Count
    """0: the set has no classes, and every label is 0."""
    count: Count
    """Training samples, without the held-out ones."""
    class_names: list[str]
    mean: list[Finite]
    """Per channel; a loader subtracts it from raw latents."""
    std: list[Above0]
    """Per channel; a loader then divides by it."""
    encoder: dict[str, Any] = field(default_factory=dict)
    """`_target_` and arguments of the autoencoder that decodes the latents."""
    encoder_sha256: str | None = None
    """Hash of the autoencoder's weights; sampling refuses to decode with others."""
    fingerprint: str = ""
    """Identifies the data set, so that no run resumes on another one."""
    earlier_fingerprint: str = ""
    """The one that checkpoints of earlier versions have for the same set; "" where it is the
    same."""

    @property
    def labels(self) -> range:
        """The labels to draw samples of: all classes, or without classes 0, which is then the null
        label."""
        return range(max(1, self.num_classes))

    @property
    def names(self) -> list[str]:
        """The name of each class; its number where the set names none."""
        return self.class_names or [str(number) for number in range(self.num_classes)]

    def with_order(self, suffix: str, earlier: str | None = None) -> LatentSpec:
        """The spec of the same set in an order, or with an error, that no other run may resume on;
        `earlier` is what earlier versions called it, if not the same."""
        known = self.earlier_fingerprint and f"{self.earlier_fingerprint}-{earlier or suffix}"
        return replace(self, fingerprint=f"{self.fingerprint}-{suffix}", earlier_fingerprint=known)

    def make_normaliser(self, device: torch.device) -> Callable[[Any], Tensor]:
        """The function raw -> (raw - mean) / std in fp32; its constants lie on `device`, so a call
        copies nothing."""
        mean, std = self.make_channel_statistics(device)
        return lambda raw: (raw.float() - mean) / std

    def denormalise(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Raw latents, as an autoencoder decodes them."""
        mean, std = self.make_channel_statistics(latents.device)
        return latents.float() * std + mean

    def make_channel_statistics(self, device: torch.device) -> Float[Tensor, "2 C 1 1"]:
        """Mean and std."""
        given = torch.tensor([self.mean, self.std], dtype=torch.float32, device=device)
        return given.view(2, -1, 1, 1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_wrong_lengths(facts: Any) -> list[str]:
    """Sentences about statistics of a spec or a manifest that are not one a channel."""
    return [
        f"{name} has {len(values)} values, and there are {facts.channels} channels"
        for name, values in (("mean", facts.mean), ("std", facts.std))
        if len(values) != facts.channels
    ]


class LoaderArgs(TypedDict):
    """The arguments that every loader takes from the run, beside those of its configuration."""

    batch_size: int
    """Samples of this rank in one micro-batch."""
    seed: int
    device: torch.device
    rank: NotRequired[int]
    world_size: NotRequired[int]


class LatentLoader:
    """Base of all loaders: endless batches, of which each has one rank's samples of a global batch.

    The order is a pure function of (seed, samples seen): the n-th training sample is the same one
    at any batch size, world size and after any resume. Each epoch has every sample once; batches
    run across the ends of epochs. A subclass adds `batch_at` and `held_out`.
    """

    held_out_count: int = 0
    """Samples that `held_out` gives; evaluation shows no time left where it is 0."""
    wait_for_batch_seconds: float = 1800.0
    """Seconds to wait for a batch whose readers have stopped giving any."""

    def __init__(self, spec: LatentSpec, **args: Unpack[LoaderArgs]) -> None:
        self.spec = spec
        self.skipped: dict[str, int] = {}
        """Blocks that could not be used and that others stand in for -> their samples."""
        self.batch_size = args["batch_size"]
        self.seed = args["seed"]
        self.device = args["device"]
        self.rank = args.get("rank", 0)
        self.world_size = args.get("world_size", 1)
        self.normalise = spec.make_normaliser(self.device)
        self.samples_seen = 0

    @classmethod
    def foresee(cls, memory: float, **settings: Any) -> tuple[LatentSpec, float] | None:
        """Returns the spec of the latents that these settings of the configuration describe, and
        the bytes that they would take of a device with `memory` bytes; None if the loader must be
        built to know."""
        return None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch_at(self.samples_seen + self.rank * self.batch_size)
        self.samples_seen += self.world_size * self.batch_size
        return batch

    def batch_at(self, start: int) -> Batch:
        """The rank's samples: those at `batch_size` positions from `start` on, or at others that
        all ranks agree on."""
        raise NotImplementedError

    def make_batch(self, rows: LatentTensors, position: Int[Tensor, "B"]) -> Batch:
        """Makes a batch of raw samples at their positions in the run."""
        latents = self.normalise(draw_samples(rows, self.seed, position))
        return Batch(latents, rows.labels, rows.ids, position)

    def make_plain_batch(self, rows: LatentTensors, start: int) -> Batch:
        """Makes a batch of raw samples, without augmentation, at the positions from `start` on."""
        position = torch.arange(start, start + len(rows.labels), device=self.device)
        return Batch(self.normalise(rows.latents), rows.labels, rows.ids, position)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        """The held-out split, once, in a fixed order and without augmentation; the last batch may
        be smaller."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, int]:
        """A few integers from which `load_state_dict` continues exactly."""
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, value in state.items():
            if type(value) is not int or not 0 <= value < 2**53:
                raise UserError(f"the state of the loader says {name}={value}, which is no count.")
        self.samples_seen = state["samples_seen"]


class Int8Latents:
    """Latents in 8 bits with one scale per sample and channel: half the memory of 16 bits.

    `latents[ids]` returns fp32, and what is set there is rounded. That moves a value by at most
    half of 1/127 of the largest one of its channel in its sample.
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


@dataclass
class LatentTensors:
    """Samples of a latent set, raw. `mirrored` holds the latents of the flipped images, `std` the
    posterior's."""

    latents: Float[Tensor, "N C H W"] | Int8Latents
    labels: Int[Tensor, "N"]
    ids: Int[Tensor, "N"] = None  # pyright: ignore[reportAssignmentType]
    """Number of each sample in its split; 0, 1, 2 … where none are given."""
    std: Float[Tensor, "N C H W"] | Int8Latents | None = None
    mirrored: Float[Tensor, "N C H W"] | Int8Latents | None = None
    mirrored_std: Float[Tensor, "N C H W"] | Int8Latents | None = None

    def __post_init__(self) -> None:
        if self.ids is None:
            self.ids = torch.arange(len(self.labels), device=self.labels.device)

    def as_floating(self) -> Float[Tensor, "N C H W"]:
        """The latents, for a caller that knows they are not `Int8Latents`."""
        assert isinstance(self.latents, Tensor)
        return self.latents

    def rows(self, ids: Tensor | slice) -> LatentTensors:
        """Gathers the samples `ids`, as floating-point tensors."""
        found: Any = [None if tensor is None else tensor[ids] for tensor in vars(self).values()]
        return LatentTensors(*found)


def draw_samples(
    rows: LatentTensors, seed: int, position: Int[Tensor, "B"]
) -> Float[Tensor, "B C H W"]:
    """Mirrors each sample or not, and draws it from its posterior, where the set has what that
    needs.

    Both draws are functions of (seed, position): any rank, worker or restart makes the same.
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
