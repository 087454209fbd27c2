"""Lists the images of WebDataset tars, and reads each tar to its end marker.

Python's tarfile takes the end of a file and a damaged header for the end of a tar, and says
nothing.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError
from encoding.images import ImageEntry, sample_key
from encoding.listing import ImageList, Unused, is_image, kind_of, readable

BLOCK = tarfile.BLOCKSIZE
LONGEST_LABEL = 64
COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}
"""First bytes of compressed files, and the command that decompresses them."""
Sample = dict[str, tarfile.TarInfo]
"""The members with one key, by extension."""


def limit_of(classes: int | str, images: int) -> int:
    """The number that all labels are below: as stated, or else no more classes than images."""
    return classes if isinstance(classes, int) else images


def numbered(classes: int | str, labels: list[int]) -> list[str]:
    """Names for classes that have only numbers, as many as stated, or else as the largest label
    says."""
    return [
        str(i) for i in range(classes if isinstance(classes, int) else max(labels, default=-1) + 1)
    ]


def list_tars(tars: list[Path], classes: int | str, allow_cut: bool, unused: Unused) -> ImageList:
    """Lists the images of WebDataset tars: a key is a name up to its first dot, a label the integer
    in `<key>.cls`.

    classes="none": all labels are 0. ValueError for a tar that is cut or damaged, unless
    `allow_cut`; for a sample of two images or without a label; and for a label that makes more
    classes than were stated, or than there are images.
    """
    labelled = classes != "none"
    entries: list[ImageEntry] = []
    notes = []
    for file in tars:
        with open(file, "rb") as stream:
            tar = Members(file, stream)
            samples = samples_of(tar, unused)
            if tar.cut and not allow_cut:
                raise UserError(
                    f"{tar.cut}. Fetch it again, or use what comes before: allow_cut=true."
                )
            notes += [f"{tar.cut}; what comes before is used"] if tar.cut else []
            if (
                tar.cut
                and labelled
                and samples
                and ".cls" not in samples[last := list(samples)[-1]]
            ):
                unused.add("samples cut off from their label", f"{file.name}:{last}")
                del samples[last]
            found = [
                entry_of(tar, key, sample, labelled, unused) for key, sample in samples.items()
            ]
            entries += [entry for entry in found if entry]
            if not any(found):
                unused.add("tars without images", file.name)
    if not labelled or not entries:
        return ImageList(entries, [], unused, notes)
    largest = max(entries, key=lambda entry: entry.label)
    if largest.label >= limit_of(classes, len(entries)):
        known = (
            f"classes={classes}" if isinstance(classes, int) else f"there are {len(entries)} images"
        )
        raise UserError(
            f"{largest.key} has the label {largest.label}, and {known}; number the classes from 0 "
            "without gaps, or say how many there are: classes=<n>."
        )
    return ImageList(entries, numbered(classes, [largest.label]), unused, notes)


def samples_of(tar: Members, unused: Unused) -> dict[str, Sample]:
    """The samples of a tar by key; ValueError if two of their members have one name."""
    samples: dict[str, Sample] = {}
    for member in tar:
        if kind := kind_of_other(member):
            if not member.isdir():
                unused.add(kind, f"{tar.file.name}:{member.name}")
            continue
        key, extension = sample_key(member.name)
        sample = samples.setdefault(key, {})
        extension = f".{extension.lower()}"
        if extension in sample:
            raise UserError(
                f"{tar.file}: {readable(member.name)} is there twice; every sample of a tar needs "
                "a key of its own."
            )
        sample[extension] = member
    return samples


def kind_of_other(member: tarfile.TarInfo) -> str | None:
    """What a member is whose bytes are no part of a sample."""
    if not member.isreg():
        return "links and devices in tars"
    if member.issparse():
        return "sparse members of tars"
    if member.name.rpartition("/")[2].startswith("."):
        return "hidden"
    return None if member.size else "empty files"


def entry_of(
    tar: Members, key: str, sample: Sample, labelled: bool, unused: Unused
) -> ImageEntry | None:
    """The image of a sample, if it has one; ValueError if it has two, or no class index where it
    needs one."""
    images = [member for extension, member in sample.items() if is_image(extension)]
    if len(images) > 1:
        raise UserError(
            f"{tar.file}: {readable(key)} has {len(images)} images; give each a key of its own."
        )
    for extension, member in sample.items():
        if member not in images and not (images and labelled and extension == ".cls"):
            unused.add(kind_of(member.name), f"{tar.file.name}:{member.name}")
    if not images:
        return None
    name = readable(images[0].name)
    if labelled and ".cls" not in sample:
        raise UserError(
            f"{tar.file}: {name} has no label; a member named {readable(key)}.cls must hold it. "
            "To train without labels: classes=none."
        )
    label = label_of(tar, sample[".cls"]) if labelled else 0
    return ImageEntry(
        f"{readable(tar.file.name)}:{name}",
        label,
        str(tar.file),
        images[0].offset_data,
        images[0].size,
    )


def label_of(tar: Members, member: tarfile.TarInfo) -> int:
    """The class index that a member holds as text."""
    told = f"{tar.file}: {readable(member.name)} must hold a class index, not"
    if member.size > LONGEST_LABEL:
        raise UserError(f"{told} {member.size} bytes.")
    tar.stream.seek(member.offset_data)
    text = tar.stream.read(member.size).decode("utf-8", "backslashreplace").strip()
    if not text.isdecimal():
        raise UserError(f"{told} {text!r}.")
    return int(text)


class Members:
    """Yields the whole members of a tar, and of the tars that were appended to it with `cat`; then
    says how it ends.

    ValueError if the file is no tar.
    """

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self.file = file
        self.stream = stream
        self.size = os.fstat(stream.fileno()).st_size
        self.cut: str | None = None
        """How the tar ends other than with its end marker, two blocks of zeros: a hole looks like
        one, but goes on."""

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        start = 0
        while start < self.size or not start:
            self.stream.seek(start)
            try:
                tar = tarfile.TarFile(fileobj=self.stream)
            except OSError:
                raise
            except Exception as error:  # tarfile raises many kinds for what is no tar
                if not start:
                    raise UserError(self.no_tar()) from error
                tar = None
            if tar is None or (start and tar.offset == start):
                self.cut = (
                    f"{self.file} is damaged: from byte {start} of {self.size} on it is no tar"
                )
                return
            damaged = yield from self.of_one(tar)
            end = min(tar.offset, self.size)
            start = self.after_zeros(end)
            if damaged or start - end < 2 * BLOCK:
                self.cut = (
                    f"{self.file} was cut or is damaged: byte {end} of {self.size} is no member "
                    "and no end marker"
                )
                return

    def of_one(self, tar: tarfile.TarFile) -> Generator[tarfile.TarInfo, None, bool]:
        """Yields the whole members of one tar; returns whether a damaged header ended it."""
        while True:
            try:
                member = tar.next()
            except OSError:
                raise
            except Exception:  # tarfile raises as many kinds for a damaged header
                return True
            if member is None:
                return False
            if (
                not member.isreg()
                or member.issparse()
                or member.offset_data + member.size <= self.size
            ):
                yield member

    def after_zeros(self, start: int) -> int:
        """The first block from `start` on that is not all zeros; the size of the file if there is
        none."""
        self.stream.seek(start)
        while block := self.stream.read(BLOCK):
            if block.count(0) < len(block):
                return start
            start += len(block)
        return start

    def no_tar(self) -> str:
        if not self.size:
            return f"{self.file} is empty; fetch it again, or move it away."
        self.stream.seek(0)
        head = self.stream.read(6)
        for magic, command in COMPRESSED.items():
            if head.startswith(magic):
                return (
                    f"{self.file} is compressed, and images are read from their place in the "
                    f"file; {command} it."
                )
        return f"{self.file} is no tar; fetch it again, or move it away."
