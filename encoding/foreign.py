"""Reads latents that other tools wrote: `FORMATS` lists the formats, each with its reader.

A reader takes the files of a source and yields its parts, pairs of the number of samples in a part
and an iterator over them; so the samples are counted without reading any. A file of columns has
the samples of a part as rows of its tensors, or one sample; a listed file has one sample; a tar has
one part.

This module unpickles no Python objects: it reads `.npy` and `.npz` without objects, `.pt` with
`weights_only=True`, safetensors, and labels in `.cls` or `.json`. It raises a UserError if labels
and latents do not pair one to one; encoding/foreign_values.py then checks each sample's values.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load, load_file
from torch import Tensor

from common.errors import UserError, describe_first_fault
from common.text import shorten_error
from encoding.images import Unused
from encoding.tars import Sample as TarSample
from encoding.tars import read_samples

MIRRORED_NAMES = ("mirrored", "latents_flip", "flip")
"""Names under which a source may hold the latents of the mirrored images. LightningDiT writes
`latents_flip`."""
LABEL_NAMES = ("label", "cls", "class")
"""Names under which a .json member of a tar may hold the label."""
NAMING = {
    "latents": "",
    "labels": ", for .npy, .npz and .pt also labels=<file>, or import without labels: classes=none",
}
"""Our name of a column -> what else than a key names it, for the message that it is missing."""
Sample = tuple[str, Mapping[str, Any]]
"""One sample, as a pair: a text for messages that says where the sample lies in the source, and a
mapping from name to value, whose values are not checked yet. The names are `latents` and, if the
source has them, `mirrored` (both are arrays of numpy or PyTorch) and `labels` (any value)."""
Parts = Iterator[tuple[int, Iterator[Sample]]]
"""Parts of a source: the number of samples of each, and the samples, to be read before the next
part."""


class ForeignOptions(NamedTuple):
    """Settings of an import: `latents_key` and `labels_key`, the names of tensors in the source;
    `labels`, the path of a separate file with the labels (None: there is no such file); `labelled`,
    whether labels are imported."""

    latents_key: str = "latents"
    labels_key: str = "labels"
    labels: str | None = None
    labelled: bool = True


class Format(NamedTuple):
    """A format of latents: `name`, for messages; `mark`, a pattern of the names of its files, which
    begin with a slash if the source is their folder and not the file itself; `read`, its reader."""

    name: str
    mark: str
    read: Callable[[list[Path], ForeignOptions], Parts]


class ForeignLatents(NamedTuple):
    """Latents that another tool wrote: `format`, its name; `total`, the number of samples; and
    `samples`, a function that returns an iterator over the samples."""

    format: str
    total: int
    samples: Callable[[], Iterator[Sample]]


@contextmanager
def translate_errors(source: Path | str) -> Iterator[None]:
    """Turns any exception in the `with` block, such as numpy, torch, tarfile or json raise for a
    damaged file, into a UserError that names the source."""
    try:
        if isinstance(source, Path) and not source.is_file():
            raise FileNotFoundError("it is no file, or a link to none")
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{source} cannot be read ({shorten_error(error).partition('. ')[0]}); copy it again "
            "if it is damaged, and save plain tensors, for nothing is unpickled."
        ) from error


def read_plain(file: Path) -> Any:
    """Reads a .npy or .npz file without objects, a .safetensors file, or a .pt file that holds
    tensors, or dicts or lists of tensors, with `weights_only=True`. Raises UserError if the file
    holds any other object. Large arrays stay on disk until they are used, but for .npz."""
    with translate_errors(file):
        if file.suffix == ".npy":
            # Copy on write, because PyTorch warns about read-only arrays.
            return np.load(file, mmap_mode="c")
        if file.suffix == ".npz":
            if not zipfile.is_zipfile(file):
                raise ValueError("File is not a zip file")
            with np.load(file) as content:
                # A compressed array may be a thousand times as large as its file.
                if any(member.compress_type for member in content.zip.infolist()):
                    raise UserError(f"{file} holds compressed arrays; write them by numpy.savez.")
                return dict(content)
        if file.suffix == ".safetensors":
            return load_file(file)
        return torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )


def is_dense(value: Any) -> bool:
    """Tells whether a value is a strided tensor on the CPU, and not expanded: with a stride of 0 a
    tensor repeats the same bytes, so a file of a few bytes could claim to have 10^12 samples."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and 0 not in value.stride()
    )


def read_content(file: Path, key: str) -> dict[Any, Any]:
    """Returns the tensors of a file by name; a tensor without a name gets the name `key`."""
    content = read_plain(file)
    return content if isinstance(content, dict) else {key: content}


def open_columns(file: Path, options: ForeignOptions) -> dict[str, Any]:
    """Returns the columns `latents`, `labels` and `mirrored` of a file, those which it has and
    which are imported, each an array with one row per sample. A file of one sample, as sd-scripts
    and musubi-tuner write it beside an image, gives columns of one row. Raises UserError if a
    column is missing, is no array, or has another length than the others."""
    content = read_content(file, options.latents_key)
    # If a file has tensors of one size, name them also without it: latents_1x32x32_bfloat16 becomes
    # latents, and latents_flipped_32x32 latents_flip.
    named = {
        re.sub(r"(?<=flip)ped|_\d+x\d+.*", "", str(key)): value for key, value in content.items()
    }
    if len(named) == len(content):
        content = named | content
    if options.labels is not None:
        other = read_content(Path(options.labels).expanduser(), options.labels_key)
        content |= {key: value for key, value in other.items() if key == options.labels_key}

    names = {"latents": options.latents_key}
    if options.labelled:
        names["labels"] = options.labels_key
    for name, key in names.items():
        if key not in content:
            raise UserError(
                f"{file} has no {key}; set {name}_key=<name> (it holds "
                f"{', '.join(map(str, content))}){NAMING[name]}."
            )
    for name in MIRRORED_NAMES:
        if name in content:
            names.setdefault("mirrored", name)

    columns = {name: content[key] for name, key in names.items()}
    for name, column in columns.items():
        if not (isinstance(column, np.ndarray) or is_dense(column)) or not column.ndim:
            raise UserError(
                f"{file}: {name} is a {type(column).__name__}, and no dense tensor with a row for "
                "each sample; save it as one, an expanded tensor as .contiguous()."
            )

    # One sample's latents have the shape (C, H, W), or with a key such as latents_1x32x32_bfloat16
    # (C, 1, H, W).
    sized = any(re.match(r"latents_\d+x\d+x\d+_", str(key)) for key in content)
    if sized or columns["latents"].ndim == 3:
        columns |= {name: columns[name][None] for name in columns.keys() - {"labels"}}
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        lengths = " and ".join(f"{count} {name}" for name, count in counts.items())
        raise UserError(f"{file} has {lengths}; give the same number of each.")
    return columns


def read_columns(files: list[Path], options: ForeignOptions) -> Parts:
    """Reads files with the tensors of many samples or of one; the labels may be in a second file,
    `options.labels`. Raises UserError for latents of the VAE of Qwen-Image by musubi-tuner."""
    for file in files:
        if re.search(r"\d+x\d+_(qi[el]?|kr2)\.safetensors$", file.name):
            raise UserError(
                f"{file} holds latents of Qwen-Image that musubi-tuner normalised per channel, "
                "which no scale undoes; encode the pictures by precompute_latents.py "
                "encoder=qwen_image."
            )
        columns = open_columns(file, options)
        count = len(columns["latents"])
        rows = (
            (f"sample {i} of {file}", {name: column[i] for name, column in columns.items()})
            for i in range(count)
        )
        yield count, rows


def read_files(labels: Mapping[Path, Any]) -> Parts:
    """Reads .npy files with one sample each. `labels` maps each file to its label: a value, the
    path of a .npy file that holds the value, or None if the label is not imported."""

    def yield_samples() -> Iterator[Sample]:
        for file, label in labels.items():
            value = read_plain(label) if isinstance(label, Path) else label
            yield str(file), {"latents": read_plain(file), "labels": value}

    yield len(labels), yield_samples()


def read_feature_folders(folders: list[Path], options: ForeignOptions) -> Parts:
    """Reads folders that fast-DiT wrote: the latents of sample i in `<name>_features/<i>.npy`, of
    shape (1, C, H, W), and its label in `<name>_labels/<i>.npy`."""
    labels: dict[Path, Path | None] = {}
    for stem, _, kind in sorted(str(folder).rpartition("_") for folder in folders):
        other = Path(f"{stem}_labels" if kind == "features" else f"{stem}_features")
        partners = {file.name for file in other.glob("*.npy")}
        for file in sorted(Path(f"{stem}_{kind}").glob("*.npy")):
            if options.labelled and file.name not in partners:
                raise UserError(f"{file} lacks {other / file.name}; restore it, or remove both.")
            if kind == "features":
                labels[file] = other / file.name if options.labelled else None
    return read_files(labels)


class Listing(BaseModel):
    """The content of `dataset.json`."""

    labels: list[tuple[str, Any]]


def read_listed_files(files: list[Path], options: ForeignOptions) -> Parts:
    """Reads a folder as EDM2 and REPA write it: .npy files with one sample each, and
    `dataset.json`, which holds {"labels": [[file, label], …]} and need not exist if labels are not
    imported."""
    (file,) = files
    arrays = sorted(file.parent.rglob("*.npy"))
    if not options.labelled:
        return read_files(dict.fromkeys(arrays))
    with translate_errors(file):
        content = file.read_bytes()
    try:
        pairs = Listing.model_validate_json(content).labels
    except ValidationError as error:
        raise UserError(
            f"{file} {describe_first_fault(error, 'list of labels')}; write "
            '{"labels": [[file, label], …]}, or import without: classes=none.'
        ) from error

    # Map each file to its label, and check neither that the file exists nor that the label is a
    # number.
    labels = {}
    for name, label in pairs:
        array = file.parent / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{file} names a file outside its folder: {name}; correct it.")
        if array in labels:
            raise UserError(f"{file} names {name} twice; each file has one label.")
        labels[array] = label
    unlabelled = [array for array in arrays if array not in labels]
    if unlabelled:
        raise UserError(
            f"{len(unlabelled)} .npy files in {file.parent} have no label in dataset.json: "
            f"{unlabelled[0]} …; add them."
        )
    return read_files(labels)


def read_tars(tars: list[Path], options: ForeignOptions) -> Parts:
    """Reads WebDataset tars whose samples have the members `<key>.npy` or `<key>.safetensors`, and
    `<key>.cls` or `<key>.json`."""
    keys = {"latents": (options.latents_key,), "labels": LABEL_NAMES}
    for file in tars:
        with translate_errors(file), file.open("rb") as stream:
            unused = Unused()
            samples, cut = read_samples(file, stream, unused)
            if cut:
                raise UserError(f"{cut}; copy or write it again.")
            if unused.kinds.keys() - {"hidden"}:
                raise UserError(f"{file} holds {unused}; write each member as a plain file.")
            chosen = [
                choose_members(f"{file}: {key}", members, options)
                for key, members in samples.items()
            ]
            rows = (
                (where, {n: read_member(stream, m, keys[n], where) for n, m in members.items()})
                for where, members in chosen
            )
            yield len(chosen), rows


def choose_members(
    where: str, members: TarSample, options: ForeignOptions
) -> tuple[str, TarSample]:
    """Chooses among the members of a sample in a tar, which `members` maps from their extensions.
    Returns `where`, which says where the sample lies, and a dict: `latents`, and `labels` if labels
    are imported -> its member. Raises UserError for a sample that lacks one of these."""
    names = ", ".join(sorted(members))
    arrays = [name for name in members if name.endswith((".npy", ".safetensors"))]
    if len(arrays) > 1:
        arrays = [name for name in arrays if name.rpartition(".")[0] == f".{options.latents_key}"]
    if len(arrays) != 1:
        raise UserError(
            f"{where} has {names}, of which not one alone can be the latents; give each sample one "
            ".npy or .safetensors, or set latents_key=<name> for <key>.<name>.npy."
        )
    chosen = {"latents": members[arrays[0]]}
    if options.labelled:
        label = members.get(".cls") or members.get(".json")
        if label is None:
            raise UserError(
                f"{where} has {names}, and no class index in a .cls or a .json member; add one, or "
                "import without labels: classes=none."
            )
        chosen["labels"] = label
    return where, chosen


def read_member(
    stream: BinaryIO, member: tarfile.TarInfo, names: tuple[str, ...], where: str
) -> Any:
    """Returns the content of a .npy or .cls member, or what a .safetensors or .json member holds
    under one of the `names`, without checking that it is latents or a class index."""
    place = f"{where}: {member.name}"
    with translate_errors(place):
        stream.seek(member.offset_data)
        content = stream.read(member.size)
        extension = Path(member.name.lower()).suffix
        if extension == ".npy":
            return np.load(io.BytesIO(content), allow_pickle=False)
        if extension == ".cls":
            text = content.decode().strip()
            return int(text) if text.isdecimal() else text
        values = load(content) if extension == ".safetensors" else json.loads(content)
    for name in names:
        if isinstance(values, dict) and name in values:
            return values[name]
    raise UserError(
        f"{place} has no {' or '.join(names)}; add it, or set latents_key=<name> for latents, "
        "classes=none for labels."
    )


LISTED = Format("a folder with dataset.json", r"/dataset\.json", read_listed_files)
FORMATS = (
    Format("a .npy, .npz or .pt file", r"[^/].*\.(npy|npz|pt|pth)", read_columns),
    Format("a folder with latents.npy and labels.npy", r"/latents\.npy", read_columns),
    Format(
        "safetensors or .npz files",  # but those of text encoders and of statistics
        r"(?!/.*(_te(_outputs)?|statistics)\.\w+$)(.*\.safetensors|/.*\.npz)",
        read_columns,
    ),
    Format("WebDataset tars with one key per sample", r".*\.tar", read_tars),
    LISTED,
    Format("a folder with *_features and *_labels", r"/.*_(features|labels)", read_feature_folders),
)


def open_foreign(source: str, options: ForeignOptions) -> ForeignLatents:
    """Recognises the format of the file or folder `source`, and counts its samples. Raises
    UserError if the format is unknown, or if the source lacks samples or labels."""
    path = Path(source).expanduser()
    if (path / "manifest.json").is_file():
        raise UserError(
            f"source={source} is a latent set of ours already; use it: data.path={source}."
        )

    # Collect the files of each known format; exactly one format must have some.
    files = {path.name: path}
    if path.is_dir():
        files = {f"/{file.name}": file for file in sorted(path.iterdir())}
    matches = []
    for known in FORMATS:
        found = [file for name, file in files.items() if re.fullmatch(known.mark, name)]
        if found:
            matches.append((known, found))
    # A folder of .npy files without dataset.json has no labels, so it is accepted only with
    # classes=none.
    if not matches and not options.labelled and any(path.rglob("*.npy")):
        matches = [(LISTED, [path / "dataset.json"])]
    if len(matches) != 1:
        raise UserError(
            f"source={source} holds {'several formats' if matches else 'no known format'}; "
            f"give one: {', '.join(known.name for known in FORMATS)}."
        )

    known, found = matches[0]
    has_second_file = known in FORMATS[:2]
    if options.labels is not None and not (options.labelled and has_second_file):
        raise UserError(
            f"labels={options.labels} goes with a .npy, .npz or .pt file and not with "
            "classes=none; leave labels out, and set labels_key=<name> where the source names its "
            "own."
        )
    if options.labelled and "/latents.npy" in files:
        options = options._replace(labels=options.labels or str(path / "labels.npy"))
    total = sum(count for count, _ in known.read(found, options))
    if not total:
        raise UserError(f"source={source} holds no samples ({known.name}).")
    return ForeignLatents(
        known.name,
        total,
        lambda: chain.from_iterable(samples for _, samples in known.read(found, options)),
    )
