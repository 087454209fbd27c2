"""Reads the blocks of a latent set and verifies each: length, hash, names, dtypes, shapes, labels,
finite values.

A shard is a tar whose members are blocks: safetensors files of some hundred samples
(data/shards.py). `BlockReader` reads a block by its offset in the manifest; it parses no tar and
unpickles nothing. The manifest's order numbers the samples of a split; that number is the id in a
`Batch`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from common.errors import UserError
from common.text import first_line, printable
from data.manifest import Block, Manifest, Shard
from data.source import Source, unreadable

OnCorrupt = Literal["error", "skip"]
MOST_UNREACHABLE = 3
"""After so many blocks in a row the reader gives up: the store is gone, not a block."""
REMEDY = "run precompute_latents.py again to rebuild it, or set data.on_corrupt=skip"


class DamagedBlockError(UserError):
    """A block that is not what the manifest says; one sentence names shard and samples."""


class UnreachableError(DamagedBlockError):
    """A block that no attempt could read this time."""


class Place(NamedTuple):
    """A block, its shard, and the number of its first sample in the split."""

    shard: Shard
    block: Block
    first: int

    def __str__(self) -> str:
        last = self.first + self.block.samples - 1
        return f"{self.shard.file} (samples {self.first}–{last} of {self.shard.split})"


class Skipped(NamedTuple):
    """A block that `data.on_corrupt=skip` left out."""

    place: str
    samples: int
    reason: str


class BlockReader:
    """Reads the blocks of one split by number."""

    def __init__(
        self, source: Source, manifest: Manifest, split: str, on_corrupt: OnCorrupt = "error"
    ) -> None:
        if on_corrupt not in ("error", "skip"):
            raise UserError(f"data.on_corrupt={on_corrupt} is unknown; choose error or skip.")
        self.source = source
        self.on_corrupt = on_corrupt
        self.damaged: dict[int, str] = {}
        """Number of a block that the reader never tries again -> the fault it found."""
        self.reports: list[Skipped] = []
        """The blocks skipped since the last `take_reports`."""
        shards = [shard for shard in manifest.shards if shard.split == split]
        blocks = [(shard, block) for shard in shards for block in shard.blocks]
        firsts = [0, *accumulate(block.samples for _, block in blocks)]
        self.count = firsts.pop()
        self.places = [Place(*pair, first) for pair, first in zip(blocks, firsts, strict=True)]
        self.blocks_of_shard = [len(shard.blocks) for shard in shards]
        names = ("latents", "mirrored") if manifest.flips else ("latents",)
        self.names = {"labels", *names}
        """Of the tensors in every block."""
        self.names_of_std = {"std", "mirrored_std"} if manifest.flips else {"std"}
        """Of those that the blocks of a variational encoder have beside them."""
        self.with_std: bool | None = None if manifest.kind == "mean_std" else False
        """Whether the blocks of this set have them; None until the first good block shows it."""
        self.shape = (manifest.channels, manifest.height, manifest.width)
        self.dtype = getattr(torch, manifest.dtype)
        self.classes = len(manifest.class_names)

    def read(self, number: int) -> dict[str, Tensor]:
        """Reads all tensors of a block, and the `ids` of its samples.

        DamagedBlockError if the block differs from the manifest or cannot be read. With
        `on_corrupt="skip"` the samples of the next good block replace it, repeated or cut to the
        same number, so that the order keeps its length.
        """
        unreachable = 0
        reason = ""
        for other in (*range(number, len(self.places)), *range(number)):
            if other in self.damaged:
                continue
            try:
                tensors = self.fetched(other)
            except DamagedBlockError as error:
                if self.on_corrupt == "error":
                    raise
                reason = str(error).partition(";")[0]
                if isinstance(error, UnreachableError):
                    unreachable += 1
                    if unreachable == MOST_UNREACHABLE:
                        raise
                else:
                    self.damaged[other] = reason
                place = self.places[other]
                self.reports.append(Skipped(str(place), place.block.samples, reason))
                continue
            tensors["ids"] = torch.arange(len(tensors["labels"])) + self.places[other].first
            if other != number:
                rows = torch.arange(self.places[number].block.samples) % len(tensors["labels"])
                tensors = {name: tensor[rows] for name, tensor in tensors.items()}
            return tensors
        reason = next(iter(self.damaged.values()), reason)
        raise UserError(
            f"{self.source}: not one block can be read ({reason}); run precompute_latents.py again."
        )

    def fetched(self, number: int) -> dict[str, Tensor]:
        try:
            return self.checked(number)
        except DamagedBlockError as error:
            bad_copy = not isinstance(error, UnreachableError) and self.source.forget(
                self.places[number].shard.file
            )
            if bad_copy:  # fetch it again
                return self.checked(number)
            raise

    def take_reports(self) -> list[Skipped]:
        reports = self.reports
        self.reports = []
        return reports

    def checked(self, number: int) -> dict[str, Tensor]:
        """Reads a block; DamagedBlockError if it is not what the manifest says."""
        shard, block, _ = place = self.places[number]
        what = f"{self.source}/{place}"
        try:
            content = self.source.read(shard.file, block.offset, block.size)
        except OSError as error:
            # Another attempt does not find a missing file either.
            kind = DamagedBlockError if isinstance(error, FileNotFoundError) else UnreachableError
            raise kind(f"{unreadable(what, error)}; {REMEDY}.") from error
        if len(content) != block.size:
            raise DamagedBlockError(
                f"{what} ends early, {len(content)} of {block.size} bytes are there; {REMEDY}."
            )
        if hashlib.sha256(content).hexdigest() != block.sha256:
            raise DamagedBlockError(
                f"{what} is damaged: its sha256 differs from the manifest's; {REMEDY}."
            )
        try:
            tensors = load(content)
        except Exception as error:  # of safetensors, and of torch for a dtype that it does not know
            raise DamagedBlockError(
                f"{what} is no safetensors file: {first_line(error)}; {REMEDY}."
            ) from error
        if fault := self.fault(tensors, block.samples):
            raise DamagedBlockError(f"{what} {printable(fault)}; {REMEDY}.")
        return tensors

    def fault(self, tensors: dict[str, Tensor], samples: int) -> str | None:
        """Why a block does not fit the manifest, as the end of a sentence: a right hash may be of
        wrong tensors."""
        with_std = (
            bool(self.names_of_std & tensors.keys()) if self.with_std is None else self.with_std
        )
        expected = self.names | (self.names_of_std if with_std else set())
        if tensors.keys() != expected:
            return (
                f"holds {', '.join(sorted(tensors))}, and a block of this set "
                f"{', '.join(sorted(expected))}"
            )
        for name, tensor in tensors.items():
            shape = (samples,) if name == "labels" else (samples, *self.shape)
            dtype = torch.int64 if name == "labels" else self.dtype
            if tensor.shape != shape or tensor.dtype != dtype:
                return (
                    f"holds {name} {kind(tensor.shape, tensor.dtype)}, the manifest says "
                    f"{kind(shape, dtype)}"
                )
            # an order of magnitude quicker than isfinite
            low, high = (extreme.item() for extreme in tensor.aminmax())
            if name == "labels" and not 0 <= low <= high < max(1, self.classes):
                return f"holds labels from {low} to {high}, but there are {self.classes} classes"
            if not math.isfinite(low) or not math.isfinite(high):
                return f"holds {name} that are not finite"
            if name in self.names_of_std and low < 0.0:
                return f"holds {name} below 0"
        self.with_std = with_std
        return None


def kind(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def add_skipped(found: dict[str, int], reports: list[Skipped]) -> None:
    """Adds to `found`, place -> samples, the blocks that `data.on_corrupt=skip` left out, and
    prints each new one."""
    for place, samples, reason in reports:
        if place not in found:
            found[place] = samples
            print(
                f"skipped {samples} samples, others stand in ({sum(found.values())} so far): "
                f"{reason}",
                flush=True,
            )
