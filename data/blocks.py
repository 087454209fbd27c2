"""Reads the blocks of a latent set and verifies each: length, hash, count, and that all values are finite.

A shard is a tar whose members are blocks: safetensors files of some hundred samples (data/shards.py). `BlockReader`
reads a block by its offset in the manifest; it parses no tar and unpickles nothing. The manifest's order numbers the
samples of a split; that number is the id in a `Batch`.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from data.manifest import Block, Manifest, Shard
from data.source import Source, unreadable

OnCorrupt = Literal["error", "skip"]
MOST_UNREACHABLE = 3
"""After so many blocks in a row the reader gives up: the store is gone, not a block."""
REMEDY = "run precompute_latents.py again to rebuild it, or set data.on_corrupt=skip"


class DamagedBlockError(ValueError):
    """A block that is not what the manifest says; one sentence names shard and samples."""


class UnreachableError(DamagedBlockError):
    """A block that no attempt could read this time."""


class Place(NamedTuple):
    """A block, its shard, and the number of its first sample in the split."""

    shard: Shard
    block: Block
    first: int

    def __str__(self) -> str:
        return f"samples {self.first}–{self.first + self.block.samples - 1} of {self.shard.split}"


class BlockReader:
    """Reads the blocks of one split by number."""

    def __init__(self, source: Source, manifest: Manifest, split: str, on_corrupt: OnCorrupt = "error") -> None:
        if on_corrupt not in ("error", "skip"):
            raise ValueError(f"data.on_corrupt={on_corrupt} is unknown; choose error or skip.")
        self.source, self.on_corrupt = source, on_corrupt
        self.damaged: set[int] = set()
        self.reports: list[tuple[str, int]] = []
        """(sentence, samples) of each block skipped since the last `take_reports`."""
        shards = [shard for shard in manifest.shards if shard.split == split]
        blocks = [(shard, block) for shard in shards for block in shard.blocks]
        firsts = [0, *accumulate(block.samples for _, block in blocks)]
        self.count = firsts.pop()
        self.places = [Place(*pair, first) for pair, first in zip(blocks, firsts, strict=True)]
        self.blocks_of_shard = [len(shard.blocks) for shard in shards]
        self.fields = ["latents", "labels", *(["mirrored"] if manifest.flips else [])]
        """Names of the tensors that every block has; only some encoders add those of the posterior's std."""
        self.shape = (manifest.channels, manifest.height, manifest.width)
        expected = manifest.count if split == "train" else manifest.held_out
        if self.count != expected:
            raise ValueError(
                f"{source}: the {split} shards hold {self.count} samples, the manifest says {expected}; "
                f"run precompute_latents.py again to rebuild the manifest."
            )

    def read(self, number: int) -> dict[str, Tensor]:
        """Reads all tensors of a block, and the `ids` of its samples.

        DamagedBlockError if the block differs from the manifest or cannot be read. With `on_corrupt="skip"` the samples
        of the next good block replace it, repeated or cut to the same number, so that the order keeps its length.
        """
        unreachable = 0
        for other in (*range(number, len(self.places)), *range(number)):
            if other in self.damaged:
                continue
            try:
                tensors = self.fetched(other)
            except DamagedBlockError as error:
                if self.on_corrupt == "error":
                    raise
                if isinstance(error, UnreachableError):
                    unreachable += 1
                    if unreachable == MOST_UNREACHABLE:
                        raise
                else:
                    self.damaged.add(other)
                self.reports.append((str(error).partition(";")[0], self.places[other].block.samples))
                continue
            tensors["ids"] = torch.arange(len(tensors["labels"])) + self.places[other].first
            if other != number:
                rows = torch.arange(self.places[number].block.samples) % len(tensors["labels"])
                tensors = {name: tensor[rows] for name, tensor in tensors.items()}
            return tensors
        raise ValueError(f"{self.source}: not one block can be read; see the damaged ones above.")

    def fetched(self, number: int) -> dict[str, Tensor]:
        try:
            return self.checked(number)
        except DamagedBlockError as error:
            bad_copy = not isinstance(error, UnreachableError) and self.source.forget(self.places[number].shard.file)
            if bad_copy:  # fetch it again
                return self.checked(number)
            raise

    def take_reports(self) -> list[tuple[str, int]]:
        reports, self.reports = self.reports, []
        return reports

    def checked(self, number: int) -> dict[str, Tensor]:
        shard, block, _ = place = self.places[number]
        what = f"{self.source}/{shard.file} ({place})"
        try:
            content = self.source.read(shard.file, block.offset, block.size)
        except OSError as error:
            # Another attempt does not find a missing file either.
            kind = DamagedBlockError if isinstance(error, FileNotFoundError) else UnreachableError
            raise kind(f"{unreadable(what, error)}; {REMEDY}.") from error
        if len(content) != block.size:
            raise DamagedBlockError(f"{what} ends early, {len(content)} of {block.size} bytes are there; {REMEDY}.")
        if hashlib.sha256(content).hexdigest() != block.sha256:
            raise DamagedBlockError(f"{what} is damaged: its sha256 differs from the manifest's; {REMEDY}.")
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise DamagedBlockError(f"{what} is no safetensors file: {error}; {REMEDY}.") from error
        self.check(tensors, block, what)
        return tensors

    def check(self, tensors: dict[str, Tensor], block: Block, what: str) -> None:
        """Checks names, shapes and values: the hash is right also if the writer wrote the wrong tensors."""
        for name in self.fields:
            if name not in tensors or len(tensors[name]) != block.samples:
                found = "none" if name not in tensors else len(tensors[name])
                raise DamagedBlockError(f"{what} holds {found} {name}, the manifest says {block.samples}; {REMEDY}.")
            if name != "labels" and tensors[name].shape[1:] != self.shape:
                raise DamagedBlockError(f"{what} holds {name} of shape {tuple(tensors[name].shape[1:])}; {REMEDY}.")
        for name, tensor in tensors.items():
            # The extremes carry NaN along, and are an order of magnitude quicker than isfinite in 16 bits.
            if tensor.is_floating_point() and len(tensor) and not torch.stack(tensor.aminmax()).isfinite().all():
                raise DamagedBlockError(f"{what} holds {name} that are not finite; {REMEDY}.")


class Skips:
    """Prints each block that `data.on_corrupt=skip` left out once, and counts its samples."""

    def __init__(self) -> None:
        self.said: set[str] = set()
        self.samples = 0

    def say(self, reports: list[tuple[str, int]]) -> None:
        for sentence, samples in reports:
            if sentence not in self.said:
                self.said.add(sentence)
                self.samples += samples
                print(f"skipped {samples} samples, others stand in ({self.samples} so far): {sentence}", flush=True)
