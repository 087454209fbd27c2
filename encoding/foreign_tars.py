"""Reads the latents of other tools from WebDataset tars, a sample a key."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.errors import UserError
from encoding.foreign_samples import PLAIN, Asked, Foreign, Sample, reading
from encoding.images import sample_key
from encoding.tars import Members


def of_tars(tars: list[Path], asked: Asked) -> Foreign:
    """Reads WebDataset tars: of each sample `<key>.npy` or `<key>.safetensors`, and `<key>.cls` or
    `<key>.json`."""

    def samples() -> Iterator[Sample]:
        for file in tars:
            pairs = paired(file, asked)
            with file.open("rb") as stream:
                for where, latents, label in pairs:
                    content = content_of(stream, latents, where)
                    found = (
                        None
                        if label is None
                        else label_in(content_of(stream, label, where), label.name, where)
                    )
                    yield Sample(where, latents_in(content, latents.name, asked, where), found)

    count = sum(len(paired(file, asked)) for file in tars)
    return Foreign(f"{count} samples in {len(tars)} tars", count, asked.classes, samples)


def paired(file: Path, asked: Asked) -> list[tuple[str, tarfile.TarInfo, tarfile.TarInfo | None]]:
    """The place of each sample, and its members of latents and label; ValueError for one without
    either."""
    try:
        with file.open("rb") as stream:
            tar = Members(file, stream)
            members = [
                m for m in tar if not m.isdir() and not m.name.rpartition("/")[2].startswith(".")
            ]
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); copy or write it again."
        ) from error
    if tar.cut:
        raise UserError(f"{tar.cut}; copy or write it again.")
    grouped: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in members:
        key, extension = sample_key(member.name)
        parts = grouped.setdefault(key, {})
        if extension in parts or not member.isreg() or member.issparse():
            fault = "is there twice" if extension in parts else "is a link, a device or sparse"
            raise UserError(
                f"{file}: {member.name} {fault}; write each member once, as a plain file."
            )
        parts[extension] = member
    found = []
    for key, parts in grouped.items():
        where = f"{file}: {key}"
        held = ", ".join(sorted(parts))
        arrays = [name for name in parts if name.rpartition(".")[2] in ("npy", "safetensors")]
        if len(arrays) > 1:
            arrays = [name for name in arrays if name.rpartition(".")[0] == asked.latents_key]
        if len(arrays) != 1:
            raise UserError(
                f"{where} has {held}, of which not one alone can be the latents; give each sample "
                "one .npy or .safetensors, or set latents_key=<name> for <key>.<name>.npy."
            )
        label = None if asked.classes == 0 else parts.get("cls") or parts.get("json")
        if label is None and asked.classes != 0:
            raise UserError(
                f"{where} has {held}, and no class index in a .cls or a .json member; add one, or "
                "import without labels: classes=none."
            )
        found.append((where, parts[arrays[0]], label))
    return found


def content_of(stream: BinaryIO, member: tarfile.TarInfo, where: str) -> bytes:
    with reading(f"{where}: {member.name}"):
        stream.seek(member.offset_data)
        return stream.read(member.size)


def latents_in(content: bytes, name: str, asked: Asked, where: str) -> Any:
    from safetensors.torch import load

    with reading(where, PLAIN):
        if name.endswith(".npy"):
            return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        tensors = load(content)
    if asked.latents_key not in tensors:
        raise UserError(f"{where} holds {', '.join(tensors)}; set latents_key=<name>.")
    return tensors[asked.latents_key]


def label_in(content: bytes, member: str, where: str) -> Any:
    """What stands for the label: the number in a .cls, or in a .json under label, cls or class."""
    with reading(f"{where}: {member}"):
        text = content.decode().strip()
        if not member.endswith(".json"):
            return int(text) if text.isdecimal() else text
        found = json.loads(text)
    names = [
        name for name in ("label", "cls", "class") if isinstance(found, dict) and name in found
    ]
    if not names:
        raise UserError(
            f"{where}: {member} has no label, cls or class; add one, or set classes=none."
        )
    return found[names[0]]
