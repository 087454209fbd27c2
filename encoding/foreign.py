"""Reads latents that other tools wrote: tensors in files, files per sample, WebDataset tars with
samples as members.

It unpickles nothing: `.npy` without objects, `.pt` with `weights_only=True`, safetensors, and
`.cls` or `.json` labels. Labels and latents that do not pair one to one are refused here;
scripts/import_latents.py checks the samples.
"""

from __future__ import annotations

import io
import json
import reprlib
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from common.errors import UserError
from common.text import shorten_error
from encoding.images import Unused
from encoding.tars import read_samples

PLAIN_REMEDY = "copy it again if it is damaged, and save plain tensors, for nothing is unpickled"
MIRRORED_NAMES = ("mirrored", "latents_flip", "flip")
"""Names of the latents of mirrored images; the second is LightningDiT's."""
Sample = tuple[str, Mapping[str, Any]]
"""Its place, and unchecked arrays of numpy or PyTorch: `latents`, and where the source has them
`labels`, or whatever stands for its label, and `mirrored`."""


class ForeignOptions(NamedTuple):
    """Names of the tensors, a file of labels, and the number of classes: None is not known, 0 is
    without labels."""

    latents_key: str = "latents"
    labels_key: str = "labels"
    labels: str | None = None
    classes: int | None = None


class ForeignLatents(NamedTuple):
    """Latents of another tool, and their number."""

    description: str
    total: int
    samples: Callable[[], Iterator[Sample]]


@contextmanager
def translate_errors(what: Path | str, remedy: str = "copy or write it again") -> Iterator[None]:
    """Turns what numpy, torch, safetensors, tarfile and json raise for damaged files into one
    ValueError."""
    try:
        if isinstance(what, Path) and not what.is_file():
            raise FileNotFoundError("it is no file, or a link to none")
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{what} cannot be read ({shorten_error(error).partition('. ')[0]}); {remedy}."
        ) from error


def open_foreign(source: str, asked: ForeignOptions) -> ForeignLatents:
    """Recognises the format of `source`; ValueError if it is none of the known ones, or lacks
    samples or labels."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"source={source} does not exist; give a file or a folder of latents.")
    if (path / "manifest.json").is_file():
        raise UserError(
            f"source={source} is a latent set of ours already; use it: data.path={source}."
        )
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    tensors = [file for file in files if file == path and file.suffix in (".npy", ".pt", ".pth")]
    pair = path / "latents.npy", path / "labels.npy"
    if all(file.is_file() for file in pair):
        tensors = [pair[0]]
        if asked.classes != 0:
            asked = asked._replace(labels=asked.labels or str(pair[1]))
    features = [file for file in files if file.name.endswith(("_features", "_labels"))]
    loose = asked.classes == 0 and not features and not tensors and any(path.rglob("*.npy"))
    known = {
        read_tensors: tensors,
        read_safetensors: [file for file in files if file.suffix == ".safetensors"],
        read_tars: [file for file in files if file.suffix == ".tar"],
        read_listed_files: [path] if loose or (path / "dataset.json").is_file() else [],
        read_feature_folders: features,
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
    if not foreign.total:
        raise UserError(f"source={source} holds no samples: {foreign.description}.")
    return foreign


def map_array(file: Path) -> np.ndarray:
    """Maps a .npy file copy on write, which PyTorch takes without a warning; nobody writes."""
    with translate_errors(file, PLAIN_REMEDY):
        return np.lib.format.open_memmap(file, mode="c")


def read_plain_tensors(file: Path) -> Any:
    """What a .pt file holds, if those are tensors in plain containers."""
    with translate_errors(file, PLAIN_REMEDY):
        return torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )


def is_dense(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    )


def find_names(held: Iterable[Any], asked: ForeignOptions, file: Path) -> dict[str, str]:
    """Maps latents, labels and mirrored to the names by which `file` holds them."""
    held = list(held)
    if asked.latents_key not in held:
        raise UserError(
            f"{file} holds {', '.join(map(str, held))}; say which are the latents: "
            "latents_key=<name>."
        )
    names = {"latents": asked.latents_key}
    if asked.classes != 0:
        names["labels"] = asked.labels_key
        if asked.labels_key not in held:
            raise UserError(
                f"{file} has no {asked.labels_key}; set labels_key=<name>, for .npy and .pt also "
                "labels=<file>, or import without labels: classes=none."
            )
    for name in MIRRORED_NAMES:
        if name in held:
            names.setdefault("mirrored", name)
    return names


def count_samples(file: Path, columns: dict[str, Any]) -> int:
    """The number of samples; ValueError if `columns` do not have as many of each."""
    counts = {name: len(column) if column.ndim else 0 for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        held = " and ".join(f"{count} {name}" for name, count in counts.items())
        raise UserError(f"{file} has {held}; give as many of each.")
    return counts["latents"]


def yield_rows(file: Path, columns: dict[str, Any]) -> Iterator[Sample]:
    """Yields the samples of arrays of one length."""
    for i in range(count_samples(file, columns)):
        yield f"sample {i} of {file}", {name: column[i] for name, column in columns.items()}


def read_tensors(files: list[Path], asked: ForeignOptions) -> ForeignLatents:
    """Reads a .npy or .pt file, whose labels may lie in another."""
    (path,) = files

    def table(file: Path, key: str) -> dict[Any, Any]:
        found = map_array(file) if file.suffix == ".npy" else read_plain_tensors(file)
        return found if isinstance(found, dict) else {key: found}

    content = table(path, asked.latents_key)
    if asked.labels is not None:
        other = table(Path(asked.labels).expanduser(), asked.labels_key)
        content |= {key: value for key, value in other.items() if key == asked.labels_key}
    columns = {name: content[key] for name, key in find_names(content, asked, path).items()}
    for name, column in columns.items():
        if is_dense(column):
            if 0 in column.stride():  # a file of bytes could hold 10^12 samples
                raise UserError(f"{path}: {name} is an expanded tensor; save it as .contiguous().")
            columns[name] = column.detach()
        elif not isinstance(column, np.ndarray):
            raise UserError(
                f"{path}: {name} is a {type(column).__name__}, and no dense tensor; save it as one."
            )
    count = count_samples(path, columns)
    return ForeignLatents(f"tensors of {path}", count, lambda: yield_rows(path, columns))


def read_safetensors(files: list[Path], asked: ForeignOptions) -> ForeignLatents:
    """Reads LightningDiT's files, and others with latents and labels in them."""

    def columns(file: Path) -> dict[str, Any]:
        with translate_errors(file):
            tensors = safe_open(file, "pt")
        names = find_names(tensors.keys(), asked, file)
        return {name: tensors.get_tensor(key) for name, key in names.items()}  # mapped, not read

    def samples() -> Iterator[Sample]:
        for file in files:
            yield from yield_rows(file, columns(file))

    count = sum(count_samples(file, columns(file)) for file in files)
    return ForeignLatents(f"{len(files)} safetensors files", count, samples)


def read_files(labels: Mapping[Path, Any]) -> ForeignLatents:
    """Reads .npy files, a sample each, of which each has a label or a .npy file with one."""

    def samples() -> Iterator[Sample]:
        for file, label in labels.items():
            found = map_array(label) if isinstance(label, Path) else label
            yield str(file), {"latents": map_array(file), "labels": found}

    return ForeignLatents(f"{len(labels)} .npy files", len(labels), samples)


def read_feature_folders(folders: list[Path], asked: ForeignOptions) -> ForeignLatents:
    """Reads fast-DiT's files: `<name>_features/<i>.npy` of shape (1, C, H, W),
    `<name>_labels/<i>.npy`."""
    found: dict[Path, Any] = {}
    for stem in sorted({str(folder).rpartition("_")[0] for folder in folders}):
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
        for name in sorted(features):
            label = Path(f"{stem}_labels", name)
            found[Path(f"{stem}_features", name)] = label if asked.classes != 0 else None
    return read_files(found)


def read_listed_files(folders: list[Path], asked: ForeignOptions) -> ForeignLatents:
    """Reads EDM2's and REPA's files: .npy files and `dataset.json` with {"labels": [[file, label],
    …]}."""
    (folder,) = folders
    found = sorted(folder.rglob("*.npy"))
    if asked.classes == 0:
        return read_files(dict.fromkeys(found))
    labels = read_listing(folder)
    alone = [file for file in found if file not in labels]
    if alone:
        raise UserError(
            f"{len(alone)} .npy files in {folder} have no label in dataset.json: {alone[0]} "
            "…; add them."
        )
    return read_files(labels)


def read_listing(folder: Path) -> dict[Path, Any]:
    """The files that `folder`/dataset.json names, and their labels."""
    file = folder / "dataset.json"
    labels = {}
    with translate_errors(file):
        content = json.loads(file.read_bytes())
    pairs = isinstance(content, dict) and content.get("labels")
    if not isinstance(pairs, list) or not pairs:
        raise UserError(
            f'{file} has no "labels": [[file, label], …]; add them, or import without: '
            "classes=none."
        )
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UserError(f"{file} has the entry {reprlib.repr(pair)}; it must be [file, label].")
        latents = folder / pair[0]
        if Path(pair[0]).is_absolute() or ".." in Path(pair[0]).parts:
            raise UserError(f"{file} names a file outside its folder: {pair[0]}; correct it.")
        if latents in labels:
            raise UserError(f"{file} names {pair[0]} twice; each file has one label.")
        labels[latents] = pair[1]
    return labels


def read_tars(tars: list[Path], asked: ForeignOptions) -> ForeignLatents:
    """Reads WebDataset tars: of each sample `<key>.npy` or `<key>.safetensors`, and `<key>.cls` or
    `<key>.json`."""

    def samples() -> Iterator[Sample]:
        for file in tars:
            for stream, where, latents, label in pair_members(file, asked):
                found = {"latents": read_latents(stream, latents, asked, where)}
                if label is not None:
                    found["labels"] = read_label(stream, label, where)
                yield where, found

    count = sum(1 for file in tars for _ in pair_members(file, asked))
    return ForeignLatents(f"{count} samples in {len(tars)} tars", count, samples)


def pair_members(
    file: Path, asked: ForeignOptions
) -> Iterator[tuple[BinaryIO, str, tarfile.TarInfo, tarfile.TarInfo | None]]:
    """Yields for each sample of a tar its stream, the sample's place, and its members of latents
    and label; ValueError for one without them."""
    with translate_errors(file), file.open("rb") as stream:
        unused = Unused()
        samples, cut = read_samples(file, stream, unused)
        if cut:
            raise UserError(f"{cut}; copy or write it again.")
        if unused.kinds.keys() - {"hidden"}:
            raise UserError(f"{file} holds {unused}; write each member as a plain file.")
        for key, parts in samples.items():
            where = f"{file}: {key}"
            held = ", ".join(sorted(parts))
            arrays = [name for name in parts if name.endswith((".npy", ".safetensors"))]
            if len(arrays) > 1:
                arrays = [
                    name for name in arrays if name.rpartition(".")[0] == f".{asked.latents_key}"
                ]
            if len(arrays) != 1:
                raise UserError(
                    f"{where} has {held}, of which not one alone can be the latents; give each "
                    "sample one .npy or .safetensors, or set latents_key=<name> for "
                    "<key>.<name>.npy."
                )
            label = None
            if asked.classes != 0:
                label = parts.get(".cls") or parts.get(".json")
                if label is None:
                    raise UserError(
                        f"{where} has {held}, and no class index in a .cls or a .json member; add "
                        "one, or import without labels: classes=none."
                    )
            yield stream, where, parts[arrays[0]], label


def read_latents(
    stream: BinaryIO, member: tarfile.TarInfo, asked: ForeignOptions, where: str
) -> Any:
    with translate_errors(where, PLAIN_REMEDY):
        stream.seek(member.offset_data)
        content = stream.read(member.size)
        if member.name.lower().endswith(".npy"):
            return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        tensors = load(content)
    if asked.latents_key not in tensors:
        raise UserError(f"{where} holds {', '.join(tensors)}; set latents_key=<name>.")
    return tensors[asked.latents_key]


def read_label(stream: BinaryIO, member: tarfile.TarInfo, where: str) -> Any:
    """What stands for the label: the number in a .cls, or in a .json under label, cls or class."""
    with translate_errors(f"{where}: {member.name}"):
        stream.seek(member.offset_data)
        text = stream.read(member.size).decode().strip()
        if not member.name.lower().endswith(".json"):
            return int(text) if text.isdecimal() else text
        found = json.loads(text)
    for name in ("label", "cls", "class"):
        if isinstance(found, dict) and name in found:
            return found[name]
    raise UserError(
        f"{where}: {member.name} has no label, cls or class; add one, or set classes=none."
    )
