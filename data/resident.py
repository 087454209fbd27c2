"""The loader of latents that lie on the device: all of them where they fit, else a chunk of them at
a time (`ChunkOrder` in data/order.py)."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from common.errors import UserError
from data.blocks import BlockLoader, BlockReader, OnCorrupt, Readers, add_skipped, open_set
from data.loader import (
    Batch,
    InMemoryLatents,
    Int8Latents,
    LatentLoader,
    LatentSpec,
    LatentTensors,
    LoaderArgs,
)
from data.manifest import Normalisation
from data.order import Chunk, ChunkOrder

GIB = 2**30
Storage = Literal["native", "int8"]


class ChunkedLatents(BlockLoader):
    """The loader of a set that does not fit: `chunk_size` samples lie on the device, beside room
    for as many that come next.

    Batches come from the first of two buffers, while a thread fills the second one through pinned
    memory, on a CUDA stream of its own.
    """

    def __init__(
        self,
        spec: LatentSpec,
        train: BlockReader,
        held_out: BlockReader,
        chunk_size: int,
        args: LoaderArgs,
    ) -> None:
        super().__init__(spec, args, train, held_out)
        self.copies = torch.cuda.Stream(args.device) if args.device.type == "cuda" else None
        self.readers = Readers(1, "chunk")
        self.stop = weakref.finalize(self, end_copies, self.readers, self.copies)
        self.allocate(chunk_size)

    def allocate(self, chunk_size: int) -> None:
        """Makes two buffers for chunks of at most `chunk_size` samples, in place of those there
        were."""
        self.current: Chunk | None = None
        self.coming: Chunk | None = None  # the thread stops filling at the next block
        self.readers.submit(lambda: None).result()
        if self.copies is not None:
            self.copies.synchronize()
        # Their memory is free before the new ones take theirs.
        self.buffers: list[tuple[Tensor, Tensor]] = []
        """Bytes of samples, and the order in which batches take them."""
        self.order = ChunkOrder(self.blocks.counts, self.seed, chunk_size)
        for _ in range(2):
            rows = torch.empty(
                chunk_size, self.blocks.row_bytes, dtype=torch.uint8, device=self.device
            )
            self.buffers.append(
                (rows, torch.empty(chunk_size, dtype=torch.long, device=self.device))
            )

    def batch_at(self, start: int) -> Batch:
        position = torch.arange(start, start + self.batch_size, device=self.device)
        found = []
        left = self.batch_size
        while left:
            chunk, offset = self.order.locate(start)
            rows, order = self.buffer_with(chunk)
            found.append(rows.index_select(0, order[offset : min(chunk.size, offset + left)]))
            start += len(found[-1])
            left -= len(found[-1])
        return self.batch(self.blocks.latents_in(torch.cat(found)), position)

    def buffer_with(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Waits for the buffer that holds `chunk`, and lets the thread fill the other one with the
        chunk after it."""
        if chunk != self.current:
            if chunk != self.coming:  # at the start, and after a resume
                self.begin(chunk)
            copied = self.filled.result()
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)
            add_skipped(self.skipped, self.blocks.take_reports())
            self.buffers.reverse()
            self.current = chunk
            self.begin(self.order.after(chunk))
        return self.buffers[0]

    def begin(self, chunk: Chunk) -> None:
        """Lets the thread fill the second buffer with `chunk`."""
        self.coming = chunk
        used = self.copies and torch.cuda.current_stream(self.device).record_event()
        self.filled = self.readers.submit(self.fill, chunk, *self.buffers[1], used)

    def fill(self, chunk: Chunk, rows: Tensor, order: Tensor, used: Any) -> Any:
        """Copies the blocks of `chunk` into a buffer after the event `used`; returns the event of
        the last copy."""
        first = 0
        with torch.cuda.stream(self.copies):  # does nothing on a CPU
            if self.copies is not None:
                self.copies.wait_event(used)
            for number in chunk.blocks:
                if chunk != self.coming or self.readers.closed.is_set():
                    return None  # the loader wants another chunk by now, or nothing more
                block = self.blocks.rows(number)

                # At most the block on its way and the one that was read lie in pinned memory.
                if self.copies is not None:
                    self.copies.synchronize()
                rows[first : first + len(block)].copy_(self.pinned(block), non_blocking=True)
                first += len(block)
            drawn = self.pinned(self.order.permutation(chunk))
            order[: chunk.size].copy_(drawn, non_blocking=True)
            return self.copies and self.copies.record_event()

    def pinned(self, tensor: Tensor) -> Tensor:
        """The tensor in memory from which a GPU copies while the thread goes on."""
        return tensor if self.copies is None else tensor.pin_memory()

    def state_dict(self) -> dict[str, int]:
        # The first version called a chunk so.
        return super().state_dict() | {"window": self.order.chunk_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues with the chunk size that the run began with, because the order of samples
        depends on it."""
        super().load_state_dict(state)
        if state["window"] != self.order.chunk_size:
            self.allocate(state["window"])


def end_copies(readers: Readers, copies: torch.cuda.Stream | None) -> None:
    """Ends the thread that fills buffers, and what it has queued; `weakref.finalize` calls this
    when the process ends, too, for a copy that outlives the CUDA context ends the process with an
    error."""
    readers.close(wait=True)
    if copies is not None:
        copies.synchronize()


class ResidentLatents(LatentLoader):
    """Loads the latent set at `path`, a folder or a URL, onto the device, and verifies every block.

    The device holds all of it if that takes at most `device_memory_gib` (null: half of the free
    memory), else a chunk; the loader prints which, and why. `storage="int8"`
    halves the memory of 16-bit latents and prints its error. `normalisation`: "channel" uses the
    mean and std per channel that precompute measured, "scale_shift" the autoencoder's own
    constants, `[[means], [stds]]` these. `encoder` and `latent_scale` are expectations: the loader
    refuses a set made with another encoder or scale. With `on_corrupt="skip"` the next good block's
    samples replace those of a damaged one.
    """

    def __init__(
        self,
        *,
        path: str | None,
        normalisation: Normalisation = "channel",
        encoder: str | None = None,
        latent_scale: float | None = None,
        storage: Storage = "native",
        device_memory_gib: float | None = None,
        on_corrupt: OnCorrupt = "error",
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if storage not in ("native", "int8"):
            raise UserError(f"data.storage={storage} is unknown; choose native or int8.")
        expected = (normalisation, encoder, latent_scale)
        spec, train, held_out = open_set("resident", path, *expected, on_corrupt)
        if storage == "int8":
            spec = spec.ordered(storage)
        args = LoaderArgs(batch_size, seed, device, rank, world_size)
        super().__init__(spec, args)
        allowed = memory_allowed(device, device_memory_gib, world_size)
        a_sample = bytes_of_a_sample(train, storage)
        whole = a_sample * (train.count + held_out.count)
        self.loader: LatentLoader
        if whole <= allowed:
            what = "all of it on the device"
            tensors, error = read_split(train, device, storage)
            if storage == "int8":
                worst = (error / torch.tensor(train.manifest.std)).max()
                print(
                    f"data: int8 moves a latent by {worst:.2%} of its channel's std (RMS, worst "
                    "channel)",
                    flush=True,
                )
            kept_out, _ = read_split(held_out, device, storage)
            self.loader = InMemoryLatents(spec, tensors, kept_out, args)
            add_skipped(self.loader.skipped, train.take_reports() + held_out.take_reports())
        elif storage == "int8":
            raise UserError(
                f"data.storage=int8: {gib(a_sample * train.count)} do not fit into the "
                f"{gib(allowed)} allowed; use storage=native, which takes a window at a time, "
                "or raise data.device_memory_gib."
            )
        else:
            chunk_size = min(train.count, int(allowed // (2 * a_sample)))
            what = f"a window of {chunk_size} samples on the device, and the next one on its way"
            self.loader = ChunkedLatents(spec, train, held_out, chunk_size, args)

        self.skipped = self.loader.skipped
        self.held_out_count = held_out.count
        if rank == 0:
            how = "half of what is free" if device_memory_gib is None else "as given"
            print(
                f"data: {what}, for the set takes {gib(whole)} and {gib(allowed)} are allowed "
                f"({how})",
                flush=True,
            )

    def batch_at(self, start: int) -> Batch:
        return self.loader.batch_at(start)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return self.loader.held_out(batch_size)

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict() | super().state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        if ("window" in state) != isinstance(self.loader, ChunkedLatents):
            what = "a window of the set" if "window" in state else "all of the set"
            raise UserError(
                f"the run was started with {what} on the device, which is another order of "
                "samples; set data.device_memory_gib so that it is again."
            )
        self.loader.load_state_dict(state)
        super().load_state_dict(state)


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def memory_allowed(device: torch.device, given: float | None, world_size: int = 1) -> int:
    """Bytes that latents may take on the device: as given, or half of the memory that is free there
    now.

    All processes take the least of theirs, because the order of samples depends on it.
    """
    if given is not None:
        if given <= 0:
            raise UserError(f"data.device_memory_gib={given} must be above 0.")
        return int(given * GIB)
    if device.type == "cuda":
        allowed = torch.cuda.mem_get_info(device)[0] // 2
    else:
        allowed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if world_size > 1 and torch.distributed.is_initialized():
        least = torch.tensor(allowed, device=device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least)
    if world_size > 1 and device.type == "cuda":
        raise UserError(
            "data=resident in several processes needs data.device_memory_gib=<GiB>, the same for "
            "all."
        )
    return allowed


def bytes_of_a_sample(blocks: BlockReader, storage: Storage) -> int:
    if storage == "native":
        return blocks.row_bytes
    sample = [tensor[0] for tensor in blocks.like.values()]
    return sum(t.numel() + 4 * len(t) if t.ndim == 3 else t.nbytes for t in sample)


def read_split(
    blocks: BlockReader, device: torch.device, storage: Storage
) -> tuple[LatentTensors, Tensor]:
    """Reads a split onto `device`: its tensors, and the RMS error per channel of `storage`.

    It goes block by block, so two copies of the split are never in memory.
    """
    # An empty split has no block that would say what it lacks.
    split: dict[str, Any] = {
        "latents": torch.empty(0, *blocks.shape),
        "labels": torch.empty(0, dtype=torch.long),
    }
    squares = torch.zeros(blocks.shape[0], dtype=torch.float64)
    for number, place in enumerate(blocks.places):
        rows = slice(place.first, place.first + place.block.samples)
        for name, tensor in blocks.read(number).items():
            values: Any = tensor
            if storage == "int8" and tensor.ndim == 4:
                values = Int8Latents.of(tensor)
            if isinstance(values, Int8Latents) and name == "latents":
                squares += (values[:] - tensor.float()).double().square().sum((0, 2, 3))
            if number == 0:
                split[name] = empty_like(values, blocks.count, device)
            split[name][rows] = values.to(device)
    numbers = max(1, blocks.count * math.prod(blocks.shape[1:]))
    return LatentTensors(**split), (squares / numbers).sqrt()


def empty_like(like: Any, count: int, device: torch.device) -> Any:
    """Uninitialised memory for `count` samples such as these."""
    if isinstance(like, Int8Latents):
        return Int8Latents(*(empty_like(part, count, device) for part in vars(like).values()))
    return like.new_empty((count, *like.shape[1:]), device=device)
