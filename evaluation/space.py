"""What a feature space is. Letters: B images, H W their size, D features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from common.errors import UserError
from common.exact_products import exact_products


class Features(nn.Module, ABC):
    """Maps 8-bit RGB images to features. A class of one's own derives from this one and is built
    without arguments.

    Calling it runs `forward` without gradients, in true fp32 (no TF32, no autocast), with
    deterministic convolutions. An image's features do not depend on the other images of its batch,
    up to rounding.
    """

    name: str
    dim: int
    """Features per image."""

    @abstractmethod
    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        """Features in fp32, on the device of the images, which is that of this module."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name, dim, version or hash of the weights, resizing: what must be equal for two figures
        to be comparable.

        Plain values that JSON can hold.
        """

    def __call__(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise UserError(
                f"{self.name}: images must be uint8 (B, H, W, 3), not {images.dtype} "
                f"{images.shape}."
            )
        with torch.no_grad(), exact(images.device):
            return super().__call__(images).float()


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """No autocast, no TF32, and the same convolution algorithms every time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    try:
        with exact_products(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def planes(images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 3 H W"]:
    """The channels in front, still 0 to 255, in fp32."""
    return images.permute(0, 3, 1, 2).float()
