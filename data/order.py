"""Orders in which loaders read the samples of a set, as pure functions of (seed, epoch, position).

A *block* is a safetensors member of a shard (data/blocks.py).

- `EpochOrder` permutes all samples of a set that is on the device as a whole.
- `ChunkOrder` permutes the blocks of a set, cuts the sequence of blocks into *chunks*, and permutes
  the samples within each chunk. The device holds one chunk at a time.
- `StreamOrder` permutes the shards, and the blocks in each shard, and cuts the sequence of samples
  into S equal *streams*. A *window* is up to W consecutive samples of a stream, in shuffled order.
  A *batch* takes one sample from each stream in turn: position p of the epoch is sample p div S of
  stream p mod S.

A position is counted over all epochs, so a resumed run continues at the position that equals the
number of samples it has seen, at any batch size and world size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from common.errors import UserError

GOLDEN = 0x9E3779B97F4A7C15
CACHED_EPOCHS = 2
"""Number of epochs whose order stays in memory: two, because a batch may span two epochs."""


def make_generator(*key: int) -> torch.Generator:
    """Makes a random generator on the CPU, seeded with a hash of the numbers `key`."""
    state = 0
    for number in key:
        state = (state * GOLDEN + number) % 2**63
    return torch.Generator().manual_seed(state)


def draw_permutation(count: int, *key: int) -> Int[Tensor, "N"]:
    """Draws a random permutation of 0 … count - 1, seeded by `key`. Draws it on the CPU, so that it
    does not depend on the device."""
    return torch.randperm(count, generator=make_generator(*key))


class EpochOrder:
    """Order of a set of N samples that permutes all samples in each epoch. The sample at position p
    is entry p mod N of the permutation of epoch p div N. The permutations are stored on
    `device`."""

    def __init__(self, count: int, seed: int, device: torch.device) -> None:
        self.count = count
        self.find_epoch = lru_cache(CACHED_EPOCHS)(
            lambda e: draw_permutation(count, seed, e).to(device)
        )

    def find_ids(self, start: int, count: int) -> Int[Tensor, "B"]:
        """Returns the ids of the samples at positions start … start + count - 1."""
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self.count)
            part = self.find_epoch(epoch)[offset : offset + count]
            parts.append(part)
            start += len(part)
            count -= len(part)
        return torch.cat(parts)


@dataclass
class Chunk:
    """Consecutive blocks of an epoch's permutation that the device holds at the same time; `size`
    is the number of samples in all these blocks together."""

    epoch: int
    number: int
    first: int
    """Position, within the epoch, of the chunk's first sample."""
    size: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass
class ChunkOrder:
    """Order that permutes the blocks of each epoch and cuts them into chunks of at most
    `chunk_size` samples; `counts` is the number of samples of each block."""

    counts: list[int]
    seed: int
    chunk_size: int

    def __post_init__(self) -> None:
        if self.chunk_size < max(self.counts):
            raise UserError(
                f"a chunk of {self.chunk_size} samples holds not even one block of "
                f"{max(self.counts)}; raise data.device_memory_gib, or make the set with a smaller "
                "block_size."
            )
        self.count = sum(self.counts)
        self.find_epoch = lru_cache(CACHED_EPOCHS)(self.draw_epoch)

    def draw_epoch(self, epoch: int) -> list[Chunk]:
        """Permutes the blocks of an epoch and returns them in chunks; a chunk ends before the first
        block that no longer fits into the chunk."""
        chunk = Chunk(epoch, 0, 0)
        chunks = [chunk]
        for block in draw_permutation(len(self.counts), self.seed, epoch).tolist():
            if chunk.size + self.counts[block] > self.chunk_size:
                chunk = Chunk(epoch, len(chunks), chunk.first + chunk.size)
                chunks.append(chunk)
            chunk.blocks.append(block)
            chunk.size += self.counts[block]
        return chunks

    def locate(self, position: int) -> tuple[Chunk, int]:
        """Returns the chunk that contains a position, and the position's offset from the chunk's
        first sample."""
        epoch, p = divmod(position, self.count)
        chunks = self.find_epoch(epoch)
        chunk = chunks[bisect_right(chunks, p, key=lambda chunk: chunk.first) - 1]
        return chunk, p - chunk.first

    def draw_permutation(self, chunk: Chunk) -> Tensor:
        return draw_permutation(chunk.size, self.seed, chunk.epoch, chunk.number)


class Window(NamedTuple):
    """A window: `size` consecutive samples of a stream; the first of them is sample `start` of the
    epoch's order, before the window is shuffled."""

    epoch: int
    stream: int
    number: int
    """Index of the window within its stream and epoch, from 0."""
    start: int
    size: int


@dataclass
class StreamOrder:
    """Order of streams and windows: maps a position to its window, and a window to the blocks that
    hold its samples.

    `blocks_of_shard` is the number of blocks of each shard, `counts` the number of samples of each
    block, `streams` is S, `window` is W. Stream s has the positions s, s + S, s + 2 S, …, over all
    epochs, without end.
    """

    blocks_of_shard: list[int]
    counts: list[int]
    seed: int
    streams: int
    window: int

    def __post_init__(self) -> None:
        self.count = sum(self.counts)
        self.find_epoch = lru_cache(CACHED_EPOCHS)(self.draw_epoch)

    def __reduce__(self) -> Any:
        """Makes the object picklable, so that it can be sent to spawned worker processes: pickles
        the constructor's arguments, because the lru_cache in `find_epoch` cannot be pickled."""
        arguments = (self.blocks_of_shard, self.counts, self.seed, self.streams, self.window)
        return type(self), arguments

    def draw_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Permutes the shards of an epoch, and the blocks in each shard. Returns the block numbers
        in the new order, and for each of these blocks the number of samples before it in the
        epoch."""
        generator = make_generator(self.seed, epoch)
        shards = torch.arange(len(self.counts)).split(self.blocks_of_shard)
        order = torch.cat(
            [
                shards[shard][torch.randperm(len(shards[shard]), generator=generator)]
                for shard in torch.randperm(len(shards), generator=generator).tolist()
            ]
        )
        counts = torch.tensor(self.counts)[order]
        return order, counts.cumsum(0) - counts

    def locate(self, position: int) -> tuple[Window, int]:
        """Returns the window that contains a position, and the position's offset from the window's
        first sample.

        The first window of each stream is shorter, in each stream by a different number of samples.
        So the windows of different streams end at different batches, which spreads the reading
        evenly over the batches.
        """
        epoch, p = divmod(position, self.count)
        offset, stream = divmod(p, self.streams)
        shorter = stream * self.window // self.streams
        number = (offset + shorter) // self.window

        # If the number of samples is not divisible by the number of streams, the first streams have
        # one sample more.
        size, longer = divmod(self.count, self.streams)
        first = stream * size + min(stream, longer)
        start = max(0, number * self.window - shorter)
        end = min((number + 1) * self.window - shorter, size + (stream < longer))
        return Window(epoch, stream, number, first + start, end - start), offset - start

    def find_blocks(self, window: Window) -> Iterator[tuple[int, int, int]]:
        """Yields (block number, first row, number of rows) for each block that contains samples of
        the window, in the order of the epoch, in which the window is not yet shuffled. The rows are
        those samples of the block that belong to the window."""
        order, starts = self.find_epoch(window.epoch)
        start = window.start
        end = window.start + window.size
        index = int(torch.searchsorted(starts, start, right=True)) - 1
        while start < end:
            block = int(order[index])
            row = start - int(starts[index])
            rows = min(end - start, self.counts[block] - row)
            yield block, row, rows
            start += rows
            index += 1

    def draw_permutation(self, window: Window) -> Tensor:
        return draw_permutation(window.size, self.seed, window.epoch, window.stream, window.number)


class RankPositions(NamedTuple):
    """Assigns the positions of each global batch to the ranks, `batch_size` positions to each
    rank."""

    batch_size: int
    rank: int
    world_size: int
    streams: int

    @property
    def global_batch(self) -> int:
        return self.world_size * self.batch_size

    def find_streams(self) -> range:
        """Returns the numbers of the streams that this rank reads: its own, or all of them if every
        rank reads every stream.

        Each rank has its own streams if every global batch has equally many samples of each stream,
        and the number of streams is a multiple of the number of ranks.
        """
        if self.global_batch % self.streams or self.streams % self.world_size:
            return range(self.streams)
        per_rank = self.streams // self.world_size
        return range(self.rank * per_rank, (self.rank + 1) * per_rank)

    def find_positions(self, start: int, stream: int) -> range:
        """Returns this rank's positions that lie in `stream`, one of `find_streams`, in the global
        batch that begins at position `start`.

        If every rank reads every stream, a rank has `batch_size` consecutive positions of the
        global batch; otherwise it has all positions of its own streams.
        """
        size = self.global_batch
        if len(self.find_streams()) == self.streams:
            start += self.rank * self.batch_size
            size = self.batch_size
        return range(start + (stream - start) % self.streams, start + size, self.streams)
