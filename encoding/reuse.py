"""Copies latents and captions from an earlier set, so that a set which has grown, or has other
classes, captions or held-out images, costs what is new.

An image is recognised by a hash of its bytes, which the sidecars of shards hold; a caption by its
text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.files import read_object, refuse_changes
from data.blocks import BlockReader
from data.captions import CaptionTable
from data.manifest import read_manifest
from data.source import open_source
from encoding.images import Decoded
from encoding.job import read_job

SETTINGS = "resolution background max_megapixels flips kind dtype precision encoder_sha256"
"""Keys of job.json on which the latents of an image depend."""
NAMES = ("latents", "std", "mirrored", "mirrored_std")


class EarlierSet:
    """A finished set, from which latents are copied. Raises ValueError if its files do not say
    which images it holds."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        self.folder = Path(path).expanduser()
        self.job = read_job(self.folder)
        self.refuse_others(settings)
        manifest = read_manifest(self.folder)
        self.read_block = lru_cache(128)(BlockReader.read_verified)
        self.images: dict[str, tuple[BlockReader, int, int]] = {}
        """Hash of an image's bytes -> reader of its split, number of its block, row in the
        block."""
        for split in ("held_out", "train"):
            self.blocks = BlockReader(open_source(str(self.folder)), manifest, split)
            files = [shard.file for shard in manifest.shards if shard.split == split]
            places = enumerate(self.blocks.places)
            rows = [(self.blocks, n, row) for n, p in places for row in range(p.block.samples)]
            try:
                digests = [read_object(self.folder / f"{file}.json")["images"] for file in files]
                self.images |= zip(chain(*digests), rows, strict=True)
            except (OSError, KeyError, ValueError) as error:
                raise UserError(
                    f"reuse={path} does not say which images it holds ({error}); leave reuse out."
                ) from error

    def refuse_others(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError if images have other latents with these `settings`, keys of
        job.json."""
        keys = settings.keys() & set(SETTINGS.split())
        refuse_changes(f"reuse={self.folder}", self.job, settings, keys, "leave reuse out")
        if settings["kind"] == "sample":
            raise UserError(
                "reuse= needs kind=mean_std: with kind=sample the noise of an image depends on its "
                "place in the list; leave reuse out."
            )

    def open_captions(self, settings: Mapping[str, Any]) -> CaptionTable | None:
        """Opens the captions of the set; None if it has none with these settings of tokens."""
        keys = ("text_tokens", "text_dtype")
        if any(self.job.get(key) != settings[key] for key in keys):
            return None
        return CaptionTable.read(self.blocks, "tokens", torch.device("cpu"))

    def describe(self, encode: Callable[[int], Tensor], batch_size: int) -> str:
        """Says how many images the set has, and whether the encoder gives an image the same bits in
        any batch; `encode` encodes the first images of the job."""
        exact = torch.equal(encode(1)[0], encode(batch_size)[0])
        equal = "the bytes" if exact else "the values, but for the rounding in other batches,"
        return f"{len(self.images)} images are in {self.folder}; the set has {equal} of a fresh one"

    def add_latents(self, new: Mapping[str, Tensor], decoded: Decoded) -> dict[str, Tensor]:
        """Returns the latents of a batch, in its order: those of `new` images, and copies."""
        rows = {place: {k: t[i] for k, t in new.items()} for i, place in enumerate(decoded.places)}
        for place, digest in decoded.digests.items():
            if place not in rows:
                reader, number, row = self.images[digest]
                block = self.read_block(reader, number)
                rows[place] = {name: block[name][row] for name in NAMES if name in block}
        ordered = [rows[place] for place in decoded.digests]
        return {name: torch.stack([row[name] for row in ordered]) for name in ordered[0]}
