"""The loader of latents streamed from WebDataset tars, local or remote.

A latent goes this way: `StreamOrder` (data/order.py) says which windows of which streams a rank
needs; threads of a worker process read and shuffle them (`read_windows`); the worker puts the next
samples of its streams together (`StreamDataset`); a thread of the run's process joins what all
workers have for a batch (`join_batches`); `StreamedLatents` copies that to the device and normalises
it.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Annotated, Any, Unpack

import torch
from jaxtyping import UInt8
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from common.errors import UserError
from common.text import shorten_error
from common.workers import Prefetcher, Readers, refuse_small_shared_memory
from data.blocks import BlockLoader, BlockReader, OnCorrupt, SkippedBlock, add_skipped, open_set
from data.loader import Batch, Count, LatentSpec, LoaderArgs, Size
from data.manifest import Normalisation
from data.order import RankPositions, StreamOrder

GIB = 2**30
MAX_STREAMS = 64
READERS_PER_WORKER = 8
"""Threads of a worker; they wait for the disk or the network most of the time."""
COPIES_OF_A_BLOCK = 3
"""Peak copies of a block in memory while a thread reads it: its bytes, its tensors, its rows."""


def read_windows(
    order: StreamOrder, blocks: BlockReader, position: int
) -> Iterator[tuple[int, UInt8[Tensor, "n bytes"]]]:
    """Yields the windows of a stream without end, shuffled, from `position` on: the position of the
    first row, and the rows.

    It keeps the last block of a window, because the next window begins in it.
    """
    last = -1
    content = torch.empty(0)
    while True:
        window, offset = order.locate(position)
        shuffled = torch.empty(window.size, blocks.row_bytes, dtype=torch.uint8)
        place = order.draw_permutation(window).argsort()
        done = 0
        for block, first, rows in order.find_blocks(window):
            if block != last:
                content = blocks.read_rows(block)
                last = block
            shuffled[place[done : done + rows]] = content[first : first + rows]
            done += rows
        yield position, shuffled[offset:]
        position += (window.size - offset) * order.streams


WorkerBatch = tuple[Tensor, list[int], list[SkippedBlock]]
"""A worker's samples of a batch as rows of bytes, their positions, and the blocks it skipped."""


@dataclass(eq=False)
class StreamDataset(IterableDataset):
    """Yields a worker's samples of each batch, without end: of the rank's streams worker w of W
    reads every W-th.

    In the end it yields the reason of a failure, because an exception would arrive in the parent
    process as a page of traceback.
    """

    order: StreamOrder
    blocks: BlockReader
    rank_positions: RankPositions
    start: int

    def __iter__(self) -> Iterator[WorkerBatch | str]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = self.rank_positions.find_streams() or range(self.order.streams)
        readers = Readers(READERS_PER_WORKER, "reader")
        streams: dict[int, Iterator[tuple[int, Tensor]]] = {}
        start = self.start
        try:
            while True:
                wanted = [
                    position
                    for number in own[worker::workers]
                    for position in self.rank_positions.find_positions(start, number)
                ]
                yield self.batch(streams, readers, wanted)
                start += self.rank_positions.global_batch
        except UserError as error:
            yield str(error)
        finally:
            readers.close()

    def batch(
        self, streams: dict[int, Iterator[tuple[int, Tensor]]], readers: Readers, wanted: list[int]
    ) -> WorkerBatch:
        """The samples at `wanted` positions, of `streams`; it begins those that are not there."""
        every = self.order.streams
        for position in wanted:
            if position % every not in streams:
                windows = Prefetcher(read_windows(self.order, self.blocks, position), readers)
                streams[position % every] = chain.from_iterable(
                    zip(count(first, every), rows, strict=False) for first, rows in windows
                )

        # What comes before a position in its stream is for other ranks.
        taken = [next(row for at, row in streams[p % every] if at == p) for p in wanted]
        rows = torch.stack(taken) if taken else torch.empty(0, dtype=torch.uint8)
        return rows, wanted, self.blocks.take_reports()


def join_batches(
    loader: DataLoader, workers: int, pin_memory: bool
) -> Generator[tuple[Tensor, Tensor, list[SkippedBlock]]]:
    """Yields (rows, positions, reports) of each batch, in the order of positions, without end;
    ValueError with the reason if a worker fails.

    It runs in a thread, whose children the workers are: in the main thread PyTorch would raise the
    death of one as an error of whatever line runs then.
    """
    items = iter(loader)
    try:
        while True:
            found = [next(items) for _ in range(workers)]
            for item in found:
                if isinstance(item, str):
                    raise UserError(item)
            parts, positions, reports = zip(*found, strict=True)
            position, order = torch.tensor(list(chain(*positions))).sort()
            rows = torch.cat(parts)[order]
            if pin_memory:
                rows = rows.pin_memory()
                position = position.pin_memory()
            yield rows, position, list(chain(*reports))
    except (RuntimeError, OSError, EOFError) as error:
        # The latter two come of a kill while a worker sent a batch.
        reason = shorten_error(error)
        if isinstance(error, RuntimeError) and not reason.startswith("DataLoader worker"):
            raise
        raise UserError(
            f"a reader of data=webdataset died ({reason}); start the same command again to resume, "
            "with a smaller data.window or data.num_workers if memory ran out."
        ) from error
    finally:
        # Not when `items` is collected, for the traceback of a failure keeps it.
        getattr(items, "_shutdown_workers", lambda: None)()


def end_reading(feeder: Readers, batches: Generator[Any]) -> None:
    """Ends the thread and the workers; `weakref.finalize` calls this when the process ends, too."""
    feeder.close(wait=True)
    with contextlib.suppress(ValueError):  # the thread still waits for a worker
        batches.close()


class StreamedLatents(BlockLoader):
    """Streams the latent set at `path`, a folder or a URL, block by block.

    A batch takes its samples from `streams` ranges of the set, each shuffled inside a `window` of
    samples. Null chooses as many as the set is large enough for (`choose_stream_count`); a resumed run
    keeps the number that it began with. The windows take at most `host_memory_gib` of host memory,
    all streams together; the loader prints how much. `num_workers` processes read ahead,
    `prefetch_factor` batches each; with 0 threads of this process read. `persistent_workers` is
    PyTorch's: they live on from one epoch to the next, or new ones are started there. `timeout`,
    `retries` and `cache` are for URLs (data/source.py). `normalisation`, `encoder`,
    `latent_scale`: see ResidentLatents.
    """

    @classmethod
    def foresee(cls, memory: float, **settings: Any) -> tuple[LatentSpec, float]:
        """See `LatentLoader`; nothing of the set stays on the device."""
        return open_set("webdataset", **settings)[0], 0.0

    def __init__(
        self,
        *,
        path: str | None,
        normalisation: Normalisation = "channel",
        encoder: str | None = None,
        latent_scale: float | None = None,
        streams: Size | None = None,
        window: Size = 256,
        host_memory_gib: float = 8.0,
        num_workers: Count = 2,
        prefetch_factor: Size = 4,
        persistent_workers: bool = True,
        pin_memory: bool = True,
        on_corrupt: OnCorrupt = "error",
        cache: str | None = None,
        timeout: Annotated[float, Field(gt=0, le=86_400)] = 30.0,
        retries: Count = 5,
        **args: Unpack[LoaderArgs],
    ) -> None:
        expected = (normalisation, encoder, latent_scale)
        remote = {"cache": cache, "timeout": timeout, "retries": retries}
        spec, train, held_out = open_set("webdataset", path, *expected, on_corrupt, **remote)
        spec = spec.with_order(str(window), f"{streams or MAX_STREAMS}-{window}")
        super().__init__(spec, train, held_out, **args)

        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.epoch = 0
        """The epoch of the latest batch."""
        self.pin_memory = pin_memory and self.device.type == "cuda"
        self.given_streams = streams
        self.window = window
        self.allowed_gib = host_memory_gib
        self.batches: Prefetcher[tuple[Tensor, Tensor, list[SkippedBlock]]] | None = None
        self.use_streams(streams)

    def use_streams(self, given: int | None) -> None:
        """Cuts the set into `given_streams` streams, or as many as fit, and prints the memory that they
        take."""
        places = self.blocks.places
        a_stream = count_stream_bytes(self.blocks, self.window)
        streams = choose_stream_count(given, len(places), a_stream, self.allowed_gib)
        self.order = StreamOrder(
            self.blocks.blocks_of_shard, self.blocks.counts, self.seed, streams, self.window
        )
        self.rank_positions = RankPositions(self.batch_size, self.rank, self.world_size, streams)
        if self.rank:
            return

        windows = len(self.rank_positions.find_streams() or range(streams)) * a_stream
        readers = max(1, self.num_workers)
        reading = (
            readers
            * READERS_PER_WORKER
            * COPIES_OF_A_BLOCK
            * max(place.block.size for place in places)
        )
        print(
            f"data: {self.spec.count} samples in {len(places)} blocks from {self.blocks.source}, "
            f"{streams} streams, windows of {self.window}; in each process windows take up to "
            f"{windows / 2**20:.2f} MiB and reading about {reading / 2**20:.2f} MiB of host memory",
            flush=True,
        )

    def start_reading(self) -> Prefetcher[tuple[Tensor, Tensor, list[SkippedBlock]]]:
        """Starts the workers, and the thread that takes from them."""
        a_batch = self.batch_size * self.blocks.row_bytes
        prefetch = self.prefetch_factor if self.num_workers else None
        if prefetch is not None:
            refuse_small_shared_memory(
                "the workers of data=webdataset",
                prefetch,
                a_batch,
                "lower data.prefetch_factor, or use data.num_workers=0",
            )
        loader = DataLoader(
            StreamDataset(self.order, self.blocks, self.rank_positions, self.samples_seen),
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=prefetch,
            generator=torch.Generator(),  # the default would draw from the run's generator
        )

        feeder = Readers(1, "feeder")
        batches = join_batches(loader, max(1, self.num_workers), self.pin_memory)
        self.stop = weakref.finalize(self, end_reading, feeder, batches)
        self.batches = Prefetcher(batches, feeder)
        return self.batches

    def stop_reading(self) -> None:
        """Ends the workers and the thread, if there are any."""
        if self.batches is not None:
            self.stop()
            self.batches = None

    def batch_at(self, start: int) -> Batch:
        epoch = self.samples_seen // self.spec.count
        if epoch != self.epoch and not self.persistent_workers:
            self.stop_reading()
        self.epoch = epoch
        batches = self.batches or self.start_reading()
        try:
            rows, position, reports = batches.get(self.wait_for_batch_seconds)
        except TimeoutError as error:
            raise UserError(
                f"data=webdataset gave no batch for {self.wait_for_batch_seconds / 60:g} minutes "
                "(runtime.parallel.timeout_minutes). A disk that hangs does that, and so does a "
                "full /dev/shm; mend it, or use data.num_workers=0."
            ) from error
        add_skipped(self.skipped, reports)
        rows = rows.to(self.device, non_blocking=True)
        position = position.to(self.device, non_blocking=True)
        return self.batch(self.blocks.unpack_rows(rows), position)

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {"streams": self.order.streams}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues with the number of streams that the run began with, because the order of
        samples depends on it."""
        super().load_state_dict(state)
        # Earlier versions had 64 where none were given.
        streams = state.get("streams", self.given_streams or MAX_STREAMS)
        if streams < 1 or self.given_streams not in (None, streams):
            raise UserError(
                f"data.streams={self.given_streams}, but the run began with {streams}; leave data.streams "
                "out."
            )
        if streams != self.order.streams:
            self.use_streams(streams)
        self.stop_reading()


def count_stream_bytes(blocks: BlockReader, window: int) -> int:
    """Bytes of a stream's two windows, and of the block that the later one ends in."""
    largest = max(blocks.counts)
    a_sample = max(place.block.size / place.block.samples for place in blocks.places)
    return math.ceil((2 * window + largest) * a_sample)


def choose_stream_count(given: int | None, blocks: int, a_stream: int, allowed_gib: float) -> int:
    """The number of streams: as given, or a power of two, at most 64 and a quarter of the blocks,
    that fits.

    Two streams share the block where one ends and the other begins, so a quarter makes at most a
    quarter more reads. ValueError if they take more than `allowed_gib` of memory.
    """
    least = given or 1
    if not least * a_stream <= allowed_gib * GIB:
        raise UserError(
            f"data.host_memory_gib={allowed_gib} is too little for {least} streams, whose windows "
            f"take {least * a_stream / GIB:.2f} GiB; raise it, or lower "
            f"data.{'streams' if given else 'window'}."
        )
    most = min(MAX_STREAMS, blocks // 4, allowed_gib * GIB // a_stream)
    return given or 1 << (max(1, int(most)).bit_length() - 1)
