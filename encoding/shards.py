"""Writes the shards of a latent set: WebDataset tars of blocks (data/manifest.py says what they
hold).

`mtime=0` makes equal content equal bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from common.files import file_sha256, rename, sync_folder
from data.manifest import Block, Shard


class ShardWriter:
    """Writes one shard to a temporary name; `close()` syncs it to disk and renames it.

    Without `close()` (an exception, a kill) no file is there that a reader would take for a shard.
    """

    def __init__(self, file: Path, split: str, block_size: int) -> None:
        self.file = file
        self.split: Any = split
        self.block_size = block_size
        self.temporary = file.with_name(f"{file.name}.tmp")
        self.stream = self.temporary.open("wb")
        self.tar = tarfile.TarFile(fileobj=self.stream, mode="w")
        self.pending: dict[str, Tensor] = {}
        self.blocks: list[Block] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Appends samples: tensors of one length n along their first axis, on the CPU."""
        self.pending = {
            name: torch.cat([self.pending[name], tensor]) if self.pending else tensor
            for name, tensor in tensors.items()
        }
        while len(self.pending["labels"]) >= self.block_size:
            self.write_block()

    def write_block(self) -> None:
        block = {name: t[: self.block_size].contiguous() for name, t in self.pending.items()}
        self.pending = {name: t[self.block_size :] for name, t in self.pending.items()}
        payload = save(block)
        size = len(payload)
        member = tarfile.TarInfo(f"{self.file.stem}-{len(self.blocks):06d}.safetensors")
        member.size = size
        member.mode = 0o444
        member.uname = member.gname = "fastlatent"
        self.tar.addfile(member, io.BytesIO(payload))

        # The tar goes on at a multiple of 512 bytes.
        offset = self.stream.tell() - size - -size % tarfile.BLOCKSIZE
        digest = hashlib.sha256(payload).hexdigest()
        self.blocks.append(Block(offset, size, len(block["labels"]), digest))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Deletes the unfinished file after an exception."""
        if kind is not None:
            with contextlib.suppress(OSError):  # a full disk raises once more
                self.stream.close()
            self.temporary.unlink(missing_ok=True)

    def close(self) -> Shard:
        """Finishes the file and describes it."""
        if len(self.pending.get("labels", ())):
            self.write_block()
        self.tar.close()
        self.stream.flush()
        os.fsync(self.stream.fileno())
        size = self.stream.tell()
        self.stream.close()
        digest = file_sha256(self.temporary)
        rename(self.temporary, self.file)
        sync_folder(self.file.parent)
        count = sum(block.samples for block in self.blocks)
        return Shard(self.file.name, self.split, count, size, digest, self.blocks)
