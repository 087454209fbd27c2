"""Judges samples: the feature spaces and the reference, opened once, for `scripts.evaluate` and for
runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from common.errors import UserError
from data.loader import LatentSpec
from evaluation.features import build_features
from evaluation.reference import decoded, folder_source, reconstructions, reference_sides
from evaluation.sides import NEIGHBOURS, ROWS, Side
from evaluation.space import Features
from models.autoencoders import Autoencoder, PixelAutoencoder
from training.distributed.ranks import Ranks

QUANTISATION = "uint8, rounded to the nearest value"


@dataclass(frozen=True)
class JudgeConfig:
    """In which spaces samples are compared, and with what."""

    features: tuple[str, ...]
    reference: str | None
    """A folder of images, tars or `datasets`; None: the decoded training latents."""
    reference_count: int
    """At most so many."""
    files: Mapping[str, str | None]
    """Where the weights of `inception` and `dinov2` lie."""


class Judge:
    """The feature spaces, and the reference's side in each. Built by all processes; the first has
    the sides."""

    def __init__(
        self,
        cfg: JudgeConfig,
        spec: LatentSpec,
        data: dict[str, Any] | None,
        autoencoder: Autoencoder,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        channels = 3 if not isinstance(autoencoder, PixelAutoencoder) or spec.channels == 3 else 1
        self.autoencoder = autoencoder
        self.device = device
        blank = torch.zeros(1, spec.channels, spec.height, spec.width, device=device)
        image = decoded(autoencoder, spec.denormalise(blank))
        built = build_features(cfg.features, autoencoder, channels, cfg.files)
        self.spaces: dict[str, Features] = {name: space.to(device) for name, space in built.items()}
        self.of(image)  # which tells a space the size of its images
        size = (image.shape[1], image.shape[2])
        if cfg.reference is not None:
            self.source = folder_source(cfg.reference, size, cfg.reference_count)
        elif data is not None:
            self.source = reconstructions(data, spec, autoencoder, device, cfg.reference_count)
        else:
            raise UserError(
                "reference is not set, and weights= names no training data; give "
                "reference=<folder>."
            )
        self.reference = reference_sides(self.source, self.spaces, device, ranks)

    def of(self, images: UInt8[Tensor, "B H W 3"]) -> dict[str, Tensor]:
        """The features of images in each space, as fp32 on the CPU."""
        return {name: space(images.to(self.device)).cpu() for name, space in self.spaces.items()}

    def of_latents(self, latents: Float[Tensor, "B C h w"]) -> dict[str, Tensor]:
        """The features of samples, from raw latents: decoded and quantised as the reference's
        are."""
        return self.of(decoded(self.autoencoder, latents))

    def sides(self) -> dict[str, Side]:
        """Empty sides, for samples."""
        return {name: Side(space.dim) for name, space in self.spaces.items()}

    def protocol(self) -> dict[str, Any]:
        """What figures of this judge depend on, beside the samples."""
        return {
            "reference": self.source.told,
            "features": {name: space.describe() for name, space in self.spaces.items()},
            "quantisation": QUANTISATION,
            "rows": ROWS,
            "neighbours": NEIGHBOURS,
        }
