"""The list of a source's images, and what its plan states: classes, files that are not used, what
looks odd."""

from __future__ import annotations

import hashlib
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from common.text import printable
from encoding.images import EXTENSIONS, ImageEntry, lacks_codec

FEW = 20
MANY = 100
"""So many kinds of unused files, and classes, are named one by one."""


class Unused:
    """Counts the files that no image is read from, by kind, with one example of each."""

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, name: str) -> None:
        """Counts one more; the example is the first by name."""
        number, example = self.kinds.get(kind, (0, name))
        self.kinds[kind] = (number + 1, min(name, example))

    def __str__(self) -> str:
        """Such as "2 .txt (e.g. cat/a.txt); 1 hidden (e.g. .cache)"; the largest number comes
        first."""
        ordered = sorted(self.kinds.items(), key=lambda item: (-item[1][0], item[0]))
        shown = [
            f"{number} {kind} (e.g. {readable(name)})" for kind, (number, name) in ordered[:FEW]
        ]
        if rest := ordered[FEW:]:
            shown.append(f"{sum(number for _, (number, _) in rest)} of {len(rest)} more kinds")
        return "; ".join(shown)


@dataclass(frozen=True)
class ImageList:
    """The images of a source in a fixed order."""

    entries: list[ImageEntry]
    class_names: list[str]
    """Empty: there are no classes, and every label is 0."""
    unused: Unused = field(default_factory=Unused)
    notes: list[str] = field(default_factory=list)
    """What the user may not have meant, a sentence each."""

    def sha256(self) -> str:
        """Hashes names, labels and sizes, in order."""
        lines = [f"{e.key}\t{e.label}\t{e.size}" for e in self.entries] + self.class_names
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def stated(self, source: str, planned: int) -> str:
        """The part of a job's plan that tells what the source was taken for; `planned` images are
        to be encoded."""
        counts = Counter(entry.label for entry in self.entries)
        numbers = [(counts[label], name) for label, name in enumerate(self.class_names)]
        images = f"{len(self.entries)} image{'s' * (len(self.entries) != 1)}"
        classes = (
            f"of {len(numbers)} class{'es' * (len(numbers) != 1)}" if numbers else "without classes"
        )
        lines = [f"{images} {classes} in {source}, {planned} to encode"]
        if len(numbers) > MANY:
            (fewest, rare), (most, common) = min(numbers), max(numbers)
            lines.append(f"  from {fewest} images ({rare}) to {most} ({common})")
        elif numbers:
            named = ", ".join(f"{name}: {number}" for number, name in numbers)
            lines.append(textwrap.fill(named, 120, initial_indent="  ", subsequent_indent="  "))
        if without := [name for number, name in numbers if not number]:
            lines.append(f"  classes without images: {few_of(without)}")
        if self.unused.kinds:
            lines.append(f"  not used: {self.unused}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def few_of(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def is_image(extension: str) -> bool:
    """Whether files with this extension, in lower case, are read as images."""
    return extension in EXTENSIONS and not lacks_codec(extension)


def kind_of(name: str) -> str:
    """What an unused file is, by its extension."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    if not suffixes:
        return "without extension"
    if suffixes[-1] not in EXTENSIONS:
        return "".join(suffixes[-2:]) if suffixes[-2:-1] == [".tar"] else suffixes[-1]
    codec = lacks_codec(suffixes[-1])
    return (
        f"{suffixes[-1]} (this Pillow has no {codec})"
        if codec
        else "images with two dots in their names"
    )


def readable(name: str) -> str:
    r"""The name of a file as one line that can be printed, hashed and stored: bytes that are not
    UTF-8 become \xff."""
    return printable(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
