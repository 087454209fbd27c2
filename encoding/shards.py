"""Writes shards, the tars of a latent set, and their sidecars; finds the shards that are finished.

Each finished shard has a sidecar `<shard>.json` with its description and the sums of its channels.
A job does not write a shard with a valid sidecar again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from common.errors import UserError
from common.files import (
    create_file,
    hash_content,
    hash_file,
    read_object,
    rename,
    sync_path,
    write_atomically,
)
from data.manifest import Block, Shard

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """Part `index` (0, 1, …) of a job that `count` separate commands share."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Returns the part that `text`, such as 3/64, names."""
        return cls(*map(int, text.split("/")))

    def divide(self, index: int, count: int) -> Part:
        """Returns part `index` of `count` equal parts of this part."""
        return Part(self.index * count + index, self.count * count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def name_unit(self, unit: str) -> str:
        """Returns the name of what a progress line counts, such as "images of part 3/64"."""
        return unit if self.count == 1 else f"{unit} of part {self}"

    def find_range(self, length: int) -> range:
        """Returns which of `length` things belong to this part. Parts of two divisions of a job
        have nothing in common if they do not overlap as fractions, such as 0/2 and 3/4."""
        return range(self.index * length // self.count, (self.index + 1) * length // self.count)

    def select(self, items: Sequence[Item]) -> Sequence[Item]:
        """Returns the items of this part."""
        chosen = self.find_range(len(items))
        return items[chosen.start : chosen.stop]


WHOLE = Part()
"""The only part of a job that one command does."""


def read_finished(out: Path, name: str, hashed: bool = True) -> dict[str, Any] | None:
    """Returns the content of a shard's sidecar, or None if the shard or the sidecar is absent,
    incomplete or damaged. If not `hashed`, does not look at the shard."""
    try:
        sidecar = read_object(out / f"{name}.json")
        digest = sidecar.pop("sha256")
        complete = not hashed or hash_file(out / name) == sidecar["shard"]["sha256"]
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None
    return sidecar if complete and digest == hash_content(sidecar) else None


def write_sidecar(out: Path, shard: Shard, facts: Mapping[str, Any]) -> None:
    """Writes the sidecar of a finished shard. For images, `facts` has `skipped`, sentences about
    images that the shard lacks, `sums`, which is `ChannelSums.as_dict()`, and `images`, the hashes
    of the files of its samples."""
    sidecar: dict[str, Any] = {"shard": asdict(shard), "skipped": [], **facts}
    sidecar["sha256"] = hash_content(sidecar)  # a later run detects damage by it
    write_atomically(out / f"{shard.file}.json", json.dumps(sidecar) + "\n")


@contextlib.contextmanager
def explain_full_disk(out: Path, name: str) -> Iterator[None]:
    """Raises a UserError if the disk gets full while the `with` block writes the shard `name`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"out={out}: no space is left for {name} ({error.strerror}). Finished shards are "
            "kept: free some space and run the same command again; dry_run=true says how much it "
            "takes."
        ) from error


class ShardWriter:
    """Writes one shard under a temporary name; `close()` syncs it to disk and renames it.

    If `close()` never runs (after an exception or a kill), no file has the final name of the shard.
    """

    def __init__(self, file: Path, split: str, block_size: int) -> None:
        self.file = file
        self.split: Any = split
        self.block_size = block_size
        self.temporary = file.with_name(f"{file.name}.tmp")
        self.stream = create_file(self.temporary)
        self.tar = tarfile.TarFile(fileobj=self.stream, mode="w")
        self.pending: dict[str, Tensor] = {}
        self.blocks: list[Block] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Appends samples: tensors on the CPU with equal lengths along the first axis. Writes a
        block whenever `block_size` samples are pending."""
        self.pending = {
            name: torch.cat([self.pending[name], tensor]) if self.pending else tensor
            for name, tensor in tensors.items()
        }
        while len(self.pending["labels"]) >= self.block_size:
            self.write_block()

    def write_block(self) -> None:
        """Writes the first `block_size` pending samples as one safetensors member of the tar."""
        block = {name: t[: self.block_size].contiguous() for name, t in self.pending.items()}
        self.pending = {name: t[self.block_size :] for name, t in self.pending.items()}
        self.write_member(block, len(block["labels"]))

    def write_member(self, block: Mapping[str, Tensor], samples: int) -> None:
        """Writes a block of `samples` samples as the next member of the tar."""
        payload = save(dict(block))
        size = len(payload)
        member = tarfile.TarInfo(f"{self.file.stem}-{len(self.blocks):06d}.safetensors")
        member.size = size
        member.mode = 0o444
        member.uname = member.gname = "fastlatent"
        self.tar.addfile(member, io.BytesIO(payload))

        # tarfile filled the member with zeros up to a multiple of 512 bytes, and the stream now
        # stands behind these zeros. Subtract the zeros and `size` to get the offset of the member's
        # content.
        offset = self.stream.tell() - size - -size % tarfile.BLOCKSIZE
        digest = hashlib.sha256(payload).hexdigest()
        self.blocks.append(Block(offset, size, samples, digest))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the temporary file and deletes it if the `with` block raised an exception."""
        if kind is not None:
            with contextlib.suppress(OSError):  # close() fails on a full disk
                self.stream.close()
            self.temporary.unlink(missing_ok=True)

    def close(self) -> Shard:
        """Writes the pending samples, syncs the file to disk, renames it to the shard's name, and
        returns the shard's description."""
        if len(self.pending.get("labels", ())):
            self.write_block()
        self.tar.close()
        self.stream.flush()
        os.fsync(self.stream.fileno())
        size = self.stream.tell()
        self.stream.close()
        digest = hash_file(self.temporary)
        rename(self.temporary, self.file)
        sync_path(self.file.parent)
        count = sum(block.samples for block in self.blocks)
        return Shard(self.file.name, self.split, count, size, digest, self.blocks)


class ScatteredShards(contextlib.ExitStack):
    """Writes samples that come in another order than that of the shards, all of which are open at
    once. `files` maps numbers to the shards' files; the name of a file begins with the split."""

    def __init__(self, files: Mapping[int, Path], block_size: int) -> None:
        super().__init__()
        self.sums = ChannelSums()
        """Sums of the training shards."""
        self.writers: dict[int, ShardWriter] = {}
        for number, file in files.items():
            split = file.name.partition("-")[0]
            self.writers[number] = self.enter_context(ShardWriter(file, split, block_size))

    def add(self, tensors: Mapping[str, Tensor], target: Tensor) -> None:
        """Appends samples: tensors on the CPU with equal lengths n along the first axis, each
        sample to the shard whose number is in `target` (n,)."""
        for number, writer in self.writers.items():
            part = {name: tensor[target == number] for name, tensor in tensors.items()}
            writer.add(part)
            if writer.split == "train":
                self.sums.add(part)

    def finish(self) -> list[Shard]:
        """Completes the shards, and returns their descriptions."""
        return [writer.close() for writer in self.writers.values()]


def cast_tensors(
    tensors: Mapping[str, Tensor], dtype: str, samples: Sequence[str]
) -> dict[str, Tensor]:
    """Casts the latents of a batch to `dtype`, and moves them to the CPU; integers stay as they
    are. `samples` are the names of the batch's samples: if a value overflows in `dtype`, a
    UserError names the first sample with such a value."""
    block = dict(tensors)
    for name in sorted(name for name in tensors if tensors[name].is_floating_point()):
        fault = f"too large for dtype={dtype}; use dtype=bfloat16 or float32 and"
        fits = tensors[name].to(getattr(torch, dtype))
        good = fits.isfinite()
        if dtype == "uint8":
            fault = "no pixels from 0 to 255, as dtype=uint8 needs; use dtype=float16 and"
            fits = tensors[name].clamp(0.0, 255.0).to(torch.uint8)
            good = fits == tensors[name]
        bad = ~good.flatten(1).all(1)
        if bad.any():
            where = samples[int(bad.nonzero()[0])]
            raise UserError(f"{where} has {name} that are {fault} another out, or leave it out.")
        block[name] = fits.cpu()
    return block


class ChannelSums:
    """Sums latents, and their squares, per channel in fp64. If the set stores the posterior's std,
    adds std² to the squares: training draws latents from the posterior, and std² is the mean square
    of the noise in them."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds the latents of a batch. `tensors` maps `latents` and, if the set has them, `std`,
        `mirrored` and `mirrored_std` to tensors (B, C, H, W)."""
        for name, std_name in (("latents", "std"), ("mirrored", "mirrored_std")):
            if name in tensors:
                values = tensors[name].double()
                self.count += values.numel() // values.shape[1]
                self.total += values.sum((0, 2, 3))
                self.squares += values.square().sum((0, 2, 3))
                if std_name in tensors:
                    self.squares += tensors[std_name].double().square().sum((0, 2, 3))

    def as_dict(self) -> dict[str, Any]:
        total, squares = (
            v.tolist() if isinstance(v, Tensor) else [] for v in (self.total, self.squares)
        )
        return {"count": self.count, "total": total, "squares": squares}


def compute_channel_statistics(sums: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Returns (means, standard deviations), each with one value per channel. `sums` is a list with
    `ChannelSums.as_dict()` of each shard."""
    sums = [s for s in sums if s["count"]]
    count = sum(s["count"] for s in sums)
    mean, square = (
        torch.tensor([s[name] for s in sums], dtype=torch.float64).sum(0) / count
        for name in ("total", "squares")
    )
    return mean.tolist(), (square - mean.square()).clamp(min=1e-12).sqrt().tolist()
