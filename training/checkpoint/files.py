"""Splits a training state among the ranks that write it, and joins it from their files.

A state has pieces, such as the optimizer's, and a piece has leaves by name, which are tensors and
numbers. `training/state.py` gives each piece a `Layout`. On disk a leaf has the path `piece.name`,
such as `optimizer.12.exp_avg`. Each rank writes one safetensors file
(https://github.com/huggingface/safetensors: 8 bytes of header length, a JSON header, the tensors'
bytes), with its rows of sharded tensors. Joined, the rows make whole tensors, which fit any number
of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel.sharding import find_first_row, to_full, to_local
from common.errors import UserError
from common.text import shorten_error
from training.distributed.ranks import SINGLE, Ranks

WEIGHTS_FILES = ("model.safetensors", "ema.safetensors")
RANK_FILE = "rank-{rank}-of-{world_size}.safetensors"
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}
METADATA_KEY = "fastlatent"
"""Key of the model's description in the metadata of a safetensors file."""
CHUNK_BYTES = 1 << 24
"""Bytes hashed and written at a time."""
FLUSH_BYTES = 1 << 28
"""Bytes between two flushes to disk. A single flush of a large file would show no progress."""


class Layout(Enum):
    """The ways in which a checkpoint can hold a piece of the state."""

    whole = auto()
    """Whole tensors in a separate file, which the first rank gathers and writes; other tools can
    read it."""
    shared = auto()
    """Tensors and numbers, sharded or equal on all ranks."""
    values = auto()
    """Numbers that are equal on all ranks."""
    sums = auto()
    """Tensors that differ by rank, and numbers; another number of ranks loads the tensors' mean."""
    each = auto()
    """Tensors that differ by rank; another number of ranks loads, on rank r, those of rank r mod
    the old number."""


LAYOUTS_WITH_NUMBERS = (Layout.values, Layout.sums)
"""Layouts whose numbers have a separate entry in `state.json`."""


class Staged(NamedTuple):
    """A rank's part of a state, copied to host memory so that later steps cannot change it."""

    whole: dict[str, dict[str, Tensor]]
    """Pieces with the layout `whole`; empty except on the first rank."""
    rank_tensors: dict[str, Tensor]
    """Tensors for this rank's file, by path."""
    rows: dict[str, int]
    """First row of each tensor in `rank_tensors` that is a shard."""
    values: dict[str, Any]
    """All leaves that are no tensors, as JSON types."""
    copied: torch.cuda.Event | None = None
    """CUDA event after the last copy; None if there is nothing to wait for."""

    @property
    def nbytes(self) -> int:
        parts = (*self.whole.values(), self.rank_tensors)
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def wait(self) -> None:
        """Waits until the tensors are in host memory. Any thread may call it."""
        # Select the event's GPU: in a new thread the current device is GPU 0, which may belong to
        # another rank.
        if self.copied is not None:
            with torch.cuda.device(self.copied.device):
                self.copied.synchronize()


def stage(
    state: Mapping[str, Mapping[str, Any]], layouts: Mapping[str, Layout], first: bool, copy: bool
) -> Staged:
    """Copies this rank's part of a state to host memory; all ranks must call it together.

    Without `copy`, tensors that are in host memory already are not copied: write them before the
    next step changes them. With `copy`, the current CUDA stream copies after the last step and
    before the next one, so only a caller of `Staged.wait` waits for the copies.
    """

    def move(path: str, tensor: Tensor) -> Tensor:
        return copy_to_host(path, tensor.detach()) if copy else tensor.detach().cpu()

    copied = torch.cuda.Event() if copy and torch.cuda.is_initialized() else None
    leaves: dict[str, Any] = {}
    staged = Staged({}, {}, {}, {"leaves": leaves}, copied)
    for piece, layout in layouts.items():
        tensors = {name: leaf for name, leaf in state[piece].items() if isinstance(leaf, Tensor)}
        numbers = {name: leaf for name, leaf in state[piece].items() if name not in tensors}
        if layout in LAYOUTS_WITH_NUMBERS:
            staged.values[piece] = numbers
        else:
            leaves |= flatten({piece: numbers})

        for name, leaf in tensors.items():
            path = f"{piece}.{name}"
            if layout is Layout.whole:
                # Gather one by one, so that no device holds more than one gathered tensor.
                tensor = to_full(leaf)
                if first:
                    staged.whole.setdefault(piece, {})[name] = move(path, tensor)
            elif isinstance(leaf, DTensor):
                start = find_first_row(leaf)
                if start is not None:
                    staged.rows[path] = start
                    staged.rank_tensors[path] = move(path, to_local(leaf))
            elif first or layout is not Layout.shared:
                staged.rank_tensors[path] = move(path, leaf)
    if copied is not None:
        copied.record()
    return staged


def copy_to_host(path: str, tensor: Tensor) -> Tensor:
    """Copies a tensor to host memory. A tensor on a GPU is copied to page-locked memory, which
    PyTorch caches, so the next save reuses it."""
    try:
        host_tensor = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    except RuntimeError as error:
        raise UserError(
            f"there is no host memory for a copy of the state, {tensor.nbytes / 2**20:.0f} MiB for "
            f"{path} ({shorten_error(error)}); use async_checkpoints=false."
        ) from error
    return host_tensor.copy_(tensor, non_blocking=True)


def assemble_state(
    folder: Path, values: Mapping[str, Any], layouts: Mapping[str, Layout], ranks: Ranks = SINGLE
) -> dict[str, dict[str, Any]]:
    """Reads the files of all ranks; returns the leaves by piece and name, with whole tensors.

    `values` is the content of the checkpoint's `state.json`.
    """
    # Collect each tensor's parts, with their first rows.
    parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    world_size = values["world_size"]
    for rank in range(world_size):
        with safe_open(folder / RANK_FILE.format(rank=rank, world_size=world_size), "pt") as file:
            rows = json.loads(file.metadata()["rows"])
            for path in file.keys():  # noqa: SIM118  # no mapping
                parts[path].append((rows.get(path, 0), file.get_tensor(path)))

    # Fill the pieces: whole tensors and numbers, then other leaves, then joined tensors.
    state: dict[str, dict[str, Any]] = {}
    for piece, layout in layouts.items():
        if layout is Layout.whole:
            state[piece] = load_file(folder / f"{piece}.safetensors")
        else:
            state[piece] = dict(values[piece]) if layout in LAYOUTS_WITH_NUMBERS else {}
    for piece, leaves in nest(values["leaves"]).items():
        state[piece] |= leaves
    for piece, leaves in nest(parts).items():
        for name, tensor_parts in leaves.items():
            state[piece][name] = join_parts(tensor_parts, layouts[piece], ranks)
    return state


def join_parts(parts: list[tuple[int, Tensor]], layout: Layout, ranks: Ranks) -> Tensor:
    """Joins the parts of a tensor, given as (first row, rows), and returns this rank's tensor."""
    tensors = [rows for _, rows in sorted(parts, key=lambda part: part[0])]
    same_number = len(tensors) == ranks.world_size
    if layout is Layout.each or (layout is Layout.sums and same_number):
        return tensors[ranks.rank % len(tensors)]
    if layout is Layout.sums:
        return torch.stack(tensors).mean(0)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def flatten(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, leaf) for all leaves of nested mappings."""
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        else:
            yield name, value


def nest(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Turns a mapping with names `key.entry` into nested dicts: key -> entry -> leaf."""
    tree: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        key, _, entry = name.partition(".")
        tree.setdefault(key, {})[entry] = leaf
    return tree


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    wrote: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Writes tensors of the host to `file` and flushes it to the disk; returns its size and hash as
    `bytes` and `sha256`.

    The hash is of the tensors in memory, not of the file read back. After each part of the file,
    calls `wrote` with the number of its bytes; all but the last `FLUSH_BYTES` of the file are then
    on the disk. TypeError for a dtype that safetensors lacks; OSError if writing fails.
    """
    digest = hashlib.sha256()
    size = 0
    with file.open("wb") as stream:
        for part in generate_bytes(tensors, metadata):
            digest.update(part)
            size += stream.write(part)
            if size % FLUSH_BYTES < len(part):
                stream.flush()
                os.fsync(stream.fileno())
            wrote(len(part))
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def generate_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file in order. Tensors of wide dtypes come first, so that
    every tensor is aligned."""
    # Make the header.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} is of {tensor.dtype}, which safetensors lacks.")
        offsets = [end, end + tensor.nbytes]
        end = offsets[1]
        shape = list(tensor.shape)
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": offsets,
        }

    # Pad the header with spaces, so that the tensors begin at a multiple of 8 bytes.
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        content = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def make_header(described: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Makes the metadata of the weights file `kind`, "model" or "ema"."""
    description = {name: described[name] for name in ("model", "spec", "step")}
    if described.get("adapter"):
        description["adapter"] = described["adapter"] | {"base": described["base"]}
    return {METADATA_KEY: json.dumps({"weights": kind, **description})}
