"""Converts latents of another tool to shards and a manifest of this framework.

    python -m scripts.import_latents source=latents.npy labels=labels.npy out=latents/mine \\
        encoder=sd scale=0.18215
    python -m scripts.import_latents source=vavae_f16d32 out=latents/mine \\
        encoder=models/vavae scale=1
    python -m scripts.import_latents source=repa out=latents/mine encoder=sd scale=1 \\
        moments=mean_std

`source` is one of these: a .npy, .pt or .safetensors file; a folder with latents.npy and
labels.npy; a folder of safetensors files; a folder of .npy files with dataset.json; a folder with
*_features and *_labels; or WebDataset tars with one key per sample. The latents do not show which
encoder made them, nor their `scale` (1 for latents as the encoder gives them), and the script
guesses neither. Labels are class indices below the number of samples, or below `classes`. `classes`
may also be a text file with one class name per line; classes=none imports latents without labels.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.paths import refuse_missing
from common.config.schema import Positive, PrecomputeConfig, refuse_unset, refuse_values
from common.errors import UserError
from common.text import split_lines
from scripts.commands import find_encoder_node, run_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Size, Tensor

    from data.manifest import Manifest, Shard
    from encoding.caption_job import CaptionJob
    from encoding.foreign import ForeignLatents
    from models.images import Autoencoder

MAX_SHARDS = 256
"""Largest number of shards. Each sample goes to a random shard, so all shards are open at once."""
CHUNK_SAMPLES = 256
"""Number of samples that the command reads and writes together."""
MAX_CLASSES = 1_000_000
"""Largest number of classes that an import accepts; a limit is needed because the manifest lists
the name of each class."""


@dataclass(frozen=True)
class ImportConfig:
    """Keys of the command: the latents to import, and what the user knows about them."""

    source: str | None = None
    out: str | None = None
    encoder: str | None = None
    """Encoder that made the latents: a file of conf/encoder (sd, sdxl, flux, …), or a folder or hub
    id in the diffusers format."""
    scale: float | None = None
    """Factor by which the source's latents were multiplied: stored value = (raw value - shift) ·
    scale. diffusers calls it scaling_factor."""
    shift: float | None = None
    moments: str = "none"
    """What the channels of the source hold. none: the latents; mean_std or mean_logvar: first the
    posterior's mean, then its std or the log of its variance."""
    labels: str | None = None
    latents_key: str = "latents"
    labels_key: str = "labels"
    captions: str | None = None
    """JSON file with the captions: a list that has a text, or a list of texts, for each sample."""
    text_encoder: str | None = None
    """Encoder of the captions: wordllama, or a folder or hub id of a model of transformers."""
    classes: int | str | None = None
    """The number of classes, a text file with one class name per line, "none" for latents without
    labels, or null: one more than the highest label."""
    dtype: str = "float16"
    held_out: float = 0.02
    seed: int = 0
    shard_size: Positive = 2048
    block_size: Positive = 256
    check_scale: bool = True
    """If true, the command stops if the std of the raw latents, which it computes with `scale`, is
    2.5 or more times as large or as small as the usual std of this encoder's latents, 1 /
    scaling_factor."""
    device: str = "auto"


def check_config(cfg: ImportConfig) -> ImportConfig:
    """Returns the configuration unchanged. Raises UserError for keys that are missing or wrong."""
    hints = {
        "source": "<file or folder of latents>",
        "out": "<new folder>",
        "encoder": "<sd, sdxl, flux, …, a folder or a hub id>; it is not guessed from the latents",
        "scale": (
            "<what they were multiplied by>, 1 for latents as the encoder gives them; it is not "
            "guessed"
        ),
    }
    refuse_unset(cfg, hints)

    choices = {
        "moments": ("none", "mean_std", "mean_logvar"),
        "dtype": ("float16", "bfloat16", "float32"),
    }
    for key, allowed in choices.items():
        value = vars(cfg)[key]
        if value not in allowed:
            raise UserError(f"{key}={value} is unknown; choose one of {', '.join(allowed)}.")

    refuse_values(cfg)
    if (cfg.captions is None) != (cfg.text_encoder is None):
        raise UserError(
            f"captions={cfg.captions} and text_encoder={cfg.text_encoder}: set both, or none."
        )
    if not cfg.scale:
        raise UserError("scale=0 cannot be the factor of the latents; give another number.")
    find_class_names(cfg)
    return cfg


def find_class_names(cfg: ImportConfig) -> list[str] | None:
    """Returns the names of the classes: an empty list for classes=none, None if `classes` is not
    set."""
    if cfg.classes is None:
        return None
    if isinstance(cfg.classes, str):
        names = [] if cfg.classes == "none" else read_class_names(cfg.classes)
        if len(set(names)) < len(names):
            raise UserError(f"classes={cfg.classes} must name each class once, one per line.")
        return names
    if not 1 <= cfg.classes <= MAX_CLASSES:
        raise UserError(
            f"classes={cfg.classes} must be a number from 1 to {MAX_CLASSES}, a text file, or none."
        )
    return [str(i) for i in range(cfg.classes)]


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
    refuse_missing("source", cfg.source, "name a file or folder of latents")
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
    names = find_class_names(cfg)
    options = ForeignOptions(cfg.latents_key, cfg.labels_key, cfg.labels, labelled=names != [])
    foreign = open_foreign(str(cfg.source), options)
    if not 0 <= round(cfg.held_out * foreign.total) < foreign.total:
        raise UserError(
            f"held_out={cfg.held_out} of {foreign.total} latents leaves none to train on, or is "
            "below 0; give a share from 0 to 1."
        )
    node = find_encoder_node("encoder", str(cfg.encoder))
    device = pick_device(cfg.device)
    autoencoder = build(node, "encoder", kind=Autoencoder).to(device)
    if cfg.shift is None and autoencoder.shift_factor and cfg.scale != 1.0:
        raise UserError(
            f"shift is not set, and this encoder has one ({autoencoder.shift_factor}); say "
            f"whether it was subtracted: shift={autoencoder.shift_factor}, or shift=0."
        )
    check_encoder(cfg, undo_scale(cfg, next(read_chunks(foreign, names))), autoencoder)
    print(f"{foreign.description}: {foreign.total} latents", flush=True)

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
        manifest.write(unfinished)
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


def read_chunks(foreign: ForeignLatents, names: list[str] | None) -> Iterator[dict[str, Tensor]]:
    """Yields chunks of n ≤ `CHUNK_SAMPLES` samples, each a dict from name to tensor: `latents` (n,
    C, H, W), `labels` (n,) and, if the source has latents of mirrored images, `mirrored` (n, C, H,
    W). `names` are the class names from `find_class_names`.

    Raises a UserError that names the first sample whose label is no class index, or whose latents
    are not finite floating-point numbers of the same shape as in the samples before.
    """
    import torch
    from torch.utils.data import default_collate

    from encoding.foreign_values import convert_latents, parse_class_index

    limit = len(names) if names else min(foreign.total, MAX_CLASSES)
    samples = foreign.samples()
    first = None
    while group := list(islice(samples, CHUNK_SAMPLES)):
        tensors = []
        for where, parts in group:
            sample = {n: convert_latents(v, where) for n, v in parts.items() if n != "labels"}
            shapes = " and ".join(f"{n} of shape {tuple(t.shape)}" for n, t in sample.items())
            first = first or shapes
            if shapes != first:
                raise UserError(
                    f"{where} has {shapes}, and the first sample {first}; all samples of a set "
                    "have the same shape, so import each shape as a separate set."
                )
            sample["labels"] = torch.tensor(
                0 if names == [] else parse_class_index(parts.get("labels"), limit, where)
            )
            tensors.append(sample)
        yield default_collate(tensors)


def undo_scale(cfg: ImportConfig, chunk: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a chunk of the source to the tensors of a stored block, in fp32: raw latents, as the
    encoder gives them, and the std of the posterior if the source stores it (`moments` is not
    none)."""
    assert cfg.scale is not None
    tensors = {name: chunk[name] for name in ("labels", "captions") if name in chunk}
    for name, std_name in (("latents", "std"), ("mirrored", "mirrored_std")):
        if name not in chunk:
            continue

        values = chunk[name]
        if cfg.moments != "none":
            if values.shape[1] % 2:
                raise UserError(
                    f"moments={cfg.moments}, but {name} have {values.shape[1]} channels, and mean "
                    "and spread as many each; set moments=none if the channels are latents alone."
                )
            values, spread = values.chunk(2, dim=1)
            if cfg.moments == "mean_logvar":
                spread = (0.5 * spread.clamp(-30.0, 20.0)).exp()
            elif (spread < 0.0).any():
                raise UserError(
                    "moments=mean_std, but a std is negative; set moments=mean_logvar, or none."
                )
            tensors[std_name] = spread / abs(cfg.scale)
        tensors[name] = values / cfg.scale + (cfg.shift or 0.0)
    return tensors


def check_encoder(cfg: ImportConfig, chunk: dict[str, Tensor], autoencoder: Autoencoder) -> None:
    """Raises a UserError unless the encoder can have made these latents: the encoder can decode
    latents of this shape, and their std fits the encoder's scaling factor."""
    from common.text import shorten_error

    latents = chunk["latents"][:4]
    try:
        autoencoder.decode(latents.to(next(autoencoder.parameters()).device))
    except RuntimeError as error:
        raise UserError(
            f"encoder={cfg.encoder} cannot decode latents of shape {tuple(latents.shape[1:])} "
            f"({shorten_error(error)}); name the encoder that made them, or set moments."
        ) from error

    # An encoder's scaling factor is about 1 / std of its latents. Refuse a `scale` that gives raw
    # latents with a very different std, because the user probably gave a wrong value.
    factor = autoencoder.scaling_factor
    if cfg.check_scale and factor:
        spread = float(chunk["latents"].std())
        if not 0.4 < spread * factor < 2.5:
            raise UserError(
                f"with scale={cfg.scale} the latents have a std of {spread:.3g}, but those of "
                f"this encoder have about {1.0 / factor:.3g} (its scaling_factor is {factor}); set "
                "the scale that they were multiplied by, or check_scale=false if it is right."
            )


def write_set(
    cfg: ImportConfig,
    foreign: ForeignLatents,
    autoencoder: Autoencoder,
    node: dict[str, Any],
    out: Path,
    captions: CaptionJob | None = None,
) -> Manifest:
    """Writes the shards to the folder `out` and returns their manifest."""
    import torch

    from data.manifest import Manifest
    from encoding.job import describe_autoencoder, describe_shards

    # Assign each sample to a random shard: 0 is the held-out shard, the numbers above are training
    # shards.
    held_out = round(cfg.held_out * foreign.total)
    shards = min(MAX_SHARDS, math.ceil((foreign.total - held_out) / cfg.shard_size))
    order = torch.randperm(foreign.total, generator=torch.Generator().manual_seed(cfg.seed))
    place = order.argsort()
    target = torch.where(place < held_out, 0, 1 + (place - held_out) % shards)

    names = find_class_names(cfg)
    chunks = read_chunks(foreign, names)
    if captions is not None:
        numbers = captions.number_captions(captions.captions).split(CHUNK_SAMPLES)
        pairs = zip(chunks, numbers, strict=True)
        chunks = (chunk | {"captions": part} for chunk, part in pairs)
    written, sums, labels, shape = write_shards(cfg, chunks, target, out)
    if captions is not None:
        written += captions.run(out)
    if names is None:
        names = [str(i) for i in range(int(labels.max()) + 1)]
    empty = len(names) - len(labels[target > 0].unique())
    summary = f"{len(names)} classes, {empty} of them without a training sample"
    print(summary if names else "no labels")
    return Manifest(
        **describe_autoencoder(autoencoder, node),
        **describe_shards(written, [sums]),
        height=shape["latents"][2],
        width=shape["latents"][3],
        class_names=names,
        kind="mean_std" if cfg.moments != "none" else "sample",
        dtype=cfg.dtype,  # pyright: ignore[reportArgumentType]
        flips="mirrored" in shape,
        resize="not known: imported",
        precision="not known: imported",
        source=str(cfg.source),
        source_sha256=hashlib.sha256(labels.numpy().tobytes()).hexdigest(),
        seed=cfg.seed,
        text=captions and captions.spec,
    )


def write_shards(
    cfg: ImportConfig, latents: Iterator[dict[str, Tensor]], target: Tensor, out: Path
) -> tuple[list[Shard], dict[str, Any], Tensor, dict[str, Size]]:
    """Writes sample i to shard number `target[i]`; shard 0 is the held-out one.

    Returns four values: the shards; `ChannelSums.as_dict` of the training latents; the labels of
    all samples (N,); and name of a tensor -> shape of that tensor in a chunk.
    """
    import torch

    from encoding.shards import ChannelSums, ShardWriter, cast_tensors

    sums = ChannelSums()
    labels = []
    start = 0
    shape = {}
    with contextlib.ExitStack() as stack:
        files: dict[int, ShardWriter] = {}
        for number in target.unique().tolist():
            split = "train" if number else "held_out"
            file = out / f"{split}-{max(0, number - 1):05d}.tar"
            files[number] = stack.enter_context(ShardWriter(file, split, cfg.block_size))

        for chunk in latents:
            places = [f"sample {start + i} of {cfg.source}" for i in range(len(chunk["labels"]))]
            tensors = cast_tensors(undo_scale(cfg, chunk), cfg.dtype, places)
            shape = {name: tensor.shape for name, tensor in tensors.items()}
            labels.append(tensors["labels"])
            chunk_target = target[start : start + len(places)]
            for number in chunk_target.unique().tolist():
                part = {name: tensor[chunk_target == number] for name, tensor in tensors.items()}
                files[number].add(part)
                if number:
                    sums.add(part)
            start += len(places)
        shards = [file.close() for file in files.values()]
        return shards, sums.as_dict(), torch.cat(labels), shape


def main() -> None:
    run_command(lambda cfg: import_latents(check_config(cfg)), ImportConfig, __doc__)


if __name__ == "__main__":
    main()
