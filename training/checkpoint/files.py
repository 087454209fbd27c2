"""Splits a training state among the processes that write it, and joins it again from their files.

A state has pieces, and a piece has leaves by name. `training/state.py` says how each piece is kept,
see `Kept`. On the disk a leaf has the path `piece.name`, such as `optimizer.12.exp_avg`. Tensors go
into one safetensors file a process (https://github.com/huggingface/safetensors: 8 bytes of header
length, a JSON header, the tensors' bytes), sharded ones as this process's rows. Read together, the
rows give whole tensors, which fit any number of processes.
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
"""The entry of a header's metadata that describes the model."""
CHUNK_BYTES = 1 << 24
"""Bytes that are hashed and written at a time."""
FLUSH_BYTES = 1 << 28
"""Bytes that may be on their way to the disk: a large file at once would leave nobody told of its
progress."""


class Layout(Enum):
    """How a checkpoint keeps a piece of the state."""

    whole = auto()
    """Tensors in a file of their own, gathered and written by the first process, so that anything
    can read them."""
    shared = auto()
    """Tensors and numbers; sharded, or the same in all processes."""
    values = auto()
    """Numbers that are the same in all processes."""
    sums = auto()
    """Tensors of each process, and numbers; at another number of processes each loads the mean of
    the tensors."""
    each = auto()
    """Tensors of each process; at another number of processes, rank r loads those of rank r mod the
    old number."""


LAYOUTS_WITH_NUMBERS = (Layout.values, Layout.sums)
"""Pieces whose numbers have an entry of their own in `state.json`."""


class Staged(NamedTuple):
    """One process's share of a state, in host memory, safe from the steps that follow."""

    whole: dict[str, dict[str, Tensor]]
    """The pieces that are kept whole; empty except in the first process."""
    rank_tensors: dict[str, Tensor]
    rows: dict[str, int]
    """First row of each tensor in `rank_tensors` that is a shard."""
    values: dict[str, Any]
    """Everything that is no tensor; fit for JSON."""
    copied: torch.cuda.Event | None = None
    """Has happened when the tensors have arrived."""

    @property
    def nbytes(self) -> int:
        return sum(
            t.nbytes for part in (*self.whole.values(), self.rank_tensors) for t in part.values()
        )

    def wait(self) -> None:
        """Waits until the tensors have arrived. Any thread may call it; a new thread starts on the
        first device."""
        if self.copied is not None:
            with torch.cuda.device(self.copied.device):
                self.copied.synchronize()


def stage(
    state: Mapping[str, Mapping[str, Any]], kept: Mapping[str, Layout], first: bool, copying: bool
) -> Staged:
    """Takes this process's share of a state to host memory; all processes call it together.

    Without `copying` tensors of the host are taken as they are: write them before the next step.
    With it, copies are queued on the current stream, after the step that made the values and before
    the next one, so only a caller of `Staged.wait` waits for them.
    """

    def host(path: str, tensor: Tensor) -> Tensor:
        return copy_to_host(path, tensor.detach()) if copying else tensor.detach().cpu()

    copied = torch.cuda.Event() if copying and torch.cuda.is_initialized() else None
    leaves: dict[str, Any] = {}
    staged = Staged({}, {}, {}, {"leaves": leaves}, copied)
    for piece, how in kept.items():
        tensors = {name: leaf for name, leaf in state[piece].items() if isinstance(leaf, Tensor)}
        numbers = {name: leaf for name, leaf in state[piece].items() if name not in tensors}
        if how in LAYOUTS_WITH_NUMBERS:
            staged.values[piece] = numbers
        else:
            leaves |= flatten({piece: numbers})

        for name, leaf in tensors.items():
            path = f"{piece}.{name}"
            if how is Layout.whole:
                # One by one, so that no device holds more than one gathered tensor.
                tensor = to_full(leaf)
                if first:
                    staged.whole.setdefault(piece, {})[name] = host(path, tensor)
            elif isinstance(leaf, DTensor):
                start = find_first_row(leaf)
                if start is not None:
                    staged.rows[path] = start
                    staged.rank_tensors[path] = host(path, to_local(leaf))
            elif first or how is not Layout.shared:
                staged.rank_tensors[path] = host(path, leaf)
    if copied is not None:
        copied.record()
    return staged


def copy_to_host(path: str, tensor: Tensor) -> Tensor:
    """A copy in host memory, page-locked beside a GPU; PyTorch keeps such memory from one save to
    the next."""
    try:
        room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    except RuntimeError as error:
        raise UserError(
            f"there is no host memory for a copy of the state, {tensor.nbytes / 2**20:.0f} MiB for "
            f"{path} ({shorten_error(error)}); use async_checkpoints=false."
        ) from error
    return room.copy_(tensor, non_blocking=True)


def assemble_state(
    folder: Path, values: Mapping[str, Any], kept: Mapping[str, Layout], ranks: Ranks = SINGLE
) -> dict[str, dict[str, Any]]:
    """Reads the files of all processes and returns the state, leaves by piece and name; each tensor
    is whole.

    `values` is the checkpoint's `state.json`.
    """
    parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for rank in range(values["world_size"]):
        with safe_open(
            folder / RANK_FILE.format(rank=rank, world_size=values["world_size"]), "pt"
        ) as f:
            rows = json.loads(f.metadata()["rows"])
            for path in f.keys():  # noqa: SIM118  # no mapping
                parts[path].append((rows.get(path, 0), f.get_tensor(path)))

    state: dict[str, dict[str, Any]] = {}
    for piece, how in kept.items():
        if how is Layout.whole:
            state[piece] = load_file(folder / f"{piece}.safetensors")
        else:
            state[piece] = dict(values[piece]) if how in LAYOUTS_WITH_NUMBERS else {}
    for piece, leaves in nest(values["leaves"]).items():
        state[piece] |= leaves
    for piece, leaves in nest(parts).items():
        state[piece] |= {name: join_parts(of, kept[piece], ranks) for name, of in leaves.items()}
    return state


def join_parts(parts: list[tuple[int, Tensor]], how: Layout, ranks: Ranks) -> Tensor:
    """One tensor of this process from those of all files, each with its first row."""
    tensors = [rows for _, rows in sorted(parts, key=lambda part: part[0])]
    if how is Layout.each or (how is Layout.sums and len(tensors) == ranks.world_size):
        return tensors[ranks.rank % len(tensors)]
    if how is Layout.sums:
        return torch.stack(tensors).mean(0)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def flatten(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with dotted names."""
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        else:
            yield name, value


def nest(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The leaves whose names are `key.entry`, by key and entry."""
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
    """Writes tensors of the host to `file`, flushed to the disk; returns its size and hash: `bytes`
    and `sha256`.

    The hash is of what was meant to be written, not of what a disk gave back, and no second copy is
    made in memory. `wrote` is called with the bytes of each part; all but the last `FLUSH` of them
    are on the disk then. TypeError for a dtype that the format lacks; OSError as the disk gives it.
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
    """The bytes of a file, in order; wide dtypes first, so that every tensor lies aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} is of {tensor.dtype}, which safetensors does not hold.")
        offsets = [end, end + tensor.nbytes]
        end = offsets[1]
        shape = list(tensor.shape)
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": offsets,
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        content = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def make_header(described: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Metadata for the header of the weights file `kind`, "model" or "ema"."""
    told = {name: described[name] for name in ("model", "spec", "step")}
    if described.get("adapter"):
        told["adapter"] = described["adapter"] | {"base": described["base"]}
    return {METADATA_KEY: json.dumps({"weights": kind, **told})}
