"""Says which resolution fits the shapes of a job's images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean

from PIL import ExifTags

from common.config.contradictions import list_sides
from encoding.images import open_image


def read_aspect(content: bytes, key: str) -> float | None:
    """Returns the width of an image, whose name is `key`, divided by its height, after EXIF data
    have turned it upright; None if it cannot be opened. Decodes nothing."""
    with suppress(Exception), open_image(content, key) as image:
        aspect = image.width / image.height
        # Pillow decodes a PNG to look for EXIF data behind its pixels, where hardly any has them.
        exif = {} if image.format == "PNG" and "exif" not in image.info else image.getexif()
        turned = exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        # Pillow opens a TIFF with the size that it has when it is upright.
        return 1.0 / aspect if turned and image.format != "TIFF" else aspect
    return None


def measure_kept(aspects: Sequence[float], size: Sequence[int]) -> float:
    """Returns the mean share of their pixels that images of these aspects keep when they are
    cropped to the aspect of `size`, height and width."""
    ratios = [aspect * size[0] / size[1] for aspect in aspects]
    return fmean(min(ratio, 1.0 / ratio) for ratio in ratios)


def describe_shapes(
    aspects: Sequence[float], resolution: int | list[int], grid: Sequence[int]
) -> str:
    """Says how many images of these aspects are portraits, which share of their pixels the job's
    `resolution` keeps, and which resolution of about as many pixels would keep more; also which
    patches divide its latents, whose height and width are `grid`. Says only the latter if
    `aspects` is empty."""
    height, width = list_sides(resolution)
    common = math.gcd(*grid)
    patches = [str(size) for size in range(1, common + 1) if common % size == 0]
    said = f"  latents of {grid[0]}×{grid[1]}: model.patch_size may be {', '.join(patches)}"
    if not aspects:
        return said

    # Try all sizes of about as many pixels that the encoder takes, and that patches of 2 divide if
    # they divide the present one; no side is longer than four times the other.
    area = height * width
    step = height // grid[0] * (2 - common % 2)
    sides = range(step, 2 * math.isqrt(area) + 1, step)
    sizes = [(side, round(area / side / step) * step) for side in sides]
    near = [
        size
        for size in sizes
        if abs(math.prod(size) / area - 1.0) < 0.1 and max(size) <= 4 * min(size)
    ]
    best = max([(height, width), *near], key=lambda size: measure_kept(aspects, size))

    kept = measure_kept(aspects, (height, width))
    most = measure_kept(aspects, best)
    portrait = fmean(aspect < 1.0 for aspect in aspects)
    landscape = fmean(aspect > 1.0 for aspect in aspects)
    said += (
        f"\n  of the first {len(aspects)} images {portrait:.0%} are portrait, {landscape:.0%} "
        f"landscape: resolution=[{height},{width}] keeps {kept:.0%} of their pixels"
    )
    if most > kept + 0.01:
        said += f", [{best[0]},{best[1]}] would keep {most:.0%}"
    return said
