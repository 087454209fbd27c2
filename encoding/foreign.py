"""Reads latents that other tools wrote: tensors in files, files per sample, WebDataset tars with samples as members.

It unpickles nothing: `.npy` without objects, `.pt` with `weights_only=True`, safetensors, and `.cls` or `.json` labels.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.technique import first_line
from encoding.images import sample_key

CHUNK = 256
MIRRORED = ("mirrored", "latents_flip", "flip")
"""Names of the latents of mirrored images; the second is LightningDiT's."""


@dataclass(frozen=True)
class Foreign:
    """Latents of another tool: their number, and chunks of `latents` (n, C, H, W), `labels` (n,), maybe `mirrored`."""

    what: str
    count: int
    chunks: Callable[[], Iterator[dict[str, Tensor]]]


def open_foreign(source: str, labels: str | None, latents_key: str, labels_key: str) -> Foreign:
    """Recognises the format of `source`; ValueError if it is none of the known ones, or has no labels."""
    path = Path(source).expanduser()
    if not path.exists():
        raise ValueError(f"source={source} does not exist; give a file or a folder of latents.")
    if path.is_dir() and (path / "manifest.json").is_file():
        raise ValueError(f"source={source} is a latent set of ours already; use it: data.path={source}.")
    if path.is_file() and path.suffix in (".npy", ".pt", ".pth"):
        return of_tensors(path, labels, latents_key, labels_key)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.suffix == ".safetensors" else []
    if files:
        return of_safetensors(files, labels, latents_key, labels_key)
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [path] if path.suffix == ".tar" else []
    if tars:
        return of_tars(tars, latents_key)
    if path.is_dir() and (path / "dataset.json").is_file():
        return of_listed_files(path)
    if path.is_dir() and (features := sorted(path.glob("*_features"))):
        return of_feature_folders(path, features)
    raise ValueError(
        f"source={source} is nothing known; give .npy, .pt or .safetensors files, a folder of safetensors, WebDataset "
        f"tars with a sample a key, a folder with dataset.json, or one with *_features and *_labels."
    )


def array(file: Path | io.BytesIO) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.load(file, allow_pickle=False))


def mapped(path: Path) -> Any:
    """Opens a file of tensors, memory-mapped where its format allows that."""
    import numpy as np

    try:
        if path.suffix == ".npy":
            # Copy on write, which PyTorch takes without a warning; nobody writes.
            return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # numpy and torch raise many kinds for damaged files and for objects
        raise ValueError(
            f"{path} cannot be read ({first_line(error)}); save plain tensors, for nothing is unpickled."
        ) from error


def cut(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Cuts tensors of one length to chunks, which are memory-mapped where the tensors are."""
    for parts in zip(*(tensor.split(CHUNK) for tensor in tensors.values()), strict=True):
        yield dict(zip(tensors, parts, strict=True))


def of_tensors(path: Path, labels: str | None, latents_key: str, labels_key: str) -> Foreign:
    content = mapped(path)
    table = content if isinstance(content, dict) else {latents_key: content}
    if latents_key not in table:
        raise ValueError(f"{path} holds {', '.join(table)}; say which are the latents: latents_key=<name>.")
    given = mapped(Path(labels).expanduser()) if labels is not None else table.get(labels_key)
    if isinstance(given, dict):
        given = given.get(labels_key)
    if given is None:
        raise ValueError(f"{path} has no {labels_key}; give the file that has: labels=<file> (labels_key=<name>).")
    tensors = {"latents": table[latents_key], "labels": given}
    if len(tensors["latents"]) != len(given):
        raise ValueError(f"{path} has {len(tensors['latents'])} latents and {len(given)} labels; give as many of each.")
    held = sorted(table.keys() & set(MIRRORED), key=MIRRORED.index)
    tensors |= {"mirrored": table[held[0]]} if held else {}
    return Foreign(f"tensors of {path}", len(given), lambda: cut(tensors))


def of_safetensors(files: list[Path], labels: str | None, latents_key: str, labels_key: str) -> Foreign:
    """Reads LightningDiT's files, and others with latents and labels in them."""
    from safetensors import safe_open

    if labels is not None:
        raise ValueError(f"labels={labels}: safetensors hold their labels themselves, under labels_key={labels_key}.")
    counts = []
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            if latents_key not in names or labels_key not in names:
                raise ValueError(f"{file} holds {', '.join(names)}; set latents_key=<name> labels_key=<name>.")
            counts.append(tensors.get_slice(latents_key).get_shape()[0])

    def chunks() -> Iterator[dict[str, Tensor]]:
        for file in files:
            with safe_open(file, "pt") as tensors:
                names = {"latents": latents_key, "labels": labels_key}
                held = sorted(set(tensors.keys()) & set(MIRRORED), key=MIRRORED.index)
                names |= {"mirrored": held[0]} if held else {}
                yield from cut({name: tensors.get_tensor(key) for name, key in names.items()})

    return Foreign(f"{len(files)} safetensors files", sum(counts), chunks)


def of_feature_folders(path: Path, features: list[Path]) -> Foreign:
    """Reads fast-DiT's files: `<name>_features/<i>.npy` of shape (1, C, H, W), `<name>_labels/<i>.npy`."""
    pairs = []
    for folder in features:
        others = folder.with_name(f"{folder.name.removesuffix('_features')}_labels")
        for file in sorted(folder.glob("*.npy")):
            if not (others / file.name).is_file():
                raise ValueError(f"{file} has no label: {others / file.name} does not exist; restore it.")
            pairs.append((file, others / file.name))

    def samples() -> Iterator[tuple[Tensor, int]]:
        for file, label in pairs:
            yield squeezed(array(file), file), int(array(label).flatten()[0])

    return Foreign(f"{len(pairs)} pairs of .npy files in {path}", len(pairs), lambda: stacked(samples()))


def of_listed_files(path: Path) -> Foreign:
    """Reads EDM2's and REPA's files: .npy files and `dataset.json` with {"labels": [[file, label], …]}."""
    listed = json.loads((path / "dataset.json").read_text()).get("labels")
    if not listed:
        raise ValueError(f"{path / 'dataset.json'} lists no labels; latents without classes cannot be imported.")

    def samples() -> Iterator[tuple[Tensor, int]]:
        for name, label in listed:
            file = (path / name).resolve()
            if not file.is_relative_to(path.resolve()):
                raise ValueError(f"{path / 'dataset.json'} names a file outside its folder: {name}; correct it.")
            yield squeezed(array(file), file), int(label)

    return Foreign(f"{len(listed)} .npy files in {path}", len(listed), lambda: stacked(samples()))


def of_tars(tars: list[Path], latents_key: str) -> Foreign:
    """Reads WebDataset tars: of each sample `<key>.npy` or `<key>.safetensors`, and `<key>.cls` or `<key>.json`."""

    def samples() -> Iterator[tuple[Tensor, int]]:
        from safetensors.torch import load

        for file in tars:
            for key, parts in keyed(file):
                array_name = next((name for name in parts if name == "npy" or name.endswith(".npy")), None)
                if array_name is not None:
                    latents = array(io.BytesIO(parts[array_name]))
                elif "safetensors" in parts:
                    latents = load(parts["safetensors"])[latents_key]
                else:
                    raise ValueError(f"{file}: {key} has {', '.join(parts)}, but neither .npy nor .safetensors.")
                yield squeezed(latents, file), label_of(parts, f"{file}: {key}")

    count = sum(1 for file in tars for _ in keyed(file))
    return Foreign(f"{count} samples in {len(tars)} tars", count, lambda: stacked(samples()))


def keyed(file: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields (key, members) of each sample: neighbouring members with one name up to its first dot."""
    with tarfile.open(file) as tar:
        for key, members in groupby(filter(tarfile.TarInfo.isfile, tar), lambda member: sample_key(member.name)[0]):
            content = {sample_key(m.name)[1]: tar.extractfile(m).read() for m in members}  # pyright: ignore[reportOptionalMemberAccess]
            yield key, content


def label_of(parts: dict[str, bytes], what: str) -> int:
    try:
        if "cls" in parts:
            return int(parts["cls"])
        content = json.loads(parts["json"])
        return int(next(content[name] for name in ("label", "cls", "class") if name in content))
    except (KeyError, ValueError, StopIteration) as error:
        raise ValueError(f"{what} has no class index in a .cls or a .json member; add one.") from error


def squeezed(latents: Tensor, file: Path) -> Tensor:
    """Removes a leading 1: (C, H, W); ValueError for a shape other than that or (1, C, H, W)."""
    found = latents[0] if latents.ndim == 4 and len(latents) == 1 else latents
    if found.ndim != 3:
        raise ValueError(f"{file} holds an array of shape {tuple(latents.shape)}; it must be (C, H, W).")
    return found


def stacked(samples: Iterator[tuple[Tensor, int]]) -> Iterator[dict[str, Tensor]]:
    while group := list(islice(samples, CHUNK)):
        latents, labels = zip(*group, strict=True)
        yield {"latents": torch.stack(latents), "labels": torch.tensor(labels)}
