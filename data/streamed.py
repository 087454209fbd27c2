"""The loader of latents streamed from WebDataset tars, local or remote.

How a latent gets to the device: `StreamOrder` (data/order.py) says which windows of which streams a
rank needs. Threads of a worker process read and shuffle these windows (`read_windows`). The worker
collects the next samples of its streams (`StreamDataset`). A thread of the training process joins
the parts of a batch from all workers (`join_batches`). `StreamedLatents` copies the batch to the
device and normalises it.
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
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from common.errors import UserError
from common.memory import GIB
from common.text import format_bytes, shorten_error
from common.workers import Prefetcher, Readers, refuse_small_shared_memory
from data.blocks import BlockReader, OnCorrupt, SkippedBlock, add_skipped, open_set
from data.caption_blocks import read_captions
from data.loader import Batch, LatentLoader, LoaderArgs
from data.manifest import Normalisation
from data.order import RankPositions, StreamOrder
from data.rows import Rows
from data.spec import Count, LatentSpec, Size

MAX_STREAMS = 64
READERS_PER_WORKER = 8
"""Number of reading threads per worker; it is large because these threads mostly wait for the disk
or the network."""
COPIES_OF_A_BLOCK = 3
"""Peak number of copies of a block in memory while a thread reads the block: its raw bytes, its
tensors, its rows."""


def read_windows(
    order: StreamOrder, blocks: BlockReader, position: int
) -> Iterator[tuple[int, Rows]]:
    """Yields (position of the first row, rows) for each window of a stream, endlessly, starting at
    `position`. The rows (n, bytes of a sample) are the window's samples, shuffled within the
    window. The first window lacks the samples before `position`."""
    last_block = -1
    content = torch.empty(0)
    while True:
        window, offset = order.locate(position)
        shuffled = torch.empty(window.size, blocks.row_bytes, dtype=torch.uint8)
        target = order.draw_permutation(window).argsort()
        done = 0

        # Keep the last block of a window in memory, because the next window begins in that block.
        for block, first, rows in order.find_blocks(window):
            if block != last_block:
                content = blocks.read_rows(block)
                last_block = block
            shuffled[target[done : done + rows]] = content[first : first + rows]
            done += rows
        yield position, shuffled[offset:]
        position += (window.size - offset) * order.streams


Streams = dict[int, Iterator[tuple[int, Tensor]]]
"""Number of a stream -> iterator of its samples: position and row of bytes."""
WorkerBatch = tuple[Tensor, list[int], list[SkippedBlock]]
"""A worker's part of a batch: samples as rows of bytes, the position of each sample, and reports on
the blocks that the worker skipped."""
JoinedBatch = tuple[Tensor, Tensor, list[SkippedBlock]]
"""The parts of a batch from all workers: samples as rows of bytes, sorted by position, their
positions, and reports on skipped blocks."""


@dataclass(eq=False)
class StreamDataset(IterableDataset):
    """Yields a worker's part of each batch, endlessly. Worker w of W reads every W-th stream of the
    rank, from the w-th on.

    If reading fails, it yields the error message as text, because PyTorch shows an exception of a
    worker as a long traceback in the parent process.
    """

    order: StreamOrder
    blocks: BlockReader
    rank_positions: RankPositions
    start: int

    def __iter__(self) -> Iterator[WorkerBatch | str]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank_streams = self.rank_positions.find_streams()
        readers = Readers(READERS_PER_WORKER, "reader")
        streams: Streams = {}
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

    def collect_batch(self, streams: Streams, readers: Readers, wanted: list[int]) -> WorkerBatch:
        """Takes the samples at the positions `wanted` from `streams`; opens a stream when it is
        first needed."""
        every = self.order.streams
        for position in wanted:
            if position % every not in streams:
                windows = Prefetcher(read_windows(self.order, self.blocks, position), readers)
                streams[position % every] = chain.from_iterable(
                    zip(count(first, every), rows, strict=False) for first, rows in windows
                )

        # Skip rows before a wanted position, because their samples belong to other ranks.
        parts = [next(row for at, row in streams[p % every] if at == p) for p in wanted]
        rows = torch.empty(0, dtype=torch.uint8)
        if parts:
            epoch = torch.tensor(wanted) // self.order.count
            rows = self.blocks.append_captions(torch.stack(parts), self.order.seed, epoch)
        return rows, wanted, self.blocks.take_reports()


def join_batches(loader: DataLoader, pin_memory: bool) -> Generator[JoinedBatch]:
    """Yields the batches, endlessly. Raises UserError with the reason if a worker fails.

    It must run in another thread than the main thread, because it starts the workers. If the main
    thread starts them and one dies, PyTorch's signal handler raises an error at whatever line the
    main thread then executes.
    """
    items = iter(loader)
    try:
        while True:
            worker_batches = [next(items) for _ in range(max(1, loader.num_workers))]
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
        # Explain to the user that a worker died: an OSError or EOFError means that a worker was
        # killed while it sent a batch. Raise any other RuntimeError unchanged.
        reason = shorten_error(error)
        if isinstance(error, RuntimeError) and not reason.startswith("DataLoader worker"):
            raise
        raise UserError(
            f"a reader of data=webdataset died ({reason}); start the same command again to resume, "
            "with a smaller data.window or data.num_workers if memory ran out."
        ) from error
    finally:
        # End the workers now: after an error the traceback still refers to `items`, so without this
        # line the workers continue to run.
        getattr(items, "_shutdown_workers", lambda: None)()


def end_reading(feeder: Readers, batches: Generator[Any]) -> None:
    """Ends the thread that joins batches, and the workers. `weakref.finalize` calls this function
    when the loader is freed or the process ends."""
    feeder.close(wait=True)

    # Ignore the ValueError that `batches.close` raises if the thread still waits for a worker.
    with contextlib.suppress(ValueError):
        batches.close()


class StreamedLatents(LatentLoader):
    """Streams the latent set at `path`, a folder or a URL, block by block.

    A batch takes its samples from `streams` parts of the set, and each part is shuffled within
    windows of `window` samples. If `streams` is null, `choose_stream_count` computes it from the
    size of the set; a resumed run keeps the number with which it began. All windows together take
    at most `host_memory_gib` of host memory; the loader prints how much. `num_workers` processes
    each read `prefetch_factor` batches ahead; with 0, threads of the training process read. With
    `persistent_workers` the workers continue to run at the end of an epoch; otherwise new workers
    start for each epoch. Captions are in host memory; a sample gets its caption where it is read,
    so the device only has captions that it needs. `timeout`, `retries` and `cache` have an effect
    for URLs only (data/source.py). `normalisation`, `encoder` and `latent_scale` mean the same as
    for `ResidentLatents`.
    """

    @classmethod
    def foresee(cls, memory: float, **settings: Any) -> tuple[LatentSpec, float]:
        """Returns the spec of the set, and 0 bytes, because a streamed set keeps no latents on the
        device (see `LatentLoader.foresee`)."""
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
        spec, train, held_out = open_set(
            "webdataset",
            path,
            normalisation,
            encoder,
            latent_scale,
            on_corrupt,
            cache=cache,
            timeout=timeout,
            retries=retries,
        )
        spec = spec.with_order(str(window))
        super().__init__(spec, **args)
        self.blocks = train
        self.held_out_blocks = held_out
        self.held_out_count = held_out.count
        self.captions = train.captions = read_captions(train, self.text)

        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.epoch = 0
        """Epoch of the latest batch."""
        self.pin_memory = pin_memory and self.device.type == "cuda"
        self.configured_streams = streams
        self.window = window
        self.allowed_gib = host_memory_gib
        self.batches: Prefetcher[JoinedBatch] | None = None
        self.use_streams(streams)

    def use_streams(self, configured: int | None) -> None:
        """Cuts the set into `configured` streams (None: as many as `choose_stream_count` returns),
        and prints how much host memory the streams take."""
        places = self.blocks.places
        # A stream takes two windows, the current one and the next, and the block in which the next
        # window ends.
        sample_bytes = max(place.block.size / place.block.samples for place in places)
        stream_bytes = math.ceil((2 * self.window + max(self.blocks.counts)) * sample_bytes)
        streams = choose_stream_count(configured, len(places), stream_bytes, self.allowed_gib)
        self.order = StreamOrder(
            self.blocks.blocks_of_shard, self.blocks.counts, self.seed, streams, self.window
        )
        self.rank_positions = RankPositions(self.batch_size, self.rank, self.world_size, streams)
        if self.rank:
            return

        windows = len(self.rank_positions.find_streams()) * stream_bytes
        reading = (
            max(1, self.num_workers)
            * READERS_PER_WORKER
            * COPIES_OF_A_BLOCK
            * max(place.block.size for place in places)
        )
        print(
            f"data: {self.spec.count} samples in {len(places)} blocks from {self.blocks.source}, "
            f"{streams} streams, windows of {self.window}; in each process windows take up to "
            f"{format_bytes(windows)} and reading about {format_bytes(reading)} of host memory",
            flush=True,
        )
        if self.captions is not None:
            count = self.captions.spec.count
            print(
                f"data: {count} captions take {format_bytes(count * self.captions.row_bytes)} of "
                "host memory",
                flush=True,
            )

    def start_reading(self) -> Prefetcher[JoinedBatch]:
        """Starts the workers, and the thread that joins their parts of batches; returns an iterator
        of the joined batches."""
        prefetch = self.prefetch_factor if self.num_workers else None
        if prefetch is not None:
            refuse_small_shared_memory(
                "the workers of data=webdataset",
                prefetch,
                self.batch_size * self.blocks.joined_bytes,
                "lower data.prefetch_factor, or use data.num_workers=0",
            )

        # Pass a `generator`: without one, the DataLoader draws a seed from PyTorch's global
        # generator, which changes the random numbers of the run.
        loader = DataLoader(
            StreamDataset(self.order, self.blocks, self.rank_positions, self.samples_seen),
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=prefetch,
            generator=torch.Generator(),
        )

        feeder = Readers(1, "feeder")
        batches = join_batches(loader, self.pin_memory)
        self.stop = weakref.finalize(self, end_reading, feeder, batches)
        self.batches = Prefetcher(batches, feeder)
        return self.batches

    def stop_reading(self) -> None:
        """Ends the workers and the thread that joins batches, if they run."""
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
        samples, text = self.blocks.unpack_rows(rows)
        return self.make_batch(samples, position, text)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        parts = self.held_out_blocks.read_in_order(batch_size, self.device, self.skipped)
        for number, samples in enumerate(parts):
            yield self.make_plain_batch(samples, number * batch_size)

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {"streams": self.order.streams}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Loads the state of a run, and uses that run's number of streams, because the order of
        samples depends on this number."""
        super().load_state_dict(state)
        streams = state["streams"]
        if streams < 1 or self.configured_streams not in (None, streams):
            raise UserError(
                f"data.streams={self.configured_streams}, but the run began with {streams}; leave "
                "data.streams out."
            )
        if streams != self.order.streams:
            self.use_streams(streams)
        self.stop_reading()


def choose_stream_count(
    configured: int | None, blocks: int, stream_bytes: int, allowed_gib: float
) -> int:
    """Returns the number of streams: `configured`, or if that is None the largest power of two of
    streams that fit into `allowed_gib`, at most 64 and at most a quarter of the number of blocks.

    Two neighbouring streams both read the block at their border, so with a quarter as many streams
    as blocks they read at most a quarter more blocks. Raises UserError if the streams take more
    than `allowed_gib`.
    """
    fewest = configured or 1
    if not fewest * stream_bytes <= allowed_gib * GIB:
        raise UserError(
            f"data.host_memory_gib={allowed_gib} is too little for {fewest} streams, whose windows "
            f"take {format_bytes(fewest * stream_bytes)}; raise it, or lower "
            f"data.{'streams' if configured else 'window'}."
        )
    if configured:
        return configured
    limit = min(MAX_STREAMS, blocks // 4, allowed_gib * GIB // stream_bytes)
    return 1 << (max(1, int(limit)).bit_length() - 1)
