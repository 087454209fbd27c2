"""The manifest of a latent set, and opening the set with it.

`manifest.json` lies beside the shards, which hold raw latents. It says how precompute_latents.py made them, how to
normalise them, and what every shard holds, so that nobody has to remember or guess it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data.loader import LatentSpec
from data.source import Source, open_source, unreadable

FORMAT = 2
NAME = "manifest.json"


class Block(NamedTuple):
    """One safetensors member of a shard: offset and size of its bytes, its samples, and the hash of its bytes."""

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


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts about a latent set. `write_manifest` in encoding/job.py makes them."""

    channels: int
    height: int
    width: int
    class_names: list[str]
    kind: Literal["mean_std", "sample"]
    """"mean_std": the posterior's mean (and its std, if the encoder is variational); "sample": one seeded draw."""
    dtype: Literal["float16", "bfloat16", "float32"]
    flips: bool
    """True if the set has the latents of the mirrored images too."""
    mean: list[float]
    """Per channel, over the stored training latents; fp64."""
    std: list[float]
    encoder: dict[str, Any]
    """`_target_` and arguments of the autoencoder."""
    encoder_class: str | None = None
    encoder_sha256: str | None = None
    scaling_factor: float | None = None
    """From the autoencoder's config; only `data.normalisation=scale_shift` uses it."""
    shift_factor: float | None = None
    input_range: list[float]
    resize: str
    resolution: int | None = None
    """Of the images in pixels; None for imported latents."""
    psnr_db: float | None = None
    """Of the reconstruction of the first images of the set."""
    precision: str
    """The one in which the encoder really computed: fp32, bf16."""
    count: int
    held_out: int
    skipped: list[str] = field(default_factory=list)
    """Images that Pillow could not decode, with the reason."""
    source: str
    source_sha256: str
    """Hash of the list of images, in order."""
    seed: int
    versions: dict[str, str]
    shards: list[Shard]
    format: int = FORMAT

    def fingerprint(self) -> str:
        """Hashes shards, class names and encoder: same fingerprint, same training data."""
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
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
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


def open_set(
    group: str, path: str | None, normalisation: str, encoder: str | None, latent_scale: float | None, **remote: Any
) -> tuple[Source, Manifest, LatentSpec]:
    """Opens the set at `path` for `data=<group>`: its source, manifest and spec.

    ValueError if the set was not made with `encoder` and `latent_scale`; None expects nothing. `remote`: see
    `open_source`.
    """
    if path is None:
        raise ValueError(
            f"data={group} needs data.path=<folder of latents>; make one with "
            f"`python precompute_latents.py source=<images> out=<folder>`, or use data=digits."
        )
    source = open_source(path, **remote)
    manifest = read_manifest(source)
    made_with = str(manifest.encoder.get("path", manifest.encoder.get("_target_")))
    if encoder is not None and made_with not in (encoder, str(Path(encoder).expanduser().resolve())):
        raise ValueError(f"data.encoder={encoder}, but {source} was encoded with {made_with}; change one of them.")
    if latent_scale is not None and latent_scale != manifest.scaling_factor:
        raise ValueError(
            f"data.latent_scale={latent_scale}, but the encoder of {source} has {manifest.scaling_factor}; "
            f"change one of them."
        )
    return source, manifest, spec_of(manifest, source, normalisation)


def spec_of(manifest: Manifest, source: Source, normalisation: str) -> LatentSpec:
    """The spec of the training split with the mean and std per channel that `normalisation` chooses."""
    if normalisation not in ("channel", "scale_shift"):
        raise ValueError(f"data.normalisation={normalisation} is unknown; choose channel or scale_shift.")
    mean, std = manifest.mean, manifest.std
    if normalisation == "scale_shift":
        if manifest.scaling_factor is None:
            raise ValueError(
                f"data.normalisation=scale_shift, but the encoder of {source} has no scaling factor; use channel."
            )
        mean = [manifest.shift_factor or 0.0] * manifest.channels
        std = [1.0 / manifest.scaling_factor] * manifest.channels
    return LatentSpec(
        channels=manifest.channels,
        height=manifest.height,
        width=manifest.width,
        num_classes=len(manifest.class_names),
        count=manifest.count,
        class_names=manifest.class_names,
        mean=mean,
        std=std,
        encoder=manifest.encoder,
        encoder_sha256=manifest.encoder_sha256,
        fingerprint=f"{manifest.fingerprint()}-{normalisation}",
    )


def write_atomically(file: Path, text: str) -> None:
    """Writes to a temporary file, flushes it to disk and renames it to `file`."""
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
