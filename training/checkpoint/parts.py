"""Splits a training state among the processes that write it, and puts it together again from their
files.

Each piece of the state says how it is kept, see `Kept`; `training/state.py` lists the pieces.
Tensors go into one file a process, sharded ones as this process's rows. Read together, the rows
give whole tensors, which fit any number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel.sharding import local, rows_of, whole
from common.errors import UserError
from common.text import first_line
from training.checkpoint.find import PART
from training.distributed.ranks import SINGLE, Ranks


class Kept(Enum):
    """How a checkpoint keeps a piece of the state."""

    whole = (
        "tensors in a file of their own, gathered and written by the first process, so that "
        "anything can read them"
    )
    shared = (
        "a tree of tensors and numbers, two or three levels deep; sharded, or the same in all "
        "processes"
    )
    values = "numbers that are the same in all processes"
    sums = (
        "tensors of each process, and numbers; at another number of processes each loads the "
        "mean of the tensors"
    )
    each = (
        "tensors of each process; at another number of processes, rank r loads those of rank r "
        "mod the old number"
    )


class Staged(NamedTuple):
    """One process's share of a state, in host memory, safe from the steps that follow."""

    whole: dict[str, dict[str, Tensor]]
    """The pieces that are kept whole; empty except in the first process."""
    own: dict[str, Tensor]
    rows: dict[str, int]
    """First row of each tensor in `own` that is a shard."""
    values: dict[str, Any]
    """Everything that is no tensor; fit for JSON."""

    @property
    def nbytes(self) -> int:
        return sum(
            t.nbytes for tensors in (*self.whole.values(), self.own) for t in tensors.values()
        )


class HostCopies:
    """Host memory that tensors are copied to, kept from one save to the next; page-locked beside a
    GPU.

    The copies are queued on the current stream, after the step that made the values and before the
    next one, so only a caller of `ready` waits for them.
    """

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.copied: torch.cuda.Event | None = None
        self.device = 0

    def take(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.memory or self.memory[name].shape != tensor.shape:
            try:
                self.memory[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            except RuntimeError as error:
                raise UserError(
                    "there is no host memory for a copy of the state, "
                    f"{tensor.nbytes / 2**20:.0f} MiB for {name} ({first_line(error)}); use "
                    "async_checkpoints=false."
                ) from error
        return self.memory[name].copy_(tensor, non_blocking=True)

    def mark(self) -> None:
        """To be called after the last `take`."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.device = torch.cuda.current_device()
            self.copied = torch.cuda.Event()
            self.copied.record()

    def ready(self) -> None:
        """Waits until all copies are complete. Any thread may call it; a new thread starts on the
        first device."""
        if self.copied is not None:
            torch.cuda.set_device(self.device)
            self.copied.synchronize()


def stage(
    state: Mapping[str, Any], kept: Mapping[str, Kept], first: bool, copies: HostCopies | None
) -> Staged:
    """Takes this process's share of a state, pieces by name, to host memory; all processes call it
    together.

    Without `copies` tensors of the host are taken as they are: write them before the next step.
    """

    def host(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.cpu() if copies is None else copies.take(name, tensor)

    staged = Staged({}, {}, {}, {"leaves": {}})
    for piece, how in kept.items():
        if how is Kept.whole:
            # One by one, so that no device holds more than one gathered tensor.
            gathered = ((name, whole(tensor)) for name, tensor in state[piece].items())
            found = {name: host(f"{piece}.{name}", tensor) for name, tensor in gathered if first}
            staged.whole.update({piece: found} if first else {})
            continue
        if how in (Kept.values, Kept.sums):
            staged.values[piece] = {
                k: v for k, v in state[piece].items() if not isinstance(v, Tensor)
            }
        for name, leaf in flat(state[piece], piece):
            if isinstance(leaf, DTensor):
                if (start := rows_of(leaf)) is not None:
                    staged.own[name], staged.rows[name] = host(name, local(leaf)), start
            elif isinstance(leaf, Tensor):
                if first or how is not Kept.shared:
                    staged.own[name] = host(name, leaf)
            elif how is Kept.shared:
                staged.values["leaves"][name] = leaf
    if copies is not None:
        copies.mark()
    return staged


def assembled(
    folder: Path, values: Mapping[str, Any], kept: Mapping[str, Kept], ranks: Ranks = SINGLE
) -> dict[str, Any]:
    """Reads the files of all processes and returns the state, pieces by name; each tensor is whole.

    `values` is the checkpoint's `state.json`.
    """
    found: dict[str, list[tuple[int, Tensor]]] = {}
    """Tensor -> (first row, rows) in each file that has it."""
    for rank in range(values["world_size"]):
        with safe_open(
            folder / PART.format(rank=rank, world_size=values["world_size"]), "pt"
        ) as opened:
            rows = json.loads(opened.metadata()["rows"])
            for name in opened.keys():  # noqa: SIM118  # no mapping
                found.setdefault(name, []).append((rows.get(name, 0), opened.get_tensor(name)))
    with_numbers = (Kept.values, Kept.sums)
    state: dict[str, Any] = {
        piece: dict(values[piece]) if how in with_numbers else {} for piece, how in kept.items()
    }
    for piece, how in kept.items():
        if how is Kept.whole:
            state[piece] = load_file(folder / f"{piece}.safetensors")
    for name, leaf in [*values["leaves"].items(), *found.items()]:
        piece, key, *rest = name.split(".")
        if kept[piece] in (Kept.each, Kept.sums):
            key = ".".join([key, *rest])
            rest = []
        node = (
            state[piece].setdefault(int(key) if key.isdecimal() else key, {})
            if rest
            else state[piece]
        )
        node[rest[0] if rest else key] = joined(leaf, kept[piece], ranks) if name in found else leaf
    return state


def joined(found: list[tuple[int, Tensor]], how: Kept, ranks: Ranks) -> Tensor:
    """One tensor of this process from those of all files."""
    tensors = [tensor for _, tensor in found]
    if how is Kept.each or (how is Kept.sums and len(tensors) == ranks.world_size):
        return tensors[ranks.rank % len(tensors)]
    if how is Kept.sums:
        return torch.stack(tensors).mean(0)
    return (
        tensors[0]
        if len(tensors) == 1
        else torch.cat([rows for _, rows in sorted(found, key=lambda part: part[0])])
    )


def flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with dotted names."""
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flat(value, name)
        else:
            yield name, value
