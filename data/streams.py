"""The order of a streamed latent set, and the readers that follow it. Four nouns describe both:

- *block*: a safetensors member of a shard, read whole. Each epoch permutes the shards, and the
  blocks of each shard.
- *stream*: one of S equal ranges of the epoch's samples in that order. The readers read all S side
  by side.
- *window*: up to W consecutive samples of a stream, shuffled together.
- *batch*: the next sample of every stream in turn. Position p of the epoch has sample p div S of
  stream p mod S.

All this is a pure function of (seed, epoch, position), so a run continues from the number of
samples that it has seen, at any batch size and world size. Outside `StreamOrder` a stream does not
end: stream s has the positions s, s + S, … of all epochs. Ranks and worker processes read whole
streams where the numbers divide.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from data.blocks import BlockReader, Skipped
from data.loader import seeded
from data.read_ahead import Readers

READERS = 8
"""Threads of a worker; they wait for the disk or the network most of the time."""


class Window(NamedTuple):
    """`size` samples from the `start`-th of the epoch on."""

    epoch: int
    stream: int
    number: int
    """In its stream."""
    start: int
    size: int


class StreamOrder:
    """Maps positions to windows and windows to blocks. `blocks_of_shard` and `counts` (samples)
    describe the set."""

    def __init__(
        self, blocks_of_shard: list[int], counts: list[int], seed: int, streams: int, window: int
    ) -> None:
        self.blocks_of_shard = blocks_of_shard
        self.counts = counts
        self.seed = seed
        self.streams = streams
        self.window = window
        self.count = sum(counts)
        self.cache: dict[int, tuple[array[int], array[int]]] = {}

    def blocks(self, epoch: int) -> tuple[array[int], array[int]]:
        """Block numbers in the order of an epoch, and the first sample of each in that order."""
        known = self.cache.get(epoch)
        if known is None:
            firsts = list(accumulate(self.blocks_of_shard, initial=0))
            generator = seeded(self.seed, epoch)
            order = array("q")
            for shard in torch.randperm(len(self.blocks_of_shard), generator=generator).tolist():
                inside = torch.randperm(self.blocks_of_shard[shard], generator=generator)
                order.extend((inside + firsts[shard]).tolist())
            starts = accumulate((self.counts[block] for block in order[:-1]), initial=0)
            known = order, array("q", starts)
            self.cache = {e: found for e, found in self.cache.items() if e >= epoch - 1} | {
                epoch: known
            }
        return known

    def locate(self, position: int) -> tuple[Window, int]:
        """The window of a position, counted over all epochs, and the offset in it.

        The first window of a stream is shorter, by another amount in each stream. So windows do not
        end together, and reading is spread evenly over the batches.
        """
        epoch, p = divmod(position, self.count)
        offset, stream = divmod(p, self.streams)
        shorter = stream * self.window // self.streams
        number = (offset + shorter) // self.window
        size, longer = divmod(self.count, self.streams)
        first = stream * size + min(stream, longer)
        start = max(0, number * self.window - shorter)
        end = min((number + 1) * self.window - shorter, size + (stream < longer))
        return Window(epoch, stream, number, first + start, end - start), offset - start

    def blocks_of(self, window: Window) -> Iterator[tuple[int, int, int]]:
        """(block, first row, rows) of the samples of a window, before they are shuffled."""
        order, starts = self.blocks(window.epoch)
        start = window.start
        end = window.start + window.size
        at = bisect_right(starts, start) - 1
        while start < end:
            block = order[at]
            row = start - starts[at]
            rows = min(end - start, self.counts[block] - row)
            yield block, row, rows
            start = start + rows
            at = at + 1

    def permutation(self, window: Window) -> Tensor:
        return torch.randperm(
            window.size, generator=seeded(self.seed, window.epoch, window.stream, window.number)
        )


class RankPositions(NamedTuple):
    """Decides which positions of each global batch a rank reads: `batch_size` of them."""

    batch_size: int
    rank: int
    world_size: int
    streams: int

    @property
    def global_batch(self) -> int:
        return self.world_size * self.batch_size

    def own_streams(self) -> range | None:
        """The rank's streams where each global batch has as many samples of each stream; else
        None."""
        if self.global_batch % self.streams == 0 and self.streams % self.world_size == 0:
            each = self.streams // self.world_size
            return range(self.rank * each, (self.rank + 1) * each)
        return None

    def positions(self, start: int, stream: int) -> range:
        """The rank's positions in `stream`, of the global batch from position `start` on.

        A rank without streams of its own reads `batch_size` consecutive positions.
        """
        own = self.own_streams()
        start, size = (
            (start + self.rank * self.batch_size, self.batch_size)
            if own is None
            else (start, self.global_batch)
        )
        first = start + (stream - start) % self.streams
        return (
            range(first, start + size, self.streams) if own is None or stream in own else range(0)
        )


def to_bytes(tensors: dict[str, Tensor]) -> UInt8[Tensor, "n bytes"]:
    """Joins all tensors of some samples, a row a sample: one slice, one copy and one file
    descriptor, not many."""
    names = sorted(tensors)  # a safetensors file has no order
    flat = [tensors[name].contiguous().flatten().view(torch.uint8) for name in names]
    return torch.cat([values.view(len(tensors["labels"]), -1) for values in flat], dim=1)


def from_bytes(
    rows: UInt8[Tensor, "n bytes"], like: dict[str, Tensor], order: Int[Tensor, "n"]
) -> dict[str, Tensor]:
    """Inverts `to_bytes`, on any device, with the rows in another order; dtypes and shapes are
    those of `like`."""
    names = sorted(like)
    sizes = [like[name][0].numel() * like[name].element_size() for name in names]
    values = rows.index_select(0, order).split(sizes, dim=1)
    return {
        name: bytes_.contiguous()
        .flatten()
        .view(like[name].dtype)
        .view(len(rows), *like[name].shape[1:])
        for name, bytes_ in zip(names, values, strict=True)
    }


class StreamReader:
    """Reads one stream in order. While batches use up a window, `readers` read the next one."""

    def __init__(self, order: StreamOrder, blocks: BlockReader, readers: Readers) -> None:
        self.order = order
        self.blocks = blocks
        self.readers = readers
        self.windows: dict[Window, Future[Tensor]] = {}
        self.last_block: tuple[int, Tensor] | None = None
        self.unused = torch.empty(0)
        self.position = -1
        """The rows of the current window that no batch has had yet, and the position of the
        first."""

    def begin(self, positions: range) -> None:
        """Starts to read the window at the first of `positions`, and does not wait for it."""
        if positions and (positions.start != self.position or not len(self.unused)):
            self.submit(self.order.locate(positions.start)[0])

    def submit(self, window: Window) -> Future[Tensor]:
        if window not in self.windows:
            self.windows[window] = self.readers.submit(self.read, window)
        return self.windows[window]

    def take(self, positions: range) -> list[Tensor]:
        """The rows of the samples at `positions`, a tensor for each window."""
        taken = []
        at = positions.start
        left = len(positions)
        while left:
            if at != self.position or not len(self.unused):
                self.unused = self.rows_from(at)
            rows = self.unused[:left]
            taken.append(rows)
            self.unused = self.unused[left:]
            at = at + len(rows) * self.order.streams
            left = left - len(rows)
            self.position = at
        return taken

    def rows_from(self, position: int) -> Tensor:
        """Waits for the window of a position, starts to read the one after it, and returns the rows
        from there on."""
        window, offset = self.order.locate(position)
        rows = self.submit(window).result()[offset:]
        after, _ = self.order.locate(position + len(rows) * self.order.streams)
        self.windows = {w: future for w, future in self.windows.items() if w == after}
        self.submit(after)
        return rows

    def read(self, window: Window) -> Tensor:
        """The rows of a window, shuffled. The reader keeps the last block, because the next window
        begins in it."""
        place = self.order.permutation(window).argsort()
        shuffled: Tensor | None = None
        done = 0
        for block, row, rows in self.order.blocks_of(window):
            kept = self.last_block
            content = (
                kept[1]
                if kept is not None and kept[0] == block
                else to_bytes(self.blocks.read(block))
            )
            self.last_block = block, content
            if shuffled is None:
                shuffled = content.new_empty((window.size, content.shape[1]))
            shuffled.index_copy_(0, place[done : done + rows], content[row : row + rows])
            done += rows
        assert shuffled is not None
        return shuffled


class WorkerBatch(NamedTuple):
    """A worker's n samples of a batch: their positions (8 n bytes), then their rows; or the reason
    of its failure."""

    buffer: UInt8[Tensor, "bytes"]
    samples: int
    reports: list[Skipped]
    failure: str | None = None

    def position(self) -> Tensor:
        return self.buffer[: 8 * self.samples].view(torch.long)

    def rows(self) -> Tensor:
        return self.buffer[8 * self.samples :].view(self.samples, -1)


class StreamDataset(IterableDataset):
    """Yields a worker's samples of each batch, without end: of the rank's streams worker w of W
    reads every W-th.

    It yields a failure too, because an exception would arrive in the parent process as a page of
    traceback.
    """

    def __init__(
        self, order: StreamOrder, blocks: BlockReader, of_rank: RankPositions, start: int
    ) -> None:
        self.order = order
        self.blocks = blocks
        self.of_rank = of_rank
        self.start = start

    def __iter__(self) -> Iterator[WorkerBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = self.of_rank.own_streams()
        numbers = (range(self.order.streams) if own is None else own)[worker::workers]
        readers = Readers(READERS, "reader")
        streams = {number: StreamReader(self.order, self.blocks, readers) for number in numbers}
        start = self.start
        try:
            while True:
                try:
                    yield self.batch(streams, start)
                except ValueError as error:
                    yield WorkerBatch(torch.empty(0), 0, [], str(error))
                    return
                start += self.of_rank.global_batch
        finally:
            readers.close()

    def batch(self, streams: dict[int, StreamReader], start: int) -> WorkerBatch:
        wanted = {number: self.of_rank.positions(start, number) for number in streams}
        for number, stream in streams.items():
            stream.begin(wanted[number])
        position = [p for positions in wanted.values() for p in positions]
        taken = [rows for number, stream in streams.items() for rows in stream.take(wanted[number])]
        reports = self.blocks.take_reports()
        if not taken:
            return WorkerBatch(torch.empty(0, dtype=torch.uint8), 0, reports)
        size = len(position) * (8 + taken[0].shape[1])
        batch = WorkerBatch(torch.empty(size, dtype=torch.uint8), len(position), reports)
        batch.position().copy_(torch.tensor(position))
        torch.cat(taken, out=batch.rows())
        return batch
