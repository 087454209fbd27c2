"""The loader of latents streamed from WebDataset tars, local or remote.

The path of a latent: `StreamOrder` (data/order.py) says which windows of which streams a rank
needs; threads of a worker process read and shuffle them (`read_windows`); the worker collects the
next samples of its streams (`StreamDataset`); a thread of the run's process joins the parts of a
batch from all workers (`join_batches`); `StreamedLatents` copies it to the device, normalised.
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
"""Reading threads per worker: most of the time they wait for the disk or the network."""
COPIES_OF_A_BLOCK = 3
"""Peak copies of a block in memory while a thread reads it: bytes, tensors, rows."""


def read_windows(
    order: StreamOrder, blocks: BlockReader, position: int
) -> Iterator[tuple[int, UInt8[Tensor, "n bytes"]]]:
    """Yields the shuffled windows of a stream from `position` on, without end, each as the position
    of its first row and its rows; a row is the bytes of one sample."""
    last_block = -1
    content = torch.empty(0)
    while True:
        window, offset = order.locate(position)
        shuffled = torch.empty(window.size, blocks.row_bytes, dtype=torch.uint8)
        target = order.draw_permutation(window).argsort()
        done = 0

        # The next window begins in the last block of this one, so that block stays in memory.
        for block, first, rows in order.find_blocks(window):
            if block != last_block:
                content = blocks.read_rows(block)
                last_block = block
            shuffled[target[done : done + rows]] = content[first : first + rows]
            done += rows
        yield position, shuffled[offset:]
        position += (window.size - offset) * order.streams


WorkerBatch = tuple[Tensor, list[int], list[SkippedBlock]]
"""A worker's part of a batch: rows of bytes, their positions, and the blocks it skipped."""


@dataclass(eq=False)
class StreamDataset(IterableDataset):
    """Yields a worker's part of each batch, without end; worker w of W reads every W-th stream of
    the rank.

    It yields a failure as text, because PyTorch passes an exception of a worker on to the parent
    process as a page of traceback.
    """

    order: StreamOrder
    blocks: BlockReader
    rank_positions: RankPositions
    start: int

    def __iter__(self) -> Iterator[WorkerBatch | str]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank_streams = self.rank_positions.find_streams() or range(self.order.streams)
        readers = Readers(READERS_PER_WORKER, "reader")
        streams: dict[int, Iterator[tuple[int, Tensor]]] = {}
        start = self.start
        try:
            while True:
                wanted = [
                    position
                    for number in rank_streams[worker::workers]
                    for position in self.rank_positions.find_positions(start, number)
                ]
                yield self.collect_batch(streams, readers, wanted)
                start += self.rank_positions.global_batch
        except UserError as error:
            yield str(error)
        finally:
            readers.close()

    def collect_batch(
        self, streams: dict[int, Iterator[tuple[int, Tensor]]], readers: Readers, wanted: list[int]
    ) -> WorkerBatch:
        """Takes the samples at `wanted` positions from `streams`; opens streams on first use."""
        every = self.order.streams
        for position in wanted:
            if position % every not in streams:
                windows = Prefetcher(read_windows(self.order, self.blocks, position), readers)
                streams[position % every] = chain.from_iterable(
                    zip(count(first, every), rows, strict=False) for first, rows in windows
                )

        # Skip the rows before a wanted position, which belong to other ranks.
        parts = [next(row for at, row in streams[p % every] if at == p) for p in wanted]
        rows = torch.stack(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return rows, wanted, self.blocks.take_reports()


def join_batches(
    loader: DataLoader, workers: int, pin_memory: bool
) -> Generator[tuple[Tensor, Tensor, list[SkippedBlock]]]:
    """Yields (rows, positions, reports) of each batch, in order of positions, without end;
    ValueError with the reason if a worker fails.

    It runs in a thread that owns the workers: PyTorch reports a worker's death by a signal to the
    owner, and in the main thread that error would hit any line that happens to run.
    """
    items = iter(loader)
    try:
        while True:
            worker_batches = [next(items) for _ in range(workers)]
            for item in worker_batches:
                if isinstance(item, str):
                    raise UserError(item)
            parts, positions, reports = zip(*worker_batches, strict=True)
            position, order = torch.tensor(list(chain(*positions))).sort()
            rows = torch.cat(parts)[order]
            if pin_memory:
                rows = rows.pin_memory()
                position = position.pin_memory()
            yield rows, position, list(chain(*reports))
    except (RuntimeError, OSError, EOFError) as error:
        # OSError and EOFError: a worker was killed while it sent a batch.
        reason = shorten_error(error)
        if isinstance(error, RuntimeError) and not reason.startswith("DataLoader worker"):
            raise
        raise UserError(
            f"a reader of data=webdataset died ({reason}); start the same command again to resume, "
            "with a smaller data.window or data.num_workers if memory ran out."
        ) from error
    finally:
        # End the workers here: if a failure ends this loop, its traceback keeps `items` alive, and
        # Python would end them only when it collects `items`.
        getattr(items, "_shutdown_workers", lambda: None)()


def end_reading(feeder: Readers, batches: Generator[Any]) -> None:
    """Ends the thread that joins batches, and the workers; `weakref.finalize` also calls this when
    the process ends."""
    feeder.close(wait=True)

    # `batches.close` raises ValueError if the thread still waits for a worker.
    with contextlib.suppress(ValueError):
        batches.close()


class StreamedLatents(BlockLoader):
    """Streams the latent set at `path`, a folder or a URL, block by block.

    A batch takes its samples from `streams` ranges of the set, each shuffled inside a `window` of
    samples. `streams` null: `choose_stream_count` decides by the size of the set; a resumed run
    keeps the number it began with. All windows together take at most `host_memory_gib` of host
    memory; the loader prints how much. `num_workers` processes read `prefetch_factor` batches ahead
    each; 0: threads of this process read. `persistent_workers`: workers survive the end of an epoch
    (otherwise new ones start). `timeout`, `retries` and `cache` are for URLs (data/source.py).
    `normalisation`, `encoder`, `latent_scale`: see ResidentLatents.
    """

    @classmethod
    def foresee(cls, memory: float, **settings: Any) -> tuple[LatentSpec, float]:
        """See `LatentLoader`; no part of the set stays on the device."""
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
        """Epoch of the latest batch."""
        self.pin_memory = pin_memory and self.device.type == "cuda"
        self.configured_streams = streams
        self.window = window
        self.allowed_gib = host_memory_gib
        self.batches: Prefetcher[tuple[Tensor, Tensor, list[SkippedBlock]]] | None = None
        self.use_streams(streams)

    def use_streams(self, configured: int | None) -> None:
        """Cuts the set into `configured` streams (None: see `choose_stream_count`), and prints the
        host memory that they take."""
        places = self.blocks.places
        stream_bytes = count_stream_bytes(self.blocks, self.window)
        streams = choose_stream_count(configured, len(places), stream_bytes, self.allowed_gib)
        self.order = StreamOrder(
            self.blocks.blocks_of_shard, self.blocks.counts, self.seed, streams, self.window
        )
        self.rank_positions = RankPositions(self.batch_size, self.rank, self.world_size, streams)
        if self.rank:
            return

        windows = len(self.rank_positions.find_streams() or range(streams)) * stream_bytes
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
        """Starts the workers, and the thread that joins their batches."""
        batch_bytes = self.batch_size * self.blocks.row_bytes
        prefetch = self.prefetch_factor if self.num_workers else None
        if prefetch is not None:
            refuse_small_shared_memory(
                "the workers of data=webdataset",
                prefetch,
                batch_bytes,
                "lower data.prefetch_factor, or use data.num_workers=0",
            )

        # Without `generator`, the DataLoader draws a seed from PyTorch's global generator, which
        # would change the random numbers of the run.
        loader = DataLoader(
            StreamDataset(self.order, self.blocks, self.rank_positions, self.samples_seen),
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=prefetch,
            generator=torch.Generator(),
        )

        feeder = Readers(1, "feeder")
        batches = join_batches(loader, max(1, self.num_workers), self.pin_memory)
        self.stop = weakref.finalize(self, end_reading, feeder, batches)
        self.batches = Prefetcher(batches, feeder)
        return self.batches

    def stop_reading(self) -> None:
        """Ends the workers and the thread, if they run."""
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
        return self.make_batch(self.blocks.unpack_rows(rows), position)

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {"streams": self.order.streams}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues with the run's number of streams: the order of samples depends on it."""
        super().load_state_dict(state)
        # Checkpoints of earlier versions lack the number; these versions used 64 by default.
        streams = state.get("streams", self.configured_streams or MAX_STREAMS)
        if streams < 1 or self.configured_streams not in (None, streams):
            raise UserError(
                f"data.streams={self.configured_streams}, but the run began with {streams}; leave "
                "data.streams out."
            )
        if streams != self.order.streams:
            self.use_streams(streams)
        self.stop_reading()


def count_stream_bytes(blocks: BlockReader, window: int) -> int:
    """Counts the bytes of host memory that a stream takes: two windows, and the block in which the
    later window ends."""
    largest = max(blocks.counts)
    sample_bytes = max(place.block.size / place.block.samples for place in blocks.places)
    return math.ceil((2 * window + largest) * sample_bytes)


def choose_stream_count(
    configured: int | None, blocks: int, stream_bytes: int, allowed_gib: float
) -> int:
    """Returns `configured`, or the largest power of two that fits in memory, is at most 64 and at
    most a quarter of the blocks.

    Neighbouring streams both read the block at their border; with a quarter of the blocks these
    double reads add at most a quarter. ValueError if the streams take more than `allowed_gib`.
    """
    fewest = configured or 1
    if not fewest * stream_bytes <= allowed_gib * GIB:
        raise UserError(
            f"data.host_memory_gib={allowed_gib} is too little for {fewest} streams, whose windows "
            f"take {fewest * stream_bytes / GIB:.2f} GiB; raise it, or lower "
            f"data.{'streams' if configured else 'window'}."
        )
    if configured:
        return configured
    limit = min(MAX_STREAMS, blocks // 4, allowed_gib * GIB // stream_bytes)
    return 1 << (max(1, int(limit)).bit_length() - 1)
