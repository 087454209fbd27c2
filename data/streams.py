"""The order of a streamed latent set, and reading it: many streams side by side, each shuffled inside a window.

The training split has N samples in blocks. In epoch e its shards, and the blocks of each, are permuted; that sequence
of samples is cut into S equal ranges, and each range is shuffled inside windows of W samples. Position p of the epoch
is sample p div S of range p mod S, so a batch takes the next samples of every range. All this is a pure function of
(seed, epoch, position): a stream continues from the number of samples seen, at any batch size and world size.

A *lane* is every S-th position of the endless stream, g = lane, lane + S, …: in each epoch it walks through one range.
Ranks and worker processes own whole lanes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from data.blocks import BlockReader
from data.order import seeded


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
        self.cache: dict[int, tuple[list[int], list[int]]] = {}

    def blocks(self, epoch: int) -> tuple[list[int], list[int]]:
        """Block numbers in the order of an epoch, and the first sample of each in that order."""
        if epoch not in self.cache:
            firsts = [0]
            for blocks in self.blocks_of_shard:
                firsts.append(firsts[-1] + blocks)
            generator = seeded(self.seed, epoch)
            order: list[int] = []
            for shard in torch.randperm(len(self.blocks_of_shard), generator=generator).tolist():
                inside = torch.randperm(self.blocks_of_shard[shard], generator=generator)
                order += (inside + firsts[shard]).tolist()
            starts = [0]
            for block in order[:-1]:
                starts.append(starts[-1] + self.counts[block])
            self.cache = {e: found for e, found in self.cache.items() if e >= epoch - 2} | {epoch: (order, starts)}
        return self.cache[epoch]

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


class Lane:
    """Reads one lane in order. While a window is used, the next one is read in `readers`."""

    def __init__(self, order: StreamOrder, blocks: BlockReader, readers: ThreadPoolExecutor) -> None:
        self.order, self.blocks, self.readers = order, blocks, readers
        self.windows: dict[tuple[int, int, int], Future[dict[str, Tensor]]] = {}
        self.latest: tuple[int, dict[str, Tensor]] | None = None

    def take(self, positions: range) -> list[dict[str, Tensor]]:
        """The samples at `positions` of the lane, in pieces."""
        parts, at, left = [], positions.start, len(positions)
        while left:
            spot = self.order.spot(at)
            rows = min(left, spot.size - spot.offset)
            window = self.window(spot, at).result()
            parts.append({name: tensor[spot.offset : spot.offset + rows] for name, tensor in window.items()})
            at, left = at + rows * self.order.streams, left - rows
        return parts

    def window(self, spot: Spot, position: int) -> Future[dict[str, Tensor]]:
        key = spot[:3]
        if key not in self.windows:
            self.windows[key] = self.readers.submit(self.read, spot)
        after = self.order.spot(position + (spot.size - spot.offset) * self.order.streams)
        if after[:3] not in self.windows:
            self.windows[after[:3]] = self.readers.submit(self.read, after)
        if len(self.windows) > 2:
            self.windows = {k: future for k, future in self.windows.items() if k in (key, after[:3])}
        return self.windows[key]

    def read(self, spot: Spot) -> dict[str, Tensor]:
        """The samples of a window, shuffled. The block at its end is kept: the next window begins in it."""
        parts = []
        for block, row, rows in self.order.pieces(spot):
            kept = self.latest
            tensors = kept[1] if kept is not None and kept[0] == block else self.blocks.read(block)
            self.latest = block, tensors
            parts.append({name: tensor[row : row + rows] for name, tensor in tensors.items()})
        order = self.order.permutation(spot)
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


class Part(NamedTuple):
    """What a worker adds to a batch; or why it cannot."""

    tensors: dict[str, Tensor]
    position: Tensor
    reports: list[tuple[str, int]]
    failure: str | None = None


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
        with ThreadPoolExecutor(2) as readers:
            lanes = {number: Lane(self.order, self.blocks, readers) for number in numbers}
            start = self.start
            while True:
                try:
                    yield self.part(lanes, start)
                except ValueError as error:
                    yield Part({}, torch.empty(0), [], str(error))
                    return
                start += self.share.batch

    def part(self, lanes: dict[int, Lane], start: int) -> Part:
        taken, position = [], []
        for number, lane in lanes.items():
            places = self.share.positions(start, number)
            position += places
            taken += lane.take(places)
        tensors = {name: torch.cat([part[name] for part in taken]) for name in taken[0]} if taken else {}
        return Part(tensors, torch.tensor(position, dtype=torch.long), self.blocks.take_reports())
