"""Copies latents and captions from an earlier set, so that a set which has grown, or has other
classes, captions or held-out images, costs what is new.

An image is recognised by a hash of its bytes, which the sidecars of shards hold; a caption by its
text. The new set has the bytes of a fresh one if the encoder gives an image the same bits in any
batch, else the values within its rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor
from torch.utils.data import default_collate

from common.files import refuse_changes
from data.blocks import BlockReader
from data.caption_blocks import read_captions
from data.caption_table import CaptionTable
from data.manifest import read_manifest
from data.source import open_source
from encoding.decoding import Decoded
from encoding.job import read_job
from encoding.shards import read_finished

SETTINGS = (
    "resolution background max_megapixels convert_profile flips kind dtype precision encoder_sha256"
)
"""Keys of job.json on which the latents of an image depend; with kind=sample an image also keeps
the draw of its first job."""


class EarlierSet:
    """A set, from which latents are copied. Raises UserError if latents with the `settings`, keys
    of job.json, would differ."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        self.folder = Path(path).expanduser()
        self.job = read_job(self.folder)
        self.refuse_others(settings)
        self.read_block = lru_cache(128)(self.load_block)
        self.images: dict[str, tuple[str, int, int, int]] = {}
        """Hash of an image's bytes -> its shard, the offset and size of its block, its row."""
        for shard in self.job["shards"]["images"]:
            sidecar = read_finished(self.folder, shard)
            if sidecar:
                blocks = sidecar["shard"]["blocks"]
                rows = [(shard, *b[:2], row) for b in blocks for row in range(b[2])]
                self.images |= zip(sidecar.get("images", ()), rows, strict=False)

    def refuse_others(self, settings: Mapping[str, Any]) -> None:
        keys = settings.keys() & set(SETTINGS.split())
        refuse_changes(
            f"reuse={self.folder}",
            {"convert_profile": False} | self.job,  # jobs that began before this key did not
            settings,
            keys,
            "leave reuse out, or set what it was",
        )

    def open_captions(self, settings: Mapping[str, Any]) -> CaptionTable | None:
        """Opens the captions of the set; None if it has none with these settings of tokens."""
        if any(self.job.get(key) != settings[key] for key in ("text_tokens", "text_dtype")):
            return None
        blocks = BlockReader(open_source(str(self.folder)), read_manifest(self.folder), "train")
        return read_captions(blocks, "tokens")

    def load_block(self, shard: str, offset: int, size: int) -> dict[str, Tensor]:
        with (self.folder / shard).open("rb") as stream:
            stream.seek(offset)
            return load(stream.read(size))

    def add_latents(self, new: Mapping[str, Tensor], decoded: Decoded) -> dict[str, Tensor]:
        """Returns the latents of a batch, in its order: those of `new` images, and copies."""
        fresh = ({k: t[i] for k, t in new.items()} for i in range(len(decoded.places)))
        rows = [
            next(fresh) if place in decoded.places else self.read(digest)
            for place, digest in decoded.digests.items()
        ]
        return default_collate(rows)

    def read(self, digest: str) -> dict[str, Tensor]:
        *block, row = self.images[digest]
        tensors = self.read_block(*block)
        return {name: tensors[name][row] for name in tensors.keys() - {"labels", "captions"}}
