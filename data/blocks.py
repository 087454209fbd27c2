"""Reads the blocks of a latent set, which are safetensors files inside tar files, and verifies
each: length, hash, names, dtypes, shapes, labels, finite values.

`BlockReader` reads a block by its offset in the manifest; it parses no tar and unpickles nothing.
The samples of a split are numbered in the manifest's order; a sample's number is its id in a
`Batch`.

Letters: n samples of a block, B samples of a batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from common.condition import EncodedText
from common.errors import UserError
from common.text import escape_unprintable, shorten_error
from common.workers import Prefetcher, Readers
from data.caption_table import CaptionTable
from data.loader import LatentTensors, choose_captions
from data.manifest import Block, Manifest, Normalisation, Shard, make_spec, read_manifest
from data.rows import Rows, join_rows, split_rows
from data.source import Source, describe_failed_read, open_source
from data.spec import LatentSpec

OnCorrupt = Literal["error", "skip"]
MAX_UNREACHABLE_BLOCKS = 3
"""Number of unreachable blocks at which a call of `BlockReader.read` gives up, because the whole
store is then probably unreachable."""


class DamagedBlockError(UserError):
    """A block's content differs from the manifest; the message names the block's shard and
    samples."""


class UnreachableError(DamagedBlockError):
    """All attempts to read a block failed; a later attempt may succeed."""


class Place(NamedTuple):
    """Location of a block: its shard, its entry in the manifest, and the number of its first sample
    within the split."""

    shard: Shard
    block: Block
    first: int

    def __str__(self) -> str:
        last = self.first + self.block.samples - 1
        return f"{self.shard.file} (samples {self.first}–{last} of {self.shard.split})"


class SkippedBlock(NamedTuple):
    """Report on a damaged block that the reader replaced under `data.on_corrupt=skip`: the block's
    place, its number of samples, and what is wrong with it."""

    place: str
    samples: int
    reason: str


class BlockReader:
    """Reads the blocks of one split. A block's number is its index among the blocks of the
    split."""

    remedy = "run precompute_latents.py again to rebuild it, or set data.on_corrupt=skip"

    def __init__(
        self, source: Source, manifest: Manifest, split: str, on_corrupt: OnCorrupt = "error"
    ) -> None:
        self.source = source
        self.manifest = manifest
        self.on_corrupt = on_corrupt
        self.damaged: dict[int, str] = {}
        """Number of a damaged block -> what is wrong with it. The reader does not read these blocks
        again."""
        self.captions: CaptionTable | None = None
        """Table of the set's captions, if each sample gets its caption where it is read: on the
        CPU."""
        self.reports: list[SkippedBlock] = []
        """Reports on the blocks that were skipped since the last call of `take_reports`."""

        self.places: list[Place] = []
        self.count = 0
        shards = [shard for shard in manifest.shards if shard.split == split]
        for shard in shards:
            for block in shard.blocks:
                self.places.append(Place(shard, block, self.count))
                self.count += block.samples
        self.blocks_of_shard = [len(shard.blocks) for shard in shards]
        self.counts = [place.block.samples for place in self.places]

        self.shape = (manifest.channels, manifest.height, manifest.width)
        names = {"latents", "labels"}
        names |= {"mirrored"} if manifest.flips else set()
        names |= {"captions"} if manifest.text else set()
        self.allowed_names = [names]
        """Sets of tensor names that a block may have: without or with the std of a variational
        encoder. After the first good block only the names of that block are allowed."""
        if manifest.kind == "mean_std":
            stds = {"std", "mirrored_std"} if manifest.flips else {"std"}
            self.allowed_names.append(names | stds)

    def read(self, number: int) -> dict[str, Tensor]:
        """Returns name -> tensor of a block, and under "ids" the numbers of its samples in the
        split.

        Raises DamagedBlockError if the block differs from the manifest or cannot be read. With
        `on_corrupt="skip"` the method instead returns samples of the next good block, repeated or
        cut to the number of the damaged block's samples, so that later samples keep their
        positions.
        """
        unreachable = 0
        reason = ""
        for candidate in (*range(number, len(self.places)), *range(number)):
            if candidate in self.damaged:
                continue
            try:
                tensors = self.read_verified(candidate)
            except DamagedBlockError as error:
                unreachable += isinstance(error, UnreachableError)
                if self.on_corrupt == "error" or unreachable == MAX_UNREACHABLE_BLOCKS:
                    raise
                reason = str(error).partition(";")[0]
                if not isinstance(error, UnreachableError):
                    self.damaged[candidate] = reason
                place = self.places[candidate]
                self.reports.append(SkippedBlock(str(place), place.block.samples, reason))
                continue

            samples = len(tensors["labels"])
            tensors["ids"] = torch.arange(samples) + self.places[candidate].first
            if candidate != number:
                rows = torch.arange(self.places[number].block.samples) % samples
                tensors = {name: tensor[rows] for name, tensor in tensors.items()}
            return tensors
        reason = next(iter(self.damaged.values()), reason)
        raise UserError(
            f"{self.source}: not one block can be read ({reason}); run precompute_latents.py again."
        )

    @cached_property
    def sample_template(self) -> dict[str, Tensor]:
        """Dict from name to tensor of one sample, each tensor of shape (1, …); all samples of the
        set have these names, dtypes and shapes."""
        return {name: tensor[:1].clone() for name, tensor in sorted(self.read(0).items())}

    @property
    def row_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.sample_template.values())

    @property
    def joined_bytes(self) -> int:
        """Bytes of a sample with its caption, if `append_captions` appends one."""
        return self.row_bytes + (self.captions.row_bytes if self.captions else 0)

    def read_rows(self, number: int) -> Rows:
        """Reads a block as raw bytes, with all tensors of a sample in one row. A batch of rows then
        needs one slice, one copy and one file descriptor, instead of one for each tensor name."""
        tensors = self.read(number)
        return join_rows([tensors[name] for name in self.sample_template])

    def append_captions(self, rows: Rows, seed: int, epoch: Tensor | int) -> Rows:
        """Returns rows of samples with the bytes of one caption at the end of each, which
        `choose_captions` chooses; without a table of captions returns `rows`. All tensors are on
        the CPU."""
        if self.captions is None:
            return rows
        columns = split_rows(rows, self.sample_template, ("ids", "captions"))
        numbers = choose_captions(columns["captions"], columns["ids"], seed, epoch)
        return torch.cat((rows, join_rows(list(self.captions.columns.select(numbers)))), dim=1)

    def unpack_rows(self, rows: Rows) -> tuple[LatentTensors, EncodedText | None]:
        """Converts rows of bytes, as `read_rows` returns them, to samples; with a table of captions
        also converts the captions that `append_captions` appended. All tensors are on the device of
        `rows`."""
        text = self.captions and self.captions.unpack_rows(rows[:, self.row_bytes :])
        return LatentTensors(**split_rows(rows, self.sample_template)), text

    def read_in_order(
        self, size: int, device: torch.device, skipped: dict[str, int]
    ) -> Iterator[LatentTensors]:
        """Yields all samples of the split once, in order and on `device`, `size` at a time; the
        last part may be smaller. A thread reads one block ahead. At the end the method adds the
        blocks that it skipped to `skipped` (see `add_skipped`). Raises the errors of `read`."""
        readers = Readers(1, "held-out")
        try:
            content = map(self.read_rows, range(len(self.places)))
            for rows in cut_rows(Prefetcher(content, readers), size):
                yield self.unpack_rows(rows.to(device))[0]
        finally:
            readers.close()
            add_skipped(skipped, self.take_reports())

    def take_reports(self) -> list[SkippedBlock]:
        reports = self.reports
        self.reports = []
        return reports

    def read_verified(self, number: int, retry: bool = True) -> dict[str, Tensor]:
        """Reads a block and checks it against the manifest; raises DamagedBlockError if the block
        differs, UnreachableError if it cannot be read now.

        If the block is damaged and the source can drop its local copy, reads the block once more.
        """
        place = self.places[number]
        shard = place.shard
        block = place.block
        name = f"{self.source}/{place}"
        try:
            content = self.source.read(shard.file, block.offset, block.size)
        except OSError as error:
            # Raise UnreachableError if a later attempt may succeed; a missing file will stay
            # missing.
            missing = isinstance(error, FileNotFoundError)
            error_type = DamagedBlockError if missing else UnreachableError
            raise error_type(f"{describe_failed_read(name, error)}; {self.remedy}.") from error
        try:
            return self.parse_block(content, block)
        except DamagedBlockError as error:
            if retry and self.source.forget(shard.file):
                return self.read_verified(number, retry=False)
            raise DamagedBlockError(f"{name} {error}; {self.remedy}.") from error

    def parse_block(self, content: bytes, block: Block) -> dict[str, Tensor]:
        """Parses and checks the bytes of a block; returns name -> tensor. Raises DamagedBlockError,
        with the end of a sentence as message, if the bytes differ from the manifest. Checks the
        tensors even if the hash is right, because the program that wrote the set may have hashed
        wrong tensors."""
        if len(content) != block.size:
            raise DamagedBlockError(f"ends early, {len(content)} of {block.size} bytes are there")
        if hashlib.sha256(content).hexdigest() != block.sha256:
            raise DamagedBlockError("is damaged: its sha256 differs from the manifest's")

        # Catch all exceptions: safetensors raises its own types of exceptions, and PyTorch raises
        # other types for an unknown dtype.
        try:
            tensors = load(content)
        except Exception as error:
            raise DamagedBlockError(f"is no safetensors file: {shorten_error(error)}") from error

        if tensors.keys() not in self.allowed_names:
            expected = " or ".join(", ".join(sorted(names)) for names in self.allowed_names)
            raise DamagedBlockError(
                f"holds {escape_unprintable(', '.join(sorted(tensors)))}, but a block of this set "
                f"holds {expected}"
            )
        for name, tensor in tensors.items():
            self.check_tensor(name, tensor, block.samples)
        self.allowed_names = [set(tensors)]
        return tensors

    def check_tensor(self, name: str, tensor: Tensor, samples: int) -> None:
        """Raises DamagedBlockError if a tensor's dtype or shape is not the manifest's, or if it has
        values that are not finite or out of range, such as labels that are no class."""
        actual = describe_tensor(tensor.shape, tensor.dtype)
        expected = describe_tensor((samples, *self.shape), self.manifest.torch_dtype)
        text = self.manifest.text
        if name == "labels":
            expected = describe_tensor((samples,), torch.int64)
        elif name == "captions" and text is not None:
            expected = describe_tensor((samples, text.per_image), torch.int32)
        if actual != expected:
            raise DamagedBlockError(f"holds {name} {actual}, the manifest says {expected}")

        # Find values that are not finite by aminmax, which is ten times as fast as isfinite: if a
        # value is NaN or infinite, so is the minimum or the maximum.
        low, high = (extreme.item() for extreme in tensor.aminmax())
        classes = len(self.manifest.class_names)
        if name == "labels" and not 0 <= low <= high < max(1, classes):
            raise DamagedBlockError(
                f"holds labels from {low} to {high}, but there are {classes} classes"
            )
        if name == "captions" and text is not None and not -1 <= low <= high < text.count:
            raise DamagedBlockError(
                f"holds captions from {low} to {high}, but there are {text.count} captions"
            )
        if not math.isfinite(low) or not math.isfinite(high):
            raise DamagedBlockError(f"holds {name} that are not finite")
        if name.endswith("std") and low < 0.0:
            raise DamagedBlockError(f"holds {name} below 0")


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns dtype and shape as text, e.g. "float16[64, 4, 32, 32]"."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


REMOTE_SETTINGS = ("cache", "timeout", "retries")
"""Configuration keys of a loader that `open_set` passes on to `open_source`."""


def open_set(
    group: str,
    path: str | None = None,
    normalisation: Normalisation = "channel",
    encoder: str | None = None,
    latent_scale: float | None = None,
    on_corrupt: OnCorrupt = "error",
    **settings: Any,
) -> tuple[LatentSpec, BlockReader, BlockReader]:
    """Opens the latent set at `path`; returns its spec, and the block readers of the training split
    and of the held-out split. `group` is the value of the key `data`, which error messages name.

    Raises UserError if the set was made with another encoder than `encoder` or another scale than
    `latent_scale`; None allows any. `settings` may hold all other configuration keys of the loader;
    only those in `REMOTE_SETTINGS` have an effect here.
    """
    if path is None:
        raise UserError(
            f"data={group} needs data.path=<folder of latents>; make one with "
            f"`python precompute_latents.py source=<images> out=<folder>`, or use data=digits."
        )
    remote = {name: value for name, value in settings.items() if name in REMOTE_SETTINGS}
    source = open_source(path, **remote)
    manifest = read_manifest(source)

    # Refuse a set made with another encoder or scale than the configuration expects.
    made_with = str(manifest.encoder.get("path", manifest.encoder.get("_target_")))
    if encoder is not None and made_with not in (
        encoder,
        str(Path(encoder).expanduser().resolve()),
    ):
        raise UserError(
            f"data.encoder={encoder}, but {source} was encoded with {made_with}; change one of "
            "them."
        )
    if latent_scale is not None and latent_scale != manifest.scaling_factor:
        raise UserError(
            f"data.latent_scale={latent_scale}, but the encoder of {source} has "
            f"{manifest.scaling_factor}; change one of them."
        )
    train, held_out = (
        BlockReader(source, manifest, split, on_corrupt) for split in ("train", "held_out")
    )
    return make_spec(manifest, source, normalisation), train, held_out


def add_skipped(skipped: dict[str, int], reports: list[SkippedBlock]) -> None:
    """Adds reports on skipped blocks to `skipped` (place of a block -> its number of samples), and
    prints a line for each block that is not yet in `skipped`."""
    for place, samples, reason in reports:
        if place not in skipped:
            skipped[place] = samples
            print(
                f"skipped {samples} samples, others replace them ({sum(skipped.values())} so far): "
                f"{reason}",
                flush=True,
            )


def cut_rows(blocks: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """Yields the rows of all blocks, in order, in tensors of `size` rows; the last tensor may have
    fewer rows."""
    remainder: list[Tensor] = []
    for rows in blocks:
        *whole, last = torch.cat([*remainder, rows]).split(size)
        remainder = [last]
        yield from whole
    yield from remainder
