"""Latents streamed from WebDataset tars, local or remote, in an order that depends on seed and position only."""

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
from data.feeder import Feeder
from data.held_out import held_out_batches
from data.in_memory import LatentTensors, sampled
from data.latent_set import open_set
from data.loader import Batch
from data.streams import Part, Share, StreamDataset, StreamOrder, columns_of, from_rows


class StreamedLatents:
    """The latent set at `path`, a folder or a URL, read block by block; see data/streams.py for the order.

    `streams` ranges of the set are read side by side, each shuffled inside a `window` of samples. `num_workers`
    processes read ahead, `prefetch_factor` batches each; 0 reads in a thread of this process. `timeout`, `retries` and
    `cache` are for URLs (data/source.py). `normalisation`, `encoder`, `latent_scale`: see ResidentLatents.
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
        # Another order of samples is another data set: a run is not resumed on it.
        self.spec = replace(spec, fingerprint=f"{spec.fingerprint}-{streams}-{window}")
        self.blocks = BlockReader(source, manifest, "train", on_corrupt)
        self.held_out_blocks = BlockReader(source, manifest, "held_out", on_corrupt)
        counts = [place.block.samples for place in self.blocks.places]
        self.order = StreamOrder(self.blocks.blocks_of_shard, counts, seed, streams, window)
        self.share = Share(world_size * batch_size, batch_size, rank, world_size, streams)
        self.seed, self.device, self.batch_size = seed, device, batch_size
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.pin_memory = pin_memory and device.type == "cuda"
        self.normalise = self.spec.normaliser(device)
        self.skips = Skips()
        self.samples_seen = 0
        self.feeder: Feeder | None = None
        if rank == 0:
            how = "whole streams" if self.share.own_lanes() is not None or world_size == 1 else "parts of streams"
            print(
                f"data: {self.spec.count} samples in {len(counts)} blocks from {source}, {streams} streams, windows of "
                f"{window}; each of {world_size} × {max(1, num_workers)} readers has {how}",
                flush=True,
            )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.feeder is None:
            batches = Assembly(self.dataset(), self.num_workers, self.prefetch_factor, self.pin_memory)
            self.feeder = Feeder(partial(batches.on, self.device, self.skips), self.device)
        tensors = self.feeder.get()
        self.samples_seen += self.share.batch
        ids, labels, position = (tensors.pop(name) for name in ("ids", "labels", "position"))
        raw = sampled(LatentTensors(labels=labels, **tensors), self.seed, position)
        return Batch(self.normalise(raw), labels, ids, position)

    def dataset(self) -> StreamDataset:
        return StreamDataset(self.order, self.blocks, self.share, self.samples_seen)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return held_out_batches(self.held_out_blocks, batch_size, self.device, self.normalise, self.skips)

    def state_dict(self) -> dict[str, int]:
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.feeder is not None:
            self.feeder.stop()
            self.feeder = None
        self.samples_seen = state["samples_seen"]


def as_it_is(part: Any) -> Any:
    return part


class Assembly:
    """Batches on the device from the parts that the workers make."""

    def __init__(self, dataset: StreamDataset, workers: int, prefetch: int, pin_memory: bool) -> None:
        self.workers = workers
        self.columns = columns_of(dataset.blocks.read(0))
        self.parts = DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            collate_fn=as_it_is,
            pin_memory=pin_memory,
            prefetch_factor=prefetch if workers else None,
            generator=torch.Generator(),  # or it draws from the run's
        )

    def on(self, device: torch.device, skips: Skips) -> Iterator[dict[str, Tensor]]:
        """Tensors of a batch, in the order of positions; ValueError with the reason if the workers fail."""
        parts = iter(self.parts)
        while True:
            batch = [self.next_part(parts) for _ in range(max(1, self.workers))]
            for part in batch:
                skips.say(part.reports)
            filled = [part for part in batch if part.samples]
            position, order = torch.cat([part.position() for part in filled]).sort()
            moved = [part._replace(buffer=part.buffer.to(device, non_blocking=True)).rows() for part in filled]
            rows = moved[0] if len(moved) == 1 else torch.cat(moved)
            tensors = from_rows(rows, self.columns, order.to(device, non_blocking=True))
            yield tensors | {"position": position.to(device, non_blocking=True)}

    def next_part(self, parts: Iterator[Part]) -> Part:
        try:
            part = next(parts)
        except (RuntimeError, OSError, EOFError) as error:  # the latter two: killed while it sent a batch
            reason = first_line(error)
            if isinstance(error, RuntimeError) and not reason.startswith(("DataLoader worker", "Pin memory thread")):
                raise
            raise ValueError(
                f"a reader of data=webdataset died ({reason}); start the same command again to resume, with a "
                f"smaller data.window or data.num_workers if memory ran out."
            ) from error
        if part.failure is not None:
            raise ValueError(part.failure)
        return part
