"""Shards: WebDataset tars whose members are blocks of samples, each block one safetensors file.

A block holds `latents` (n, C, H, W) and `labels` (n,), and where the set has them `std`, `mirrored`, `mirrored_std`.
Blocks, because reading one member a sample costs 26 times as much; `mtime=0`, so that equal content is equal bytes.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from data.manifest import Shard, sync_folder

SUFFIX = "safetensors"


class ShardWriter:
    """Writes one shard under a temporary name; `close()` syncs it to disk and gives it its name.

    Left without `close()` (an exception, a kill) it leaves no file that a reader would take for a shard.
    """

    def __init__(self, file: Path, split: str, block_size: int) -> None:
        from webdataset.writer import TarWriter

        self.file, self.split, self.block_size = file, split, block_size
        self.temporary = file.with_name(f"{file.name}.tmp")
        self.stream = self.temporary.open("wb")
        self.tar = TarWriter(self.stream, encoder=False, mtime=0, user="fastlatent", group="fastlatent")
        self.pending: list[dict[str, Tensor]] = []
        self.block_counts: list[int] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Appends samples: tensors of one length n along their first axis, on the CPU."""
        self.pending.append(dict(tensors))
        while sum(len(part["labels"]) for part in self.pending) >= self.block_size:
            self.write_block(self.block_size)

    def write_block(self, size: int) -> None:
        joined = {name: torch.cat([part[name] for part in self.pending]) for name in self.pending[0]}
        block = {name: tensor[:size].contiguous() for name, tensor in joined.items()}
        rest = {name: tensor[size:] for name, tensor in joined.items()}
        self.tar.write({"__key__": f"{self.file.stem}-{len(self.block_counts):06d}", SUFFIX: save(block)})
        self.block_counts.append(len(block["labels"]))
        self.pending = [rest] if len(rest["labels"]) else []

    def close(self) -> Shard:
        """Finishes the file and describes it."""
        if self.pending:
            self.write_block(self.block_size)
        self.tar.close()
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        digest = file_sha256(self.temporary)
        with tarfile.open(self.temporary) as tar:
            blocks = [[m.offset_data, m.size, n] for m, n in zip(tar, self.block_counts, strict=True)]
        size = self.temporary.stat().st_size
        self.temporary.replace(self.file)
        sync_folder(self.file.parent)
        return Shard(self.file.name, self.split, sum(self.block_counts), size, digest, blocks)  # pyright: ignore[reportArgumentType]


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_shard(folder: Path, shard: Shard) -> dict[str, Tensor]:
    """All samples of a shard that has been verified against its manifest entry; ValueError if it does not match."""
    file = folder / shard.file
    if not file.is_file():
        raise ValueError(f"{file} is missing ({shard.count} samples); run precompute_latents.py again to rebuild it.")
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise ValueError(
            f"{file} is damaged: its sha256 differs from the manifest's ({shard.count} samples); "
            f"delete it and run precompute_latents.py again."
        )
    blocks = [load(content[offset : offset + size]) for offset, size, _ in shard.blocks]
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
