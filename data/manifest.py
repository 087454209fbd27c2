"""The manifest: what a latent set is, so that nothing about it has to be remembered or guessed.

`manifest.json` lies beside the shards. Latents are stored raw; the manifest says how they were made, how to normalise
them, and what every shard holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data.source import Source, open_source, unreadable

FORMAT = 2
NAME = "manifest.json"


class Block(NamedTuple):
    """One safetensors payload of a shard: where its bytes lie, how many samples it holds, and their hash."""

    offset: int
    size: int
    samples: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """One tar file, its blocks in file order."""

    file: str
    split: Literal["train", "held_out"]
    count: int
    bytes: int
    sha256: str
    blocks: list[Block]


@dataclass(frozen=True)
class Manifest:
    """All that is known about a latent set. See `write_manifest` in encoding/job.py for where it comes from."""

    channels: int
    height: int
    width: int
    class_names: list[str]
    kind: Literal["mean_std", "sample"]
    """"mean_std": the posterior's mean (and its std, where the encoder is variational); "sample": one seeded draw."""
    dtype: Literal["float16", "bfloat16", "float32"]
    flips: bool
    """True if the latents of the mirrored images are stored too."""
    mean: list[float]
    """Per channel, over the stored training latents; fp64."""
    std: list[float]
    encoder: dict[str, Any]
    """`_target_` and arguments of the autoencoder."""
    encoder_class: str | None
    encoder_sha256: str | None
    scaling_factor: float | None
    """What the autoencoder's config says; used only with `data.normalisation=scale_shift`."""
    shift_factor: float | None
    input_range: list[float]
    resize: str
    resolution: int | None
    """Of the images in pixels; None for imported latents, of which it is not known."""
    psnr_db: float | None
    """Reconstruction of the first images of the set."""
    precision: str
    """In which the encoder really computed: fp32, bf16."""
    count: int
    held_out: int
    skipped: list[str]
    """Images that could not be decoded, with the reason."""
    source: str
    source_sha256: str
    """Hash of the list of images, in order."""
    seed: int
    versions: dict[str, str]
    shards: list[Shard]
    format: int = FORMAT

    def fingerprint(self) -> str:
        """Hash of all that determines the latents: same fingerprint, same training data."""
        parts = [shard.sha256 for shard in self.shards] + self.class_names + [str(self.encoder_sha256)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        write_atomically(folder / NAME, json.dumps(asdict(self), indent=1) + "\n")


def read_manifest(folder: str | Path | Source) -> Manifest:
    """Reads and checks `folder/manifest.json`; ValueError names the file and the field that does not fit."""
    source = open_source(folder) if isinstance(folder, str | Path) else folder
    file = f"{source}/{NAME}"
    remedy = (
        f"data.path={source} must name a folder that precompute_latents.py has finished. "
        f"Run `python precompute_latents.py source=<images> out={source}` (the same command again continues)"
    )
    try:
        content = source.read(NAME)
    except OSError as error:
        raise ValueError(f"{unreadable(file, error)}; {remedy}.") from error
    try:
        raw = json.loads(content)
    except ValueError as error:
        raise ValueError(
            f"{file} is not valid JSON ({error}); run precompute_latents.py again to rebuild it."
        ) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise ValueError(f"{file} has format {found}, this version reads {FORMAT}; run precompute_latents.py again.")
    expected = {f.name for f in fields(Manifest)}
    if missing := sorted(expected - raw.keys()):
        raise ValueError(f"{file} lacks {', '.join(missing)}; run precompute_latents.py again to rebuild it.")
    try:
        shards = [Shard(**shard | {"blocks": [Block(*b) for b in shard["blocks"]]}) for shard in raw["shards"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{file}: a shard's entry is broken ({error}); run precompute_latents.py again.") from error
    manifest = Manifest(**{name: raw[name] for name in expected if name != "shards"}, shards=shards)
    for shard in manifest.shards:
        if Path(shard.file).name != shard.file:
            raise ValueError(
                f"{file} names a shard outside its folder: {shard.file}; run precompute_latents.py again to rebuild it."
            )
    return manifest


def write_atomically(file: Path, text: str) -> None:
    """Writes beside the file, flushes to disk, renames over it."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        with temporary.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:  # a full disk
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
