"""The manifest of a latent set: its fields, its checks, and the spec that a run takes from it.

`manifest.json` is in the same folder as the shards. It says how precompute_latents.py made the
latents, how to normalise them, and what each shard contains. A shard is a WebDataset tar whose
members are *blocks*: safetensors files with a few hundred samples each, as raw `latents` (n, C, H,
W) and `labels` (n,), in some sets also `std`, `mirrored`, `mirrored_std` and `captions`. A tar with
one member per sample takes 26 times as long to read. Shards of the split "captions" hold the
encoded captions (data/caption_blocks.py).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from common.errors import UserError, describe_first_fault
from common.files import hash_content, write_json
from data.source import Source, describe_failed_read, open_source
from data.spec import Above0, Count, Finite, LatentSpec, Size, TextSpec, find_wrong_lengths

FORMAT = 2
MANIFEST_NAME = "manifest.json"
Normalisation = Literal["channel", "scale_shift"] | list[list[float]]
"""Source of mean and std per channel: "channel" for the mean and std measured over the set,
"scale_shift" for the autoencoder's constants, or the numbers themselves as [[means], [stds]]."""
FINGERPRINT_FIELDS = (
    "channels height width class_names kind dtype flips mean std "
    "scaling_factor shift_factor encoder_sha256"
)
"""Fields of the manifest on which training depends; the fingerprint is a hash of these fields and
of the shards."""
SHARD_NAME = re.compile(r"\w[\w.-]*\.tar", re.ASCII)
"""Matches a valid file name of a shard, which has no folder and no character with a special meaning
in a URL."""


class Block(NamedTuple):
    """One safetensors member of a shard: offset in the tar and size of the member in bytes, its
    number of samples, and the hash of its bytes."""

    offset: Count
    size: Size
    samples: Size
    sha256: str


@dataclass(frozen=True)
class Shard:
    """One tar file of the set; `blocks` is its blocks in file order, `count` its number of
    samples."""

    file: str
    split: Literal["train", "held_out", "captions"]
    count: Size
    bytes: Size
    sha256: str
    blocks: list[Block]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`, the description of a latent set; encoding/job.py writes the
    file."""

    channels: Size
    height: Size
    width: Size
    class_names: list[str]
    """Name of each class. Empty for a set without classes, in which every label is 0, the null
    label."""
    kind: Literal["mean_std", "sample"]
    """"mean_std": the set stores the posterior's mean (and its std, if the encoder is variational);
    "sample": the set stores one seeded draw from the posterior."""
    dtype: Literal["float16", "bfloat16", "float32", "uint8"]
    flips: bool
    """True if the set also stores the latents of each image mirrored."""
    mean: list[Finite]
    """Mean per channel over the stored training latents, computed in fp64."""
    std: list[Above0]
    encoder: dict[str, Any]
    """`_target_` and arguments of the autoencoder."""
    encoder_class: str | None = None
    encoder_sha256: str | None = None
    scaling_factor: Above0 | None = None
    """Number from the autoencoder's config by which it multiplies latents; only
    `data.normalisation=scale_shift` uses this number."""
    shift_factor: Finite | None = None
    input_range: list[Finite]
    resize: str
    resolution: int | list[int] | None = None
    """Side of the images in pixels, or [height, width] if they are not square; None for imported
    latents."""
    psnr_db: float | None = None
    """PSNR, in dB, of the autoencoder's reconstructions of the first images; None if not
    measured."""
    precision: str
    """Precision in which the encoder computed the latents: fp32 or bf16."""
    count: Size
    held_out: Count
    skipped: list[str] = field(default_factory=list)
    """Images that are not in the set because Pillow could not decode them, each with the reason."""
    source: str
    source_sha256: str
    """Hash of the ordered list of source images."""
    seed: int
    versions: dict[str, str]
    shards: list[Shard]
    text: TextSpec | None = None
    """Description of the captions; None if the set has none."""
    format: Literal[2] = FORMAT

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def compute_fingerprint(self) -> str:
        """Returns a hash of everything in the set on which training depends: the shards, their
        order and `FINGERPRINT_FIELDS`."""
        facts = {name: vars(self)[name] for name in FINGERPRINT_FIELDS.split()}
        if self.text is not None:
            facts["text"] = asdict(replace(self.text, encoder={}))  # its folder may move
        shards = [(shard.split, shard.sha256, shard.blocks) for shard in self.shards]
        return hash_content([facts, shards], sort_keys=True)

    def find_faults(self) -> Iterator[str]:
        """Yields a sentence for each contradiction between fields of the manifest."""
        yield from find_wrong_lengths(self)
        if self.text is not None:
            yield from self.text.find_faults()
        for role, names in (
            ("shard", [shard.file for shard in self.shards]),
            ("class", [repr(name) for name in self.class_names]),
        ):
            for name, times in Counter(names).items():
                if times > 1:
                    yield f"the {role} {name} is there {times} times"

        for shard in self.shards:
            yield from self.find_shard_faults(shard)
        for split, count in (
            ("train", self.count),
            ("held_out", self.held_out),
            ("captions", self.text.count if self.text else 0),
        ):
            total = sum(shard.count for shard in self.shards if shard.split == split)
            if total != count:
                yield f"the {split} shards hold {total} samples, and it says {count}"

    def find_shard_faults(self, shard: Shard) -> Iterator[str]:
        """Yields a sentence for each fault of a shard, in its name, its counts or its offsets."""
        if not SHARD_NAME.fullmatch(shard.file):
            yield f"the shard {shard.file!r} is outside its folder or no .tar"
        if sum(block.samples for block in shard.blocks) != shard.count:
            yield f"the blocks of {shard.file} do not hold its count of {shard.count} samples"

        # To find blocks that are too small for their number of samples, compute the bytes of the
        # smallest possible sample, which has latents and an int64 label.
        # The smallest caption is its pooled vector.
        values = (1 + self.flips) * self.channels * self.height * self.width
        smallest = values * self.torch_dtype.itemsize + 8
        if shard.split == "captions" and self.text is not None:
            smallest = 2 * self.text.width
        end = 0
        for block in shard.blocks:
            if block.samples * smallest > block.size:
                yield f"a block of {shard.file} is too small for its samples"
            if block.offset < end:
                yield f"the blocks of {shard.file} overlap"
            end = block.offset + block.size
        if end > shard.bytes:
            yield f"the blocks of {shard.file} lie beyond its {shard.bytes} bytes"

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST_NAME, asdict(self))


SCHEMA = TypeAdapter(Manifest)


def read_manifest(folder: str | Path | Source) -> Manifest:
    """Reads and checks `manifest.json` in `folder`. Raises UserError that names the file and the
    faulty field."""
    source = open_source(folder) if isinstance(folder, str | Path) else folder
    file = f"{source}/{MANIFEST_NAME}"
    remedy = (
        f"data.path={source} must name a folder that precompute_latents.py has finished. Run "
        f"`python precompute_latents.py source=<images> out={source}` (the same command again "
        "continues)"
    )
    try:
        content = source.read(MANIFEST_NAME)
    except OSError as error:
        raise UserError(f"{describe_failed_read(file, error)}; {remedy}.") from error

    # Pydantic checks the type of each field; `find_faults` then compares fields with each other.
    rebuild = "run precompute_latents.py again to rebuild it"
    try:
        manifest = SCHEMA.validate_json(content, strict=True)
    except ValidationError as error:
        fault = describe_first_fault(error, "manifest")
        for wrong in error.errors(include_url=False):
            if wrong["loc"] == ("format",):
                fault = f"has format {str(wrong['input'])[:40]}, and this version reads {FORMAT}"
        raise UserError(f"{file} {fault}; {rebuild}.") from error
    faults = list(manifest.find_faults())
    if faults:
        more = f" (the first of {len(faults)} faults)" if faults[1:] else ""
        raise UserError(f"{file}: {faults[0]}{more}; {rebuild}.")
    return manifest


def make_spec(manifest: Manifest, source: Source, normalisation: Normalisation) -> LatentSpec:
    """Makes the spec of the training split from the manifest. `normalisation` names the source of
    mean and std, or is the numbers themselves, [[means], [stds]]."""
    mean = manifest.mean
    std = manifest.std
    normalisation_name = str(normalisation)
    if isinstance(normalisation, list):
        lengths = [len(part) for part in normalisation]
        if lengths != [manifest.channels] * 2 or min(normalisation[1]) <= 0.0:
            raise UserError(
                f"data.normalisation={normalisation} must be [[means],[stds]] of "
                f"{manifest.channels} channels, the latter above 0; or channel or scale_shift."
            )
        mean, std = normalisation
        normalisation_name = f"given-{hashlib.sha256(repr((mean, std)).encode()).hexdigest()[:16]}"
    elif normalisation not in ("channel", "scale_shift"):
        raise UserError(
            f"data.normalisation={normalisation} is unknown; choose channel or scale_shift."
        )
    elif normalisation == "scale_shift":
        if manifest.scaling_factor is None:
            raise UserError(
                f"data.normalisation=scale_shift, but the encoder of {source} has no scaling "
                "factor; use channel."
            )
        mean = [manifest.shift_factor or 0.0] * manifest.channels
        std = [1.0 / manifest.scaling_factor] * manifest.channels

    # Add the normalisation to the fingerprint, so that a run cannot resume with another
    # normalisation of the same set.
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
        fingerprint=f"{manifest.compute_fingerprint()}-{normalisation_name}",
        text=manifest.text,
    )
