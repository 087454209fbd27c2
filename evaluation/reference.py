"""The reference that samples are compared with: images of a folder, or the decoded training latents
of a run.

Their features are made once and kept below ~/.cache/fastlatent, so the set itself may be read-only.

Letters: B images, H W their size.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from common.errors import UserError
from common.files import cache_folder
from common.progress import Progress
from data.loader import LatentLoader, LatentSpec
from encoding.images import RESIZE, DecodedImages, ImageEntry, decoding_loader, read_again
from encoding.listing import is_image
from encoding.sources import list_images
from evaluation.sides import Side
from evaluation.space import Features, exact
from models.autoencoders import Autoencoder
from models.images import to_uint8
from sampling.resumable_chunks import Pieces
from training.components import build_loader
from training.distributed.ranks import Ranks
from training.goodput import CLOCK

PIECE = 512
BATCH = 64
FEWEST = 8
Images = Iterator[UInt8[Tensor, "B H W 3"]]


@dataclass(frozen=True)
class Source:
    """Images to compare with: what they are, how many, and a way to get those of numbers first …
    last - 1."""

    told: dict[str, Any]
    """`kind`, `sha256` of what determines them, `count`, `resize`."""
    count: int
    images: Callable[[int, int], Images]


def folder_source(folder: str, size: tuple[int, int], limit: int) -> Source:
    """The images of a folder, tars or `datasets`, cropped to `size`; drawn by a fixed order if more
    than `limit`.

    ValueError if there are too few, if one cannot be decoded, and if the samples are not square.
    """
    if size[0] != size[1]:
        raise UserError(
            f"reference={folder}: samples of {size[0]}×{size[1]} are not square; leave reference "
            "out."
        )
    listed = images_of(folder)
    order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()[:limit]
    entries = [listed[i] for i in order]
    digest = hashlib.sha256()
    for entry in entries:  # all bytes: a file of the same name and size may be another image
        digest.update(hashlib.sha256(read_again(entry)).digest())

    def images(first: int, last: int) -> Images:
        dataset = DecodedImages(entries[first:last], size[0])
        batches = [part.tolist() for part in torch.arange(last - first).split(BATCH)]
        for decoded in decoding_loader(dataset, batches, workers=int(len(batches) > 1)):
            if trouble := [*decoded.reasons, *([decoded.unread] if decoded.unread else [])]:
                raise UserError(f"reference={folder}: {trouble[0]}; remove or mend it.")
            yield decoded.pixels.permute(0, 2, 3, 1)

    told = {
        "kind": "images",
        "name": folder,
        "sha256": digest.hexdigest(),
        "resize": f"{RESIZE}, {size[0]}",
    }
    return enough(
        Source(told | {"count": len(entries)}, len(entries), images), f"reference={folder}"
    )


def images_of(folder: str) -> list[ImageEntry]:
    """The images right in a folder, or else as `precompute_latents.py` finds them; labels do not
    matter."""
    path = Path(folder).expanduser()
    flat = (
        sorted(p for p in path.iterdir() if is_image(p.suffix.lower()) and p.is_file())
        if path.is_dir()
        else []
    )
    if flat:
        return [ImageEntry(file.name, 0, str(file), 0, file.stat().st_size) for file in flat]
    try:
        return list_images(path, "none").entries
    except ValueError as error:
        raise UserError(str(error).replace(f"source={path}", f"reference={folder}", 1)) from error


def reconstructions(
    node: dict[str, Any],
    spec: LatentSpec,
    autoencoder: Autoencoder,
    device: torch.device,
    limit: int,
) -> Source:
    """The training latents of `node`, a run's data configuration, decoded: the first `limit` in the
    order of seed 0.

    They are read into host memory, and only where their features are not known yet.
    """
    count = min(spec.count, limit)

    def images(first: int, last: int) -> Images:
        loader = opened(json.dumps(node), spec.fingerprint)
        if loader.state_dict()["samples_seen"] != first:
            loader.load_state_dict(loader.state_dict() | {"samples_seen": first})
        for start in range(first, last, BATCH):
            latents = spec.denormalise(next(loader).latents[: last - start]).to(device)
            yield decoded(autoencoder, latents)

    order = {key: node[key] for key in ("_target_", "streams", "window") if key in node}
    facts = [
        spec.fingerprint,
        spec.encoder_sha256 or spec.encoder.get("_target_"),
        spec.mean,
        spec.std,
        order,
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    told = {"kind": "reconstructions", "sha256": digest, "resize": "none", "count": count}
    return enough(Source(told, count, images), "the training set")


def decoded(
    autoencoder: Autoencoder, latents: Float[Tensor, "B C h w"]
) -> UInt8[Tensor, "B H W 3"]:
    """8-bit images from raw latents, in true fp32 whatever the process has set."""
    with torch.no_grad(), exact(latents.device):
        return torch.from_numpy(to_uint8(autoencoder.decode(latents)))


@functools.lru_cache(maxsize=1)
def opened(node: str, fingerprint: str) -> LatentLoader:
    """The loader of the training set on the CPU; ValueError if it is no longer the set of this
    fingerprint."""
    with contextlib.redirect_stdout(io.StringIO()):  # the run has told of its data already
        loader = build_loader(json.loads(node), 0, BATCH, torch.device("cpu"))
    if fingerprint not in (loader.spec.fingerprint, loader.spec.earlier_fingerprint):
        raise UserError(
            f"the run's data are {loader.spec.fingerprint} now, its weights were trained on "
            f"{fingerprint}; give images to compare with: reference=<folder>."
        )
    return loader


def enough(source: Source, name: str) -> Source:
    """The source; ValueError if halves of it would be too small for any distance."""
    if source.count < FEWEST:
        raise UserError(
            f"{name} gives {source.count} images to compare with; give {FEWEST} or more."
        )
    return source


@CLOCK.spending("evaluation")
def reference_sides(
    source: Source, spaces: Mapping[str, Features], device: torch.device, ranks: Ranks
) -> dict[str, Side]:
    """The reference's side of the comparison in each space; the processes share the work, the first
    has the result.

    Every space has a folder of its own in the cache, so that one more space costs only its own
    features.
    """
    kept: dict[str, Pieces] = {}
    for name in sorted(spaces):  # in one order, so that two commands never wait for each other
        job = {
            "reference": {k: v for k, v in source.told.items() if k != "name"},
            "features": spaces[name].describe(),
        }
        key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:32]
        kept[name] = Pieces(
            cache_folder("references") / key, job, -(-source.count // PIECE), ranks, waits=True
        )
    missing = {name: pieces.missing() for name, pieces in kept.items()}
    todo = sorted(set().union(*missing.values()))
    if todo:
        ranks.say(
            f"making features ({', '.join(name for name in missing if missing[name])}) of "
            f"{source.count} images of the reference; a later run finds them in "
            f"{cache_folder('references')}"
        )
    spans = {number: (number * PIECE, min((number + 1) * PIECE, source.count)) for number in todo}
    total = sum(last - first for first, last in spans.values())
    progress = Progress(total, "images", silent=not ranks.first, lasting=False)
    for number, (first, last) in spans.items():
        found: dict[str, list[Tensor]] = {name: [] for name in spaces if number in missing[name]}
        for images in source.images(first, last):
            for name, features in found.items():
                features.append(spaces[name](images.to(device)).cpu())
            progress.advance(len(images))
        for name, features in found.items():
            kept[name].write(number, {name: torch.cat(features)})
    progress.close()
    opened.cache_clear()
    ranks.wait_for_all()
    sides = {name: Side(space.dim) for name, space in spaces.items()} if ranks.first else {}
    for name, side in sides.items():
        for number in range(kept[name].count):
            side.add(kept[name].read(number)[name])
    for pieces in kept.values():
        pieces.close()
    return sides
