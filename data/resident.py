"""The loader of latents that lie on the device: all of them where they fit, else a chunk of them at
a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from common.errors import UserError
from data.blocks import BlockReader, OnCorrupt, add_skipped
from data.chunked import ChunkedLatents
from data.loader import Batch, InMemoryLatents, Int8Latents, LatentTensors, LoaderArgs
from data.manifest import Normalisation, open_set

GIB = 2**30
Storage = Literal["native", "int8"]


class ResidentLatents:
    """Loads the latent set at `path`, a folder or a URL, onto the device, and verifies every block.

    The device holds all of it if that takes at most `device_memory_gib` (null: half of the free
    memory), else a chunk (data/chunked.py); the loader prints which, and why. `storage="int8"`
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
        source, manifest, spec = open_set("resident", path, normalisation, encoder, latent_scale)
        self.spec = spec if storage == "native" else spec.ordered(storage)
        train, held_out = (
            BlockReader(source, manifest, split, on_corrupt) for split in ("train", "held_out")
        )
        args = LoaderArgs(batch_size, seed, device, rank, world_size)
        allowed = memory_allowed(device, device_memory_gib, world_size)
        a_sample = bytes_of_a_sample(train, storage)
        whole = a_sample * (train.count + held_out.count)
        if whole <= allowed:
            what = "all of it on the device"
            tensors, ids, error = read_split(train, device, storage)
            if storage == "int8":
                worst = (error / torch.tensor(manifest.std)).max()
                print(
                    f"data: int8 moves a latent by {worst:.2%} of its channel's std (RMS, worst "
                    "channel)",
                    flush=True,
                )
            held_out_tensors, held_out_ids, _ = read_split(held_out, device, storage)
            self.loader: InMemoryLatents | ChunkedLatents = InMemoryLatents(
                self.spec, tensors, held_out_tensors, args, ids, held_out_ids
            )
            add_skipped(self.loader.skipped, train.take_reports() + held_out.take_reports())
        else:
            if storage == "int8":
                raise UserError(
                    f"data.storage=int8: {gib(a_sample * train.count)} do not fit into the "
                    f"{gib(allowed)} allowed; use storage=native, which takes a window at a time, "
                    "or raise data.device_memory_gib."
                )
            chunk_size = min(train.count, int(allowed // (2 * a_sample)))
            what = f"a window of {chunk_size} samples on the device, and the next one on its way"
            self.loader = ChunkedLatents(self.spec, train, held_out, chunk_size, args)
        self.held_out_count = held_out.count
        if rank == 0:
            how = "as given" if device_memory_gib is not None else "half of what is free"
            print(
                f"data: {what}, for the set takes {gib(whole)} and {gib(allowed)} are allowed "
                f"({how})",
                flush=True,
            )

    @property
    def skipped(self) -> dict[str, int]:
        return self.loader.skipped

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self.loader)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return self.loader.held_out(batch_size)

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        if ("window" in state) != isinstance(self.loader, ChunkedLatents):
            raise UserError(
                "the run was started with "
                + ("a window of the set" if "window" in state else "all of the set")
                + (
                    " on the device, which is another order of samples; set "
                    "data.device_memory_gib so that it is again."
                )
            )
        self.loader.load_state_dict(state)


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
    sample = [tensor[0] for tensor in blocks.read(0).values()]
    return sum(
        t.numel() + 4 * len(t) if storage == "int8" and t.ndim == 3 else t.nbytes for t in sample
    )


def read_split(
    blocks: BlockReader, device: torch.device, storage: Storage
) -> tuple[LatentTensors, Tensor | None, Tensor]:
    """Reads a split onto `device`: its tensors, its ids if some samples replace others, the RMS
    error per channel.

    It goes block by block, so two copies of the split are never in memory.
    """
    split: dict[str, Tensor | Int8Latents] = {}
    ids = torch.arange(blocks.count)
    squares = torch.zeros(blocks.shape[0], dtype=torch.float64)
    numbers = 0
    for number, place in enumerate(blocks.places):
        tensors = blocks.read(number)
        rows = slice(place.first, place.first + place.block.samples)
        ids[rows] = tensors.pop("ids")
        for name, tensor in tensors.items():
            small = storage == "int8" and tensor.ndim == 4
            values = Int8Latents.of(tensor) if small else tensor
            if isinstance(values, Int8Latents) and name == "latents":
                squares += (values[:] - tensor.float()).double().square().sum((0, 2, 3))
                numbers += tensor[:, 0].numel()
            if name not in split:
                split[name] = empty_like(values, blocks.count, device)
            split[name][rows] = values.to(device)  # pyright: ignore[reportArgumentType]
    if not split:
        return (
            LatentTensors(torch.zeros(0, *blocks.shape), torch.zeros(0, dtype=torch.long)),
            None,
            squares,
        )
    replaced = None if torch.equal(ids, torch.arange(blocks.count)) else ids
    return LatentTensors(**split), replaced, (squares / max(1, numbers)).sqrt()  # pyright: ignore[reportArgumentType]


def empty_like(
    like: Tensor | Int8Latents, count: int, device: torch.device
) -> Tensor | Int8Latents:
    """Uninitialised memory for `count` samples such as these."""
    if isinstance(like, Int8Latents):
        return Int8Latents(
            *(t.new_empty((count, *t.shape[1:]), device=device) for t in vars(like).values())
        )
    return like.new_empty((count, *like.shape[1:]), device=device)
