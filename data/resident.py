"""Latents made by precompute_latents.py on the device: all of them where they fit, else a window of them at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from data.blocks import BlockReader, OnCorrupt, Skips
from data.in_memory import InMemoryLatents, Int8Latents, LatentTensors
from data.latent_set import open_set
from data.loader import Batch, LatentSpec
from data.manifest import Manifest
from data.window import WindowedLatents

GIB = 2**30
Storage = Literal["native", "int8"]


class ResidentLatents:
    """The latent set in folder or at URL `path`, every block verified.

    All of it lies on the device if it takes at most `device_memory_gib` (null: half of what is free), else a window
    (data/window.py); it says which, and why. `storage="int8"` halves the memory of 16-bit latents and states its error.
    `normalisation`: "channel" uses the mean and std that were measured per channel, "scale_shift" the autoencoder's own
    constants. `encoder` and `latent_scale` are expectations: a set made with another encoder or scale is refused.
    `on_corrupt="skip"` lets the samples of the next good block stand in for those of a damaged one.
    """

    def __init__(
        self,
        *,
        path: str | None,
        normalisation: Literal["channel", "scale_shift"] = "channel",
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
            raise ValueError(f"data.storage={storage} is unknown; choose native or int8.")
        source, manifest, spec = open_set("resident", path, normalisation, encoder, latent_scale)
        self.spec = spec if storage == "native" else replace(spec, fingerprint=f"{spec.fingerprint}-{storage}")
        train, held_out = (BlockReader(source, manifest, split, on_corrupt) for split in ("train", "held_out"))
        allowed = memory_allowed(device, device_memory_gib, world_size)
        a_sample = bytes_of_a_sample(train, storage)
        shared = {"batch_size": batch_size, "seed": seed, "device": device, "rank": rank, "world_size": world_size}
        if a_sample * (train.count + held_out.count) <= allowed:
            what = "all of it on the device"
            self.loader: InMemoryLatents | WindowedLatents = in_memory(
                self.spec, train, held_out, manifest, storage, shared
            )
        else:
            if storage == "int8":
                raise ValueError(
                    f"data.storage=int8: {gib(a_sample * train.count)} do not fit into the {gib(allowed)} allowed; "
                    f"use storage=native, which takes a window at a time, or raise data.device_memory_gib."
                )
            window = min(train.count, int(allowed // (2 * a_sample)))
            what = f"a window of {window} samples on the device, and the next one on its way"
            self.loader = WindowedLatents(self.spec, train, held_out, window=window, **shared)
        if rank == 0:
            how = "as given" if device_memory_gib is not None else "half of what is free"
            whole = a_sample * (train.count + held_out.count)
            print(f"data: {what}, for the set takes {gib(whole)} and {gib(allowed)} are allowed ({how})", flush=True)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self.loader)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return self.loader.held_out(batch_size)

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        if ("window" in state) != isinstance(self.loader, WindowedLatents):
            raise ValueError(
                "the run was started with "
                + ("a window of the set" if "window" in state else "all of the set")
                + " on the device, which is another order of samples; set data.device_memory_gib so that it is again."
            )
        self.loader.load_state_dict(state)


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def memory_allowed(device: torch.device, given: float | None, world_size: int = 1) -> int:
    """Bytes that latents may take on the device: as given, or half of what is free there now.

    The least of all processes: what fits decides about the order, which must be one.
    """
    if given is not None:
        if given <= 0:
            raise ValueError(f"data.device_memory_gib={given} must be above 0.")
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
        raise ValueError("data=resident in several processes needs data.device_memory_gib=<GiB>, the same for all.")
    return allowed


def bytes_of_a_sample(blocks: BlockReader, storage: Storage) -> int:
    """What a sample takes on the device."""
    total = 0
    for tensor in blocks.read(0).values():
        if storage == "int8" and tensor.ndim == 4:
            total += tensor[0].numel() + 4 * tensor.shape[1]
        else:
            total += tensor[0].numel() * tensor.element_size()
    return total


def in_memory(
    spec: LatentSpec,
    train: BlockReader,
    held_out: BlockReader,
    manifest: Manifest,
    storage: Storage,
    shared: dict,
) -> InMemoryLatents:
    device = shared["device"]
    tensors, ids, error = read_split(train, device, storage)
    if storage == "int8":
        relative = (error / torch.tensor(manifest.std)).tolist()
        print(f"data: int8 moves a latent by {max(relative):.2%} of its channel's std (RMS, worst channel)", flush=True)
    held_out_tensors = read_split(held_out, device, storage)[0]
    Skips().say(train.take_reports() + held_out.take_reports())
    return InMemoryLatents(spec, tensors, held_out_tensors, ids=ids, **shared)


def read_split(
    blocks: BlockReader, device: torch.device, storage: Storage
) -> tuple[LatentTensors, Tensor | None, Tensor]:
    """A split on `device`, the ids of its samples where others stand in for some, and the RMS error per channel.

    Block by block: at no time are two copies of the split in memory.
    """
    split: dict[str, Tensor | Int8Latents] = {}
    ids = torch.arange(blocks.count)
    squares, numbers = torch.zeros(blocks.shape[0], dtype=torch.float64), 0
    for number, place in enumerate(blocks.places):
        tensors = blocks.read(number)
        rows = slice(place.first, place.first + place.block.samples)
        ids[rows] = tensors.pop("ids")
        for name, tensor in tensors.items():
            small = storage == "int8" and tensor.ndim == 4
            part = Int8Latents.of(tensor) if small else tensor
            if isinstance(part, Int8Latents) and name == "latents":
                squares += (part[:] - tensor.float()).double().square().sum((0, 2, 3))
                numbers += tensor[:, 0].numel()
            if name not in split:
                split[name] = room(part, blocks.count, device)
            split[name][rows] = part.to(device)  # pyright: ignore[reportArgumentType]
    if not split:
        return LatentTensors(torch.zeros(0, *blocks.shape), torch.zeros(0, dtype=torch.long)), None, squares
    known_as = None if torch.equal(ids, torch.arange(blocks.count)) else ids
    return LatentTensors(**split), known_as, (squares / max(1, numbers)).sqrt()  # pyright: ignore[reportArgumentType]


def room(like: Tensor | Int8Latents, count: int, device: torch.device) -> Tensor | Int8Latents:
    """Room for `count` samples such as these."""
    if isinstance(like, Int8Latents):
        values, scale = (torch.empty(count, *t.shape[1:], dtype=t.dtype, device=device) for t in vars(like).values())
        return Int8Latents(values, scale)
    return torch.empty(count, *like.shape[1:], dtype=like.dtype, device=device)
