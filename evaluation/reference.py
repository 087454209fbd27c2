"""The reference that samples are compared with: images of a folder, or the decoded training latents of a run.

Their features are made once and kept below ~/.cache/fastlatent, so the set itself may be read-only.

Letters: B images, H W their size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader

from data.loader import LatentSpec
from encoding.images import RESIZE, DecodedImages, collate, list_images
from evaluation.sides import Side
from evaluation.space import Features
from models.autoencoders import Autoencoder
from models.images import to_uint8
from training.components import build_loader
from training.pieces import Pieces, cache_folder
from training.process.ranks import Ranks

PIECE = 512
BATCH = 64
Images = Iterator[UInt8[Tensor, "B H W 3"]]


@dataclass(frozen=True)
class Source:
    """Images to compare with: what they are, how many, and a way to get those of numbers first … last - 1."""

    told: dict[str, Any]
    """`kind`, `sha256` of what determines them, `count`, `resize`."""
    count: int
    images: Callable[[int, int], Images]


def folder_source(folder: str, size: tuple[int, int], limit: int) -> Source:
    """The images of a folder, tars or `datasets`, cropped to `size`; drawn by a fixed order if more than `limit`.

    ValueError if there are none, if one cannot be decoded, and if the samples are not square.
    """
    if size[0] != size[1]:
        raise ValueError(f"reference={folder}: samples of {size[0]}×{size[1]} are not square; leave reference out.")
    listed = list_images(folder)
    order = torch.randperm(len(listed.entries), generator=torch.Generator().manual_seed(0)).tolist()[:limit]
    entries = [listed.entries[i] for i in order]

    def images(first: int, last: int) -> Images:
        dataset = DecodedImages(entries[first:last], size[0])
        for decoded in DataLoader(dataset, BATCH, num_workers=int(last - first > BATCH), collate_fn=collate):
            if trouble := [*decoded.reasons, *([decoded.unread] if decoded.unread else [])]:
                raise ValueError(f"reference={folder}: {trouble[0]}; remove or mend it.")
            yield decoded.pixels.permute(0, 2, 3, 1)

    told = {"kind": "images", "name": folder, "sha256": listed.sha256(), "count": len(entries), "resize": RESIZE}
    return Source(told | {"side": size[0]}, len(entries), images)


def reconstructions(
    node: dict[str, Any], spec: LatentSpec, autoencoder: Autoencoder, device: torch.device, limit: int
) -> Source:
    """The training latents of `node`, a run's data configuration, decoded: the first `limit` in the order of seed 0."""
    loader = build_loader(node, 0, BATCH, device)
    if loader.spec.fingerprint != spec.fingerprint:
        raise ValueError(
            f"the latents of the run have changed since ({loader.spec.fingerprint} instead of {spec.fingerprint}); "
            f"give images to compare with: reference=<folder>."
        )
    count = min(spec.count, limit)

    def images(first: int, last: int) -> Images:
        loader.load_state_dict({"samples_seen": first})
        for start in range(first, last, BATCH):
            decoded = autoencoder.decode(spec.denormalise(next(loader).latents))
            yield torch.from_numpy(to_uint8(decoded))[: last - start]

    weights = spec.encoder_sha256 or spec.encoder.get("_target_")
    facts = json.dumps([spec.fingerprint, weights, spec.mean, spec.std])
    digest = hashlib.sha256(facts.encode()).hexdigest()
    return Source({"kind": "reconstructions", "sha256": digest, "count": count, "resize": "none"}, count, images)


def reference_sides(
    source: Source, spaces: Mapping[str, Features], device: torch.device, ranks: Ranks
) -> dict[str, Side]:
    """The reference's side of the comparison in each space; the processes share the work, the first has the result.

    Every space has a folder of its own in the cache, so that one more space costs only its own features.
    """
    sides = {}
    for name, space in spaces.items():
        job = {"reference": {k: v for k, v in source.told.items() if k != "name"}, "features": space.describe()}
        key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:32]
        pieces = Pieces(cache_folder("references", key), job, -(-source.count // PIECE), ranks, waits=True)
        for number in pieces.missing():
            first = number * PIECE
            batches = source.images(first, min(first + PIECE, source.count))
            pieces.write(number, {name: torch.cat([space(images.to(device)).cpu() for images in batches])})
        ranks.wait_for_all()
        if ranks.first:
            sides[name] = Side(space.dim)
            for number in range(pieces.count):
                sides[name].add(pieces.read(number)[name])
        pieces.close()
    return sides
