"""The order of a streamed latent set, and reading it: many streams side by side, each shuffled inside a window.

The training split has N samples in blocks. In epoch e its shards, and the blocks of each, are permuted; that sequence
of samples is cut into S equal ranges, and each range is shuffled inside windows of W samples. Position p of the epoch
is sample p div S of range p mod S, so a batch takes the next samples of every range. All this is a pure function of
(seed, epoch, position): a stream continues from the number of samples seen, at any batch size and world size.

A *lane* is every S-th position of the endless stream, g = lane, lane + S, …: in each epoch it walks through one range.
Ranks and worker processes own whole lanes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from data.blocks import BlockReader
from data.order import seeded
from data.readers import Readers

READERS = 8
"""Threads of a worker; they wait for the disk or the network most of the time."""


class Spot(NamedTuple):
    """A window of the stream, and a place in it."""

    epoch: int
    range: int
    window: int
    offset: int
    """Of the sample in its window."""
    size: int
    """Samples in the window."""


class StreamOrder:
    """Which sample stands at a position. `blocks_of_shard` and `counts` describe the set."""

    def __init__(self, blocks_of_shard: list[int], counts: list[int], seed: int, streams: int, window: int) -> None:
        for key, value in (("streams", streams), ("window", window)):
            if value < 1:
                raise ValueError(f"data.{key}={value} must be at least 1.")
        self.blocks_of_shard, self.counts = blocks_of_shard, counts
        self.seed, self.streams, self.window = seed, streams, window
        self.count = sum(counts)
        self.cache: dict[int, tuple[array[int], array[int]]] = {}

    def blocks(self, epoch: int) -> tuple[array[int], array[int]]:
        """Block numbers in the order of an epoch, and the first sample of each in that order."""
        known = self.cache.get(epoch)
        if known is None:
            firsts = [0]
            for blocks in self.blocks_of_shard:
                firsts.append(firsts[-1] + blocks)
            generator = seeded(self.seed, epoch)
            order = array("q")
            for shard in torch.randperm(len(self.blocks_of_shard), generator=generator).tolist():
                inside = torch.randperm(self.blocks_of_shard[shard], generator=generator)
                order.extend((inside + firsts[shard]).tolist())
            starts = array("q", [0])
            for block in order[:-1]:
                starts.append(starts[-1] + self.counts[block])
            known = order, starts
            self.cache = {e: found for e, found in self.cache.items() if e >= epoch - 1} | {epoch: known}
        return known

    def extent(self, range_: int) -> tuple[int, int]:
        """First sample and number of samples of a range."""
        size, longer = divmod(self.count, self.streams)
        return range_ * size + min(range_, longer), size + (range_ < longer)

    def spot(self, position: int) -> Spot:
        """Where the sample at a position of the endless stream stands.

        The first window of a range is shorter, by another amount in each range, so that windows do not end together:
        reading is spread evenly over the batches.
        """
        epoch, p = divmod(position, self.count)
        offset, range_ = divmod(p, self.streams)
        ahead = range_ * self.window // self.streams
        window, inside = divmod(offset + ahead, self.window)
        start, end = self.bounds(range_, window)
        return Spot(epoch, range_, window, inside - (ahead if window == 0 else 0), end - start)

    def bounds(self, range_: int, window: int) -> tuple[int, int]:
        """First and last sample (exclusive) of a window, counted from the start of its range."""
        ahead = range_ * self.window // self.streams
        start = max(0, window * self.window - ahead)
        return start, min((window + 1) * self.window - ahead, self.extent(range_)[1])

    def pieces(self, spot: Spot) -> Iterator[tuple[int, int, int]]:
        """(block, first row, rows) that make up a window, in order."""
        order, starts = self.blocks(spot.epoch)
        first = self.extent(spot.range)[0]
        start, end = (first + bound for bound in self.bounds(spot.range, spot.window))
        at = bisect_right(starts, start) - 1
        while start < end:
            block, row = order[at], start - starts[at]
            rows = min(end - start, self.counts[block] - row)
            yield block, row, rows
            start, at = start + rows, at + 1

    def permutation(self, spot: Spot) -> Tensor:
        return torch.randperm(spot.size, generator=seeded(self.seed, spot.epoch, spot.range, spot.window))


class Share(NamedTuple):
    """What one rank takes of each global micro-batch of `batch` samples, `share` of them."""

    batch: int
    share: int
    rank: int
    ranks: int
    streams: int

    def own_lanes(self) -> range | None:
        """Its lanes, where each batch has as many samples of each; else a rank takes a stretch of each batch."""
        if self.batch % self.streams == 0 and self.streams % self.ranks == 0:
            each = self.streams // self.ranks
            return range(self.rank * each, (self.rank + 1) * each)
        return None

    def positions(self, start: int, lane: int) -> range:
        """Its positions of one lane in the batch that starts at `start`."""
        own = self.own_lanes()
        if own is None:
            start += self.rank * self.share
        end = start + (self.batch if own is not None else self.share)
        first = start + (lane - start) % self.streams
        return range(first, end, self.streams) if own is None or lane in own else range(0)


class Column(NamedTuple):
    """Where a tensor's values lie in a row of bytes, one row a sample."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def columns_of(tensors: dict[str, Tensor]) -> list[Column]:
    columns, start = [], 0
    for name in sorted(tensors):  # a safetensors file has no order
        tensor = tensors[name]
        end = start + tensor[0].numel() * tensor.element_size()
        columns.append(Column(name, tensor.dtype, tuple(tensor.shape[1:]), start, end))
        start = end
    return columns


def as_rows(tensors: dict[str, Tensor]) -> UInt8[Tensor, "n bytes"]:
    """All tensors of some samples in one: one slice, one copy and one file descriptor instead of many."""
    flat = [tensors[name].contiguous().flatten().view(torch.uint8) for name in sorted(tensors)]
    return torch.cat([values.view(len(tensors["labels"]), -1) for values in flat], dim=1)


def from_rows(rows: UInt8[Tensor, "n bytes"], columns: list[Column], order: Int[Tensor, "n"]) -> dict[str, Tensor]:
    """The inverse of `as_rows`, on any device, with the rows in another order."""
    rows = rows.index_select(0, order)
    return {
        c.name: rows[:, c.start : c.end].contiguous().flatten().view(c.dtype).view(len(rows), *c.shape) for c in columns
    }


class Lane:
    """Reads one lane in order. While a window is used, the next one is read in `readers`."""

    def __init__(self, order: StreamOrder, blocks: BlockReader, readers: Readers) -> None:
        self.order, self.blocks, self.readers = order, blocks, readers
        self.windows: dict[tuple[int, int, int], Future[Tensor]] = {}
        self.latest: tuple[int, Tensor] | None = None
        self.rest, self.at = torch.empty(0), -1
        """What is left of the window in use, and the position of its first row."""

    def begin(self, positions: range) -> None:
        """Reading of the window that `positions` begin in has begun when this returns."""
        if positions and (positions.start != self.at or not len(self.rest)):
            self.submit(self.order.spot(positions.start))

    def submit(self, spot: Spot) -> Future[Tensor]:
        if spot[:3] not in self.windows:
            self.windows[spot[:3]] = self.readers.submit(self.read, spot)
        return self.windows[spot[:3]]

    def take(self, positions: range) -> list[Tensor]:
        """The rows of the samples at `positions` of the lane, in pieces."""
        parts, at, left = [], positions.start, len(positions)
        while left:
            if at != self.at or not len(self.rest):
                self.rest = self.window(at)
            part = self.rest[:left]
            parts.append(part)
            self.rest = self.rest[left:]
            at, left = at + len(part) * self.order.streams, left - len(part)
            self.at = at
        return parts

    def window(self, position: int) -> Tensor:
        """The rows of its window from that position on; then reading the window after it begins."""
        spot = self.order.spot(position)
        rows = self.submit(spot).result()[spot.offset :]
        after = self.order.spot(position + len(rows) * self.order.streams)
        self.windows = {key: future for key, future in self.windows.items() if key == after[:3]}
        self.submit(after)
        return rows

    def read(self, spot: Spot) -> Tensor:
        """The rows of a window, shuffled. The block at its end is kept: the next window begins in it."""
        parts = []
        for block, row, rows in self.order.pieces(spot):
            kept = self.latest
            content = kept[1] if kept is not None and kept[0] == block else as_rows(self.blocks.read(block))
            self.latest = block, content
            parts.append(content[row : row + rows])
        return torch.cat(parts).index_select(0, self.order.permutation(spot))


class Part(NamedTuple):
    """What a worker adds to a batch of n samples: their positions (8 n bytes), then their rows; or why it cannot."""

    buffer: UInt8[Tensor, "bytes"]
    samples: int
    reports: list[tuple[str, int]]
    failure: str | None = None

    def position(self) -> Tensor:
        return self.buffer[: 8 * self.samples].view(torch.long)

    def rows(self) -> Tensor:
        return self.buffer[8 * self.samples :].view(self.samples, -1)


class StreamDataset(IterableDataset):
    """Endless parts of batches: worker w of W yields its lanes' samples of each batch in turn.

    A failure is an item too: an exception would arrive as a page of traceback.
    """

    def __init__(self, order: StreamOrder, blocks: BlockReader, share: Share, start: int) -> None:
        self.order, self.blocks, self.share, self.start = order, blocks, share, start

    def __iter__(self) -> Iterator[Part]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = self.share.own_lanes()
        numbers = (range(self.order.streams) if own is None else own)[worker::workers]
        readers = Readers(READERS, "reader")
        lanes = {number: Lane(self.order, self.blocks, readers) for number in numbers}
        start = self.start
        try:
            while True:
                try:
                    yield self.part(lanes, start)
                except ValueError as error:
                    yield Part(torch.empty(0), 0, [], str(error))
                    return
                start += self.share.batch
        finally:
            readers.close()

    def part(self, lanes: dict[int, Lane], start: int) -> Part:
        places = {number: self.share.positions(start, number) for number in lanes}
        for number, lane in lanes.items():
            lane.begin(places[number])
        position = [place for of_lane in places.values() for place in of_lane]
        taken = [rows for number, lane in lanes.items() for rows in lane.take(places[number])]
        if not taken:
            return Part(torch.empty(0, dtype=torch.uint8), 0, self.blocks.take_reports())
        size = taken[0].shape[1]
        part = Part(
            torch.empty(len(position) * (8 + size), dtype=torch.uint8), len(position), self.blocks.take_reports()
        )
        part.position().copy_(torch.tensor(position))
        torch.cat(taken, out=part.rows())
        return part
