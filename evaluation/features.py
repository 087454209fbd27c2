"""Feature spaces that download nothing, and the one place that builds a space from its name.

Letters: B images, H W their size, D features, C channels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import UserError
from evaluation.pretrained_features import Dinov2Features, InceptionFeatures
from evaluation.space import Features, planes
from models.autoencoders import Autoencoder
from training.config.build import is_admitted

MAX_ENCODER_FEATURES = 256


class RandomFeatures(Features):
    """A fixed random convolutional network that needs no download: 64 channels on a 2×2 grid, so it
    sees layout too.

    Random features rank generators much as trained ones do (https://arxiv.org/abs/2208.09218). The
    weights come from numpy's RandomState, whose stream numpy has frozen. Another network is another
    version: old figures compare no more.
    """

    name = "random"
    dim = 256
    version = 1
    SIDE = 64
    CHANNELS = (3, 32, 64, 64, 64)

    def __init__(self) -> None:
        super().__init__()
        draw = np.random.RandomState(0)
        convolutions = []
        for C_in, C_out in zip(self.CHANNELS, self.CHANNELS[1:], strict=False):
            # He et al. 2015
            weight = draw.standard_normal((C_out, C_in, 3, 3)) * math.sqrt(2.0 / (9 * C_in))
            convolution = nn.Conv2d(C_in, C_out, 3, stride=2, padding=1, bias=False, device="meta")
            convolution.weight = nn.Parameter(torch.from_numpy(weight).float(), requires_grad=False)
            convolutions += [convolution, nn.ReLU()]
        self.network = nn.Sequential(*convolutions)

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 256"]:
        x = F.interpolate(planes(images), (self.SIDE, self.SIDE), mode="bilinear", antialias=True)
        return F.adaptive_avg_pool2d(self.network(x / 127.5 - 1.0), 2).flatten(1)

    def describe(self) -> dict[str, Any]:
        resize = f"bilinear antialiased {self.SIDE}"
        return {"name": self.name, "dim": self.dim, "version": self.version, "resize": resize}


class EncoderFeatures(Features):
    """The mean latents of a latent set's own autoencoder, averaged over the finest square grid with
    ≤ 256 values.

    `channels`, 1 or 3, are those of the autoencoder's images. Of grey ones the first is taken:
    three equal channels would make the covariance singular. `dim` follows from the size of the
    images and is known after the first batch; all batches must have that size.
    """

    name = "encoder"

    def __init__(self, autoencoder: Autoencoder, channels: int) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise UserError(
                "features=encoder: images have 1 or 3 channels, these latents decode to "
                f"{channels}."
            )
        self.autoencoder = autoencoder.eval()
        self.channels = channels
        self.seen: tuple[int, int, int] | None = None

    @property
    def latents(self) -> tuple[int, int, int]:
        """C, height and width of the latents."""
        if self.seen is None:
            raise RuntimeError(
                "EncoderFeatures know the size of the latents after their first batch of images."
            )
        return self.seen

    @property
    def grid(self) -> int:
        """Side of the grid."""
        C, height, width = self.latents
        return max(1, min(height, width, math.isqrt(MAX_ENCODER_FEATURES // C)))

    @property
    def dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.latents[0] * self.grid**2

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        latents = self.autoencoder.encode(planes(images)[:, : self.channels] / 127.5 - 1.0)[0]
        _, C, height, width = latents.shape
        if self.seen not in (None, (C, height, width)):
            raise UserError(
                f"features=encoder: latents of shape {(C, height, width)} after {self.seen}; use "
                "one size."
            )
        self.seen = (C, height, width)
        return F.adaptive_avg_pool2d(latents, self.grid).flatten(1)

    def describe(self) -> dict[str, Any]:
        about = {
            "name": self.name,
            "dim": self.dim,
            "latents": list(self.latents),
            "resize": "none",
        }
        return about | {"class": self.autoencoder.kind, "sha256": self.autoencoder.weights_sha256}


KNOWN = ("encoder", "random", "inception", "dinov2")


def build_features(
    names: Sequence[str], autoencoder: Autoencoder, channels: int, files: Mapping[str, str | None]
) -> dict[str, Features]:
    """The feature spaces called `names`: some of `KNOWN`, or paths of classes in packages that
    `extensions=` names.

    `autoencoder` and `channels` make "encoder"; `files` says where the weights of "inception" and
    "dinov2" are. ValueError for an unknown or doubled name, for none at all, and for weights that
    are missing or not the right ones.
    """
    if not names or len(set(names)) < len(names):
        raise UserError(
            f"features={list(names)} must name one space or more, each once; choose of "
            f"{', '.join(KNOWN)}."
        )
    return {name: build_one(name, autoencoder, channels, files) for name in names}


def build_one(
    name: str, autoencoder: Autoencoder, channels: int, files: Mapping[str, str | None]
) -> Features:
    if name == "encoder":
        return EncoderFeatures(autoencoder, channels)
    if name == "random":
        return RandomFeatures()
    if name == "inception":
        return InceptionFeatures(files.get(name))
    if name == "dinov2":
        return Dinov2Features(files.get(name))
    module, _, attribute = name.rpartition(".")
    if not module or not is_admitted(name):
        raise UserError(
            f"features={name} is unknown; choose of {', '.join(KNOWN)}, or give the path of a "
            "class in a package that extensions=[…] on this command line names."
        )
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise UserError(
            f"features={name}: there is no module {error.name}; correct the path, or install it."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Features)):
        raise UserError(
            f"features={name} is no class derived from evaluation.features.Features, which it "
            "must be."
        )
    return found()
