"""Encodes each different caption of a job once, into shards beside those of the latents.

A caption's number is its place among all different captions of the job, sorted by their hashes; so
it depends only on the images and their captions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from common.terminal import Progress
from data.captions import count_caption_bytes, join_text, quantise
from data.loader import TextSpec
from encoding.images import ImageEntry
from encoding.job import (
    Plan,
    ShardWriter,
    explain_full_disk,
    locate_encoder,
    read_finished,
    write_sidecar,
)
from models.text_encoders import TextEncoder
from training.config.schema import PrecomputeConfig
from training.distributed.ranks import Ranks


@dataclass
class CaptionJob:
    """The different captions of a job, and how they are encoded."""

    encoder: TextEncoder
    cfg: PrecomputeConfig
    texts: list[str]
    spec: TextSpec
    without: list[str]
    """Names of the images without a caption."""

    @classmethod
    def plan(cls, plan: Plan, cfg: PrecomputeConfig, encoder: TextEncoder) -> CaptionJob:
        """Lists the captions of a plan's images, and adds their shards to the plan. Raises
        ValueError if no image has a caption."""
        entries = [entry for _, _, images in plan.shards for _, entry in images]
        texts = {text for entry in entries for text in entry.captions[: cfg.max_captions]}
        if not texts:
            raise UserError(
                f"captions={cfg.captions}: no image of source={cfg.source} has a caption; put a "
                ".txt or .json with the image's name beside it, or take captions=<file of "
                "templates>."
            )
        ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
        max_tokens = find_longest(encoder, ["", *ordered], cfg.text_tokens)
        empty = encoder.encode([""], max_tokens)
        spec = TextSpec(
            encoder=locate_encoder(cfg.text_encoder, encoder.revision),
            encoder_sha256=encoder.weights_sha256,
            width=encoder.width,
            max_tokens=max_tokens,
            dtype=cfg.text_dtype.value,
            count=len(ordered),
            per_image=max(len(entry.captions[: cfg.max_captions]) for entry in entries),
            empty_pooled=empty.pooled[0].tolist(),
            empty_tokens=empty.tokens[0, : empty.lengths[0]].tolist(),
        )
        without = [entry.key for entry in entries if not entry.captions]
        plan.text = spec
        for number in range(-(-len(ordered) // cfg.shard_size)):
            plan.caption_shards.append(f"captions-{number:05d}.tar")
        return cls(encoder, cfg, ordered, spec, without)

    def describe(self, images: int) -> str:
        """Says how many captions there are, and how many bytes they take."""
        spec = self.spec
        size = count_caption_bytes(spec, "tokens")
        lines = [
            f"{spec.count} different captions, up to {spec.per_image} an image, in at most "
            f"{spec.max_tokens} tokens of {spec.width} values in {spec.dtype}: "
            f"{size / 2**20:.2f} MiB, {size / 1024 / images:.1f} KiB an image"
        ]
        if self.without:
            lines.append(
                f"  note: {len(self.without)} images have no caption, such as {self.without[0]}; "
                "the empty caption takes its place"
            )
        return "\n".join(lines)

    def number_captions(self, entries: Sequence[ImageEntry]) -> Tensor:
        """Returns the numbers of the captions of each image, int32 (n, M), filled up with -1."""
        numbers = torch.full((len(entries), self.spec.per_image), -1, dtype=torch.int32)
        for row, entry in zip(numbers, entries, strict=True):
            for place, text in enumerate(entry.captions[: self.spec.per_image]):
                row[place] = self.index[text]
        return numbers

    def __post_init__(self) -> None:
        self.index = {text: number for number, text in enumerate(self.texts)}

    def run(self, plan: Plan, out: Path, ranks: Ranks) -> None:
        """Writes each unfinished shard of captions of this rank, and its sidecar."""
        size = self.cfg.shard_size
        shards = list(enumerate(plan.caption_shards))[ranks.rank :: ranks.world_size]
        todo = [shard for shard in shards if read_finished(out, shard[1]) is None]
        total = sum(len(self.texts[i * size : (i + 1) * size]) for i, _ in todo)
        progress = Progress(total, "captions", silent=not ranks.first)
        for number, name in todo:
            texts = self.texts[number * size : (number + 1) * size]
            with (
                explain_full_disk(out, name),
                ShardWriter(out / name, "captions", self.cfg.block_size) as writer,
            ):
                for start in range(0, len(texts), self.cfg.block_size):
                    part = texts[start : start + self.cfg.block_size]
                    writer.write_member(self.encode(part), len(part))
                    progress.advance(len(part))
                write_sidecar(out, writer.close())
        progress.close()

    def encode(self, texts: list[str]) -> dict[str, Tensor]:
        """Encodes the captions of a block, in batches; returns its tensors."""
        spec = self.spec
        text = self.encoder.encode(texts, spec.max_tokens, self.cfg.batch_size)
        tokens = quantise(text.tokens, getattr(torch, spec.dtype))
        stored = {"pooled": text.pooled.cpu(), "tokens": tokens.cpu()}
        for name, tensor in stored.items():
            bad = ~tensor.isfinite().flatten(1).all(1)
            if bad.any():
                raise UserError(
                    f"the caption {texts[int(bad.nonzero()[0])]!r} has {name} that are too large "
                    "for float16; take another text_encoder, or text_dtype=int8 for its tokens."
                )
        return stored | {"lengths": text.lengths.cpu().int()} | join_text(texts)


def find_longest(encoder: TextEncoder, texts: list[str], limit: int) -> int:
    """Returns the largest number of tokens of a text, at most `limit`."""
    longest = 0
    for start in range(0, len(texts) if limit else 0, 4096):
        part = texts[start : start + 4096]
        longest = max(longest, *map(len, encoder.tokenize(part, limit)))
    return longest
