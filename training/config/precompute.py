"""The keys of an encoding job, `precompute_latents.py`, with their defaults and meanings. No torch
in here either."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.errors import UserError
from training.config.schema import RuntimeConfig, at_least


class LatentKind(str, Enum):
    mean_std = "mean_std"
    sample = "sample"


class LatentDtype(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


@dataclass(frozen=True)
class PrecomputeConfig:
    """An encoding job."""

    # a folder with one subfolder a class; tars of images + cls; a folder of `datasets`
    source: str | None = None
    out: str | None = None  # folder for shards and manifest.json
    # packages of your own; on the command line only
    extensions: list[str] = field(default_factory=list)
    # by subfolders, .cls members, a label column; or their number; none: all labels are 0
    classes: Any = "given"
    allow_cut: bool = False  # true: of a tar that was cut, or is damaged, use what comes before
    resolution: int = 256  # images are resized and centre-cropped to this square
    # what shows through transparent pixels; a name or "'#rrggbb'", in both quotes
    background: str = "white"
    # larger images are skipped; a worker takes 7 to 20 bytes a pixel to decode one
    max_megapixels: float = 80.0
    # posterior mean (and std), drawn anew each step; sample: one draw
    kind: LatentKind = LatentKind.mean_std
    dtype: LatentDtype = LatentDtype.float16
    # encode mirrored images too (a mirrored latent is not the latent of a mirrored image)
    flips: bool = False
    held_out: float = 0.02  # share of images kept out of training, for eval_loss
    limit: int | None = None  # only so many images, drawn by seed
    seed: int = 0  # order of images over shards, and draws of kind=sample
    batch_size: int = 32
    num_workers: int = 2  # processes that decode images
    shard_size: int = 2048  # images a shard
    block_size: int = 256  # samples a tar member
    min_psnr: float = 20.0  # dB; a worse reconstruction of the first images is refused
    # say what is used, what not, how many images, bytes and minutes it is, and write nothing
    dry_run: bool = False
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    encoder: Any = None

    def check(self) -> None:
        """ValueError for a value that no job can have."""
        for key, what in (
            ("source", "a folder of images or tars"),
            ("out", "the folder for the latents"),
        ):
            if not getattr(self, key):
                raise UserError(f"{key} is not set; say which: {key}=<{what}>.")
        at_least(1, self, "resolution", "batch_size", "shard_size", "block_size")
        at_least(0, self, "seed", "num_workers")
        if self.classes not in ("given", "none") and (
            type(self.classes) is not int or self.classes < 1
        ):
            raise UserError(f"classes={self.classes} must be given, none, or a number from 1 on.")
        self.runtime.check()
        if self.limit is not None:
            at_least(1, self, "limit")
        if not 0.0 <= self.held_out < 1.0:
            raise UserError(
                f"held_out={self.held_out}, the share kept out of training, must be in [0, 1)."
            )
        if self.max_megapixels <= 0.0:
            raise UserError(
                f"max_megapixels={self.max_megapixels}, millions of pixels, must be above 0."
            )
        if not is_colour(self.background):
            raise UserError(
                f"background={self.background} is no opaque colour; give a name such as white or "
                "gray, or #rrggbb in "
                f"quotes: background=\"'#ffffff'\"."
            )


def is_colour(text: str) -> bool:
    """Whether Pillow knows `text` as a colour without transparency."""
    from PIL import ImageColor  # here, so that `--help` stays quick

    try:
        return len(ImageColor.getrgb(text)) == 3
    except ValueError:
        return False
