"""The loader of latents streamed from WebDataset tars, local or remote; data/streams.py has the
order of samples."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from common.errors import UserError
from common.shared_memory import refuse_small_shared_memory
from common.text import first_line
from data.blocks import BlockReader, OnCorrupt, add_skipped
from data.loader import BaseLoader, Batch, LatentTensors, LoaderArgs, sampled
from data.manifest import Normalisation, open_set
from data.read_ahead import Feeder, held_out_batches
from data.streams import (
    READERS,
    RankPositions,
    StreamDataset,
    StreamOrder,
    WorkerBatch,
    from_bytes,
    to_bytes,
)

GIB = 2**30
MOST_STREAMS = 64
COPIES = 3
"""Of a block, while a thread reads it: its bytes, its tensors and its rows."""


class StreamedLatents(BaseLoader):
    """Streams the latent set at `path`, a folder or a URL, block by block.

    A batch takes its samples from `streams` ranges of the set, each shuffled inside a `window` of
    samples. Null chooses as many as the set is large enough for (`fitting_streams`); a resumed run
    keeps the number that it began with. The windows take at most `host_memory_gib` of host memory,
    all streams together; the loader prints how much. `num_workers` processes read ahead,
    `prefetch_factor` batches each; with 0 a thread of this process reads. `timeout`, `retries` and
    `cache` are for URLs (data/source.py). `normalisation`, `encoder`, `latent_scale`: see
    ResidentLatents.
    """

    def __init__(
        self,
        *,
        path: str | None,
        normalisation: Normalisation = "channel",
        encoder: str | None = None,
        latent_scale: float | None = None,
        streams: int | None = None,
        window: int = 256,
        host_memory_gib: float = 8.0,
        num_workers: int = 2,
        prefetch_factor: int = 4,
        pin_memory: bool = True,
        on_corrupt: OnCorrupt = "error",
        cache: str | None = None,
        timeout: float = 30.0,
        retries: int = 5,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        sizes = (("streams", streams, 1), ("window", window, 1), ("num_workers", num_workers, 0))
        for key, value, least in (*sizes, ("prefetch_factor", prefetch_factor, 1)):
            if value is not None and value < least:
                raise UserError(f"data.{key}={value} must be at least {least}.")
        source, manifest, spec = open_set(
            "webdataset",
            path,
            normalisation,
            encoder,
            latent_scale,
            cache=cache,
            timeout=timeout,
            retries=retries,
        )
        spec = replace(
            spec,
            fingerprint=f"{spec.fingerprint}-{window}",
            earlier_fingerprint=f"{spec.earlier_fingerprint}-{streams or MOST_STREAMS}-{window}",
        )
        super().__init__(spec, LoaderArgs(batch_size, seed, device, rank, world_size))
        self.blocks, self.held_out_blocks = (
            BlockReader(source, manifest, split, on_corrupt) for split in ("train", "held_out")
        )
        self.held_out_count = self.held_out_blocks.count
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory and device.type == "cuda"
        self.feeder: Feeder | None = None
        self.source = source
        self.given = streams
        self.window = window
        self.allowed_gib = host_memory_gib
        self.use_streams(streams)

    def use_streams(self, given: int | None) -> None:
        """Cuts the set into `given` streams, or as many as fit, and prints the memory that they
        take."""
        places = self.blocks.places
        ranks = self.world_size
        readers = max(1, self.num_workers)
        a_stream = memory_of_a_stream(self.blocks, self.window)
        streams = fitting_streams(given, len(places), a_stream, self.allowed_gib)
        counts = [place.block.samples for place in places]
        self.order = StreamOrder(
            self.blocks.blocks_of_shard, counts, self.seed, streams, self.window
        )
        self.of_rank = RankPositions(self.batch_size, self.rank, ranks, streams)
        if self.rank == 0:
            own = self.of_rank.own_streams()
            how = "whole streams" if own is not None or ranks == 1 else "parts of streams"
            windows = (streams if own is None else len(own)) * a_stream
            reading = readers * READERS * COPIES * max(place.block.size for place in places)
            print(
                f"data: {self.spec.count} samples in {len(places)} blocks from {self.source}, "
                f"{streams} streams, windows of {self.window}; each of {ranks} × {readers} "
                f"readers has {how}; in each process windows take up to {windows / 2**20:.2f} MiB "
                f"and reading about {reading / 2**20:.2f} MiB of host memory",
                flush=True,
            )

    def batch_at(self, start: int) -> Batch:
        if self.feeder is None:
            dataset = StreamDataset(self.order, self.blocks, self.of_rank, self.samples_seen)
            batches = DeviceBatches(
                dataset, self.num_workers, self.prefetch_factor, self.pin_memory
            )
            self.feeder = Feeder(partial(batches.on, self.device, self.skipped), self.device)
        try:
            tensors = self.feeder.get(self.patience)
        except queue.Empty as error:
            raise UserError(
                f"data=webdataset gave no batch for {self.patience / 60:g} minutes "
                "(runtime.parallel.timeout_minutes). A disk that hangs does that, and so does a "
                "full /dev/shm; mend it, or use data.num_workers=0."
            ) from error
        ids, labels, position = (tensors.pop(name) for name in ("ids", "labels", "position"))
        raw = sampled(LatentTensors(labels=labels, **tensors), self.seed, position)
        return Batch(self.normalise(raw), labels, ids, position)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return held_out_batches(
            self.held_out_blocks, batch_size, self.device, self.normalise, self.skipped
        )

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {"streams": self.order.streams}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues with the number of streams that the run began with, because the order of
        samples depends on it."""
        # earlier versions had 64 where none were given
        streams = state.get("streams", self.given or MOST_STREAMS)
        if type(streams) is not int or streams < 1:
            raise UserError(
                f"the state of the loader says streams={streams}, which is no number of streams."
            )
        if self.given not in (None, streams):
            raise UserError(
                f"data.streams={self.given}, but the run began with {streams}; leave data.streams "
                "out."
            )
        if streams != self.order.streams:
            self.use_streams(streams)
        if self.feeder is not None:
            self.feeder.stop()
            self.feeder = None
        super().load_state_dict(state)


def memory_of_a_stream(blocks: BlockReader, window: int) -> int:
    """Bytes of a stream's two windows, and of the block that the later one ends in."""
    largest = max(place.block.samples for place in blocks.places)
    return math.ceil(
        (2 * window + largest)
        * max(place.block.size / place.block.samples for place in blocks.places)
    )


def fitting_streams(given: int | None, blocks: int, a_stream: int, allowed_gib: float) -> int:
    """The number of streams: as given, or a power of two, at most 64 and a quarter of the blocks,
    that fits.

    Two streams share the block where one ends and the other begins, so a quarter makes at most a
    quarter more reads. ValueError if they take more than `allowed_gib` of memory.
    """
    if not (given or 1) * a_stream <= allowed_gib * GIB:
        raise UserError(
            f"data.host_memory_gib={allowed_gib} is too little for {given or 1} streams, whose "
            f"windows take {(given or 1) * a_stream / GIB:.2f} GiB; raise it, or lower "
            f"data.{'streams' if given else 'window'}."
        )
    most = min(MOST_STREAMS, blocks // 4, allowed_gib * GIB // a_stream)
    return given or 1 << (max(1, int(most)).bit_length() - 1)


def unchanged(item: Any) -> Any:
    return item


class DeviceBatches:
    """Joins what the workers read into batches on the device."""

    def __init__(
        self, dataset: StreamDataset, workers: int, prefetch: int, pin_memory: bool
    ) -> None:
        self.workers = max(1, workers)
        self.like = {name: tensor[:1].clone() for name, tensor in dataset.blocks.read(0).items()}
        if workers:
            refuse_small_shared_memory(
                "the workers of data=webdataset",
                prefetch,
                dataset.of_rank.batch_size * (8 + to_bytes(self.like).shape[1]),
                "lower data.prefetch_factor, or use data.num_workers=0",
            )
        self.loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            collate_fn=unchanged,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if workers else None,
            generator=torch.Generator(),  # the default would draw from the run's generator
        )

    def on(self, device: torch.device, skipped: dict[str, int]) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of each batch in the order of positions; ValueError with the reason if
        a worker fails."""
        items = iter(self.loader)
        try:
            while True:
                found = [self.next_of(items) for _ in range(self.workers)]
                for item in found:
                    add_skipped(skipped, item.reports)
                yield self.joined([item for item in found if item.samples], device)
        finally:  # not when the iterator is collected, for the traceback of a failure keeps it
            getattr(items, "_shutdown_workers", lambda: None)()

    def joined(self, items: list[WorkerBatch], device: torch.device) -> dict[str, Tensor]:
        position, order = torch.cat([item.position() for item in items]).sort()
        moved = [
            item._replace(buffer=item.buffer.to(device, non_blocking=True)).rows() for item in items
        ]
        rows = moved[0] if len(moved) == 1 else torch.cat(moved)
        tensors = from_bytes(rows, self.like, order.to(device, non_blocking=True))
        return tensors | {"position": position.to(device, non_blocking=True)}

    def next_of(self, items: Iterator[WorkerBatch]) -> WorkerBatch:
        try:
            item = next(items)
        except (
            RuntimeError,
            OSError,
            EOFError,
        ) as error:  # the latter two: a kill while the worker sent a batch
            reason = first_line(error)
            if isinstance(error, RuntimeError) and not reason.startswith(
                ("DataLoader worker", "Pin memory thread")
            ):
                raise
            raise UserError(
                f"a reader of data=webdataset died ({reason}); start the same command again to "
                "resume, with a smaller data.window or data.num_workers if memory ran out."
            ) from error
        if item.failure is not None:
            raise UserError(item.failure)
        return item
