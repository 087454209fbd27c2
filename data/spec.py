"""The description of a latent set and of its captions.

Letters: B samples of a batch, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

Size = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(gt=-1e12, lt=1e12, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=1e-12, lt=1e12, allow_inf_nan=False)]
"""Type of a positive number. The bounds of `Finite` and `Above0` keep normalised latents finite in
fp32."""


@dataclass(frozen=True)
class TextSpec:
    """Description of a latent set's encoded captions."""

    encoder: dict[str, Any]
    """`_target_` and arguments of the text encoder."""
    encoder_sha256: str
    width: Size
    """Number of values of a vector."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**16)]
    """Largest number of tokens that are stored of a caption; 0 = pooled vectors only."""
    dtype: Literal["float16", "int8"]
    """dtype of the stored tokens."""
    count: Size
    """Number of different captions with the empty one, which is the last."""
    per_image: Size
    """Largest number of captions of an image."""
    mean: list[Finite]
    """Mean of the pooled vectors, which models subtract: all vectors of an encoder have a large
    part in common."""
    empty_pooled: list[Finite]
    """The empty caption, which replaces dropped captions: its pooled vector, and below the vectors
    of its tokens."""
    empty_tokens: list[list[Finite]]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def find_faults(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between fields."""
        rows = [self.empty_pooled, *self.empty_tokens]
        if any(len(row) != self.width for row in [self.mean, *rows]):
            yield f"a vector of the captions has not {self.width} values"
        if not all(any(row) for row in rows):
            yield "the empty caption has a vector of zeros"
        if bool(self.empty_tokens) != bool(self.max_tokens):
            yield f"the empty caption has {len(self.empty_tokens)} tokens"


@dataclass(frozen=True)
class LatentSpec:
    """Description of a latent set: what a model, a sampler and a checkpoint must know about it."""

    channels: Size
    height: Size
    width: Size
    num_classes: Count
    """Number of classes; 0 = the set has none, and every label is 0."""
    count: Count
    """Number of training samples, without the held-out samples."""
    class_names: list[str]
    mean: list[Finite]
    """Mean per channel; a loader subtracts the mean from raw latents."""
    std: list[Above0]
    """Standard deviation per channel; a loader subtracts the mean, then divides by this number."""
    encoder: dict[str, Any] = field(default_factory=dict)
    """`_target_` and arguments of the autoencoder that decodes the latents."""
    encoder_sha256: str | None = None
    """sha256 of the autoencoder's weights; sampling refuses to decode with other weights. None if
    the set names no hash."""
    fingerprint: str = ""
    """Text that identifies the data set; a run refuses to resume on a set with another
    fingerprint."""
    text: TextSpec | None = None
    """Description of the captions; None if the set has none."""

    @property
    def labels(self) -> range:
        """Labels with which a model of this set can draw samples: the numbers of all classes, or
        only 0, the null label, if the set has no classes."""
        return range(max(1, self.num_classes))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of a latent."""
        return self.channels, self.height, self.width

    @property
    def null_label(self) -> int:
        """The label that stands for "no class": the number of classes. A set with captions has at
        least one class, because the null label also drops the caption."""
        return max(self.num_classes, int(self.text is not None))

    @property
    def names(self) -> list[str]:
        """Names of the classes, in the order of their numbers; if the set has no names, the numbers
        as text."""
        return self.class_names or [str(number) for number in range(self.num_classes)]

    def with_order(self, suffix: str) -> LatentSpec:
        """Returns a copy of the spec with `suffix` at the end of its fingerprint. The suffix names
        the order or the precision in which a loader yields the samples, so that a run cannot resume
        with another order or precision."""
        return replace(self, fingerprint=f"{self.fingerprint}-{suffix}")

    def denormalise(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Converts normalised latents to raw latents, which an autoencoder can decode."""
        mean, std = self.make_channel_statistics(latents.device)
        return latents.float() * std + mean

    def make_channel_statistics(self, device: torch.device) -> Float[Tensor, "2 C 1 1"]:
        """Returns mean and std per channel, stacked, in a shape that broadcasts over latents."""
        statistics = torch.tensor([self.mean, self.std], dtype=torch.float32, device=device)
        return statistics.view(2, -1, 1, 1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LatentSpec:
        """Returns the spec that `as_dict` turned into a dict."""
        values = dict(values)
        text = values.pop("text", None)
        return cls(**values, text=text and TextSpec(**text))


def find_wrong_lengths(facts: Any) -> list[str]:
    """Checks that mean and std of a spec or manifest have one value per channel. Returns a sentence
    for `mean`, and one for `std`, if its length is wrong; an empty list if both are right."""
    return [
        f"{name} has {len(values)} values, and there are {facts.channels} channels"
        for name, values in (("mean", facts.mean), ("std", facts.std))
        if len(values) != facts.channels
    ]
