"""Decodes images in batches, in worker processes.

Letters: H W height and width of the images in pixels, n images of a batch that could be decoded.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.config.contradictions import list_sides
from common.workers import refuse_small_shared_memory
from encoding.images import ImageEntry, decode_image, describe_error, read_with_retries

BATCHES_AHEAD = 2
"""Number of batches that each worker process decodes ahead: PyTorch's default `prefetch_factor`."""
BATCH_TIMEOUT_SECONDS = 1800.0
"""Seconds to wait for a batch of decoded images, before the loader raises an error."""
DecodedItem = Tensor | str | OSError | None


class DecodedImages(Dataset):
    """Decodes images to 8-bit tensors.

    An item is a pair: a hash of the image's bytes, and usually the image as a uint8 tensor
    (3, H, W). If Pillow cannot decode the image, a text with its name and the reason is there
    instead. If no attempt could read the file, or if memory does not suffice, it is an OSError with
    such a text. It is None for an image whose hash is among those that are `known`.
    """

    known: Container[str] = ()

    def __init__(self, entries: list[ImageEntry], resolution: Any, **settings: Any) -> None:
        """`resolution` and `settings` are arguments of `decode_image`."""
        self.entries = entries
        self.pixels = math.prod(list_sides(resolution))
        self.decode = functools.partial(decode_image, resolution=resolution, **settings)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[str, DecodedItem]:
        entry = self.entries[index]
        try:
            content = read_with_retries(entry)
        except OSError as error:
            return "", OSError(f"{entry.key}: {error}")

        digest = hashlib.sha256(content).hexdigest()
        if digest in self.known:
            return digest, None
        if not content:
            return digest, f"{entry.key}: empty"
        try:
            return digest, self.decode(content, key=entry.key)
        except MemoryError:
            return digest, OSError(
                f"{entry.key}: there is no memory to decode it; lower num_workers or max_megapixels"
            )
        except Exception as error:  # Pillow raises many kinds of errors for damaged files
            return digest, f"{entry.key}: {describe_error(error)}"


class Decoded(NamedTuple):
    """A batch that a worker process decoded. One tensor holds all its images, because each tensor
    that processes share costs a file descriptor."""

    pixels: Tensor
    """The n images that could be decoded: uint8, (n, 3, H, W)."""
    places: list[int]
    """Index of each of the n images in the full batch, which includes the images that failed."""
    reasons: list[str]
    """For each image that Pillow cannot decode, a text with its name and the reason."""
    unread: str | None
    """A text with the name of the first image that no attempt could read, and the reason; None if
    there is no such image."""
    digests: dict[int, str]
    """Index in the full batch -> hash, of the decoded and the known images, in their order."""


def list_others(
    entries: Sequence[ImageEntry], hashes: Container[str], skipped: Sequence[str]
) -> list[str]:
    """Lists the names of those images that are not among the encoded ones: their hash is not in
    `hashes`, and none of `skipped`, sentences about images that could not be decoded, names them.
    Leaves out images that cannot be read."""
    others = []
    for entry in entries:
        with suppress(OSError):
            digest = hashlib.sha256(read_with_retries(entry)).hexdigest()
            left_out = any(line.startswith(f"{entry.key}: ") for line in skipped)
            if digest not in hashes and not left_out:
                others.append(entry.key)
    return others


def collate(items: list[tuple[str, DecodedItem]]) -> Decoded:
    """Joins items of `DecodedImages` into one batch."""
    images = {i: item for i, (_, item) in enumerate(items) if isinstance(item, Tensor)}
    pixels = torch.stack(list(images.values())) if images else torch.empty(0, dtype=torch.uint8)
    reasons = [item for _, item in items if isinstance(item, str)]
    unread = next((str(item) for _, item in items if isinstance(item, OSError)), None)
    digests = {i: key for i, (key, item) in enumerate(items) if i in images or item is None}
    return Decoded(pixels, list(images), reasons, unread, digests)


def make_decoding_loader(
    images: DecodedImages, sizes: int | list[int], workers: int
) -> DataLoader[Decoded]:
    """Makes a loader that yields all `images` in order, in batches of these `sizes`, or all of one
    size; `workers` processes decode ahead (0: the calling process decodes). Raises UserError if
    shared memory is too small."""
    batches = [batch.tolist() for batch in torch.arange(len(images)).split(sizes)]
    if workers:
        batch_bytes = max(map(len, batches), default=0) * 3 * images.pixels
        refuse_small_shared_memory(
            "processes that decode images",
            BATCHES_AHEAD * workers,
            batch_bytes,
            "use num_workers=0",
        )
    timeout = BATCH_TIMEOUT_SECONDS if workers else 0.0
    return DataLoader(
        images, batch_sampler=batches, num_workers=workers, collate_fn=collate, timeout=timeout
    )
