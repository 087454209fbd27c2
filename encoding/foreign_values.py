"""Checks and converts the values of samples that other tools wrote: class indices and latents."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from common.errors import UserError
from encoding.foreign import ForeignLatents, is_dense

CHUNK_SAMPLES = 256
"""Number of samples that an import reads and writes together."""


def read_chunks(
    foreign: ForeignLatents, classes: int, pixels: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields chunks of n ≤ `CHUNK_SAMPLES` samples, each a dict: `latents` (n, C, H, W) and, if the
    source has latents of mirrored images, `mirrored` (n, C, H, W), both in fp32; `labels` (n,),
    below `classes`, or all 0 if `classes` is 0; and `places`, n texts that say where the samples
    lie.

    Raises a UserError that names the first sample whose label is no class index, or whose latents
    are not finite floating-point numbers, or if `pixels` 8-bit numbers, of the same shape as in the
    samples before.
    """
    samples = convert_samples(foreign, classes, pixels)
    while group := list(islice(samples, CHUNK_SAMPLES)):
        yield default_collate(group)


def convert_samples(
    foreign: ForeignLatents, classes: int, pixels: bool
) -> Iterator[dict[str, Any]]:
    """Yields the samples of `read_chunks`."""
    first = None
    for where, parts in foreign.samples():
        sample = {n: convert_latents(v, where, pixels) for n, v in parts.items() if n != "labels"}
        shapes = " and ".join(f"{n} of shape {tuple(t.shape)}" for n, t in sample.items())
        first = first or shapes
        if shapes != first:
            raise UserError(
                f"{where} has {shapes}, and the first sample {first}; all samples of a set have "
                "the same shape, so import each shape as a separate set."
            )
        label = parse_class_index(parts.get("labels"), classes, where) if classes else 0
        yield sample | {"labels": label, "places": where}


def parse_class_index(label: Any, limit: int, where: str) -> int:
    """Converts a label to its class index. Raises UserError unless the label is a whole number
    (such as 3.0) from 0 to `limit` - 1."""
    label = label.tolist() if hasattr(label, "tolist") else label
    while isinstance(label, list) and len(label) == 1:
        label = label[0]

    # The test `label // 1 != label` refuses fractions, and also NaN and inf.
    if (
        isinstance(label, bool)
        or not isinstance(label, int | float)
        or label // 1 != label
        or not 0 <= label < limit
    ):
        raise UserError(
            f"{where} has the label {reprlib.repr(label)}, not one class index from 0 to "
            f"{limit - 1} (of one-hot labels argmax(1)); correct it, set classes=<n> to one more "
            "than the highest, or import without labels: classes=none."
        )
    return int(label)


def convert_latents(values: Any, where: str, pixels: bool) -> Tensor:
    """Converts an array to a tensor (C, H, W) in fp32. Raises UserError unless the array has
    finite floating-point numbers, or 8-bit numbers if `pixels`, in that shape."""
    kind = getattr(values, "dtype", type(values).__name__)
    if pixels and kind == torch.uint8:
        values = values.double()
    # Convert numpy arrays of floats to float64 in this machine's byte order: PyTorch accepts no
    # other byte order.
    if getattr(kind, "kind", None) == "f" or (pixels and kind == "uint8"):
        values = torch.from_numpy(values.astype("float64"))
    if not is_dense(values) or not values.is_floating_point():
        raise UserError(
            f"{where} holds {str(kind).removeprefix('torch.')}, and latents are floating-point "
            "numbers; save them as float32. (8-bit pixels need encoder=pixels dtype=uint8.)"
        )
    if values.ndim == 4:  # a batch of one sample, (1, C, H, W), or a single frame, (C, 1, H, W)
        values = values.squeeze(int(len(values) > 1))
    latents = values.detach().double()
    if latents.ndim != 3 or not latents.numel():
        raise UserError(
            f"{where} has the shape {tuple(values.shape)}, and a sample's latents have (C, H, W), "
            "without the frames of a video."
        )
    bad = latents[~latents.isfinite()]
    if len(bad):
        raise UserError(
            f"{where} has {float(bad[0])} in the source itself; encode that sample again, or leave "
            "it out."
        )
    return latents.float()
