"""Orders in which loaders read a set: pure functions of (seed, epoch, position).

- `EpochOrder` permutes all samples, for sets that lie on the device.
- `ChunkOrder` permutes blocks, cuts them into *chunks* and permutes the samples of each, for sets
  of which one chunk lies on the device at a time.
- `StreamOrder` permutes shards and the blocks in them, and cuts that sequence into S equal
  *streams*. Up to W consecutive samples of a stream make a *window*, shuffled inside. A *batch*
  takes the next sample of every stream in turn: position p of the epoch is sample p div S of
  stream p mod S.

Positions count over all epochs, so a run continues from the number of samples that it has seen, at
any batch size and world size. A *block* is a safetensors member of a shard (data/blocks.py).
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
"""Epochs whose drawn order stays in memory: a batch may span two."""


def make_generator(*key: int) -> torch.Generator:
    """Makes a CPU generator seeded with a hash of `key`."""
    state = 0
    for number in key:
        state = (state * GOLDEN + number) % 2**63
    return torch.Generator().manual_seed(state)


def draw_permutation(count: int, *key: int) -> Int[Tensor, "N"]:
    """Draws a permutation of `count` numbers, seeded by `key`, on the CPU: it is the same for every
    device."""
    return torch.randperm(count, generator=make_generator(*key))


class EpochOrder:
    """Order of a set of N samples: position p has the sample id at entry p mod N of the permutation
    of epoch p div N. The permutations lie on `device`."""

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
    """Blocks that lie on the device together; they have `size` samples."""

    epoch: int
    number: int
    first: int
    """Position of the chunk's first sample in the epoch."""
    size: int = 0
    blocks: list[int] = field(default_factory=list)


class ChunkOrder:
    """Cuts each epoch into chunks of at most `chunk_size` samples; `counts` are the samples per
    block."""

    def __init__(self, counts: list[int], seed: int, chunk_size: int) -> None:
        if chunk_size < max(counts):
            raise UserError(
                f"a window of {chunk_size} samples holds not even one block of {max(counts)}; "
                "raise data.device_memory_gib, or make the set with a smaller block_size."
            )
        self.count = sum(counts)
        self.seed = seed
        self.counts = counts
        self.chunk_size = chunk_size
        self.find_epoch = lru_cache(CACHED_EPOCHS)(self.draw_epoch)

    def draw_epoch(self, epoch: int) -> list[Chunk]:
        """Fills chunks with the permuted blocks of an epoch, one after the other."""
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
        """Returns the chunk that holds a position, and the offset of the position in the chunk."""
        epoch, p = divmod(position, self.count)
        chunks = self.find_epoch(epoch)
        chunk = chunks[bisect_right(chunks, p, key=lambda chunk: chunk.first) - 1]
        return chunk, p - chunk.first

    def find_next(self, chunk: Chunk) -> Chunk:
        return self.locate(chunk.epoch * self.count + chunk.first + chunk.size)[0]

    def draw_permutation(self, chunk: Chunk) -> Tensor:
        return draw_permutation(chunk.size, self.seed, chunk.epoch, chunk.number)


class Window(NamedTuple):
    """`size` consecutive samples of a stream, from sample `start` of the epoch on."""

    epoch: int
    stream: int
    number: int
    """Number of the window in its stream."""
    start: int
    size: int


class StreamOrder:
    """Maps positions to windows, and windows to blocks.

    `blocks_of_shard` are the blocks per shard, `counts` the samples per block. Over all epochs a
    stream has no end: stream s has the positions s, s + S, s + 2 S, …
    """

    def __init__(
        self, blocks_of_shard: list[int], counts: list[int], seed: int, streams: int, window: int
    ) -> None:
        self.count = sum(counts)
        self.seed = seed
        self.blocks_of_shard = blocks_of_shard
        self.counts = counts
        self.streams = streams
        self.window = window
        self.find_epoch = lru_cache(CACHED_EPOCHS)(self.draw_epoch)

    def __reduce__(self) -> Any:
        """Pickles the constructor's arguments for spawned workers, since no lru_cache pickles."""
        arguments = (self.blocks_of_shard, self.counts, self.seed, self.streams, self.window)
        return type(self), arguments

    def draw_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Permutes the blocks of an epoch; returns the block numbers in the new order, and for each
        block the position of its first sample in the epoch."""
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
        """Returns the window that holds a position, and the offset of the position in the window.

        The first window of each stream is shorter by a different amount, so that windows end at
        different times and reading is spread evenly over the batches.
        """
        epoch, p = divmod(position, self.count)
        offset, stream = divmod(p, self.streams)
        shorter = stream * self.window // self.streams
        number = (offset + shorter) // self.window

        # If the streams do not divide the epoch evenly, the first streams have one sample more.
        size, longer = divmod(self.count, self.streams)
        first = stream * size + min(stream, longer)
        start = max(0, number * self.window - shorter)
        end = min((number + 1) * self.window - shorter, size + (stream < longer))
        return Window(epoch, stream, number, first + start, end - start), offset - start

    def find_blocks(self, window: Window) -> Iterator[tuple[int, int, int]]:
        """Yields (block number, first row, number of rows) of each block that has samples of a
        window, in the order before shuffling."""
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
    """Deals the positions of each global batch out to the ranks, `batch_size` to each."""

    batch_size: int
    rank: int
    world_size: int
    streams: int

    @property
    def global_batch(self) -> int:
        return self.world_size * self.batch_size

    def find_streams(self) -> range | None:
        """Returns the streams that this rank alone reads; None if every rank reads every stream.

        The ranks divide the streams among them if every global batch has the same number of samples
        of each stream, and the number of streams is a multiple of the number of ranks.
        """
        if self.global_batch % self.streams or self.streams % self.world_size:
            return None
        per_rank = self.streams // self.world_size
        return range(self.rank * per_rank, (self.rank + 1) * per_rank)

    def find_positions(self, start: int, stream: int) -> range:
        """Returns the rank's positions in `stream`, in the global batch that begins at `start`.

        If every rank reads every stream, a rank has `batch_size` consecutive positions.
        """
        rank_streams = self.find_streams()
        size = self.global_batch
        if rank_streams is None:
            start += self.rank * self.batch_size
            size = self.batch_size
        elif stream not in rank_streams:
            return range(0)
        return range(start + (stream - start) % self.streams, start + size, self.streams)
