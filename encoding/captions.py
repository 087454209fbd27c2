"""Finds the captions of images: in files beside the images, in members of tars, in a column of a
folder of `datasets`, or made of the classes' names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from common.errors import UserError
from encoding.images import ImageList, escape_name

CAPTION_EXTENSIONS = (".txt", ".json")
"""Extensions of the files with captions: the file of an image has the image's name."""
CAPTION_NAMES = ("captions", "caption", "text", "prompt")
"""Keys of a JSON object, and columns of `datasets`, that may hold captions; the first is taken."""


def parse_captions(place: str, content: bytes) -> tuple[str, ...]:
    """Returns the captions that a file holds: a text has one on each line; JSON has a text, a list
    of texts, or an object that may have one of these under a key of `CAPTION_NAMES`. `place` is the
    name of the file. Raises ValueError for other content."""
    try:
        text = content.decode("utf-8-sig")
        if not place.endswith(".json"):
            return tidy(text.splitlines())
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} holds no captions in UTF-8 ({error}); mend it.") from error
    if not isinstance(value, dict):
        return tidy_value(place, value)
    found = (tidy_value(place, value.get(name)) for name in CAPTION_NAMES)
    return next(filter(None, found), ())


def tidy(lines: Iterable[str]) -> tuple[str, ...]:
    """Returns the lines without spaces around them, each once, and none that is empty. A ? replaces
    what has no code in UTF-8: one half of a surrogate pair, which JSON may hold."""
    tidied = (line.encode(errors="replace").decode().strip() for line in lines)
    return tuple(dict.fromkeys(filter(None, tidied)))


def tidy_value(place: str, value: Any) -> tuple[str, ...]:
    """Returns the captions of a text or a list of texts, none for None; ValueError for any other
    value."""
    lines = value if isinstance(value, list) else [value]
    lines = [line for line in lines if line is not None]
    if not all(isinstance(line, str) for line in lines):
        raise UserError(
            f"{place} must hold a caption or a list of captions, or an object with them as "
            f"{' or '.join(CAPTION_NAMES)}."
        )
    return tidy(lines)


def read_caption_files(image: Path) -> tuple[str, ...]:
    """Returns the captions in the files beside an image."""
    files = [image.with_suffix(extension) for extension in CAPTION_EXTENSIONS]
    found = [parse_captions(escape_name(str(f)), f.read_bytes()) for f in files if f.is_file()]
    return tidy(chain(*found))


def read_caption_column(path: Path, dataset: Any) -> list[tuple[str, ...]]:
    """Returns the captions of each row of a folder of `datasets`."""
    names = [name for name in CAPTION_NAMES if name in dataset.features]
    if not names:
        raise UserError(
            f"source={path} has no column of captions ({', '.join(CAPTION_NAMES)}); rename one, or "
            "take captions=<file of templates>."
        )
    column = dataset[names[0]]
    return [tidy_value(f"source={path}: row {i}", value) for i, value in enumerate(column)]


def fill_templates(images: ImageList, file: str) -> ImageList:
    """Returns the images with captions made of their classes' names: each line of `file` is a
    template, in which the name replaces {}. Underscores in names become spaces."""
    path = Path(file).expanduser()
    try:
        templates = tidy(path.read_text(encoding="utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"captions={file} must be given, or a text file with a template such as "
            f"'a photo of {{}}' on each line ({error})."
        ) from error
    if not templates or not all("{}" in template for template in templates):
        raise UserError(f"captions={file}: each line must have {{}}, where the class's name goes.")
    if not images.class_names:
        raise UserError(f"captions={file}: the source has no classes; take captions=given.")
    names = [name.replace("_", " ") for name in images.class_names]
    filled = [tuple(t.replace("{}", name) for t in templates) for name in names]
    entries = [replace(entry, captions=filled[entry.label]) for entry in images.entries]
    return replace(images, entries=entries)


def read_caption_list(file: str, total: int) -> list[tuple[str, ...]]:
    """Reads the captions of `total` samples from a JSON file, a list with a text or a list of texts
    for each sample."""
    try:
        values = json.loads(Path(file).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"captions={file} is no JSON file ({error}).") from error
    if not isinstance(values, list) or len(values) != total:
        raise UserError(f"captions={file} must be a list with {total} entries, one a sample.")
    return [tidy_value(f"captions={file}: entry {i}", value) for i, value in enumerate(values)]
