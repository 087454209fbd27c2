"""Writing a safetensors file as a stream that is hashed on its way to the disk.

The hash is of what was meant to be written, not of what a disk gave back, and no second copy is
made in memory.
Format: https://github.com/huggingface/safetensors (8 bytes of header length, a JSON header, the
tensors' bytes).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
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
KEY = "fastlatent"
"""The entry of a header's metadata that describes the model."""
CHUNK = 1 << 24
"""Bytes that are hashed and written at a time."""
FLUSH = 1 << 28
"""Bytes that may be on their way to the disk: a large file at once would leave nobody told of its
progress."""


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    wrote: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Writes tensors of the host to `file`, flushed to the disk; returns its size and hash: `bytes`
    and `sha256`.

    `wrote` is called with the bytes of each part; all but the last `FLUSH` of them are on the disk
    then. TypeError for a dtype that the format lacks; OSError as the disk gives it.
    """
    digest = hashlib.sha256()
    size = 0
    with file.open("wb") as stream:
        for part in parts_of(tensors, metadata):
            digest.update(part)
            size += stream.write(part)
            if size // FLUSH > (size - len(part)) // FLUSH:
                stream.flush()
                os.fsync(stream.fileno())
            wrote(len(part))
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def parts_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The bytes of the file, in order; wide dtypes first, so that every tensor lies aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is of {tensor.dtype}, which safetensors does not hold.")
        start = end
        end = end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        content = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        for start in range(0, len(content), CHUNK):
            yield content[start : start + CHUNK]


def header(described: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Metadata for the header of the weights file `kind`, "model" or "ema"."""
    told = {name: described[name] for name in ("model", "spec", "step")}
    if described.get("adapter"):
        told["adapter"] = described["adapter"] | {"base": described["base"]}
    return {KEY: json.dumps({"weights": kind, **told})}
