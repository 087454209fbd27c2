"""Reads latents that other tools wrote: files with the tensors of many samples, one file per
sample, or WebDataset tars.

This module unpickles no Python objects: it reads `.npy` without objects, `.pt` with
`weights_only=True`, safetensors, and labels in `.cls` or `.json`. It raises a UserError if labels
and latents do not pair one to one; scripts/import_latents.py then checks the values of each sample.
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
"""Names under which a source may hold the latents of the mirrored images. LightningDiT writes
`latents_flip`."""
Sample = tuple[str, Mapping[str, Any]]
"""One sample, as a pair: a text for messages that says where the sample lies in the source, and a
mapping from name to value, whose values are not checked yet. The names are `latents` and, if the
source has them, `mirrored` (both are arrays of numpy or PyTorch) and `labels` (any value)."""


class ForeignOptions(NamedTuple):
    """Settings of an import: `latents_key` and `labels_key`, the names of tensors in the source;
    `labels`, the path of a separate file with the labels (None: there is no such file); `labelled`,
    whether labels are imported."""

    latents_key: str = "latents"
    labels_key: str = "labels"
    labels: str | None = None
    labelled: bool = True


class ForeignLatents(NamedTuple):
    """Latents that another tool wrote: `description` for messages, `total`, the number of samples,
    and `samples`, a function that returns an iterator over the samples."""

    description: str
    total: int
    samples: Callable[[], Iterator[Sample]]


@contextmanager
def translate_errors(source: Path | str, remedy: str = "copy or write it again") -> Iterator[None]:
    """Turns any exception in the `with` block, such as numpy, torch, tarfile or json raise for a
    damaged file, into a UserError that names the source and the remedy."""
    try:
        if isinstance(source, Path) and not source.is_file():
            raise FileNotFoundError("it is no file, or a link to none")
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{source} cannot be read ({shorten_error(error).partition('. ')[0]}); {remedy}."
        ) from error


def open_foreign(source: str, options: ForeignOptions) -> ForeignLatents:
    """Recognises the format of the file or folder `source`, and counts its samples. Raises
    UserError if the format is unknown, or if the source lacks samples or labels."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"source={source} does not exist; give a file or a folder of latents.")
    if (path / "manifest.json").is_file():
        raise UserError(
            f"source={source} is a latent set of ours already; use it: data.path={source}."
        )

    # Collect the files of each known format; exactly one format must have some.
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    tensors = [file for file in files if file == path and file.suffix in (".npy", ".pt", ".pth")]
    latents_file = path / "latents.npy"
    labels_file = path / "labels.npy"
    if latents_file.is_file() and labels_file.is_file():
        tensors = [latents_file]
        if options.labelled:
            options = options._replace(labels=options.labels or str(labels_file))
    features = [file for file in files if file.name.endswith(("_features", "_labels"))]
    # A folder of .npy files without dataset.json has no labels, so it is accepted only with
    # classes=none.
    is_loose = not options.labelled and not features and not tensors and any(path.rglob("*.npy"))
    formats = {
        read_tensors: tensors,
        read_safetensors: [file for file in files if file.suffix == ".safetensors"],
        read_tars: [file for file in files if file.suffix == ".tar"],
        read_listed_files: [path] if is_loose or (path / "dataset.json").is_file() else [],
        read_feature_folders: features,
    }
    matches = [(read, files) for read, files in formats.items() if files]
    if len(matches) != 1:
        raise UserError(
            f"source={source} holds {'several formats' if matches else 'no known format'}; "
            "give one: a .npy, .pt or .safetensors file, a folder with latents.npy and labels.npy, "
            "one of safetensors, WebDataset tars with one key per sample, a folder with "
            "dataset.json, or one with *_features and *_labels."
        )
    if options.labels is not None and not (options.labelled and tensors):
        raise UserError(
            f"labels={options.labels} goes with a .npy or .pt file and not with classes=none; "
            "leave labels out, and set labels_key=<name> where the source names its own."
        )

    read, files = matches[0]
    foreign = read(files, options)
    if not foreign.total:
        raise UserError(f"source={source} holds no samples: {foreign.description}.")
    return foreign


def map_array(file: Path) -> np.ndarray:
    """Maps a .npy file into memory in the mode copy-on-write, because PyTorch warns about read-only
    arrays."""
    with translate_errors(file, PLAIN_REMEDY):
        return np.lib.format.open_memmap(file, mode="c")


def read_plain_tensors(file: Path) -> Any:
    """Reads a .pt file that holds tensors, or dicts or lists of tensors, with `weights_only=True`.
    Raises UserError if the file holds any other object."""
    with translate_errors(file, PLAIN_REMEDY):
        return torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )


def is_dense(value: Any) -> bool:
    """Tells whether a value is a strided tensor on the CPU."""
    return (
        isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    )


def find_names(keys: Iterable[Any], options: ForeignOptions, file: Path) -> dict[str, str]:
    """Chooses among `keys`, the names of a file's tensors. Returns a dict: our name (`latents`,
    `labels` or `mirrored`) -> the name in the file. Raises UserError if the file lacks the
    latents, or if it lacks labels that are imported."""
    keys = list(keys)
    if options.latents_key not in keys:
        raise UserError(
            f"{file} holds {', '.join(map(str, keys))}; say which are the latents: "
            "latents_key=<name>."
        )
    names = {"latents": options.latents_key}
    if options.labelled:
        names["labels"] = options.labels_key
        if options.labels_key not in keys:
            raise UserError(
                f"{file} has no {options.labels_key}; set labels_key=<name>, for .npy and .pt also "
                "labels=<file>, or import without labels: classes=none."
            )
    for name in MIRRORED_NAMES:
        if name in keys:
            names.setdefault("mirrored", name)
    return names


def count_samples(file: Path, columns: dict[str, Any]) -> int:
    """Counts the samples of a file. `columns` maps `latents`, `labels` and `mirrored` to arrays
    with one entry per sample; raises UserError if their lengths differ."""
    counts = {name: len(column) if column.ndim else 0 for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        lengths = " and ".join(f"{count} {name}" for name, count in counts.items())
        raise UserError(f"{file} has {lengths}; give the same number of each.")
    return counts["latents"]


def yield_rows(file: Path, columns: dict[str, Any]) -> Iterator[Sample]:
    """Yields the samples of a file in order; sample i has entry i of each array in `columns`."""
    for i in range(count_samples(file, columns)):
        yield f"sample {i} of {file}", {name: column[i] for name, column in columns.items()}


def read_tensors(files: list[Path], options: ForeignOptions) -> ForeignLatents:
    """Reads a .npy or .pt file; its labels may be in a second file, `options.labels`."""
    (path,) = files

    def read_columns(file: Path, key: str) -> dict[Any, Any]:
        content = map_array(file) if file.suffix == ".npy" else read_plain_tensors(file)
        return content if isinstance(content, dict) else {key: content}

    content = read_columns(path, options.latents_key)
    if options.labels is not None:
        other = read_columns(Path(options.labels).expanduser(), options.labels_key)
        content |= {key: value for key, value in other.items() if key == options.labels_key}

    columns = {name: content[key] for name, key in find_names(content, options, path).items()}
    for name, column in columns.items():
        if is_dense(column):
            # Refuse a stride of 0: a tensor with this stride repeats the same bytes, so a file of a
            # few bytes could claim to have 10^12 samples.
            if 0 in column.stride():
                raise UserError(f"{path}: {name} is an expanded tensor; save it as .contiguous().")
            columns[name] = column.detach()
        elif not isinstance(column, np.ndarray):
            raise UserError(
                f"{path}: {name} is a {type(column).__name__}, and no dense tensor; save it as one."
            )
    count = count_samples(path, columns)
    return ForeignLatents(f"tensors of {path}", count, lambda: yield_rows(path, columns))


def read_safetensors(files: list[Path], options: ForeignOptions) -> ForeignLatents:
    """Reads safetensors files with latents and labels, such as LightningDiT's."""

    def map_columns(file: Path) -> dict[str, Any]:
        with translate_errors(file):
            tensors = safe_open(file, "pt")
        names = find_names(tensors.keys(), options, file)
        # get_tensor only maps the file into memory, so no tensor is read from disk here.
        return {name: tensors.get_tensor(key) for name, key in names.items()}

    def yield_samples() -> Iterator[Sample]:
        for file in files:
            yield from yield_rows(file, map_columns(file))

    count = sum(count_samples(file, map_columns(file)) for file in files)
    return ForeignLatents(f"{len(files)} safetensors files", count, yield_samples)


def read_files(labels: Mapping[Path, Any]) -> ForeignLatents:
    """Reads .npy files with one sample each. `labels` maps each file to its label: a value, the
    path of a .npy file that holds the value, or None if the label is not imported."""

    def yield_samples() -> Iterator[Sample]:
        for file, label in labels.items():
            value = map_array(label) if isinstance(label, Path) else label
            yield str(file), {"latents": map_array(file), "labels": value}

    return ForeignLatents(f"{len(labels)} .npy files", len(labels), yield_samples)


def read_feature_folders(folders: list[Path], options: ForeignOptions) -> ForeignLatents:
    """Reads folders that fast-DiT wrote: the latents of sample i in `<name>_features/<i>.npy`, of
    shape (1, C, H, W), and its label in `<name>_labels/<i>.npy`."""
    labels_by_file: dict[Path, Any] = {}
    for stem in sorted({str(folder).rpartition("_")[0] for folder in folders}):
        features, labels = (
            {file.name for file in Path(f"{stem}_{kind}").glob("*.npy")}
            for kind in ("features", "labels")
        )
        unpaired = sorted(features ^ labels)
        if options.labelled and unpaired:
            kind = "labels" if unpaired[0] in features else "features"
            raise UserError(
                f"{len(unpaired)} files of {stem}_features and {stem}_labels have no partner: "
                f"{unpaired[0]} lacks {stem}_{kind}/{unpaired[0]}; restore it, or remove both."
            )
        for name in sorted(features):
            label = Path(f"{stem}_labels", name)
            file = Path(f"{stem}_features", name)
            labels_by_file[file] = label if options.labelled else None
    return read_files(labels_by_file)


def read_listed_files(folders: list[Path], options: ForeignOptions) -> ForeignLatents:
    """Reads a folder as EDM2 and REPA write it: .npy files with one sample each, and
    `dataset.json`, which holds {"labels": [[file, label], …]}."""
    (folder,) = folders
    files = sorted(folder.rglob("*.npy"))
    if not options.labelled:
        return read_files(dict.fromkeys(files))
    file = folder / "dataset.json"
    with translate_errors(file):
        content = json.loads(file.read_bytes())
    pairs = isinstance(content, dict) and content.get("labels")
    if not isinstance(pairs, list) or not pairs:
        raise UserError(
            f'{file} has no "labels": [[file, label], …]; add them, or import without: '
            "classes=none."
        )

    # Map each file to its label, and check neither that the file exists nor that the label is a
    # number.
    labels = {}
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UserError(f"{file} has the entry {reprlib.repr(pair)}; it must be [file, label].")
        latents = folder / pair[0]
        if Path(pair[0]).is_absolute() or ".." in Path(pair[0]).parts:
            raise UserError(f"{file} names a file outside its folder: {pair[0]}; correct it.")
        if latents in labels:
            raise UserError(f"{file} names {pair[0]} twice; each file has one label.")
        labels[latents] = pair[1]

    unlabelled = [file for file in files if file not in labels]
    if unlabelled:
        raise UserError(
            f"{len(unlabelled)} .npy files in {folder} have no label in dataset.json: "
            f"{unlabelled[0]} …; add them."
        )
    return read_files(labels)


def read_tars(tars: list[Path], options: ForeignOptions) -> ForeignLatents:
    """Reads WebDataset tars whose samples have the members `<key>.npy` or `<key>.safetensors`, and
    `<key>.cls` or `<key>.json`."""

    def yield_samples() -> Iterator[Sample]:
        for file in tars:
            for stream, where, latents, label in pair_members(file, options):
                values = {"latents": read_latents(stream, latents, options, where)}
                if label is not None:
                    values["labels"] = read_label(stream, label, where)
                yield where, values

    count = sum(1 for file in tars for _ in pair_members(file, options))
    return ForeignLatents(f"{count} samples in {len(tars)} tars", count, yield_samples)


def pair_members(
    file: Path, options: ForeignOptions
) -> Iterator[tuple[BinaryIO, str, tarfile.TarInfo, tarfile.TarInfo | None]]:
    """Yields for each sample of a tar: the open tar, the text "<file>: <key>" for messages, the
    member with its latents, and the member with its label (None with classes=none). Raises
    UserError for a sample that lacks one of these members."""
    with translate_errors(file), file.open("rb") as stream:
        unused = Unused()
        samples, cut = read_samples(file, stream, unused)
        if cut:
            raise UserError(f"{cut}; copy or write it again.")
        if unused.kinds.keys() - {"hidden"}:
            raise UserError(f"{file} holds {unused}; write each member as a plain file.")

        for key, parts in samples.items():
            where = f"{file}: {key}"
            names = ", ".join(sorted(parts))
            arrays = [name for name in parts if name.endswith((".npy", ".safetensors"))]
            if len(arrays) > 1:
                arrays = [
                    name for name in arrays if name.rpartition(".")[0] == f".{options.latents_key}"
                ]
            if len(arrays) != 1:
                raise UserError(
                    f"{where} has {names}, of which not one alone can be the latents; give each "
                    "sample one .npy or .safetensors, or set latents_key=<name> for "
                    "<key>.<name>.npy."
                )

            label = None
            if options.labelled:
                label = parts.get(".cls") or parts.get(".json")
                if label is None:
                    raise UserError(
                        f"{where} has {names}, and no class index in a .cls or a .json member; add "
                        "one, or import without labels: classes=none."
                    )
            yield stream, where, parts[arrays[0]], label


def read_latents(
    stream: BinaryIO, member: tarfile.TarInfo, options: ForeignOptions, where: str
) -> Any:
    with translate_errors(where, PLAIN_REMEDY):
        stream.seek(member.offset_data)
        content = stream.read(member.size)
        if member.name.lower().endswith(".npy"):
            return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        tensors = load(content)
    if options.latents_key not in tensors:
        raise UserError(f"{where} holds {', '.join(tensors)}; set latents_key=<name>.")
    return tensors[options.latents_key]


def read_label(stream: BinaryIO, member: tarfile.TarInfo, where: str) -> Any:
    """Returns the content of a .cls member, or the value of the key label, cls or class in a .json
    member, without checking that it is a class index."""
    with translate_errors(f"{where}: {member.name}"):
        stream.seek(member.offset_data)
        text = stream.read(member.size).decode().strip()
        if not member.name.lower().endswith(".json"):
            return int(text) if text.isdecimal() else text
        content = json.loads(text)
    for name in ("label", "cls", "class"):
        if isinstance(content, dict) and name in content:
            return content[name]
    raise UserError(
        f"{where}: {member.name} has no label, cls or class; add one, or set classes=none."
    )
