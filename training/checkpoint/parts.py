"""Splits a training state among the processes that write it, and joins it again from their files.

A state has pieces, and a piece has leaves by name. Each piece says how it is kept, see `Kept`;
`training/state.py` lists the pieces. On the disk a leaf has the path `piece.name`, such as
`optimizer.12.exp_avg`. Tensors go into one file a process, sharded ones as this process's rows.
Read together, the rows give whole tensors, which fit any number of processes.
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
    shared = "tensors and numbers; sharded, or the same in all processes"
    values = "numbers that are the same in all processes"
    sums = (
        "tensors of each process, and numbers; at another number of processes each loads the "
        "mean of the tensors"
    )
    each = (
        "tensors of each process; at another number of processes, rank r loads those of rank r "
        "mod the old number"
    )


WITH_NUMBERS = (Kept.values, Kept.sums)
"""Pieces whose numbers have an entry of their own in `state.json`."""


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
        return sum(t.nbytes for part in (*self.whole.values(), self.own) for t in part.values())


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
        """Notes where the device's queue stands; to be called after the last `take`."""
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
    state: Mapping[str, Mapping[str, Any]],
    kept: Mapping[str, Kept],
    first: bool,
    copies: HostCopies | None,
) -> Staged:
    """Takes this process's share of a state to host memory; all processes call it together.

    Without `copies` tensors of the host are taken as they are: write them before the next step.
    """

    def host(path: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.cpu() if copies is None else copies.take(path, tensor)

    staged = Staged({}, {}, {}, {"leaves": {}})
    for piece, how in kept.items():
        if how is Kept.whole:
            # One by one, so that no device holds more than one gathered tensor.
            gathered = ((name, whole(tensor)) for name, tensor in state[piece].items())
            found = {name: host(f"{piece}.{name}", tensor) for name, tensor in gathered if first}
            staged.whole.update({piece: found} if first else {})
            continue

        numbers: dict[str, Any] = {}
        for name, leaf in state[piece].items():
            path = f"{piece}.{name}"
            if not isinstance(leaf, Tensor):
                numbers[name if how in WITH_NUMBERS else path] = leaf
            elif isinstance(leaf, DTensor):
                start = rows_of(leaf)
                if start is not None:
                    staged.rows[path] = start
                    staged.own[path] = host(path, local(leaf))
            elif first or how is not Kept.shared:
                staged.own[path] = host(path, leaf)
        place = piece if how in WITH_NUMBERS else "leaves"
        staged.values[place] = staged.values.get(place, {}) | numbers
    if copies is not None:
        copies.mark()
    return staged


def assembled(
    folder: Path, values: Mapping[str, Any], kept: Mapping[str, Kept], ranks: Ranks = SINGLE
) -> dict[str, dict[str, Any]]:
    """Reads the files of all processes and returns the state, leaves by piece and name; each tensor
    is whole.

    `values` is the checkpoint's `state.json`.
    """
    state: dict[str, dict[str, Any]] = {}
    for piece, how in kept.items():
        if how is Kept.whole:
            state[piece] = load_file(folder / f"{piece}.safetensors")
        else:
            state[piece] = dict(values[piece]) if how in WITH_NUMBERS else {}

    for path, leaf in values["leaves"].items():
        piece, _, name = path.partition(".")
        state[piece][name] = leaf
    for path, parts in read_parts(folder, values["world_size"]).items():
        piece, _, name = path.partition(".")
        state[piece][name] = joined(parts, kept[piece], ranks)
    return state


def read_parts(folder: Path, world_size: int) -> dict[str, list[tuple[int, Tensor]]]:
    """The tensors of all processes by path: (first row, rows) from each file that has it."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for rank in range(world_size):
        file = folder / PART.format(rank=rank, world_size=world_size)
        with safe_open(file, "pt") as opened:
            rows = json.loads(opened.metadata()["rows"])
            for path in opened.keys():  # noqa: SIM118  # no mapping
                found.setdefault(path, []).append((rows.get(path, 0), opened.get_tensor(path)))
    return found


def joined(parts: list[tuple[int, Tensor]], how: Kept, ranks: Ranks) -> Tensor:
    """One tensor of this process from those of all files."""
    tensors = [tensor for _, tensor in parts]
    if how is Kept.each or (how is Kept.sums and len(tensors) == ranks.world_size):
        return tensors[ranks.rank % len(tensors)]
    if how is Kept.sums:
        return torch.stack(tensors).mean(0)
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])


def flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with dotted names."""
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flat(value, name)
        else:
            yield name, value


def nested(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The two levels of a piece whose names are `key.entry`."""
    tree: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        key, _, entry = name.partition(".")
        tree.setdefault(key, {})[entry] = leaf
    return tree
