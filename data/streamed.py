"""The loader of latents streamed from WebDataset tars, local or remote; data/streams.py has the order of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel.technique import first_line
from data.blocks import BlockReader, OnCorrupt, Skips
from data.loader import BaseLoader, Batch, LatentTensors, LoaderArgs, sampled
from data.manifest import open_set
from data.read_ahead import Feeder, held_out_batches
from data.streams import RankPositions, StreamDataset, StreamOrder, WorkerBatch, from_bytes


class StreamedLatents(BaseLoader):
    """Streams the latent set at `path`, a folder or a URL, block by block.

    A batch takes its samples from `streams` ranges of the set, each shuffled inside a `window` of samples.
    `num_workers` processes read ahead, `prefetch_factor` batches each; with 0 a thread of this process reads.
    `timeout`, `retries` and `cache` are for URLs (data/source.py). `normalisation`, `encoder`, `latent_scale`: see
    ResidentLatents.
    """

    def __init__(
        self,
        *,
        path: str | None,
        normalisation: Literal["channel", "scale_shift"] = "channel",
        encoder: str | None = None,
        latent_scale: float | None = None,
        streams: int = 64,
        window: int = 256,
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
        for key, value, least in (("num_workers", num_workers, 0), ("prefetch_factor", prefetch_factor, 1)):
            if value < least:
                raise ValueError(f"data.{key}={value} must be at least {least}.")
        source, manifest, spec = open_set(
            "webdataset", path, normalisation, encoder, latent_scale, cache=cache, timeout=timeout, retries=retries
        )
        # Another order of samples is another data set: no run resumes on it.
        spec = replace(spec, fingerprint=f"{spec.fingerprint}-{streams}-{window}")
        super().__init__(spec, LoaderArgs(batch_size, seed, device, rank, world_size))
        self.blocks, self.held_out_blocks = (
            BlockReader(source, manifest, split, on_corrupt) for split in ("train", "held_out")
        )
        counts = [place.block.samples for place in self.blocks.places]
        self.order = StreamOrder(self.blocks.blocks_of_shard, counts, seed, streams, window)
        self.of_rank = RankPositions(batch_size, rank, world_size, streams)
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.pin_memory = pin_memory and device.type == "cuda"
        self.skips = Skips()
        self.feeder: Feeder | None = None
        if rank == 0:
            how = "whole streams" if self.of_rank.own_streams() is not None or world_size == 1 else "parts of streams"
            print(
                f"data: {self.spec.count} samples in {len(counts)} blocks from {source}, {streams} streams, windows of "
                f"{window}; each of {world_size} × {max(1, num_workers)} readers has {how}",
                flush=True,
            )

    def batch_at(self, start: int) -> Batch:
        if self.feeder is None:
            dataset = StreamDataset(self.order, self.blocks, self.of_rank, self.samples_seen)
            batches = DeviceBatches(dataset, self.num_workers, self.prefetch_factor, self.pin_memory)
            self.feeder = Feeder(partial(batches.on, self.device, self.skips), self.device)
        tensors = self.feeder.get()
        ids, labels, position = (tensors.pop(name) for name in ("ids", "labels", "position"))
        raw = sampled(LatentTensors(labels=labels, **tensors), self.seed, position)
        return Batch(self.normalise(raw), labels, ids, position)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return held_out_batches(self.held_out_blocks, batch_size, self.device, self.normalise, self.skips)

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.feeder is not None:
            self.feeder.stop()
            self.feeder = None
        super().load_state_dict(state)


def unchanged(item: Any) -> Any:
    return item


class DeviceBatches:
    """Joins what the workers read into batches on the device."""

    def __init__(self, dataset: StreamDataset, workers: int, prefetch: int, pin_memory: bool) -> None:
        self.workers = max(1, workers)
        self.like = {name: tensor[:1].clone() for name, tensor in dataset.blocks.read(0).items()}
        self.loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            collate_fn=unchanged,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if workers else None,
            generator=torch.Generator(),  # the default would draw from the run's generator
        )

    def on(self, device: torch.device, skips: Skips) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of each batch in the order of positions; ValueError with the reason if a worker fails."""
        items = iter(self.loader)
        while True:
            found = [self.next_of(items) for _ in range(self.workers)]
            for item in found:
                skips.say(item.reports)
            filled = [item for item in found if item.samples]
            position, order = torch.cat([item.position() for item in filled]).sort()
            moved = [item._replace(buffer=item.buffer.to(device, non_blocking=True)).rows() for item in filled]
            rows = moved[0] if len(moved) == 1 else torch.cat(moved)
            tensors = from_bytes(rows, self.like, order.to(device, non_blocking=True))
            yield tensors | {"position": position.to(device, non_blocking=True)}

    def next_of(self, items: Iterator[WorkerBatch]) -> WorkerBatch:
        try:
            item = next(items)
        except (RuntimeError, OSError, EOFError) as error:  # the latter two: a kill while the worker sent a batch
            reason = first_line(error)
            if isinstance(error, RuntimeError) and not reason.startswith(("DataLoader worker", "Pin memory thread")):
                raise
            raise ValueError(
                f"a reader of data=webdataset died ({reason}); start the same command again to resume, with a "
                f"smaller data.window or data.num_workers if memory ran out."
            ) from error
        if item.failure is not None:
            raise ValueError(item.failure)
        return item
