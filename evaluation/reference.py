"""The reference that samples are compared with: a folder's images, or a run's training latents.

The latents are decoded. Features of a reference are made once and kept below ~/.cache/fastlatent,
so the set itself may be read-only.

Letters: B images, H W their size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from common.errors import UserError
from common.files import cache_folder
from common.progress import Progress
from data.loader import LatentSpec
from encoding.images import RESIZE, DecodedImages, ImageEntry, decoding_loader, read_again
from encoding.listing import is_image
from encoding.sources import list_images
from evaluation.distances import FeatureStats
from evaluation.features import Features, exact
from models.autoencoders import Autoencoder
from models.images import to_uint8
from sampling.resumable_chunks import ResumableChunks
from training.assemble import build_loader
from training.distributed.ranks import Ranks
from training.goodput import CLOCK

CHUNK = 512
"""Images whose features lie in one file."""
BATCH = 64
FEWEST = 8
Images = Iterator[UInt8[Tensor, "B H W 3"]]


@dataclass(frozen=True)
class Source:
    """Images to compare with: what they are, how many, and how to get them.

    ValueError if halves of them would be too small for any distance.
    """

    name: str
    """What messages call it."""
    told: dict[str, Any]
    """`kind`, `sha256` of what determines them, `count`, `resize`."""
    images: Callable[[Iterable[range]], Iterator[Images]]
    """Yields for each range of numbers the batches of those images."""

    def __post_init__(self) -> None:
        if self.count < FEWEST:
            raise UserError(
                f"{self.name} gives {self.count} images to compare with; give {FEWEST} or more."
            )

    @property
    def count(self) -> int:
        return self.told["count"]

    @property
    def identity(self) -> dict[str, Any]:
        """What `told` says but for the name: the same images may lie in another folder."""
        return {key: value for key, value in self.told.items() if key != "name"}


def folder_source(folder: str, size: tuple[int, int], limit: int) -> Source:
    """Takes the images of a folder, tars or `datasets`, cropped to `size`.

    Of more than `limit` a fixed order draws some. ValueError if there are too few, if one cannot be
    decoded, and if the samples are not square.
    """
    name = f"reference={folder}"
    if size[0] != size[1]:
        raise UserError(
            f"{name}: samples of {size[0]}×{size[1]} are not square; leave reference out."
        )
    listed = images_of(folder)
    order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(0)).tolist()[:limit]
    entries = [listed[i] for i in order]
    digest = hashlib.sha256()
    for entry in entries:  # all bytes: a file of the same name and size may be another image
        digest.update(hashlib.sha256(read_again(entry)).digest())

    def batches(wanted: range) -> Images:
        dataset = DecodedImages(entries[wanted.start : wanted.stop], size[0])
        parts = [part.tolist() for part in torch.arange(len(wanted)).split(BATCH)]
        for decoded in decoding_loader(dataset, parts, workers=int(len(parts) > 1)):
            for trouble in (*decoded.reasons, decoded.unread):
                if trouble:
                    raise UserError(f"{name}: {trouble}; remove or mend it.")
            yield decoded.pixels.permute(0, 2, 3, 1)

    told = {
        "kind": "images",
        "name": folder,
        "sha256": digest.hexdigest(),
        "resize": f"{RESIZE}, {size[0]}",
        "count": len(entries),
    }
    return Source(name, told, lambda ranges: map(batches, ranges))


def images_of(folder: str) -> list[ImageEntry]:
    """Lists the images right in a folder, or else those that `precompute_latents.py` finds there.

    Labels do not matter.
    """
    path = Path(folder).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else []
    flat = [file for file in files if is_image(file.suffix.lower()) and file.is_file()]
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
    """Decodes the training latents of `node`, a run's data configuration.

    They are the first `limit` in the order of seed 0, and are read into host memory only where
    their features are not known yet. ValueError if it is no longer the set of `spec`.
    """

    def images(ranges: Iterable[range]) -> Iterator[Images]:
        loader = build_loader(node, 0, BATCH, torch.device("cpu"))
        if spec.fingerprint not in (loader.spec.fingerprint, loader.spec.earlier_fingerprint):
            raise UserError(
                f"the run's data are {loader.spec.fingerprint} now, its weights were trained on "
                f"{spec.fingerprint}; give images to compare with: reference=<folder>."
            )

        def batches(wanted: range) -> Images:
            place = loader.state_dict()
            if place["samples_seen"] != wanted.start:
                loader.load_state_dict(place | {"samples_seen": wanted.start})
            for start in wanted[::BATCH]:
                latents = next(loader).latents[: wanted.stop - start]
                yield decoded(autoencoder, spec.denormalise(latents).to(device))

        yield from map(batches, ranges)

    facts = [
        spec.fingerprint,
        spec.encoder_sha256 or spec.encoder.get("_target_"),
        spec.mean,
        spec.std,
        {key: node[key] for key in ("_target_", "streams", "window") if key in node},
    ]
    told = {
        "kind": "reconstructions",
        "sha256": hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        "resize": "none",
        "count": min(spec.count, limit),
    }
    return Source("the training set", told, images)


def decoded(
    autoencoder: Autoencoder, latents: Float[Tensor, "B C h w"]
) -> UInt8[Tensor, "B H W 3"]:
    """Decodes raw latents to 8-bit images, in true fp32 whatever the process has set."""
    with torch.no_grad(), exact(latents.device):
        return torch.from_numpy(to_uint8(autoencoder.decode(latents)))


@CLOCK.spending("evaluation")
def reference_stats(
    source: Source, spaces: Mapping[str, Features], device: torch.device, ranks: Ranks
) -> dict[str, FeatureStats]:
    """Returns the reference's features in each space; the first process has them.

    The processes share the work. Every space has a folder of its own in the cache, so that one more
    space costs only its own features.
    """
    # sorted, so that two commands never wait for each other
    kept = {name: kept_features(source, spaces[name], ranks) for name in sorted(spaces)}
    missing = {name: set(chunks.missing()) for name, chunks in kept.items()}
    if any(missing.values()):
        ranks.say(
            f"making features ({', '.join(name for name in missing if missing[name])}) of "
            f"{source.count} images of the reference; a later run finds them in "
            f"{cache_folder('references')}"
        )
        todo = sorted(set().union(*missing.values()))
        ranges = [range(n * CHUNK, min((n + 1) * CHUNK, source.count)) for n in todo]
        total = sum(map(len, ranges))
        progress = Progress(total, "images", silent=not ranks.first, lasting=False)
        for number, batches in zip(todo, source.images(ranges), strict=True):
            features: dict[str, list[Tensor]] = {n: [] for n in spaces if number in missing[n]}
            for images in batches:
                for name, found in features.items():
                    found.append(spaces[name](images.to(device)).cpu())
                progress.advance(len(images))
            for name, found in features.items():
                kept[name].write(number, {name: torch.cat(found)})
        progress.close()

    ranks.wait_for_all()
    stats = {}
    for name, space in spaces.items():
        if ranks.first:
            stats[name] = FeatureStats(space.dim)
            for number in range(kept[name].count):
                stats[name].add(kept[name].read(number)[name])
        kept[name].close()
    return stats


def kept_features(source: Source, space: Features, ranks: Ranks) -> ResumableChunks:
    """Opens the cache of the reference's features in one space, once nobody else works in it."""
    job = {"reference": source.identity, "features": space.describe()}
    key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder("references") / key
    return ResumableChunks(folder, job, -(-source.count // CHUNK), ranks, waits=True)
