"""Reads latents that other tools wrote: tensors in files, files per sample, WebDataset tars with
samples as members.

It unpickles nothing: `.npy` without objects, `.pt` with `weights_only=True`, safetensors, and
`.cls` or `.json` labels. Labels and latents that do not pair one to one are refused here;
encoding/foreign_samples.py checks the samples.
"""

from __future__ import annotations

import json
import reprlib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from encoding.foreign_samples import CHUNK, PLAIN, Asked, Foreign, Sample, reading
from encoding.foreign_tars import of_tars

MIRRORED = ("mirrored", "latents_flip", "flip")
"""Names of the latents of mirrored images; the second is LightningDiT's."""


def open_foreign(source: str, asked: Asked) -> Foreign:
    """Recognises the format of `source`; ValueError if it is none of the known ones, or lacks
    samples or labels."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"source={source} does not exist; give a file or a folder of latents.")
    if path.is_dir() and (path / "manifest.json").is_file():
        raise UserError(
            f"source={source} is a latent set of ours already; use it: data.path={source}."
        )

    def ending(suffix: str) -> list[Path]:
        return (
            sorted(path.glob(f"*{suffix}"))
            if path.is_dir()
            else [path]
            if path.suffix == suffix
            else []
        )

    tensors = [path] if path.is_file() and path.suffix in (".npy", ".pt", ".pth") else []
    features = [*path.glob("*_features"), *path.glob("*_labels")]
    pair = path / "latents.npy", path / "labels.npy"
    if all(file.is_file() for file in pair):
        tensors = [pair[0]]
        asked = asked._replace(
            labels=asked.labels or (None if asked.classes == 0 else str(pair[1]))
        )
    loose = asked.classes == 0 and not features and not tensors and any(path.rglob("*.npy"))
    known = {
        of_tensors: tensors,
        of_safetensors: ending(".safetensors"),
        of_tars: ending(".tar"),
        of_listed_files: [path] if loose or (path / "dataset.json").is_file() else [],
        of_feature_folders: features,
    }
    found = [(read, files) for read, files in known.items() if files]
    if len(found) != 1:
        raise UserError(
            f"source={source} holds {'several formats' if found else 'no known format'}; give "
            "one: a .npy, .pt or .safetensors file, a folder with latents.npy and labels.npy, "
            "one of safetensors, WebDataset tars with a sample a key, a folder with "
            "dataset.json, or one with *_features and *_labels."
        )
    if asked.labels is not None and (asked.classes == 0 or not tensors):
        raise UserError(
            f"labels={asked.labels} goes with a .npy or .pt file and not with classes=none; leave "
            "labels out, and set labels_key=<name> where the source names its own."
        )
    read, files = found[0]
    foreign = read(files, asked)
    if not foreign.count:
        raise UserError(f"source={source} holds no samples: {foreign.what}.")
    return foreign


def array(file: Path) -> np.ndarray:
    """Maps a .npy file copy on write, which PyTorch takes without a warning; nobody writes."""
    with reading(file, PLAIN):
        return np.lib.format.open_memmap(file, mode="c")


def rows(file: Path, columns: dict[str, Any]) -> Iterator[Sample]:
    """Yields the samples of arrays of one length, or of slices of safetensors, reading `CHUNK` of
    them at a time."""
    for start in range(0, length(file, columns), CHUNK):
        with reading(file):
            parts = {name: column[start : start + CHUNK] for name, column in columns.items()}
        for i in range(len(parts["latents"])):
            one = {name: part[i] for name, part in parts.items()}
            yield Sample(
                f"sample {start + i} of {file}",
                one["latents"],
                one.get("labels"),
                one.get("mirrored"),
            )


def length(file: Path, columns: dict[str, Any]) -> int:
    """The number of samples; ValueError if `columns` do not have as many of each."""
    shapes = {n: c.get_shape() if hasattr(c, "get_shape") else c.shape for n, c in columns.items()}
    counts = {name: shape[0] if shape else "a single" for name, shape in shapes.items()}
    if len(set(counts.values())) > 1 or "a single" in counts.values():
        held = " and ".join(f"{count} {name}" for name, count in counts.items())
        raise UserError(f"{file} has {held}; give as many of each.")
    return int(shapes["latents"][0])


def named(held: Iterable[Any], asked: Asked, file: Path) -> dict[str, str]:
    """Maps latents, labels and mirrored to the names by which `file` holds them."""
    names = {"latents": asked.latents_key} | (
        {} if asked.classes == 0 else {"labels": asked.labels_key}
    )
    held = list(held)
    if asked.latents_key not in held:
        raise UserError(
            f"{file} holds {', '.join(map(str, held))}; say which are the latents: "
            "latents_key=<name>."
        )
    if asked.classes != 0 and asked.labels_key not in held:
        raise UserError(
            f"{file} has no {asked.labels_key}; set labels_key=<name>, for .npy and .pt also "
            "labels=<file>, or import without labels: classes=none."
        )
    mirrored = [name for name in MIRRORED if name in held]
    return names | ({"mirrored": mirrored[0]} if mirrored else {})


def of_tensors(files: list[Path], asked: Asked) -> Foreign:
    """Reads a .npy or .pt file, whose labels may lie in another."""
    (path,) = files

    def table(file: Path, key: str) -> dict[Any, Any]:
        if file.suffix == ".npy":
            return {key: array(file)}
        with reading(file, PLAIN):
            found = torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
        return found if isinstance(found, dict) else {key: found}

    content = table(path, asked.latents_key)
    if asked.labels is not None:
        other = Path(asked.labels).expanduser()
        content |= {
            k: v for k, v in table(other, asked.labels_key).items() if k == asked.labels_key
        }
    columns = {name: content[key] for name, key in named(content, asked, path).items()}
    for name, column in columns.items():
        if (
            isinstance(column, Tensor)
            and column.layout == torch.strided
            and column.device.type == "cpu"
        ):
            if 0 in column.stride():  # a file of bytes could hold 10^12 samples
                raise UserError(f"{path}: {name} is an expanded tensor; save it as .contiguous().")
            columns[name] = column.detach()
        elif not isinstance(column, np.ndarray):
            raise UserError(
                f"{path}: {name} is a {type(column).__name__}, and no dense tensor; save it as one."
            )
    return Foreign(
        f"tensors of {path}", length(path, columns), asked.classes, lambda: rows(path, columns)
    )


def of_safetensors(files: list[Path], asked: Asked) -> Foreign:
    """Reads LightningDiT's files, and others with latents and labels in them."""
    from safetensors import safe_open

    def columns(file: Path) -> dict[str, Any]:
        with reading(file):
            tensors = safe_open(file, "pt")
        return {
            name: tensors.get_slice(key) for name, key in named(tensors.keys(), asked, file).items()
        }

    count = sum(length(file, columns(file)) for file in files)
    what = f"{len(files)} safetensors files"
    return Foreign(
        what,
        count,
        asked.classes,
        lambda: (row for file in files for row in rows(file, columns(file))),
    )


def of_feature_folders(folders: list[Path], asked: Asked) -> Foreign:
    """Reads fast-DiT's files: `<name>_features/<i>.npy` of shape (1, C, H, W),
    `<name>_labels/<i>.npy`."""
    pairs = []
    for stem in sorted(
        {str(folder).removesuffix("_features").removesuffix("_labels") for folder in folders}
    ):
        features, labels = (
            {file.name for file in Path(f"{stem}_{kind}").glob("*.npy")}
            for kind in ("features", "labels")
        )
        if asked.classes != 0 and (alone := sorted(features ^ labels)):
            kind = "labels" if alone[0] in features else "features"
            raise UserError(
                f"{len(alone)} files of {stem}_features and {stem}_labels have no partner: "
                f"{alone[0]} lacks {stem}_{kind}/{alone[0]}; restore it, or take both away."
            )
        pairs += [
            (Path(f"{stem}_features", name), Path(f"{stem}_labels", name))
            for name in sorted(features)
        ]

    def samples() -> Iterator[Sample]:
        for file, label in pairs:
            yield Sample(str(file), array(file), None if asked.classes == 0 else array(label))

    return Foreign(f"{len(pairs)} .npy files in *_features", len(pairs), asked.classes, samples)


def of_listed_files(folders: list[Path], asked: Asked) -> Foreign:
    """Reads EDM2's and REPA's files: .npy files and `dataset.json` with {"labels": [[file, label],
    …]}."""
    (folder,) = folders
    found = sorted(folder.rglob("*.npy"))
    labels = {}
    if asked.classes != 0:
        labels = listed(folder)
        if alone := [file for file in found if file not in labels]:
            raise UserError(
                f"{len(alone)} .npy files in {folder} have no label in dataset.json: {alone[0]} "
                "…; add them."
            )
        found = list(labels)
    what = f"{len(found)} .npy files in {folder}"
    return Foreign(
        what,
        len(found),
        asked.classes,
        lambda: (Sample(str(f), array(f), labels.get(f)) for f in found),
    )


def listed(folder: Path) -> dict[Path, Any]:
    """The files that `folder`/dataset.json names, and their labels."""
    file = folder / "dataset.json"
    labels = {}
    with reading(file):
        content = json.loads(file.read_bytes())
    pairs = content.get("labels") if isinstance(content, dict) else None
    if not isinstance(pairs, list) or not pairs:
        raise UserError(
            f'{file} has no "labels": [[file, label], …]; add them, or import without: '
            "classes=none."
        )
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UserError(f"{file} has the entry {reprlib.repr(pair)}; it must be [file, label].")
        latents = folder / pair[0]
        if not latents.is_relative_to(folder) or ".." in latents.relative_to(folder).parts:
            raise UserError(f"{file} names a file outside its folder: {pair[0]}; correct it.")
        if latents in labels:
            raise UserError(f"{file} names {pair[0]} twice; each file has one label.")
        labels[latents] = pair[1]
    return labels
