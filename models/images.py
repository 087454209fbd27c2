"""Images as arrays and as PNG grids. Letters: B images, H W height and width in pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor


def to_uint8(images: Float[Tensor, "B c H W"]) -> UInt8[np.ndarray, "B H W 3"]:
    """Images in [-1, 1] with 1 or 3 channels as 8-bit RGB, rounded to the nearest value."""
    rgb = images.expand(-1, 3, -1, -1)
    scaled = ((rgb.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).cpu().numpy()


def psnr(images: Float[Tensor, "B c H W"], reference: Float[Tensor, "B c H W"]) -> float:
    """Peak signal-to-noise ratio in dB of images in [-1, 1] (peak-to-peak 2), over the whole batch."""
    error = (images.float().clamp(-1.0, 1.0) - reference.float()).square().mean()
    return float(10.0 * torch.log10(4.0 / error.clamp(min=1e-12)))


def write_grid(path: Path, images: UInt8[np.ndarray, "B H W 3"], columns: int, min_tile: int = 32) -> None:
    """Writes the images row by row as one PNG; tiles smaller than `min_tile` pixels are enlarged by whole factors."""
    from PIL import Image, ImageOps

    count, height, width, _ = images.shape
    rows = -(-count // columns)
    grid = np.full((rows, columns, height + 2, width + 2, 3), 255, dtype=np.uint8)
    for i, image in enumerate(images):
        grid[i // columns, i % columns, 1:-1, 1:-1] = image
    picture = Image.fromarray(grid.transpose(0, 2, 1, 3, 4).reshape(rows * (height + 2), columns * (width + 2), 3))
    factor = max(1, -(-min_tile // height))
    path.parent.mkdir(parents=True, exist_ok=True)
    ImageOps.scale(picture, factor, Image.Resampling.NEAREST).save(path)
