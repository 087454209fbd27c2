"""The loader that keeps latents on the device. Its samples are a `WholeSet`, of which the device
has all, or a `ChunkedSet`, of which it has one chunk at a time (`ChunkOrder` in data/order.py)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from common.condition import EncodedText
from common.errors import UserError
from common.memory import GIB, count_host_bytes
from common.text import format_bytes
from common.workers import Prefetcher, Readers
from data.blocks import BlockReader, OnCorrupt, add_skipped, open_set
from data.caption_blocks import read_captions
from data.caption_table import count_caption_bytes
from data.loader import Batch, Int8Latents, LatentLoader, LatentTensors, LoaderArgs
from data.manifest import Normalisation
from data.order import Chunk, ChunkOrder, EpochOrder
from data.spec import Above0, LatentSpec

Storage = Literal["native", "int8"]


@dataclass
class WholeSet:
    """A set that is on the device as a whole."""

    train: LatentTensors
    held_out: LatentTensors
    order: EpochOrder

    def take(self, start: int, count: int) -> tuple[LatentTensors, None]:
        """Takes the samples at the `count` positions from `start` on, by one indexing operation;
        the loader chooses their captions."""
        return self.train.gather(self.order.find_ids(start, count)), None

    def take_held_out(self, size: int) -> Iterator[LatentTensors]:
        """Yields the held-out split once, in order, `size` samples at a time."""
        for start in range(0, len(self.held_out.labels), size):
            yield self.held_out.gather(slice(start, start + size))


@dataclass(eq=False)
class ChunkedSet:
    """A set larger than the device's memory: the device has a chunk of it, of at most
    `order.chunk_size` samples, and a buffer of the same size for the next chunk.

    Samples come from one buffer while a thread fills the other buffer through pinned memory, on a
    separate CUDA stream. A sample enters a buffer with the caption that is chosen for it, so the
    table of all captions, `train.captions`, stays in host memory. The set adds the damaged blocks
    that it skips to `skipped` (see `add_skipped`).
    """

    train: BlockReader
    held_out: BlockReader
    order: ChunkOrder
    device: torch.device
    skipped: dict[str, int]
    chunk: Chunk | None = None
    """The chunk from which samples are currently taken; None before the first sample."""

    def start_filling(self, position: int) -> None:
        """Allocates two buffers on the device and starts the thread that fills them with chunks,
        beginning with the chunk that contains `position`."""
        cuda = self.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(self.device) if cuda else None
        self.last_batch = torch.cuda.Event() if cuda else None
        rows = (self.order.chunk_size, self.train.joined_bytes)
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

        # When this set is freed or the process ends, wait for the thread, because a copy that runs
        # after the CUDA context is destroyed fails.
        self.readers = Readers(1, "chunk")
        self.chunks = Prefetcher(self.fill(buffers, position), self.readers)
        self.stop = weakref.finalize(self, self.readers.close, wait=True)

    def fill(self, buffers: list[tuple[Tensor, Tensor]], position: int) -> Iterator[Any]:
        """Yields (chunk, rows, order) for the chunk that contains `position` and, endlessly, for
        the chunks after it. `rows` is the buffer with the chunk's samples as bytes, `order` the
        shuffled row numbers. Fills the two buffers in turn."""
        while True:
            chunk, offset = self.order.locate(position)
            rows, order = buffers[0]

            # Wait before overwriting this buffer, because the GPU may still be making batches from
            # the chunk in it.
            if self.last_batch is not None:
                self.last_batch.synchronize()

            first = 0
            for number in chunk.blocks:
                if self.readers.closed.is_set():
                    return
                block = self.train.read_rows(number)
                block = self.train.append_captions(block, self.order.seed, chunk.epoch)
                self.copy(block, rows[first : first + len(block)])
                first += len(block)

            self.copy(self.order.draw_permutation(chunk), order[: chunk.size])
            yield chunk, rows, order[: chunk.size]
            buffers.reverse()
            position += chunk.size - offset

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies `source` from the host to `target` on the device. Waits until this copy has ended,
        but not for other work of the GPU."""
        if self.copy_stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self.copy_stream):
            target.copy_(source.pin_memory(), non_blocking=True)
            self.copy_stream.record_event().synchronize()

    def take(self, start: int, count: int) -> tuple[LatentTensors, EncodedText | None]:
        """Takes the samples at the `count` positions from `start` on, and their captions if there
        is a table of captions. Waits for the thread if a chunk is not yet on the device."""
        parts = []

        # Take rows from several chunks if needed, because a batch may span two chunks.
        while count:
            chunk, offset = self.order.locate(start)
            if self.chunk is None:
                self.start_filling(start)
            while self.chunk != chunk:
                # Wait until the next chunk is on the device. The thread may then overwrite the
                # buffer of the previous one, once the GPU has made its batches.
                if self.last_batch is not None:
                    self.last_batch.record(torch.cuda.current_stream(self.device))
                self.chunk, self.rows, self.shuffled_ids = next(self.chunks)
                add_skipped(self.skipped, self.train.take_reports())
            ids = self.shuffled_ids[offset : offset + count]
            parts.append(self.rows.index_select(0, ids))
            start += len(ids)
            count -= len(ids)
        return self.train.unpack_rows(torch.cat(parts))

    def take_held_out(self, size: int) -> Iterator[LatentTensors]:
        """Reads the held-out split once, in order; yields `size` samples at a time."""
        return self.held_out.read_in_order(size, self.device, self.skipped)

    def restart(self, chunk_size: int) -> None:
        """Ends the thread, frees the two buffers, and cuts the set into chunks of at most
        `chunk_size` samples; the next samples may be at any position."""
        if self.chunk is not None:
            self.stop()
            self.chunk = None
            del self.chunks, self.rows, self.shuffled_ids
        self.order = ChunkOrder(self.train.counts, self.order.seed, chunk_size)


class InMemoryLatents(LatentLoader):
    """Base of the loaders that keep samples on the device, as a whole or a chunk at a time. A
    subclass sets `samples` and `held_out_count`; if it has the set as tensors, it calls `hold`."""

    samples: WholeSet | ChunkedSet

    @property
    def whole(self) -> WholeSet:
        """The set; it must be on the device as a whole."""
        assert isinstance(self.samples, WholeSet)
        return self.samples

    def hold(self, train: LatentTensors, held_out: LatentTensors) -> None:
        """Makes batches from these tensors, which are on the device."""
        self.samples = WholeSet(
            train, held_out, EpochOrder(len(train.labels), self.seed, self.device)
        )
        self.held_out_count = len(held_out.labels)

    def batch_at(self, start: int) -> Batch:
        position = torch.arange(start, start + self.batch_size, device=self.device)
        rows, text = self.samples.take(start, self.batch_size)
        return self.make_batch(rows, position, text)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        for number, rows in enumerate(self.samples.take_held_out(batch_size)):
            yield self.make_plain_batch(rows, number * batch_size)


class ResidentLatents(InMemoryLatents):
    """Loads the latent set at `path`, a folder or a URL, onto the device, and verifies every block.

    The device holds the whole set if the set takes at most `device_memory_gib` (null: half of the
    free memory), otherwise one chunk at a time (`ChunkedSet`); the loader prints which of the two,
    and why. `storage="int8"` halves the memory of 16-bit latents; the loader prints the rounding
    error. `normalisation`: "channel" uses the mean and std per channel that
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
        spec, train, held_out = open_set(
            "resident", path, normalisation, encoder, latent_scale, on_corrupt
        )
        if storage == "int8":
            if train.manifest.dtype == "uint8":
                raise UserError(
                    "data.storage=int8: this set has 8 bits already, and they are exact; leave "
                    "storage out."
                )
            spec = spec.with_order(storage)
        super().__init__(spec, **args)

        # Keep the whole set on the device if it fits, otherwise a chunk at a time; chunks cannot be
        # stored as int8.
        allowed = find_allowed_memory(self.device, device_memory_gib, self.world_size)
        sample_bytes = count_sample_bytes(train, storage)
        whole = sample_bytes * (train.count + held_out.count)
        whole += count_caption_bytes(spec.text, self.text)
        if whole <= allowed:
            plan = "all of it on the device"
            tensors, worst = read_split(train, self.device, storage)
            if storage == "int8":
                plan += f"; int8 moves a latent by {worst:.2%} of its channel's std (RMS, worst)"
            held_out_tensors, _ = read_split(held_out, self.device, storage)
            add_skipped(self.skipped, train.take_reports() + held_out.take_reports())
            self.captions = read_captions(train, self.text, self.device)
            self.hold(tensors, held_out_tensors)
        elif storage == "int8":
            raise UserError(
                f"data.storage=int8: {format_bytes(sample_bytes * train.count)} do not fit into "
                f"the {format_bytes(allowed)} allowed; use data.storage=native, which takes a "
                "chunk at a time, or raise data.device_memory_gib."
            )
        else:
            self.captions = train.captions = read_captions(train, self.text)
            chunk_size = min(train.count, int(allowed // (2 * train.joined_bytes)))
            plan = f"a chunk of {chunk_size} samples on the device, and the next one on its way"
            self.samples = ChunkedSet(
                train,
                held_out,
                ChunkOrder(train.counts, self.seed, chunk_size),
                self.device,
                self.skipped,
            )
            self.held_out_count = held_out.count

        if self.rank == 0:
            rule = "half of what is free" if device_memory_gib is None else "as given"
            print(
                f"data: the set takes {format_bytes(whole)} and {format_bytes(allowed)} are "
                f"allowed ({rule}), so {plan}",
                flush=True,
            )

    def state_dict(self) -> dict[str, int]:
        state = super().state_dict()
        if isinstance(self.samples, ChunkedSet):
            state["chunk"] = self.samples.order.chunk_size
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Loads the state of a run, and uses that run's chunk size, because the order of samples
        depends on the chunk size. Raises UserError if only one of the two runs has chunks."""
        if ("chunk" in state) != isinstance(self.samples, ChunkedSet):
            content = "a chunk of the set" if "chunk" in state else "all of the set"
            raise UserError(
                f"the run was started with {content} on the device, which is another order of "
                "samples; set data.device_memory_gib back to the value it had."
            )
        super().load_state_dict(state)
        if isinstance(self.samples, ChunkedSet):
            self.samples.restart(state["chunk"])


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
    rounding error of the latents, as a part of their channel's std, in the channel where this part
    is largest; the error is 0 unless `storage` is "int8"."""
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
    error = (squares / values).sqrt() / torch.tensor(blocks.manifest.std)
    return LatentTensors(**split), error.max()
