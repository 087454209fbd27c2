"""Loaders of a latent set by kind, and batches: compared, joined, sorted."""

from functools import partial
from itertools import islice

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from data.caption_table import count_caption_bytes
from data.loader import Batch
from data.manifest import read_manifest
from data.resident import ResidentLatents
from data.streamed import StreamedLatents
from tests.harness.words import CPU

SAMPLE_BYTES = 240
"""Size of one sample of `draw_random_samples`, with its posterior and both mirrored tensors."""


def resident(path, **changes):
    """Opens a set that lies on the device; batches of 10 unless `changes` say otherwise."""
    settings = {"batch_size": 10, "seed": 0, "device": CPU} | changes
    return ResidentLatents(path=path if path is None else str(path), **settings)


def chunked(path, samples=15, **changes):
    """Opens a set of which two chunks of so many samples fit on the device."""
    spec = read_manifest(path).text
    size = SAMPLE_BYTES
    if spec and changes.get("text"):
        size += 4 * spec.per_image + count_caption_bytes(spec, "tokens") // spec.count
    return resident(path, device_memory_gib=2 * samples * size / 2**30, **changes)


def streamed(path, **changes):
    """Opens a set that six streams read in windows of five, without worker processes."""
    settings = {"batch_size": 12, "seed": 0, "device": CPU}
    settings |= {"streams": 6, "window": 5, "num_workers": 0} | changes
    return StreamedLatents(path=str(path), **settings)


LOADERS = {
    "resident": resident,
    "int8": partial(resident, storage="int8"),
    "chunks": chunked,
    "webdataset": streamed,
    "webdataset, 2 workers": partial(streamed, num_workers=2),
}
"""Loaders that read a latent set."""


def join(batches):
    """Joins batches, also their captions."""
    return tree_map(lambda *parts: parts[0] if parts[0] is None else torch.cat(parts), *batches)


def take(loader, count):
    """Joins the next `count` batches."""
    return join(islice(loader, count))


def select(batch, rows):
    return tree_map_only(torch.Tensor, lambda tensor: tensor[rows], batch)


def sort_by_position(batch):
    return select(batch, batch.position.argsort())


def assert_same(first, second):
    for name, a, b in zip(Batch._fields, first, second, strict=True):
        for left, right in zip(tree_leaves(a), tree_leaves(b), strict=True):
            assert left is right is None or torch.equal(left, right), name
