"""Checks every hash, count, label and value of a latent set, and its statistics; decodes some
samples into a picture.

    python -m scripts.verify_latents path=latents/photos
    python -m scripts.verify_latents path=latents/photos count=16 out=check.png
    python -m scripts.verify_latents path=https://example.org/latents count=0

With `source=photos` it also looks whether the source still has the images that were encoded.
It prints every problem and ends with an error if there is one. It decodes `count` training samples
into a PNG grid, by default latents_check.png in the set's folder, or in runs/ if the set is a URL
or its folder is not writable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.config.paths import refuse_no_set
from common.config.schema import Device, Natural, refuse_unset, refuse_values
from common.errors import READ_ERRORS, UserError
from common.output import Progress
from common.text import format_bytes
from scripts.commands import run_command

if TYPE_CHECKING:
    from data.manifest import Manifest
    from data.source import Source


@dataclass(frozen=True)
class VerifyConfig:
    """Keys of the command `verify_latents`."""

    path: str | None = None
    """Folder or URL with manifest.json."""
    count: Natural = 8
    """Number of training samples to decode; 0: none."""
    source: str | None = None
    """The images of which precompute_latents.py made the set: it is a problem if some are others
    now."""
    encoder: str | None = None
    """The autoencoder's folder, if it has moved since precompute_latents.py used it."""
    out: str | None = None
    """File of the grid; null: latents_check.png in the set's folder, or in runs/."""
    device: Device = Device.auto
    """`auto`: the GPU if there is one, otherwise the CPU."""


def verify(cfg: VerifyConfig) -> list[str]:
    """Checks the set, prints a summary and returns the problems, one sentence each."""
    refuse_unset(cfg, {"path": "<folder or URL with manifest.json>"})
    refuse_values(cfg)
    refuse_no_set("path", cfg.path)
    from data.blocks import BlockReader, DamagedBlockError
    from data.caption_blocks import read_captions
    from data.manifest import read_manifest
    from data.source import LocalSource, open_source

    source = open_source(str(cfg.path))
    manifest = read_manifest(source)
    problems = check_split(source, manifest, "train") + check_split(source, manifest, "held_out")

    # Check every block of captions, as a loader does.
    try:
        read_captions(BlockReader(source, manifest, "train"), "tokens")
    except DamagedBlockError as error:
        problems.append(str(error).partition(";")[0])

    if isinstance(source, LocalSource):
        problems += check_files(source.folder, manifest, cfg.source)
    for problem in problems:
        print(f"  ! {problem}")

    shape = f"{manifest.channels}×{manifest.height}×{manifest.width}"
    total = sum(shard.bytes for shard in manifest.shards)
    print(
        f"{source}: {manifest.count} training and {manifest.held_out} held-out latents of {shape} "
        f"in {manifest.dtype}, {len(manifest.class_names)} classes, {len(manifest.shards)} "
        f"shards, {format_bytes(total)}"
    )
    if cfg.count and not problems:
        print(write_decoded_grid(cfg, source, manifest))
    return problems


def check_split(source: Source, manifest: Manifest, split: str) -> list[str]:
    """Checks every block of a split (train or held out) as a loader does. If all blocks of the
    training split are good, also compares mean and std of the channels with the manifest. Returns
    the problems."""
    from data.blocks import BlockReader, DamagedBlockError
    from encoding.shards import ChannelSums, compute_channel_statistics

    blocks = BlockReader(source, manifest, split)
    problems = []
    sums = ChannelSums()
    progress = Progress(len(blocks.places), f"{split} blocks", lasting=False)
    for number in range(len(blocks.places)):
        try:
            sums.add(blocks.read_verified(number))
        except DamagedBlockError as error:
            problems.append(str(error).partition(";")[0])
        progress.advance(1)
    progress.close()
    if split == "train" and not problems:
        mean, std = compute_channel_statistics([sums.as_dict()])
        scale = max(manifest.std)
        for name, measured, stated in (("mean", mean, manifest.mean), ("std", std, manifest.std)):
            if any(abs(a - b) > 1e-5 * scale for a, b in zip(measured, stated, strict=True)):
                problems.append(
                    f"{source}/manifest.json: {name} is {stated}, but that of the latents is "
                    f"{measured}"
                )
    return problems


def check_files(folder: Path, manifest: Manifest, images: str | None) -> list[str]:
    """Checks size and hash of the files of a local set, that its folder has no other tars, and that
    the source `images`, if it is given, has those that were encoded. Returns the problems."""
    from common.files import hash_file, read_object
    from encoding.decoding import list_others
    from encoding.sources import list_images

    problems = []
    known = set()
    for shard in manifest.shards:
        file = folder / shard.file
        known.add(file)
        if file.is_file() and hash_file(file) != shard.sha256:
            problems.append(f"{file}: size or sha256 differs from the manifest's")
    hashes = set()
    for sidecar in folder.glob("*.tar.json"):
        try:
            content = read_object(sidecar)
            hashes.update(content.get("images", ()))
            # Accept the tar of a shard without samples, of whose images Pillow could decode none.
            # The manifest does not list such a tar.
            if content["shard"]["count"] == 0:
                known.add(sidecar.with_suffix(""))
        except READ_ERRORS:
            problems.append(f"{sidecar} is no description of a shard")

    # The source may have more images than were encoded.
    entries = list_images(images, "none", allow_cut=True).entries if hashes and images else []
    others = list_others(entries, hashes, manifest.skipped)
    changed = len(others) - max(0, len(entries) - len(hashes) - len(manifest.skipped))
    if changed > 0:
        problems.append(f"source={images}: {changed} images are not those that were encoded")

    files = {*folder.glob("*.tar"), *folder.glob("*.tmp")}
    return problems + [f"{file} is not in the manifest" for file in sorted(files - known)]


def write_decoded_grid(cfg: VerifyConfig, source: Source, manifest: Manifest) -> str:
    """Decodes the first training latents, writes them as a grid of images, and returns a sentence
    about the grid."""
    import torch

    from common.environment import pick_device
    from data.blocks import BlockReader
    from data.manifest import make_spec
    from models.images import to_uint8, write_grid
    from training.weights.pretrained import build_autoencoder

    device = pick_device(cfg.device)
    autoencoder = build_autoencoder(make_spec(manifest, source, "channel"), device, cfg.encoder)
    blocks = BlockReader(source, manifest, "train")
    wanted = [i for i, place in enumerate(blocks.places) if place.first < cfg.count]
    latents = torch.cat([blocks.read(i)["latents"] for i in wanted])[: cfg.count]
    with torch.no_grad():
        parts = [autoencoder.decode(part.to(device).float()) for part in latents.split(8)]
    folder = Path(str(cfg.path)).expanduser()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        folder = Path("runs")
    out = Path(cfg.out or folder / "latents_check.png").expanduser()
    write_grid(out, to_uint8(torch.cat(parts)), columns=min(8, len(latents)))
    return f"{out}: the first {len(latents)} training latents decoded"


def refuse_problems(cfg: VerifyConfig) -> None:
    """Checks the set as `verify` does. Raises UserError if it has problems."""
    problems = verify(cfg)
    if problems:
        raise UserError(
            f"path={cfg.path}: {len(problems)} problems, listed above; run "
            "precompute_latents.py again to rebuild."
        )


if __name__ == "__main__":
    run_command(refuse_problems, VerifyConfig, __doc__)
