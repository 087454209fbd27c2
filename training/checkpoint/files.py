"""Splits the state of a training run among the ranks, each of which writes one part, and joins the
state again from the files of the ranks.

A state has pieces, such as the optimizer's. A piece has leaves, which are tensors and numbers, each
with a name. `training/state.py` gives each piece a `Layout`. On disk a leaf is named `piece.name`,
such as `optimizer.12.exp_avg`. Each rank writes one safetensors file
(https://github.com/huggingface/safetensors: 8 bytes of header length, a JSON header, the tensors'
bytes), which holds this rank's rows of sharded tensors. Reading joins the rows of all ranks to
whole tensors, which any number of ranks can load.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel.sharding import find_first_row, to_full, to_local
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.files import create_file
from common.text import shorten_error
from common.trees import flatten, nest
from training.state import LAYOUTS_WITH_NUMBERS, Layout

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
"""Key in the metadata of a safetensors file whose value is the description of the model."""
MAX_DESCRIPTION_CHARS = 2**24
"""Largest number of characters that a description may have: parsing a longer description could use
up the memory before the code can check its content."""
HASH_KEY = "tensors_sha256"
"""Key in the metadata of a safetensors file whose value is `hash_tensors` of its tensors, in files
that no manifest describes."""
CHUNK_BYTES = 1 << 24
"""Number of bytes of a file that are hashed and written, or read, at a time."""
FLUSH_BYTES = 1 << 28
"""Number of bytes between two flushes to the disk. One flush of a whole large file takes long and
shows no progress meanwhile."""


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Returns the sha256 of the names and values of tensors in host memory."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(view_bytes(tensor))
    return digest.hexdigest()


def view_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor in host memory; without a copy if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class Staged(NamedTuple):
    """A rank's part of a state, copied to host memory so that later steps cannot change it."""

    whole: dict[str, dict[str, Tensor]]
    """Unsharded tensors of the pieces with the layout `whole`: piece -> name -> tensor. Only rank 0
    has any; empty on the other ranks."""
    rank_tensors: dict[str, Tensor]
    """Name of a leaf, such as `optimizer.12.exp_avg` -> the tensor that this rank writes to its
    file."""
    rows: dict[str, int]
    """Name of each tensor in `rank_tensors` that is a shard -> the index of its first row in the
    whole tensor."""
    values: dict[str, Any]
    """All numbers of the state, as JSON types. A piece with one of `LAYOUTS_WITH_NUMBERS` has its
    own entry, piece -> name -> number; the entry `leaves` maps the dotted names of all other
    numbers to these numbers."""
    copied: torch.cuda.Event | None = None
    """CUDA event recorded after the last copy to host memory; None if the copies are already
    complete."""

    @property
    def nbytes(self) -> int:
        parts = (*self.whole.values(), self.rank_tensors)
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def wait(self) -> None:
        """Waits until the GPU has copied the tensors to host memory. Any thread may call this
        method."""
        # Select the event's GPU: in a new thread the current device is GPU 0, which may belong to
        # another rank.
        if self.copied is not None:
            with torch.cuda.device(self.copied.device):
                self.copied.synchronize()


def stage(
    state: Mapping[str, Mapping[str, Any]], layouts: Mapping[str, Layout], first: bool, copy: bool
) -> Staged:
    """Copies this rank's part of `state` to host memory and returns it. All ranks must call the
    function together, because it gathers sharded tensors. `first` is true on rank 0.

    If `copy` is false, the function does not copy tensors that are in host memory already; the
    caller must write them before the next step changes them. If `copy` is true, the copies from a
    GPU are queued on the current CUDA stream, after the last step and before the next one, and may
    still run when the function returns: call `Staged.wait` before reading them.
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
                # Gather the sharded tensors one by one, so that no device holds more than one
                # gathered tensor.
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
    folder: Path, values: Mapping[str, Any], layouts: Mapping[str, Layout], ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Reads the checkpoint in `folder`, with the files of all ranks that wrote it; returns the
    state as piece -> name -> leaf, in which all tensors are unsharded.

    `values` is the content of the checkpoint's `state.json`, `layouts` maps each piece to its
    layout, and `ranks` describes the process that loads the checkpoint.
    """
    # Collect for each tensor the parts in the rank files, each with the index of its first row in
    # the whole tensor.
    parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    world_size = values["world_size"]
    for rank in range(world_size):
        with safe_open(folder / RANK_FILE.format(rank=rank, world_size=world_size), "pt") as file:
            rows = json.loads(file.metadata()["rows"])
            for path in file.keys():  # noqa: SIM118  # no mapping
                parts[path].append((rows.get(path, 0), file.get_tensor(path)))

    # Fill the pieces of the state. First add tensors with the layout `whole`, and numbers with an
    # entry of their own in `state.json`; then the other numbers; then tensors joined from the rank
    # files.
    state: dict[str, dict[str, Any]] = {}
    for piece, layout in layouts.items():
        if layout is Layout.whole:
            state[piece] = load_file(folder / f"{piece}.safetensors")
        else:
            state[piece] = dict(values[piece]) if layout in LAYOUTS_WITH_NUMBERS else {}
    for piece, leaves in nest(values["leaves"]).items():
        state[piece] |= leaves
    for path, tensor_parts in parts.items():
        piece, _, name = path.partition(".")
        state[piece][name] = join_parts(tensor_parts, layouts[piece], ranks)
    return state


def join_parts(parts: list[tuple[int, Tensor]], layout: Layout, ranks: Ranks) -> Tensor:
    """Returns the tensor that this rank loads, from the parts that all ranks saved; a part is the
    pair (index of its first row, rows). Concatenates shards. Of tensors that differ between ranks,
    it returns the one that this rank saved, or, if another number of ranks saved them, what
    `Layout.sums` or `Layout.each` prescribes."""
    tensors = [rows for _, rows in sorted(parts, key=lambda part: part[0])]
    same_number = len(tensors) == ranks.world_size
    if layout is Layout.each or (layout is Layout.sums and same_number):
        return tensors[ranks.rank % len(tensors)]
    if layout is Layout.sums:
        return torch.stack(tensors).mean(0)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    wrote: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Writes tensors in host memory to `file`, in the safetensors format, and flushes the file to
    the disk; returns {"bytes": size of the file, "sha256": its hash}.

    The hash is computed from the bytes in memory, not from the file read back. After each part of
    the file, the function calls `wrote` with the part's number of bytes. By then at most the last
    `FLUSH_BYTES` bytes may still be in the page cache instead of on the disk. `metadata` goes into
    the header. TypeError for a dtype that safetensors lacks; OSError if writing fails.
    """
    digest = hashlib.sha256()
    size = 0
    with create_file(file) as stream:
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
    """Yields the bytes of a safetensors file in order. Tensors with the largest elements come
    first, so that each tensor is aligned to the size of its elements."""
    # Make the JSON header, which gives dtype, shape and place of each tensor in the file.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} is of {tensor.dtype}, which safetensors lacks.")
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes

    # Pad the header with spaces, so that the tensors begin at a multiple of 8 bytes.
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        content = view_bytes(tensor)
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def make_header(described: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Returns the metadata for the header of a weights file: a description of the model, as JSON.
    `kind` is "model" for a file of parameters, "ema" for a file of their averages; `described` is
    the content of `state.json`. Raises UserError for a description that would be too long to be
    read again."""
    description = {name: described[name] for name in ("model", "spec", "step")}
    if described.get("adapter"):
        description["adapter"] = described["adapter"] | {"base": described["base"]}
    text = json.dumps({"weights": kind, **description})
    if len(text) > MAX_DESCRIPTION_CHARS:
        raise UserError(
            f"the description of the model with its {len(described['spec']['class_names'])} names "
            f"of classes has {len(text)} characters, and more than {MAX_DESCRIPTION_CHARS} are not "
            "read again from the header of weights; encode the data with shorter names, or fewer."
        )
    return {METADATA_KEY: text}
