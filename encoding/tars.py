"""Lists the images of WebDataset tars, and reads each tar to its end marker.

Python's tarfile silently treats a truncated file and a damaged header as the end of a tar; this
module reports them.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError
from encoding.caption_files import CaptionReader, tidy
from encoding.images import (
    EXTENSIONS,
    ImageEntry,
    ImageList,
    Unused,
    describe_kind,
    escape_name,
    is_image,
)

BLOCK_BYTES = tarfile.BLOCKSIZE
MAX_LABEL_BYTES = 64
COMPRESSED_SIGNATURES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of files in the formats gzip, bzip2, xz and zstd."""
Sample = dict[str, tarfile.TarInfo]
"""The members of a tar that share a key: extension -> member."""


def list_tars(
    tars: list[Path], classes: int | str, allow_cut: bool, reader: CaptionReader
) -> ImageList:
    """Lists the images of WebDataset tars. A sample's key is the file name up to its first dot, its
    label the integer in `<key>.cls`; with classes="none" all labels are 0. `reader` reads the
    sample's captions in `<key>.txt`, `<key>.caption` or `<key>.json`.

    Raises UserError for a tar that is truncated or damaged, unless `allow_cut` is true; for a
    sample with two images or without a label; and for a label that is no valid class index (see
    `name_classes`).
    """
    labelled = classes != "none"
    unused = reader.unused
    entries = []
    notes = []
    for file in tars:
        with file.open("rb") as stream:
            samples, cut = read_samples(file, stream, unused)

            if cut and not allow_cut:
                raise UserError(f"{cut}. Fetch it again, or use what comes before: allow_cut=true.")
            if cut:
                notes.append(f"{cut}; what comes before is used")

                # Leave out the last sample of a truncated tar if it has no label: a label can stand
                # behind its image, so the truncation may have removed it.
                last = next(reversed(samples), None)
                if labelled and last is not None and ".cls" not in samples[last]:
                    unused.add("samples cut off from their label", f"{file.name}:{last}")
                    del samples[last]

            images = [
                make_entry(file, stream, key, sample, labelled, reader)
                for key, sample in samples.items()
            ]
        entries += filter(None, images)
        if not any(images):
            unused.add("tars without images", file.name)
    names = []
    if labelled and entries:
        names = name_classes([(entry.key, entry.label) for entry in entries], classes)
    return ImageList(entries, names, unused, notes)


def name_classes(
    labels: list[tuple[str, Any]], classes: int | str, names: list[str] | None = None
) -> list[str]:
    """Checks `labels`, pairs of (image, label), and returns the names of all classes: `names` if
    the source gives names, else the numbers from 0 as text. The number of classes is the length of
    `names`, or else `classes`; if neither gives the number, it is the largest label plus one.

    Raises UserError unless each label is an integer of 0 or more, and less than the number of
    classes. If neither `names` nor `classes` gives that number, a label must be less than the
    number of images.
    """
    stated = len(names) if names else classes
    limit = stated if isinstance(stated, int) else len(labels)
    for where, label in labels:
        if not isinstance(label, int) or not 0 <= label < limit:
            known = f"classes={stated}" if isinstance(stated, int) else f"there are {limit} images"
            raise UserError(
                f"{where} has the label {label}, and {known}; number the classes from 0 without "
                "gaps, or say how many there are: classes=<n>."
            )
    if isinstance(stated, str):
        limit = max(label for _, label in labels) + 1
    return names or [str(i) for i in range(limit)]


def make_entry(
    file: Path, stream: BinaryIO, key: str, sample: Sample, labelled: bool, reader: CaptionReader
) -> ImageEntry | None:
    """Returns the image of a sample, or None if the sample has no image; `labelled` says whether it
    must have a label. Raises UserError if the sample has two images, or if it has no label and
    must have one."""
    images = [
        member
        for extension, member in sample.items()
        if extension in EXTENSIONS and is_image(extension)
    ]
    if len(images) > 1:
        raise UserError(
            f"{file}: {escape_name(key)} has {len(images)} images; give each a key of its own."
        )
    used = (*reader.extensions, ".cls") if labelled else reader.extensions
    for extension, member in sample.items():
        if member not in images and not (images and extension in used):
            reader.unused.add(describe_kind(member.name), f"{file.name}:{member.name}")
    if not images:
        return None

    image = images[0]
    name = escape_name(image.name)
    label = 0
    if labelled:
        if ".cls" not in sample:
            raise UserError(
                f"{file}: {name} has no label; a member named {escape_name(key)}.cls must hold it. "
                "To train without labels: classes=none."
            )
        label = read_label(file, stream, sample[".cls"])
    captions: list[str] = []
    for extension in reader.extensions:
        if extension in sample:
            stream.seek(sample[extension].offset_data)
            content = stream.read(sample[extension].size)
            captions += reader.parse(f"{file}: {escape_name(key)}{extension}", content)
    return ImageEntry(
        f"{escape_name(file.name)}:{name}",
        label,
        str(file),
        image.offset_data,
        image.size,
        tidy(captions),
    )


def read_label(file: Path, stream: BinaryIO, member: tarfile.TarInfo) -> int:
    """Reads the class index that a `.cls` member holds as text; raises UserError for any other
    text."""
    problem = f"{file}: {escape_name(member.name)} must hold a class index, not"
    if member.size > MAX_LABEL_BYTES:
        raise UserError(f"{problem} {member.size} bytes.")
    stream.seek(member.offset_data)
    text = stream.read(member.size).decode("utf-8", "backslashreplace").strip()
    if not text.isdecimal():
        raise UserError(f"{problem} {text!r}.")
    return int(text)


def read_samples(
    file: Path, stream: BinaryIO, unused: Unused
) -> tuple[dict[str, Sample], str | None]:
    """Groups the members of a tar by key, as WebDataset does: the key ends at the first dot of the
    file name. Returns two values: key -> sample; and, if the tar's end marker is missing, a
    sentence about the truncation or damage, else None.

    Raises UserError if two members have the same name.
    """
    members, cut = read_members(file, stream)
    samples: dict[str, Sample] = {}
    for member in members:
        folder, _, name = member.name.rpartition("/")
        place = f"{file.name}:{member.name}"
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            unused.add("links, devices and sparse members of tars", place)
            continue
        if name.startswith(".") or not member.size:
            unused.add("hidden" if name.startswith(".") else "empty files", place)
            continue

        stem, dot, extension = name.partition(".")
        sample = samples.setdefault(f"{folder}/{stem}".lstrip("/"), {})
        extension = dot + extension.lower()
        if extension in sample:
            raise UserError(
                f"{file}: {escape_name(member.name)} is there twice; every sample of a tar needs "
                "a key of its own."
            )
        sample[extension] = member
    return samples, cut


def read_members(file: Path, stream: BinaryIO) -> tuple[list[tarfile.TarInfo], str | None]:
    """Returns two values: the complete members of a tar, also of tars appended to it with `cat`;
    and, if the file does not end with a tar's end marker (two or more blocks of zeros), a sentence
    about the truncation or damage, else None.

    The function reads on after an end marker, because another tar may follow. Raises UserError if
    the file is no tar.
    """
    size = os.fstat(stream.fileno()).st_size
    members = []
    start = 0
    while start < size or not start:
        tar = None
        damaged = False
        try:
            stream.seek(start)
            tar = tarfile.TarFile(fileobj=stream)
            while member := tar.next():
                has_content = member.isreg() and not member.issparse()
                if not has_content or member.offset_data + member.size <= size:
                    members.append(member)
        except OSError:
            raise
        except Exception as error:  # tarfile raises many kinds of errors if a file is no tar
            if tar is None and not start:
                raise UserError(explain_no_tar(file, stream)) from error
            damaged = True

        # Let `end` be the offset at which the end marker begins; if there is no end marker, the
        # offset at which the file is cut or damaged.
        end = start if tar is None else min(tar.offset, size)
        start = skip_zeros(stream, end)
        if damaged or start - end < 2 * BLOCK_BYTES:
            return members, (
                f"{file} was cut or is damaged: byte {end} of {size} is no member and no end marker"
            )
    return members, None


def skip_zeros(stream: BinaryIO, start: int) -> int:
    """Returns the offset of the first block from `start` on that is not all zeros, or the size of
    the file."""
    stream.seek(start)
    while block := stream.read(BLOCK_BYTES):
        if any(block):
            return start
        start += len(block)
    return start


def explain_no_tar(file: Path, stream: BinaryIO) -> str:
    """Returns the error message for a file without a tar header, such as a compressed tar."""
    stream.seek(0)
    head = stream.read(6)
    if head.startswith(COMPRESSED_SIGNATURES):
        return (
            f"{file} is compressed, and images are read from their place in the file; decompress "
            "it."
        )
    return (
        f"{file} is {'no tar' if head else 'empty'}; fetch it again, move it away, or name a "
        "folder of images."
    )
