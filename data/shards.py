"""Writes shards: WebDataset tars whose members are blocks of samples, each block one safetensors
file.

A block holds `latents` (n, C, H, W) and `labels` (n,), and where the set has them `std`,
`mirrored`, `mirrored_std`. Reading a member per sample instead of blocks takes 26 times as long.
`mtime=0` makes equal content equal bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from common.files import file_sha256, rename, sync_folder
from data.manifest import Block, Shard

SUFFIX = "safetensors"


class ShardWriter:
    """Writes one shard to a temporary name; `close()` syncs it to disk and renames it.

    Without `close()` (an exception, a kill) no file is there that a reader would take for a shard.
    """

    def __init__(self, file: Path, split: str, block_size: int) -> None:
        os.environ.setdefault("WDS_SECURE", "1")  # before the import: no pickles, no pipes
        from webdataset.writer import TarWriter

        self.file = file
        self.split = split
        self.block_size = block_size
        self.temporary = file.with_name(f"{file.name}.tmp")
        self.stream = self.temporary.open("wb")
        self.tar = TarWriter(
            self.stream, encoder=False, mtime=0, user="fastlatent", group="fastlatent"
        )
        self.pending: list[dict[str, Tensor]] = []
        self.written: list[tuple[int, str]] = []
        """Samples and hash of each block."""

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Appends samples: tensors of one length n along their first axis, on the CPU."""
        self.pending.append(dict(tensors))
        while sum(len(added["labels"]) for added in self.pending) >= self.block_size:
            self.write_block(self.block_size)

    def write_block(self, size: int) -> None:
        joined = {
            name: torch.cat([added[name] for added in self.pending]) for name in self.pending[0]
        }
        block = {name: tensor[:size].contiguous() for name, tensor in joined.items()}
        rest = {name: tensor[size:] for name, tensor in joined.items()}
        payload = save(block)
        self.tar.write({"__key__": f"{self.file.stem}-{len(self.written):06d}", SUFFIX: payload})
        self.written.append((len(block["labels"]), hashlib.sha256(payload).hexdigest()))
        self.pending = [rest] if len(rest["labels"]) else []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Deletes the unfinished file after an exception."""
        if kind is None:
            return
        for open_ in (self.tar, self.stream):
            with contextlib.suppress(OSError):  # a full disk raises once more
                open_.close()
        self.temporary.unlink(missing_ok=True)

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
            blocks = [
                Block(m.offset_data, m.size, *of) for m, of in zip(tar, self.written, strict=True)
            ]
        size = self.temporary.stat().st_size
        rename(self.temporary, self.file)
        sync_folder(self.file.parent)
        return Shard(
            self.file.name,
            self.split,  # pyright: ignore[reportArgumentType]
            sum(count for count, _ in self.written),
            size,
            digest,
            blocks,
        )
