"""Converts latents of another tool to shards and a manifest of this framework.

    python -m scripts.import_latents source=latents.npy labels=labels.npy out=latents/mine \\
        encoder=sd scale=0.18215
    python -m scripts.import_latents source=vavae_f16d32 out=latents/mine \\
        encoder=models/vavae scale=1
    python -m scripts.import_latents source=repa out=latents/mine encoder=sd scale=1 \\
        moments=mean_std
    python -m scripts.import_latents source=pictures.npz out=latents/mine encoder=pixels \\
        dtype=uint8 scale=1

docs/exchange.md lists the formats of `source`, which may also be a folder of .npy files alone if
labels are not imported (classes=none). The latents do not show which encoder made them, nor
their `scale` (1 for latents as the encoder gives them), and the script guesses neither.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Lt

from common.config.paths import refuse_missing
from common.config.schema import (
    LatentDtype,
    Positive,
    PrecomputeConfig,
    refuse_unset,
    refuse_values,
)
from common.errors import UserError
from common.text import split_lines
from scripts.commands import find_encoder_node, run_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from data.manifest import Manifest
    from encoding.caption_job import CaptionJob
    from encoding.foreign import ForeignLatents
    from models.images import Autoencoder

MAX_SHARDS = 256
"""Largest number of shards. Each sample goes to a random shard, so all shards are open at once."""
MAX_CLASSES = 1_000_000
"""Largest number of classes that an import accepts; a limit is needed because the manifest lists
the name of each class."""
Moments = StrEnum("Moments", "none mean_std mean_logvar")


@dataclass(frozen=True)
class ImportConfig:
    """Keys of the command: the latents to import, and what the user knows about them."""

    source: str | None = None
    """File or folder of latents in one of the formats of docs/exchange.md."""
    out: str | None = None
    """New folder, for the shards and manifest.json."""
    encoder: str | None = None
    """Encoder that made the latents: a file of conf/encoder (sd, sdxl, flux, …), or a folder or hub
    id in the diffusers format."""
    scale: float | None = None
    """Factor by which the source's latents were multiplied: stored value = (raw value - shift) ·
    scale. diffusers calls it scaling_factor."""
    shift: float | None = None
    """Number that was subtracted from the raw latents, shift_factor of diffusers; null: none was,
    which an encoder with a shift_factor allows only with scale=1."""
    moments: Moments = Moments.none
    """What the channels of the source hold. none: the latents; mean_std or mean_logvar: first the
    posterior's mean, then its std or the log of its variance."""
    labels: str | None = None
    """A second .npy, .npz or .pt file with the class indices of the samples of such a file."""
    latents_key: str = "latents"
    """Name of the latents in a file of named tensors or in the members of a tar."""
    labels_key: str = "labels"
    """Name of the labels in a file of named tensors."""
    captions: str | None = None
    """JSON file with the captions: a list that has a text, or a list of texts, for each sample."""
    text_encoder: str | None = None
    """Encoder of the captions: wordllama, or a folder or hub id of a model of transformers."""
    classes: int | str | None = None
    """The number of classes, a text file with one class name per line, "none" for latents without
    labels, or null: one more than the highest label, which is below the number of samples."""
    dtype: LatentDtype = LatentDtype.float16
    """Type of the stored latents; uint8 takes 8-bit pixels (N, C, H, W), for encoder=pixels."""
    held_out: Annotated[float, Ge(0), Lt(1)] = 0.02
    """Share of the samples that are kept out of training, to measure eval_loss."""
    seed: int = 0
    """Seed of the random order in which samples go to shards."""
    shard_size: Positive = 2048
    """Number of samples in each shard, which is a tar file; more if there would be over 256."""
    block_size: Positive = 256
    """Number of samples in each block, which is a member of a shard's tar."""
    check_scale: bool = True
    """If true, the command stops if the std of the raw latents, which it computes with `scale`, is
    2.5 or more times as large or as small as the usual std of this encoder's latents, 1 /
    scaling_factor."""
    device: str = "auto"
    """Device of the encoder: auto, cuda or cpu."""

    def check(self) -> None:
        """Raises UserError for keys that are missing or wrong."""
        refuse_unset(
            self,
            {
                "source": "<file or folder of latents>",
                "out": "<new folder>",
                "encoder": (
                    "<sd, sdxl, flux, …, a folder or a hub id>; it is not guessed from the latents"
                ),
                "scale": (
                    "<what they were multiplied by>, 1 for latents as the encoder gives them; it "
                    "is not guessed"
                ),
            },
        )

        refuse_values(self)
        if (self.captions is None) != (self.text_encoder is None):
            raise UserError(
                f"captions={self.captions} and text_encoder={self.text_encoder}: set both, or none."
            )
        if not self.scale:
            raise UserError("scale=0 cannot be the factor of the latents; give another number.")
        _ = self.class_names  # refuses wrong ones
        refuse_missing("source", self.source, "name a file or folder of latents")

    @cached_property
    def class_names(self) -> list[str] | None:
        """Names of the classes: an empty list for classes=none, None if `classes` is not set."""
        if self.classes in (None, "none"):
            return None if self.classes is None else []
        if isinstance(self.classes, str):
            names = read_class_names(self.classes)
            if len(set(names)) < len(names):
                raise UserError(f"classes={self.classes} must name each class once, one per line.")
            return names
        if not 1 <= self.classes <= MAX_CLASSES:
            raise UserError(
                f"classes={self.classes} must be a number from 1 to {MAX_CLASSES}, a text file, or "
                "none."
            )
        return [str(i) for i in range(self.classes)]


def read_class_names(file: str) -> list[str]:
    """Reads a text file with one class name per line; UserError if it has none."""
    remedy = "give a number, none, or a text file with one class name per line"
    refuse_missing("classes", file, remedy)
    try:
        lines = split_lines(Path(file).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"classes={file} is no text file; {remedy}.") from error
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise UserError(f"classes={file} is empty; {remedy}.")
    return names


def import_latents(cfg: ImportConfig) -> Path:
    """Writes shards and manifest, and returns the path of the manifest."""
    cfg.check()
    from common.config.build import build
    from common.environment import pick_device
    from common.files import rename
    from encoding.caption_files import read_caption_list
    from encoding.caption_job import CaptionJob
    from encoding.foreign import ForeignOptions, open_foreign
    from models.images import Autoencoder

    out = Path(str(cfg.out)).expanduser()
    if out.is_file() or any(out.glob("*")):
        raise UserError(f"out={cfg.out} is there already; choose a new folder, or delete it.")

    # Open the source, and build the encoder that made its latents.
    options = ForeignOptions(cfg.latents_key, cfg.labels_key, cfg.labels, cfg.class_names != [])
    foreign = open_foreign(str(cfg.source), options)
    if round(cfg.held_out * foreign.total) == foreign.total:
        raise UserError(
            f"held_out={cfg.held_out} of {foreign.total} latents leaves none to train on; lower it."
        )
    node = find_encoder_node("encoder", str(cfg.encoder))
    device = pick_device(cfg.device)
    autoencoder = build(node, "encoder", kind=Autoencoder).to(device)
    check_encoder(cfg, next(read_raw(cfg, foreign))["latents"].to(device), autoencoder)
    print(f"{foreign.format}: {foreign.total} latents", flush=True)

    # Delete the temporary folder that an import leaves behind if it is killed.
    unfinished = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        captions = None
        if cfg.captions is not None:
            texts = read_caption_list(cfg.captions, foreign.total)
            settings = PrecomputeConfig(
                text_encoder=find_encoder_node("text_encoder", str(cfg.text_encoder)),
                shard_size=cfg.shard_size,
                block_size=cfg.block_size,
            )
            captions = CaptionJob(texts, settings, device)
        manifest = write_set(cfg, foreign, autoencoder, node, unfinished, captions)
        rename(unfinished, out)
    except OSError as error:
        raise UserError(
            f"out={cfg.out} cannot be written ({error.strerror}); choose another folder, or free "
            "some space."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{manifest.count} training and {manifest.held_out} held-out latents in {out}")
    print(f"next: python -m scripts.verify_latents path={out}", flush=True)
    return out / "manifest.json"


def read_raw(cfg: ImportConfig, foreign: ForeignLatents) -> Iterator[dict[str, Any]]:
    """Yields chunks of samples as `read_chunks` does, but with raw latents, as the encoder gives
    them, and with the std of the posterior if the source stores it (`moments` is not none)."""
    from encoding.foreign_values import read_chunks

    assert cfg.scale is not None
    names = cfg.class_names
    classes = min(foreign.total, MAX_CLASSES) if names is None else len(names)
    for chunk in read_chunks(foreign, classes, cfg.dtype == LatentDtype.uint8):
        for name in chunk.keys() & {"latents", "mirrored"}:
            values = chunk[name]
            if cfg.moments != Moments.none:
                if values.shape[1] % 2:
                    raise UserError(
                        f"moments={cfg.moments}, but {name} have {values.shape[1]} channels, and "
                        "mean and spread as many each; set moments=none if the channels are "
                        "latents alone."
                    )
                values, spread = values.chunk(2, dim=1)
                if cfg.moments == Moments.mean_logvar:
                    spread = (0.5 * spread.clamp(-30.0, 20.0)).exp()
                elif (spread < 0.0).any():
                    raise UserError(
                        "moments=mean_std, but a std is negative; set moments=mean_logvar, or none."
                    )
                std_name = "std" if name == "latents" else "mirrored_std"
                chunk[std_name] = spread / abs(cfg.scale)
            chunk[name] = values / cfg.scale + (cfg.shift or 0.0)
        yield chunk


def check_encoder(cfg: ImportConfig, latents: Tensor, autoencoder: Autoencoder) -> None:
    """Raises a UserError unless the encoder can have made these raw latents: it says whether it has
    a shift, it can decode latents of this shape, and their std fits its scaling factor."""
    from common.text import shorten_error
    from models.autoencoders import ByteAutoencoder

    if cfg.shift is None and autoencoder.shift_factor and cfg.scale != 1.0:
        raise UserError(
            f"shift is not set, and this encoder has one ({autoencoder.shift_factor}); say "
            f"whether it was subtracted: shift={autoencoder.shift_factor}, or shift=0."
        )
    try:
        autoencoder.decode(latents[:4])
    except RuntimeError as error:
        raise UserError(
            f"encoder={cfg.encoder} cannot decode latents of shape {tuple(latents.shape[1:])} "
            f"({shorten_error(error)}); name the encoder that made them, or set moments."
        ) from error

    is_whole = bool((latents == latents.round()).all())
    if isinstance(autoencoder, ByteAutoencoder) and (
        latents.shape[1] not in (1, 3) or not is_whole or not 1 < latents.max() < 256
    ):
        raise UserError(
            f"encoder={cfg.encoder} takes pictures (N, C, H, W) of 1 or 3 channels, whole numbers "
            f"from 0 to 255, and the first samples have the shape {tuple(latents.shape[1:])} and "
            f"values from {float(latents.min()):.3g} to {float(latents.max()):.3g}; convert them."
        )

    # An encoder's scaling factor is about 1 / std of its latents. Refuse a `scale` that gives raw
    # latents with a very different std, because the user probably gave a wrong value.
    factor = autoencoder.scaling_factor
    spread = float(latents.std())
    if cfg.check_scale and factor and not 0.4 < spread * factor < 2.5:
        raise UserError(
            f"with scale={cfg.scale} the latents have a std of {spread:.3g}, but those of this "
            f"encoder have about {1.0 / factor:.3g} (its scaling_factor is {factor}); set the "
            "scale that they were multiplied by, or check_scale=false if it is right."
        )


def assign_shards(cfg: ImportConfig, total: int, out: Path) -> tuple[dict[int, Path], Tensor]:
    """Assigns each sample to a random shard. Returns a dict from numbers to files, 0 for the
    held-out shard and those above for training shards, and the number of each sample (N,)."""
    import torch

    held_out = round(cfg.held_out * total)
    shards = min(MAX_SHARDS, math.ceil((total - held_out) / cfg.shard_size))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(cfg.seed))
    place = order.argsort()
    files = {0: out / "held_out-00000.tar"} if held_out else {}
    files |= {1 + number: out / f"train-{number:05d}.tar" for number in range(shards)}
    return files, torch.where(place < held_out, 0, 1 + (place - held_out) % shards)


def write_set(
    cfg: ImportConfig,
    foreign: ForeignLatents,
    autoencoder: Autoencoder,
    node: dict[str, Any],
    out: Path,
    captions: CaptionJob | None = None,
) -> Manifest:
    """Writes the shards and the manifest to the folder `out`, and returns the manifest."""
    import torch

    from common.output import Progress
    from encoding.job import describe_autoencoder, save_manifest
    from encoding.shards import ScatteredShards, cast_tensors

    # Write each sample to a random shard.
    files, target = assign_shards(cfg, foreign.total, out)
    labels = torch.empty_like(target)
    tensors = {}
    progress = Progress(foreign.total, "latents")
    with ScatteredShards(files, cfg.block_size) as writer:
        for chunk in read_raw(cfg, foreign):
            places = chunk.pop("places")
            rows = slice(progress.count, progress.count + len(places))
            tensors = cast_tensors(chunk, cfg.dtype, places)
            labels[rows] = tensors["labels"]
            if captions is not None:
                tensors["captions"] = captions.number_captions(captions.captions[rows])
            writer.add(tensors, target[rows])
            progress.advance(len(places))
        shards = writer.finish()
    progress.close()
    if captions is not None:
        shards += captions.run(out)

    names = cfg.class_names
    if names is None:
        names = [str(i) for i in range(int(labels.max()) + 1)]
    empty = len(names) - len(labels[target > 0].unique())
    summary = f"{len(names)} classes, {empty} of them without a training sample"
    print(summary if names else "no labels")
    fields = {
        **describe_autoencoder(autoencoder, node),
        "height": tensors["latents"].shape[2],
        "width": tensors["latents"].shape[3],
        "class_names": names,
        "kind": "mean_std" if "std" in tensors else "sample",
        "dtype": cfg.dtype,
        "flips": "mirrored" in tensors,
        "resize": "not known: imported",
        "precision": "not known: imported",
        "source": str(cfg.source),
        "source_sha256": hashlib.sha256(labels.numpy().tobytes()).hexdigest(),
        "seed": cfg.seed,
        "text": captions and captions.spec,
    }
    return save_manifest(out, fields, shards, [writer.sums.as_dict()])


if __name__ == "__main__":
    run_command(import_latents, ImportConfig, __doc__)
