"""The interface of autoencoders, conversion and comparison of images, and grids of images as PNG
files.

Letters: B images, H W height and width in pixels, C latent channels, h w latent size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from common.files import replace_file

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST_NAME = 40
"""Largest number of characters of a class name written beside a row of images; longer names are
cut."""
SMALLEST_TILE = 32
"""Smallest height in pixels of an image in a grid; smaller images are enlarged."""
LINE_HEIGHT = 14
"""Height in pixels of a line of text beside a grid of images."""


class Autoencoder(nn.Module, ABC):
    """The interface of autoencoders. `encode` turns images into raw latents, for the latent sets
    that training reads; `decode` turns latents into images, for sampling."""

    kind: str
    scaling_factor: float | None = None
    """Factor by which raw latents should be multiplied, from the config of the weights; None: the
    config has no such factor."""
    shift_factor: float | None = None
    weights_sha256: str | None = None
    revision: str | None = None
    """Commit of the Hugging Face repository from which the weights come; None for a local
    folder."""

    @abstractmethod
    def encode(
        self, images: Float[Tensor, "B c H W"]
    ) -> tuple[Float[Tensor, "B C h w"], Float[Tensor, "B C h w"] | None]:
        """Returns the mean of the latents' posterior in fp32, and its std if the autoencoder is
        variational, otherwise None."""

    @abstractmethod
    def decode(self, latents: Float[Tensor, "B C h w"]) -> Float[Tensor, "B c H W"]:
        """Decodes raw latents to images, whose values lie approximately in [-1, 1]."""


def to_uint8(images: Float[Tensor, "B c H W"]) -> UInt8[np.ndarray, "B H W 3"]:
    """Converts images in [-1, 1] with 1 or 3 channels to 8-bit RGB, rounded to the nearest
    value."""
    rgb = images.expand(-1, 3, -1, -1)
    scaled = ((rgb.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).cpu().numpy()


def select_rgb(latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B c H W"]:
    """Takes latents that are pixels, and returns the channels to show as an image: all channels if
    there are one or three, otherwise only the first."""
    return latents if latents.shape[1] in (1, 3) else latents[:, :1]


def psnr(images: Float[Tensor, "B c H W"], reference: Float[Tensor, "B c H W"]) -> float:
    """Returns the peak signal-to-noise ratio in dB of images in [-1, 1] (peak-to-peak 2), over the
    whole batch."""
    error = (images.float().clamp(-1.0, 1.0) - reference.float()).square().mean()
    return float(10.0 * torch.log10(4.0 / error.clamp(min=1e-12)))


def write_grid(
    path: Path,
    images: UInt8[np.ndarray, "B H W 3"],
    columns: int,
    names: Sequence[str] = (),
    note: str = "",
) -> None:
    """Writes the images row by row as one PNG, and enlarges images below `SMALLEST_TILE` pixels by
    a whole factor.

    `names`, one for each row of images, go into a margin on the left, and `note` into a line below;
    without names, `note` is not written. Raises OSError if the file cannot be written.
    """
    from PIL import Image, ImageOps

    count, height, width, _ = images.shape
    rows = -(-count // columns)
    # Give each image a white frame of one pixel, and fill the last row with white tiles.
    missing = rows * columns - count
    tiles = np.pad(images, ((0, missing), (1, 1), (1, 1), (0, 0)), constant_values=255)
    grid = tiles.reshape(rows, columns, height + 2, width + 2, 3).swapaxes(1, 2)
    picture = Image.fromarray(grid.reshape(rows * (height + 2), -1, 3))
    factor = max(1, -(-SMALLEST_TILE // height))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = ImageOps.scale(picture, factor, Image.Resampling.NEAREST)
    if names:
        picture = add_names(picture, names, note)
    with replace_file(path) as temporary:
        picture.save(temporary, "PNG")


def add_names(picture: Image, names: Sequence[str], note: str) -> Image:
    """Returns a larger picture with `names`, one for each row of images, in a margin on the left,
    and `note` in a line below ("": no such line)."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default()
    # Pillow's default font has only the characters of Latin-1, so replace other characters by "?".
    lines = [name[:LONGEST_NAME].encode("latin-1", "replace").decode("latin-1") for name in names]
    margin = round(max(font.getlength(name) for name in lines)) + 8
    result = Image.new(
        "RGB", (margin + picture.width, picture.height + (LINE_HEIGHT if note else 0)), "white"
    )
    result.paste(picture, (margin, 0))

    draw = ImageDraw.Draw(result)
    for row, name in enumerate(lines):
        middle = (row + 0.5) * picture.height / len(lines)
        draw.text(
            (margin - 4 - font.getlength(name), middle - LINE_HEIGHT / 2), name, "black", font
        )
    draw.text((margin, picture.height), note, "black", font)
    return result
