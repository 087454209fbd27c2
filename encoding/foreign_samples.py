"""The samples that other tools wrote, checked one by one: whatever their format, all pass through
`Foreign.chunks`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.text import first_line

CHUNK = 256
MOST_CLASSES = 1_000_000
"""The manifest names every class."""
KINDS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


PLAIN = "copy it again if it is damaged, and save plain tensors, for nothing is unpickled"


@contextmanager
def reading(what: Path | str, remedy: str = "copy or write it again") -> Iterator[None]:
    """Turns what numpy, torch, safetensors, tarfile and json raise for damaged files into one
    ValueError."""
    try:
        if isinstance(what, Path) and not what.is_file():
            raise FileNotFoundError("it is no file, or a link to none")
        yield
    except Exception as error:
        raise UserError(
            f"{what} cannot be read ({first_line(error).partition('. ')[0]}); {remedy}."
        ) from error


class Asked(NamedTuple):
    """Names of the tensors, a file of labels, and the number of classes: None is not known, 0 is
    without labels."""

    latents_key: str = "latents"
    labels_key: str = "labels"
    labels: str | None = None
    classes: int | None = None


class Sample(NamedTuple):
    """One sample, unchecked: its place, arrays of numpy or PyTorch, and whatever stands for its
    label."""

    where: str
    latents: Any
    label: Any
    mirrored: Any = None


@dataclass(frozen=True)
class Foreign:
    """Latents of another tool, their number, and that of their classes (see `Asked`)."""

    what: str
    count: int
    classes: int | None
    samples: Callable[[], Iterator[Sample]]

    def chunks(self) -> Iterator[dict[str, Tensor]]:
        """Yields `latents` (n, C, H, W), `labels` (n,), and `mirrored` where there are some, for n
        up to `CHUNK`.

        ValueError names the first sample whose label is no class index, or whose latents are not
        finite floating-point numbers in the shape of the samples before.
        """
        samples = self.samples()
        seen = 0
        shape = None
        fields = ["latents"]
        while group := list(islice(samples, CHUNK)):
            if shape is None:
                shape = tuple(floats(group[0].latents, group[0].where).shape)
                fields += [] if group[0].mirrored is None else ["mirrored"]
            for sample in group:
                if (sample.mirrored is None) != (len(fields) == 1):
                    raise UserError(
                        f"{sample.where}: some samples have mirrored latents and others none; "
                        "give all."
                    )
            seen += len(group)
            chunk = {
                "labels": torch.tensor(
                    [self.class_index(sample.label, sample.where) for sample in group]
                )
            }
            for name in fields:
                chunk[name] = stacked(
                    [(sample.where, getattr(sample, name)) for sample in group], shape
                )
            yield chunk
        if seen != self.count:
            raise UserError(
                f"{self.what}: {self.count} samples became {seen} meanwhile; let nobody write "
                "there."
            )

    def class_index(self, label: Any, where: str) -> int:
        """Converts a label to its class index; ValueError for all but whole numbers (3.0 is one) in
        range."""
        if self.classes == 0:
            return 0
        size = math.prod(label.shape) if hasattr(label, "shape") else 1
        label = label.tolist() if size == 1 and hasattr(label, "tolist") else label
        while isinstance(label, list) and len(label) == 1:
            label = label[0]
        if size != 1 or isinstance(label, list):
            raise UserError(
                f"{where} has {len(label) if size == 1 else size} numbers as its label; give one "
                "class index each (of one-hot labels argmax(1)), or import without labels: "
                "classes=none."
            )
        # NaN and inf are not their own floor
        if type(label) not in (int, float) or label // 1 != label or label < 0:
            raise UserError(
                f"{where} has the label {reprlib.repr(label)}; number the classes from 0 on, or "
                "import without labels: classes=none."
            )
        limit = self.classes or min(self.count, MOST_CLASSES)
        if label >= limit:
            known = (
                f"classes={self.classes}"
                if self.classes
                else f"there are {self.count} samples in all"
            )
            raise UserError(
                f"{where} has the label {reprlib.repr(int(label))}, and {known}; correct the "
                "label, or set classes=<n> to one more than the highest."
            )
        return int(label)


def stacked(arrays: list[tuple[str, Any]], shape: tuple[int, ...]) -> Tensor:
    """Stacks (place, latents) to (n, C, H, W), fp32 or fp64; ValueError for another shape, and NaN
    or infinity."""
    tensors = [floats(values, where) for where, values in arrays]
    for (where, _), tensor in zip(arrays, tensors, strict=True):
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{where} has latents of shape {tuple(tensor.shape)}, and the first sample "
                f"{shape}; a set has one shape, so import each as a set of its own."
            )
    found = torch.stack(tensors)
    if not torch.stack(found.aminmax()).isfinite().all():  # the extremes carry NaN along
        row, *place = (~found.isfinite()).nonzero()[0].tolist()
        value = float(found[row][tuple(place)])
        raise UserError(
            f"{arrays[row][0]} has {value} in the source itself; encode that sample again, or "
            "leave it out."
        )
    return found


def floats(values: Any, where: str) -> Tensor:
    """Converts an array to a tensor (C, H, W) in fp32, or fp64 if it is; ValueError for one that
    holds no latents."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f" and values.dtype.itemsize <= 8:
        values = torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=False))
    if getattr(values, "dtype", None) not in KINDS:
        kind = str(getattr(values, "dtype", type(values).__name__)).removeprefix("torch.")
        raise UserError(
            f"{where} holds {kind}, and latents are floating-point numbers; save them as float32."
        )
    found: Any = values[0] if values.ndim == 4 and len(values) == 1 else values
    if found.ndim != 3 or not found.numel():
        raise UserError(
            f"{where} has the shape {tuple(values.shape)}, and a sample's latents have (C, H, W)."
        )
    return found if found.dtype == torch.float64 else found.float()
