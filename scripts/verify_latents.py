"""Checks every hash, count, label and value of a latent set, and its statistics; decodes some
samples to a picture.

    python -m scripts.verify_latents path=latents/photos
    python -m scripts.verify_latents path=latents/photos source=photos count=16 out=check.png
    python -m scripts.verify_latents path=https://example.org/latents count=0

It prints every problem and ends with an error if there is one. It decodes `count` training samples
to a PNG grid, by default latents_check.png in the set's folder, or in runs/ where that cannot be
written or is a URL; with `source`, their images stand beside them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from training.config.compose import from_words, one_sentence, refuse_no_set, typed

if TYPE_CHECKING:
    from data.blocks import BlockReader
    from data.manifest import Manifest
    from data.source import Source


@dataclass(frozen=True)
class VerifyConfig:
    """The latent set to check."""

    path: str | None = None
    """Folder or URL with manifest.json."""
    source: str | None = None
    """The images, which the grid shows beside the decoded latents."""
    count: int = 8
    """Samples to decode; 0 for none."""
    encoder: str | None = None
    """The autoencoder's folder, where it is no longer the one that precompute used."""
    out: str | None = None
    """Null: latents_check.png in the set's folder, or in runs/."""
    device: str = "auto"


def verify(cfg: VerifyConfig) -> list[str]:
    """Checks the set, prints a summary and returns the problems."""
    if cfg.path is None:
        raise UserError("path is not set; say which latent set: path=<folder with manifest.json>.")
    refuse_no_set("path", cfg.path)
    from data.manifest import read_manifest
    from data.source import open_source

    source = open_source(cfg.path)
    manifest = read_manifest(source)
    problems = [
        problem
        for split in ("train", "held_out")
        for problem in check_split(source, manifest, split)
    ]
    problems += check_files(source, manifest)
    for problem in problems:
        print(f"  ! {problem}")
    shape = f"{manifest.channels}×{manifest.height}×{manifest.width}"
    total = sum(shard.bytes for shard in manifest.shards)
    print(
        f"{source}: {manifest.count} training and {manifest.held_out} held-out latents of {shape} "
        f"in {manifest.dtype}, {len(manifest.class_names)} classes, {len(manifest.shards)} "
        f"shards, {total / 2**30:.2f} GiB"
    )
    if cfg.count and not problems:
        print(show(cfg, source, manifest))
    return problems


def check_split(source: Source, manifest: Manifest, split: str) -> list[str]:
    """Checks every block of a split as a loader does; then, if all are good, the statistics."""
    from data.blocks import BlockReader, DamagedBlockError
    from encoding.job import ChannelSums, channel_statistics

    blocks = BlockReader(source, manifest, split)
    problems = []
    sums = ChannelSums()
    for number in range(len(blocks.places)):
        try:
            tensors = blocks.checked(number)
        except DamagedBlockError as error:
            problems.append(str(error).partition(";")[0])
            continue
        sums.add(tensors)
    if split == "train" and not problems:
        mean, std = channel_statistics([sums.as_dict()])
        for what, found, said in (("mean", mean, manifest.mean), ("std", std, manifest.std)):
            scale = max(manifest.std)
            if any(abs(a - b) > 1e-5 * scale for a, b in zip(found, said, strict=True)):
                problems.append(
                    f"{source}/manifest.json: {what} is {said}, of the latents it is {found}"
                )
    return problems


def check_files(source: Source, manifest: Manifest) -> list[str]:
    """Checks size and hash of the files of a local set, and that there are no others."""
    from common.files import file_sha256, read_object
    from data.source import LocalSource

    if not isinstance(source, LocalSource):
        return []
    problems = []
    known = {shard.file for shard in manifest.shards}
    for sidecar in source.folder.glob("*.tar.json"):
        try:
            # Pillow could decode none of the shard's images
            if read_object(sidecar)["shard"]["count"] == 0:
                known.add(sidecar.stem)
        except (OSError, ValueError, KeyError, TypeError):
            problems.append(f"{sidecar} is no description of a shard")
    for shard in manifest.shards:
        file = source.folder / shard.file
        if file.is_file() and (
            file.stat().st_size != shard.bytes or file_sha256(file) != shard.sha256
        ):
            problems.append(f"{file}: size or sha256 differs from the manifest's")
    found = sorted(source.folder.glob("*.tar")) + sorted(source.folder.glob("*.tmp"))
    return problems + [f"{file} is not in the manifest" for file in found if file.name not in known]


def show(cfg: VerifyConfig, source: Source, manifest: Manifest) -> str:
    """Writes the grid and describes it in a sentence."""
    import numpy as np
    import torch

    from data.blocks import BlockReader
    from data.manifest import spec_of
    from models.images import psnr, to_uint8, write_grid
    from training.environment import pick_device
    from training.weights.pretrained import build_autoencoder

    device = pick_device(cfg.device)
    autoencoder = build_autoencoder(spec_of(manifest, source, "channel"), device, cfg.encoder)
    latents = first_latents(BlockReader(source, manifest, "train"), cfg.count)
    with torch.no_grad():
        decoded = torch.cat(
            [autoencoder.decode(part.to(device).float()) for part in latents.split(8)]
        ).cpu()
    pixels = to_uint8(decoded)
    columns = min(8, len(latents))
    said = ""
    if cfg.source is not None:
        originals = originals_of(cfg, source, manifest, len(latents))
        pixels = np.stack([to_uint8(originals), pixels], 1).reshape(-1, *pixels.shape[1:])
        columns = 2 * min(4, len(latents))
        said = f", each right of its original, at {psnr(decoded, originals):.1f} dB"
    folder = Path(str(cfg.path)).expanduser()
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    out = (
        Path(cfg.out).expanduser()
        if cfg.out
        else (folder if writable else Path("runs")) / "latents_check.png"
    )
    write_grid(out, pixels, columns=columns)
    return f"{out}: the first {len(latents)} training latents decoded{said}"


def first_latents(blocks: BlockReader, count: int) -> Any:
    import torch

    parts = [
        blocks.read(i)["latents"] for i, place in enumerate(blocks.places) if place.first < count
    ]
    return torch.cat(parts)[:count]


def originals_of(cfg: VerifyConfig, source: Source, manifest: Manifest, count: int) -> Any:
    """The images of the first training latents, in [-1, 1]; ValueError if `cfg.source` has other
    images."""
    import torch

    from common.text import first_line
    from encoding.encoder import to_input
    from encoding.images import decode_image, read_image
    from encoding.job import plan_shards
    from encoding.sources import list_images
    from training.config.schema import PrecomputeConfig

    if manifest.resolution is None:
        raise UserError(
            f"source={cfg.source}: {source} was imported, and its images are not known; leave "
            "source out."
        )
    try:
        job: dict[str, Any] = json.loads(source.read("job.json"))
        keys = (
            "seed",
            "limit",
            "held_out",
            "shard_size",
            "resolution",
            "background",
            "max_megapixels",
            "classes",
        )
        # there were fewer once
        was = typed(PrecomputeConfig, {key: job[key] for key in keys if key in job}, [])
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{source}/job.json cannot be read ({first_line(error)}); leave source out."
        ) from error
    images = list_images(str(cfg.source), was.classes, allow_cut=True)
    if images.sha256() != manifest.source_sha256:
        raise UserError(
            f"source={cfg.source} is not what {source} was made of ({manifest.source}), or an "
            f"earlier version listed it, which knew fewer formats; leave it out."
        )
    plan = plan_shards(images, was)
    skipped = {line.partition(": ")[0] for line in manifest.skipped}
    entries = [
        entry for _, split, of_shard in plan.shards if split == "train" for _, entry in of_shard
    ]
    used = [entry for entry in entries if entry.key not in skipped][:count]
    pixels = [
        decode_image(read_image(entry), was.resolution, was.background, was.max_megapixels)
        for entry in used
    ]
    return to_input(torch.stack(pixels), torch.device("cpu"))


def main() -> None:
    with one_sentence():
        cfg = from_words(VerifyConfig, sys.argv[1:], __doc__ or "")
        if problems := verify(cfg):
            raise UserError(
                f"path={cfg.path}: {len(problems)} problems, listed above; run "
                "precompute_latents.py again to rebuild."
            )


if __name__ == "__main__":
    main()
