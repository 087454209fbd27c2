"""Encodes each different caption of a job once, into shards beside those of the latents.

A caption's number is its place among all different captions of the job, sorted by their hashes; so
it depends only on the captions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.condition import TextEncoder
from common.config.build import build
from common.config.schema import PrecomputeConfig
from common.errors import UserError
from common.files import hash_content
from common.output import Progress
from common.text import format_bytes
from data.caption_blocks import join_text
from data.caption_table import CaptionTable, count_caption_bytes, quantise
from data.manifest import Shard
from data.spec import TextSpec
from encoding.shards import (
    WHOLE,
    Part,
    ShardWriter,
    explain_full_disk,
    read_finished,
    write_sidecar,
)
from models.autoencoders import locate_encoder

MEAN_CAPTIONS = 1024
"""Number of captions over which the mean vector is computed; their order, by hashes, is random."""


TEXT_SETTINGS = (
    "max_captions text_tokens text_dtype shard_size block_size batch_size captions caption_lines "
    "captions_missing"
)
"""Keys of the configuration that say how captions are stored, and where a job of images found
them."""


class CaptionJob:
    """Encodes the captions of a latent set on `device`, except those in the table `earlier`, if
    that is of the same encoder. `captions` has those of each image; `cfg` says which encoder, and
    by its keys `TEXT_SETTINGS` how captions are stored. Raises UserError if no image has a
    caption."""

    def __init__(
        self,
        captions: Sequence[Sequence[str]],
        cfg: PrecomputeConfig,
        device: torch.device,
        earlier: CaptionTable | None = None,
    ) -> None:
        encoder: TextEncoder = build(cfg.text_encoder, "text_encoder", kind=TextEncoder).to(device)
        self.encoder = encoder
        self.cfg = cfg
        self.settings_of_content = {
            "text_encoder": encoder.weights_sha256,
            "captions_sha256": hash_content(captions),
            **{key: vars(cfg)[key] for key in TEXT_SETTINGS.split()},
        }
        """Settings that determine the content of the shards, by name, for job.json."""
        self.captions = captions
        used = [own[: cfg.max_captions] for own in captions]
        texts = {text for own in used for text in own}
        if not texts:
            raise UserError(
                "text_encoder is set, but no image has a caption; put a .txt or .json with the "
                "image's name beside it, or take captions=<file of templates>."
            )
        self.texts = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
        self.texts.append("")
        self.index = {text: number for number, text in enumerate(self.texts)}

        self.lengths = encoder.count_tokens(self.texts)
        self.max_tokens = min(max(self.lengths), encoder.max_length, cfg.text_tokens)
        self.earlier = earlier
        self.known: dict[str, int] = {}
        """Caption -> its row in the table `earlier`."""
        if earlier and earlier.spec.encoder_sha256 == encoder.weights_sha256:
            self.known = {text: row for row, text in enumerate(earlier.texts)}
        self.spec = self.make_spec(max(map(len, used)))
        shards = range(-(-len(self.texts) // cfg.shard_size))
        self.shards = [f"captions-{number:05d}.tar" for number in shards]

    def make_spec(self, per_image: int) -> TextSpec:
        """Describes the captions, of which an image has at most `per_image`."""
        encoder = self.encoder
        empty = encoder.encode([""], self.max_tokens)
        some = self.encode(self.texts[:MEAN_CAPTIONS])["pooled"]
        dtype: Any = self.cfg.text_dtype
        return TextSpec(
            encoder=locate_encoder(self.cfg.text_encoder, encoder.revision),
            encoder_sha256=encoder.weights_sha256,
            width=encoder.width,
            max_tokens=self.max_tokens,
            dtype=dtype,
            count=len(self.texts),
            per_image=per_image,
            mean=some.float().mean(0).tolist(),
            empty_pooled=empty.pooled[0].tolist(),
            empty_tokens=empty.tokens[0, : empty.lengths[0]].tolist(),
        )

    def describe(self) -> str:
        """Says how many captions there are, and how many bytes they take."""
        spec = self.spec
        size = count_caption_bytes(spec, "tokens")
        text = (
            f"{spec.count - 1} different captions, up to {spec.per_image} an image, in at most "
            f"{spec.max_tokens} tokens of {spec.width} values in {spec.dtype}: "
            f"{format_bytes(size)}, {format_bytes(size / len(self.captions))} an image"
        )
        text += f"; {len(self.known.keys() & self.index.keys())} copied" if self.known else ""

        # Note how many captions have more tokens than are kept, and than the encoder reads.
        kept = self.cfg.text_tokens
        limits = {self.encoder.max_length: "the encoder reads"}
        if 0 < kept < self.encoder.max_length:
            limits[kept] = "text_tokens keeps"
        for limit, what in limits.items():
            longer = [length for length in self.lengths if length > limit]
            if longer:
                text += (
                    f"\n  note: {len(longer)} of {len(self.lengths) - 1} captions are longer than "
                    f"the {limit} tokens that {what} (median of these: {median(longer):.0f})"
                )
        uncaptioned = sum(not own for own in self.captions)
        if uncaptioned:
            text += f"\n  note: {uncaptioned} images have no caption, and get the empty one"
        return text

    def number_captions(self, captions: Sequence[Sequence[str]]) -> Tensor:
        """Returns the numbers of each image's captions, int32 (n, M), filled up with -1."""
        most = self.spec.per_image
        rows = [[self.index[text] for text in own[:most]] for own in captions]
        return torch.tensor([row + [-1] * (most - len(row)) for row in rows], dtype=torch.int32)

    def run(self, out: Path, part: Part = WHOLE) -> list[Shard]:
        """Writes each unfinished shard of captions of this part, and its sidecar; returns the
        shards that it has written."""
        shard_size = self.cfg.shard_size
        block_size = self.cfg.block_size
        shards = part.select(list(enumerate(self.shards)))
        todo = [(number, name) for number, name in shards if read_finished(out, name) is None]
        progress = Progress(len(todo), part.name_unit("shards of captions"))
        written = []

        # All shards but the last have `shard_size` captions.
        for number, name in todo:
            texts = self.texts[number * shard_size : (number + 1) * shard_size]
            with (
                explain_full_disk(out, name),
                ShardWriter(out / name, "captions", block_size) as writer,
            ):
                for start in range(0, len(texts), block_size):
                    block = texts[start : start + block_size]
                    writer.write_member(self.encode(block), len(block))
                shard = writer.close()
                write_sidecar(out, shard, {})
            written.append(shard)
            progress.advance(1)
        progress.close()
        self.encoder.cpu()  # the images need the memory
        return written

    def encode(self, texts: list[str]) -> dict[str, Tensor]:
        """Encodes the captions of a block; returns its tensors (data/caption_blocks.py)."""
        new = [text for text in texts if text not in self.known]
        parts = []
        if self.earlier and len(new) < len(texts):
            known = [self.known[text] for text in texts if text in self.known]
            parts.append(self.earlier.columns.select(torch.tensor(known)))
        if new:
            parts.append(self.encoder.encode(new, self.max_tokens, self.cfg.batch_size))

        # Join the rows, first the copied and then the new ones, and restore the order of `texts`.
        order = torch.tensor([text not in self.known for text in texts]).int()
        order = order.argsort(stable=True).argsort()
        stored = []
        for text in parts:
            tokens = quantise(text.tokens, getattr(torch, self.cfg.text_dtype))
            tokens = pad(tokens, (0, 0, 0, self.max_tokens - tokens.shape[1]))  # below 0 it cuts
            stored.append({"pooled": text.pooled, "tokens": tokens, "lengths": text.lengths.int()})
        columns = {n: torch.cat([part[n].cpu() for part in stored])[order] for n in stored[0]}
        return columns | {"text": join_text(texts)}
