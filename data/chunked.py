"""A latent set that does not fit into the device's memory: a chunk of it lies there while the next
one arrives.

Each epoch permutes the blocks of the training split and cuts them into *chunks* of at most
`chunk_size` samples; inside a chunk all samples are permuted. Position p of the epoch has the p-th
sample of that sequence, a pure function of (seed, epoch, chunk_size). The device has two buffers:
batches come from one, while a thread fills the other through pinned memory, on a CUDA stream of its
own.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from data.blocks import BlockReader, add_skipped
from data.loader import BaseLoader, Batch, LatentSpec, LatentTensors, LoaderArgs, sampled, seeded
from data.read_ahead import Readers, held_out_batches

PINNED = 2
"""Blocks in pinned memory: one on its way to the device, one being read."""


class Chunk(NamedTuple):
    """Blocks that lie on the device together."""

    epoch: int
    number: int
    blocks: list[int]
    first: int
    """Position of its first sample in the epoch."""
    size: int


class ChunkOrder:
    """The chunks of each epoch. `counts` are the samples of each block."""

    def __init__(self, counts: list[int], seed: int, chunk_size: int) -> None:
        if chunk_size < max(counts):
            raise UserError(
                f"a window of {chunk_size} samples holds not even one block of {max(counts)}; "
                "raise data.device_memory_gib, or make the set with a smaller block_size."
            )
        self.counts = counts
        self.seed = seed
        self.chunk_size = chunk_size
        self.count = sum(counts)
        self.cache: dict[int, list[Chunk]] = {}

    def chunks(self, epoch: int) -> list[Chunk]:
        if epoch not in self.cache:
            chunks: list[Chunk] = []
            blocks: list[int] = []
            first = size = 0
            for block in torch.randperm(
                len(self.counts), generator=seeded(self.seed, epoch)
            ).tolist():
                if size + self.counts[block] > self.chunk_size:
                    chunks.append(Chunk(epoch, len(chunks), blocks, first, size))
                    blocks = []
                    first = first + size
                    size = 0
                blocks.append(block)
                size += self.counts[block]
            chunks.append(Chunk(epoch, len(chunks), blocks, first, size))
            self.cache = {e: found for e, found in self.cache.items() if e >= epoch - 1} | {
                epoch: chunks
            }
        return self.cache[epoch]

    def locate(self, position: int) -> tuple[Chunk, int]:
        """The chunk of a position, counted over all epochs, and the offset in it."""
        epoch, p = divmod(position, self.count)
        chunks = self.chunks(epoch)
        chunk = chunks[bisect_right([c.first for c in chunks], p) - 1]
        return chunk, p - chunk.first

    def after(self, chunk: Chunk) -> Chunk:
        chunks = self.chunks(chunk.epoch)
        return (
            chunks[chunk.number + 1]
            if chunk.number + 1 < len(chunks)
            else self.chunks(chunk.epoch + 1)[0]
        )

    def permutation(self, chunk: Chunk) -> Tensor:
        return torch.randperm(chunk.size, generator=seeded(self.seed, chunk.epoch, chunk.number))


class Buffer:
    """Device memory for one chunk."""

    def __init__(self, chunk_size: int, like: dict[str, Tensor], device: torch.device) -> None:
        self.tensors = {
            name: t.new_empty((chunk_size, *t.shape[1:]), device=device) for name, t in like.items()
        }
        self.order = torch.empty(0, dtype=torch.long)
        self.chunk: Chunk | None = None
        self.filled: Future[Any] | None = None
        """The thread's work, until a batch first uses the chunk; its result is the CUDA event of
        the last copy."""


class ChunkedLatents(BaseLoader):
    """A `LatentLoader` with `chunk_size` samples on the device, and room for as many that come
    next."""

    def __init__(
        self,
        spec: LatentSpec,
        train: BlockReader,
        held_out: BlockReader,
        chunk_size: int,
        args: LoaderArgs,
    ) -> None:
        super().__init__(spec, args)
        self.blocks = train
        self.held_out_blocks = held_out
        self.held_out_count = held_out.count
        self.copies = torch.cuda.Stream(args.device) if args.device.type == "cuda" else None
        self.readers = Readers(1, "chunk")
        self.stop = weakref.finalize(self, end_copies, self.readers, self.copies)
        self.buffers: list[Buffer] = []
        self.pinned: list[tuple[dict[str, Tensor], Any]] = []
        self.allocate(chunk_size)

    def allocate(self, chunk_size: int) -> None:
        """Makes two buffers for chunks of at most `chunk_size` samples, in place of those there
        were."""
        for buffer in self.buffers:
            buffer.chunk = None  # the thread stops filling it at the next block
        self.readers.submit(lambda: None).result()
        if self.copies is not None:
            self.copies.synchronize()
        # frees their memory before the new ones take theirs
        self.buffers = []
        self.pinned = []
        counts = [place.block.samples for place in self.blocks.places]
        self.order = ChunkOrder(counts, self.seed, chunk_size)
        like = self.blocks.read(0)
        self.buffers = [Buffer(chunk_size, like, self.device) for _ in range(2)]
        if self.copies is not None:
            largest = max(counts)
            for _ in range(PINNED):
                block = {
                    name: t.new_empty((largest, *t.shape[1:]), pin_memory=True)
                    for name, t in like.items()
                }
                self.pinned.append((block, torch.cuda.Event()))

    def batch_at(self, start: int) -> Batch:
        position = torch.arange(start, start + self.batch_size, device=self.device)
        found = []
        at = start
        left = self.batch_size
        while left:
            chunk, offset = self.order.locate(at)
            buffer = self.buffer_with(chunk)
            rows = buffer.order[offset : offset + left]
            found.append(
                {name: tensor.index_select(0, rows) for name, tensor in buffer.tensors.items()}
            )
            at = at + len(rows)
            left = left - len(rows)
        tensors = (
            {name: torch.cat([f[name] for f in found]) for name in found[0]}
            if found[1:]
            else found[0]
        )
        ids = tensors.pop("ids")
        raw = sampled(LatentTensors(**tensors), self.seed, position)
        return Batch(self.normalise(raw), tensors["labels"], ids, position)

    def buffer_with(self, chunk: Chunk) -> Buffer:
        """Waits for the buffer that holds `chunk`, and lets the thread fill the other one with the
        chunk after it."""
        buffer = self.assign(chunk, keep=None)
        if buffer.filled is not None:
            copied = buffer.filled.result()  # raises what the thread raised
            buffer.filled = None
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)
            add_skipped(self.skipped, self.blocks.take_reports())
        self.assign(self.order.after(chunk), keep=buffer)
        return buffer

    def assign(self, chunk: Chunk, keep: Buffer | None) -> Buffer:
        """Finds the buffer of `chunk`; if there is none, the thread starts to fill one, but not
        `keep`."""
        for buffer in self.buffers:
            if buffer.chunk == chunk:
                return buffer
        buffer = self.buffers[0] if keep is not self.buffers[0] else self.buffers[1]
        buffer.chunk = chunk
        used = (
            None if self.copies is None else torch.cuda.current_stream(self.device).record_event()
        )
        buffer.filled = self.readers.submit(self.fill, buffer, chunk, used)
        return buffer

    def fill(self, buffer: Buffer, chunk: Chunk, used: Any) -> Any:
        """Copies the blocks of `chunk` into `buffer` after the event `used`; returns the event of
        the last copy."""
        row = 0
        for i, number in enumerate(chunk.blocks):
            if buffer.chunk != chunk or self.readers.closed.is_set():
                return None  # the loader wants another chunk here by now, or nothing more
            tensors = self.blocks.read(number)
            rows = len(tensors["ids"])
            if self.copies is None:
                for name, tensor in tensors.items():
                    buffer.tensors[name][row : row + rows].copy_(tensor)
            else:
                pinned, copied = self.pinned[i % PINNED]
                copied.synchronize()  # the earlier copy out of this memory has ended
                with torch.cuda.stream(self.copies):
                    if i == 0:
                        self.copies.wait_event(used)
                    for name, tensor in tensors.items():
                        pinned[name][:rows].copy_(tensor)
                        buffer.tensors[name][row : row + rows].copy_(
                            pinned[name][:rows], non_blocking=True
                        )
                    copied.record(self.copies)
            row += rows
        buffer.order = self.order.permutation(chunk)
        if self.copies is None:
            return None
        with torch.cuda.stream(self.copies):
            buffer.order = buffer.order.pin_memory().to(self.device, non_blocking=True)
            return self.copies.record_event()

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return held_out_batches(
            self.held_out_blocks, batch_size, self.device, self.normalise, self.skipped
        )

    def state_dict(self) -> dict[str, int]:
        # the key of the first version's checkpoints
        return super().state_dict() | {"window": self.order.chunk_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues with the chunk size that the run began with, because the order of samples
        depends on it."""
        super().load_state_dict(state)
        if state["window"] != self.order.chunk_size:
            self.allocate(state["window"])


def end_copies(readers: Readers, copies: torch.cuda.Stream | None) -> None:
    """Ends the thread that fills buffers, and what it has queued; `weakref.finalize` calls this
    when the process ends, too, for a copy that outlives the CUDA context ends the process with an
    error."""
    readers.close()
    readers.join()
    if copies is not None:
        copies.synchronize()
