"""Converts latents that another tool wrote to our shards and manifest.

    python -m scripts.import_latents source=latents.npy labels=labels.npy out=latents/mine \\
        encoder=sd scale=0.18215
    python -m scripts.import_latents source=vavae_f16d32 out=latents/mine \\
        encoder=models/vavae scale=1
    python -m scripts.import_latents source=repa out=latents/mine encoder=sd scale=1 \\
        moments=mean_std

`source` is a .npy, .pt or .safetensors file, a folder with latents.npy and labels.npy, of
safetensors, of .npy files with dataset.json, or with *_features and *_labels, or WebDataset tars
with a key per sample. The latents do not show which encoder made them, nor their `scale` (1 for
latents as the encoder gives them), and the script guesses neither. Labels are class indices below
the number of samples, or below `classes`, which may also be a text file with the name of a class a
line; classes=none imports latents without labels.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from common.errors import UserError
from training.config.compose import CONF, from_words, from_yaml, one_sentence, refuse_missing
from training.config.schema import Positive, refuse_values

if TYPE_CHECKING:
    from torch import Tensor

    from data.manifest import Manifest, Shard
    from encoding.foreign_samples import Foreign
    from models.autoencoders import Autoencoder

MOST_SHARDS = 256
"""All of them are open at once, because samples go to them at random."""


@dataclass(frozen=True)
class ImportConfig:
    """The latents to import, and the facts about them."""

    source: str | None = None
    out: str | None = None
    encoder: str | None = None
    """A file of conf/encoder (sd, sdxl, flux, …), or a folder or hub id in the diffusers format."""
    scale: float | None = None
    """stored = (raw - shift)·scale. diffusers calls it scaling_factor."""
    shift: float | None = None
    moments: str = "none"
    """mean_std, mean_logvar: the channels are the posterior's mean, then its std or the log of its
    variance."""
    labels: str | None = None
    latents_key: str = "latents"
    labels_key: str = "labels"
    classes: int | str | None = None
    """The number of classes, a text file with the name of a class a line, "none" for latents
    without labels, or null: one more than the highest label."""
    dtype: str = "float16"
    held_out: float = 0.02
    seed: int = 0
    shard_size: Positive = 2048
    block_size: Positive = 256
    check_scale: bool = True
    """Refuse a scale if the std of the raw latents is not about that of the encoder's."""
    device: str = "auto"


def checked(cfg: ImportConfig) -> ImportConfig:
    hints = {
        "source": "source=<file or folder of latents>",
        "out": "out=<new folder>",
        "encoder": (
            "encoder=<sd, sdxl, flux, …, a folder or a hub id>; it is not guessed from the latents"
        ),
        "scale": (
            "scale=<what they were multiplied by>, 1 for latents as the encoder gives them; it "
            "is not guessed"
        ),
    }
    for key, hint in hints.items():
        if getattr(cfg, key) is None:
            raise UserError(f"{key} is not set; say {hint}.")
    choices = {
        "moments": ("none", "mean_std", "mean_logvar"),
        "dtype": ("float16", "bfloat16", "float32"),
    }
    for key, known in choices.items():
        if getattr(cfg, key) not in known:
            raise UserError(
                f"{key}={getattr(cfg, key)} is unknown; choose one of {', '.join(known)}."
            )
    refuse_values(cfg)
    if (
        cfg.scale == 0.0
        or not math.isfinite(cast("float", cfg.scale))
        or not math.isfinite(cfg.shift or 0.0)
    ):
        raise UserError(f"scale={cfg.scale} and shift={cfg.shift} must be finite, and scale not 0.")
    if not 0.0 <= cfg.held_out < 1.0:
        raise UserError(f"held_out={cfg.held_out} must be at least 0 and below 1.")
    class_count(cfg)
    return cfg


def class_count(cfg: ImportConfig) -> int | None:
    """The number of classes: 0 for classes=none, None if it is not stated."""
    if cfg.classes is None or cfg.classes == "none":
        return None if cfg.classes is None else 0
    from encoding.foreign_samples import MOST_CLASSES

    if isinstance(cfg.classes, str):
        names = names_in(cfg.classes)
        if len(set(names)) < len(names):
            raise UserError(f"classes={cfg.classes} must name each class once, one a line.")
        return len(names)
    if not 1 <= cfg.classes <= MOST_CLASSES:
        raise UserError(
            f"classes={cfg.classes} must be a number from 1 to {MOST_CLASSES}, a text file, or "
            "none."
        )
    return cfg.classes


def names_in(file: str) -> list[str]:
    """The names of classes in a text file, one a line; ValueError where there are none."""
    refuse_missing(
        "classes", file, "give a number, none, or a text file with the name of a class a line"
    )
    try:
        names = [
            line.strip()
            for line in Path(file).expanduser().read_text().splitlines()
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"classes={file} is no text file; give one with the name of a class a line."
        ) from error
    if not names:
        raise UserError(
            f"classes={file} is empty; give a text file with the name of a class a line."
        )
    return names


def import_latents(cfg: ImportConfig) -> Path:
    """Writes shards and manifest, and returns the manifest's path."""
    refuse_missing("source", cfg.source, "name a file or folder of latents")
    from common.files import rename
    from encoding.foreign import open_foreign
    from encoding.foreign_samples import Asked
    from models.autoencoders import Autoencoder
    from training.config.build import build
    from training.environment import pick_device

    assert cfg.source is not None
    assert cfg.out is not None
    out = Path(cfg.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out={cfg.out} is there already; choose a new folder, or delete it.")
    foreign = open_foreign(
        cfg.source, Asked(cfg.latents_key, cfg.labels_key, cfg.labels, class_count(cfg))
    )
    if round(cfg.held_out * foreign.count) == foreign.count:
        raise UserError(
            f"held_out={cfg.held_out} of {foreign.count} latents leaves none to train on; lower it."
        )
    node = encoder_node(str(cfg.encoder))
    autoencoder = build(node, "encoder", kind=Autoencoder).to(pick_device(cfg.device))
    if cfg.shift is None and autoencoder.shift_factor and cfg.scale != 1.0:
        raise UserError(
            f"shift is not set, and this encoder has one ({autoencoder.shift_factor}); say "
            f"whether it was subtracted: shift={autoencoder.shift_factor}, or shift=0."
        )
    check(cfg, raw(cfg, next(foreign.chunks())), autoencoder)
    print(f"{foreign.what}: {foreign.count} latents", flush=True)
    unfinished = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an import that was killed
    try:
        unfinished.mkdir(parents=True)
        manifest = write(cfg, foreign, autoencoder, node, unfinished)
        manifest.write(unfinished)
        rename(unfinished, out)  # in the place of an empty folder, if there is one
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"out={cfg.out}: no space is left ({error.strerror}); free some and try again."
            ) from error
        if isinstance(error, OSError):
            raise UserError(
                f"out={cfg.out} cannot be written ({error.strerror}); choose another folder."
            ) from error
        raise
    print(f"{manifest.count} training and {manifest.held_out} held-out latents in {out}")
    print(f"next: python -m scripts.verify_latents path={out}", flush=True)
    return out / "manifest.json"


def encoder_node(name: str) -> dict[str, Any]:
    file = CONF / "encoder" / f"{name}.yaml"
    if file.is_file() and name != "local":
        return from_yaml(file.read_text())
    return {"_target_": "models.autoencoders.DiffusersAutoencoder", "path": name}


def raw(cfg: ImportConfig, chunk: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a chunk to the tensors of a block: latents as the encoder gives them, in fp32."""
    assert cfg.scale is not None
    found = {"labels": chunk["labels"]}
    for name, std_name in (("latents", "std"), ("mirrored", "mirrored_std")):
        if name not in chunk:
            continue
        values = chunk[name].float()
        if cfg.moments != "none":
            if values.shape[1] % 2:
                raise UserError(
                    f"moments={cfg.moments}, but {name} have {values.shape[1]} channels, and mean "
                    "and spread as many each; set moments=none if the channels are latents alone."
                )
            values, spread = values.chunk(2, dim=1)
            if cfg.moments == "mean_logvar":
                spread = (0.5 * spread.clamp(-30.0, 20.0)).exp()
            elif bool((spread < 0.0).any()):
                raise UserError(
                    "moments=mean_std, but a std is negative; set moments=mean_logvar, or none."
                )
            found[std_name] = spread / abs(cfg.scale)
        found[name] = values / cfg.scale + (cfg.shift or 0.0)
    return found


def check(cfg: ImportConfig, chunk: dict[str, Tensor], autoencoder: Autoencoder) -> None:
    """ValueError if the encoder cannot have made these latents."""
    from common.text import first_line

    latents = chunk["latents"][:4]
    try:
        autoencoder.decode(latents.to(next(autoencoder.parameters()).device))
    except RuntimeError as error:
        raise UserError(
            f"encoder={cfg.encoder} cannot decode latents of shape {tuple(latents.shape[1:])} "
            f"({first_line(error)}); name the encoder that made them, or set moments."
        ) from error
    usual = autoencoder.scaling_factor
    if cfg.check_scale and usual:
        spread = float(chunk["latents"].std())
        if not 0.4 < spread * usual < 2.5:
            raise UserError(
                f"with scale={cfg.scale} the latents have a std of {spread:.3g}, but those of "
                f"this encoder have about {1.0 / usual:.3g} (its scaling_factor is {usual}); set "
                "the scale that they were multiplied by, or check_scale=false if they are what "
                "you say."
            )


@dataclass
class Written:
    """What the shards of an import hold."""

    shards: list[Shard]
    sums: dict[str, Any]
    """Sums per channel over the training latents."""
    first: dict[str, Tensor]
    """The first tensors, whose shapes all others have."""
    highest: int
    """The highest label."""
    labelled: set[int]
    """Classes that have a training sample."""
    labels_sha256: str


def write(
    cfg: ImportConfig, foreign: Foreign, autoencoder: Autoencoder, node: dict[str, Any], out: Path
) -> Manifest:
    """Writes the shards to the folder `out` and returns their manifest."""
    from data.manifest import Manifest
    from encoding.job import facts

    written = write_shards(cfg, foreign, out)
    classes = written.highest + 1 if foreign.classes is None else foreign.classes
    empty = classes - len(written.labelled)
    said = f"{classes} classes, {empty} of them without a training sample"
    print(said if classes else "no labels", flush=True)
    names = [str(i) for i in range(classes)]
    if isinstance(cfg.classes, str) and classes:
        names = names_in(cfg.classes)
    return Manifest(
        **facts(autoencoder, node, written.shards, [written.sums]),
        height=written.first["latents"].shape[2],
        width=written.first["latents"].shape[3],
        class_names=names,
        kind="mean_std" if cfg.moments != "none" else "sample",
        dtype=cfg.dtype,  # pyright: ignore[reportArgumentType]
        flips="mirrored" in written.first,
        resize="not known: imported",
        precision="not known: imported",
        source=str(cfg.source),
        source_sha256=written.labels_sha256,
        seed=cfg.seed,
    )


def write_shards(cfg: ImportConfig, foreign: Foreign, out: Path) -> Written:
    """Deals the latents to shards at random by `cfg.seed`, the held-out ones to a shard of their
    own."""
    import torch

    from encoding.job import ChannelSums
    from encoding.shards import ShardWriter

    # Shard 0 is the held-out one.
    held_out = round(cfg.held_out * foreign.count)
    shards = max(1, min(MOST_SHARDS, -(-(foreign.count - held_out) // cfg.shard_size)))
    order = torch.randperm(foreign.count, generator=torch.Generator().manual_seed(cfg.seed))
    place = order.argsort()
    target = torch.where(place < held_out, 0, 1 + (place - held_out) % shards)

    sums = ChannelSums()
    labelled = set[int]()
    highest = -1
    start = 0
    first = {}
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        files: dict[int, ShardWriter] = {}
        for number in range(0 if held_out else 1, shards + 1):
            split = "train" if number else "held_out"
            file = out / f"{split}-{max(0, number - 1):05d}.tar"
            files[number] = stack.enter_context(ShardWriter(file, split, cfg.block_size))
        for chunk in foreign.chunks():
            tensors = stored(cfg, raw(cfg, chunk), start)
            first = first or tensors
            highest = max(highest, int(tensors["labels"].max()))
            digest.update(tensors["labels"].numpy().tobytes())
            goes_to = target[start : start + len(tensors["labels"])]
            for number in goes_to.unique().tolist():
                part = {name: tensor[goes_to == number] for name, tensor in tensors.items()}
                files[number].add(part)
                if number:
                    sums.add(part)
                    labelled.update(part["labels"].tolist())
            start += len(goes_to)
        described = [file.close() for file in files.values()]
    return Written(described, sums.as_dict(), first, highest, labelled, digest.hexdigest())


def stored(cfg: ImportConfig, tensors: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    """Converts latents to the dtype of the shards; ValueError if that overflows (the source itself
    is finite)."""
    import torch

    kind = getattr(torch, cfg.dtype)
    found = {name: t if name == "labels" else t.to(kind) for name, t in tensors.items()}
    for name, tensor in found.items():
        if (bad := ~tensor.isfinite().reshape(len(tensor), -1).all(1)).any():
            row = int(bad.nonzero()[0])
            fits = bool(tensors[name][row].isfinite().all())
            remedy = (
                "use dtype=bfloat16 or float32"
                if fits
                else f"they are so in float32 too: check scale={cfg.scale}"
            )
            raise UserError(
                f"sample {start + row} of {cfg.source} has {name} that are too large for "
                f"dtype={cfg.dtype}; {remedy}, or leave that sample out."
            )
    return found


def main() -> None:
    with one_sentence():
        import_latents(checked(from_words(ImportConfig, sys.argv[1:], __doc__ or "")))


if __name__ == "__main__":
    main()
