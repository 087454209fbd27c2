"""Loaders that keep latents on the device: given tensors, a whole set read from files, or one chunk
of such a set at a time (`ChunkOrder` in data/order.py)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from common.errors import UserError
from common.memory import GIB, count_host_bytes
from common.workers import Prefetcher, Readers
from data.blocks import BlockLoader, BlockReader, OnCorrupt, add_skipped, append_captions, open_set
from data.caption_blocks import read_captions
from data.caption_table import count_caption_bytes
from data.loader import Batch, Int8Latents, LatentLoader, LatentTensors, LoaderArgs
from data.manifest import Normalisation
from data.order import Chunk, ChunkOrder, EpochOrder
from data.spec import Above0, LatentSpec

Storage = Literal["native", "int8"]


class InMemoryLatents(LatentLoader):
    """Loader of tensors that are already on the device; it makes a batch by one indexing
    operation."""

    def __init__(
        self,
        spec: LatentSpec,
        train: LatentTensors,
        held_out: LatentTensors,
        **args: Unpack[LoaderArgs],
    ) -> None:
        super().__init__(spec, **args)
        self.train = train
        self.held_out_split = held_out
        self.held_out_count = len(held_out.labels)
        self.order = EpochOrder(len(train.labels), self.seed, self.device)

    def batch_at(self, start: int) -> Batch:
        position = torch.arange(start, start + self.batch_size, device=self.device)
        return self.make_batch(
            self.train.gather(self.order.find_ids(start, self.batch_size)), position
        )

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        for start in range(0, self.held_out_count, batch_size):
            rows = self.held_out_split.gather(slice(start, start + batch_size))
            yield self.make_plain_batch(rows, start)


class ChunkedLatents(BlockLoader):
    """Loader of a set larger than the device's memory. It keeps a chunk of at most `chunk_size`
    samples on the device, and a buffer of the same size for the next chunk.

    Batches come from one buffer while a thread fills the other buffer through pinned memory, on a
    separate CUDA stream.
    """

    def __init__(
        self,
        spec: LatentSpec,
        train: BlockReader,
        held_out: BlockReader,
        chunk_size: int,
        **args: Unpack[LoaderArgs],
    ) -> None:
        super().__init__(spec, train, held_out, **args)
        self.order = ChunkOrder(train.counts, self.seed, chunk_size)
        self.chunk: Chunk | None = None
        """The chunk from which batches are currently made; None before the first batch."""

    def start_filling(self, first: Chunk) -> None:
        """Allocates two buffers on the device and starts the thread that fills them with chunks,
        beginning with the chunk `first`."""
        cuda = self.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(self.device) if cuda else None
        self.last_batch = torch.cuda.Event() if cuda else None
        rows = (self.order.chunk_size, self.row_bytes)
        buffers = [
            (
                torch.empty(rows, dtype=torch.uint8, device=self.device),
                torch.empty(rows[0], dtype=torch.long, device=self.device),
            )
            for _ in range(2)
        ]
        # The buffers' memory may belong to kernels that are still queued on the current stream.
        if self.copy_stream is not None:
            self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))

        # When this loader is freed or the process ends, wait for the thread, because a copy that
        # runs after the CUDA context is destroyed fails.
        self.readers = Readers(1, "chunk")
        self.chunks = Prefetcher(self.fill(buffers, first), self.readers)
        self.stop = weakref.finalize(self, self.readers.close, wait=True)

    def fill(self, buffers: list[tuple[Tensor, Tensor]], chunk: Chunk) -> Iterator[Any]:
        """Yields (chunk, rows, order) for `chunk` and, endlessly, for the chunks after it. `rows`
        is the buffer with the chunk's samples as bytes, `order` the shuffled row numbers. Fills the
        two buffers in turn."""
        while True:
            rows, order = buffers[0]

            # Wait before overwriting this buffer, because the GPU may still be making batches from
            # the chunk in it.
            if self.last_batch is not None:
                self.last_batch.synchronize()

            first = 0
            for number in chunk.blocks:
                if self.readers.closed.is_set():
                    return
                block = append_captions(
                    self.blocks.read_rows(number),
                    self.blocks,
                    self.captions,
                    self.seed,
                    chunk.epoch,
                )
                self.copy(block, rows[first : first + len(block)])
                first += len(block)

            self.copy(self.order.draw_permutation(chunk), order[: chunk.size])
            yield chunk, rows, order[: chunk.size]
            buffers.reverse()
            chunk = self.order.find_next(chunk)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies `source` from the host to `target` on the device. Waits until this copy has ended,
        but not for other work of the GPU."""
        if self.copy_stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self.copy_stream):
            target.copy_(source.pin_memory(), non_blocking=True)
            self.copy_stream.record_event().synchronize()

    def batch_at(self, start: int) -> Batch:
        position = torch.arange(start, start + self.batch_size, device=self.device)
        parts = []
        missing = self.batch_size

        # Take rows from several chunks if needed, because a batch may span two chunks.
        while missing:
            chunk, offset = self.order.locate(start)
            if self.chunk is None:
                self.start_filling(chunk)
            while self.chunk != chunk:
                # Wait until the next chunk is on the device. The thread may then overwrite the
                # buffer of the previous one, once the GPU has made its batches.
                if self.last_batch is not None:
                    self.last_batch.record(torch.cuda.current_stream(self.device))
                self.chunk, self.rows, self.shuffled_ids = next(self.chunks)
                add_skipped(self.skipped, self.blocks.take_reports())
            ids = self.shuffled_ids[offset : offset + missing]
            parts.append(self.rows.index_select(0, ids))
            start += len(ids)
            missing -= len(ids)
        return self.make_batch_of_rows(torch.cat(parts), position)

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {"chunk": self.order.chunk_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Loads the state of a run, and uses that run's chunk size, because the order of samples
        depends on the chunk size."""
        super().load_state_dict(state)
        self.order = ChunkOrder(self.blocks.counts, self.seed, state["chunk"])
        if self.chunk is not None:
            self.stop()
            self.chunk = None

            # Free the device memory of the two buffers.
            del self.chunks, self.rows, self.shuffled_ids


class ResidentLatents(LatentLoader):
    """Loads the latent set at `path`, a folder or a URL, onto the device, and verifies every block.

    The device holds the whole set if the set takes at most `device_memory_gib` (null: half of the
    free memory), otherwise one chunk at a time (`ChunkedLatents`); the loader prints which of the
    two, and why. `storage="int8"` halves the memory of 16-bit latents; the loader prints the
    rounding error. `normalisation`: "channel" uses the mean and std per channel that
    precompute_latents.py measured, "scale_shift" uses the autoencoder's constants, and `[[means],
    [stds]]` these numbers. Captions, if the run uses them, are on the device with the whole set;
    with chunks they are in host memory. The loader refuses a set made with another encoder than
    `encoder` or another scale than `latent_scale`. With `on_corrupt="skip"` the samples of the next
    good block replace those of a damaged block.
    """

    @classmethod
    def foresee(
        cls,
        memory: float,
        storage: Storage = "native",
        device_memory_gib: float | None = None,
        text: str = "none",
        **settings: Any,
    ) -> tuple[LatentSpec, float]:
        """Returns the spec, and the bytes of the whole set on the device with its captions, but at
        most `device_memory_gib` (None: half of `memory`); see `LatentLoader.foresee`."""
        spec, train, held_out = open_set("resident", **settings)
        whole = count_sample_bytes(train, storage) * (train.count + held_out.count)
        whole += count_caption_bytes(spec.text, text)
        return spec, min(
            whole, memory / 2 if device_memory_gib is None else device_memory_gib * GIB
        )

    def __init__(
        self,
        *,
        path: str | None,
        normalisation: Normalisation = "channel",
        encoder: str | None = None,
        latent_scale: float | None = None,
        storage: Storage = "native",
        device_memory_gib: Above0 | None = None,
        on_corrupt: OnCorrupt = "error",
        **args: Unpack[LoaderArgs],
    ) -> None:
        expected = (normalisation, encoder, latent_scale)
        spec, train, held_out = open_set("resident", path, *expected, on_corrupt)
        if storage == "int8":
            spec = spec.with_order(storage)
        super().__init__(spec, **args)

        # Keep the whole set on the device if it fits, otherwise a chunk at a time; chunks cannot be
        # stored as int8.
        device = self.device
        allowed = find_allowed_memory(device, device_memory_gib, self.world_size)
        sample_bytes = count_sample_bytes(train, storage)
        caption_bytes = count_caption_bytes(spec.text, self.text)
        whole = sample_bytes * (train.count + held_out.count) + caption_bytes
        self.loader: LatentLoader
        if whole <= allowed:
            plan = "all of it on the device"
            tensors, error = read_split(train, device, storage)
            if storage == "int8":
                worst = (error / torch.tensor(train.manifest.std)).max()
                plan += f"; int8 moves a latent by {worst:.2%} of its channel's std (RMS, worst)"
            held_out_tensors, _ = read_split(held_out, device, storage)
            self.loader = InMemoryLatents(spec, tensors, held_out_tensors, **args)
            add_skipped(self.loader.skipped, train.take_reports() + held_out.take_reports())
        elif storage == "int8":
            raise UserError(
                f"data.storage=int8: {format_gib(sample_bytes * train.count)} do not fit into the "
                f"{format_gib(allowed)} allowed; use storage=native, which takes a chunk at a "
                "time, or raise data.device_memory_gib."
            )
        else:
            row_bytes = sample_bytes + caption_bytes // (spec.text.count if spec.text else 1)
            chunk_size = min(train.count, int(allowed // (2 * row_bytes)))
            plan = f"a chunk of {chunk_size} samples on the device, and the next one on its way"
            self.loader = ChunkedLatents(spec, train, held_out, chunk_size, **args)

        if self.text != "none":
            whole_set = isinstance(self.loader, InMemoryLatents)
            place = device if whole_set else torch.device("cpu")
            self.loader.captions = read_captions(train, self.text, place)
        self.captions = self.loader.captions
        self.skipped = self.loader.skipped
        self.held_out_count = held_out.count
        if self.rank == 0:
            rule = "half of what is free" if device_memory_gib is None else "as given"
            print(
                f"data: the set takes {format_gib(whole)} and {format_gib(allowed)} are allowed "
                f"({rule}), so {plan}",
                flush=True,
            )

    def batch_at(self, start: int) -> Batch:
        return self.loader.batch_at(start)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return self.loader.held_out(batch_size)

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict() | super().state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        if ("chunk" in state) != isinstance(self.loader, ChunkedLatents):
            content = "a chunk of the set" if "chunk" in state else "all of the set"
            raise UserError(
                f"the run was started with {content} on the device, which is another order of "
                "samples; set data.device_memory_gib back to the value it had."
            )
        self.loader.load_state_dict(state)
        super().load_state_dict(state)


def format_gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def find_allowed_memory(device: torch.device, configured_gib: float | None, world_size: int) -> int:
    """Returns how many bytes latents may take on the device: `configured_gib`; if that is None,
    half of the GPU's free memory, or on a CPU half of the host's memory.

    All ranks return the minimum over the ranks, because the order of samples depends on this number
    and must be the same on every rank.
    """
    if configured_gib is not None:
        return int(configured_gib * GIB)
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else count_host_bytes()
    allowed = free // 2

    if world_size > 1 and torch.distributed.is_initialized():
        minimum = torch.tensor(allowed, device=device)
        torch.distributed.all_reduce(minimum, torch.distributed.ReduceOp.MIN)
        return int(minimum)
    if world_size > 1 and cuda:
        raise UserError(
            "data=resident in several processes needs data.device_memory_gib=<GiB>, the same for "
            "all."
        )
    return allowed


def count_sample_bytes(blocks: BlockReader, storage: Storage) -> int:
    if storage == "native":
        return blocks.row_bytes
    sample = [tensor[0] for tensor in blocks.sample_template.values()]

    # Count int8 bytes for latents, which have three dimensions: `Int8Latents` stores one byte per
    # value, and for each sample and channel a scale of 4 bytes.
    return sum(t.numel() + 4 * len(t) if t.ndim == 3 else t.nbytes for t in sample)


def read_split(
    blocks: BlockReader, device: torch.device, storage: Storage
) -> tuple[LatentTensors, Tensor]:
    """Reads a split onto `device`, block by block. Returns the split's samples, and the RMS
    rounding error of the latents per channel, of shape (C,); the error is 0 unless `storage` is
    "int8"."""
    # Begin with empty tensors, because the names and shapes of tensors come from the first block,
    # and an empty split has no block.
    split: dict[str, Any] = {
        "latents": torch.empty(0, *blocks.shape, device=device),
        "labels": torch.empty(0, dtype=torch.long, device=device),
    }
    squares = torch.zeros(blocks.shape[0], dtype=torch.float64)
    for number, place in enumerate(blocks.places):
        rows = slice(place.first, place.first + place.block.samples)
        for name, tensor in blocks.read(number).items():
            rounded = storage == "int8" and tensor.ndim == 4
            if number == 0:
                shape = (blocks.count, *tensor.shape[1:])
                empty = Int8Latents if rounded else partial(torch.empty, dtype=tensor.dtype)
                split[name] = empty(shape, device=device)
            split[name][rows] = tensor
            if rounded and name == "latents":
                error = split[name][rows].cpu() - tensor.float()
                squares += error.double().square().sum((0, 2, 3))

    values = max(1, blocks.count * math.prod(blocks.shape[1:]))
    return LatentTensors(**split), (squares / values).sqrt()
