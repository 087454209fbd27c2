"""Finds the captions of images: in files beside the images, in members of tars, in a column of a
folder of `datasets`, in a table of file names, or made of the classes' names."""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from common.config.schema import CaptionLines, CaptionsMissing
from common.errors import READ_ERRORS, UserError
from common.text import shorten_error, split_lines
from encoding.images import ImageList, Unused, describe_kind, escape_name

CAPTION_EXTENSIONS = (".txt", ".caption", ".json")
"""Extensions of the files with captions: the file of an image has the image's name."""
CAPTION_NAMES = ("captions", "caption", "text", "prompt")
"""Keys of a JSON object, and columns of a table, that may hold captions; the first that holds some
is taken, and else `tags`, a list that becomes one caption."""
ALL_NAMES = (*CAPTION_NAMES, "tags")
FILE_NAMES = ("file_name", "filename", "image", "path")
"""Columns of a table that may hold the name of the image; the first is taken."""
TABLES = ("metadata.jsonl", "metadata.csv")
"""Tables of captions beside the images, as the imagefolder of Hugging Face `datasets` has them."""
TABLE_EXTENSIONS = (".jsonl", ".csv", ".json")


class Names:
    """Values by name. A name without a value has the values of all names that differ from it in
    case alone, or in how accents are stored: macOS takes them apart."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.alike: dict[str, set[str]] = {}

    def add(self, name: str, value: Any) -> None:
        self.values.setdefault(name, []).append(value)
        self.alike.setdefault(fold(name), set()).add(name)

    def find(self, name: str) -> list[Any]:
        names = [name] if name in self.values else sorted(self.alike.get(fold(name), ()))
        return [value for name in names for value in self.values[name]]


class CaptionReader:
    """Reads the captions of a source's images, and counts in `unused` the files of captions that
    belong to no image or hold no caption, and in `outside` the links out of the source, also those
    to images.

    `lines` says whether each line of a text is a caption, or the whole text is one; None: each
    line, but the whole text if it has an empty line between others, which separates paragraphs.
    If captions are not `wanted`, no file holds captions for this reader.
    """

    def __init__(self, lines: CaptionLines | None = None, wanted: bool = True) -> None:
        self.lines = lines
        self.extensions = CAPTION_EXTENSIONS if wanted else ()
        self.unused = Unused()
        self.outside = Unused()
        self.paragraphs: set[str] = set()
        """Texts with an empty line between others, each taken as one caption."""
        self.files = Names()
        """Path of a file without its extension -> the files of captions with that path."""
        self.rows = Names()
        """Path of an image -> (table beside the images, this path, captions in the table)."""
        self.claimed: set[Any] = set()
        """Names of files, and rows, that belong to an image."""

    def note_file(self, root: Path, name: str) -> bool:
        """Notes a file of the folder `root`, given by its path in it, and reads it if it is a
        table. Returns False if such a file holds no captions."""
        stem, extension = os.path.splitext(name)
        folder, own_name = os.path.split(name)
        if self.extensions and own_name.lower() in TABLES:
            rows = read_table(root / name)
            for image, captions in rows.items():
                path = os.path.normpath(os.path.join(folder, image))
                self.rows.add(path, (name, path, captions))
            return bool(rows)
        has_captions = extension.lower() in self.extensions
        if has_captions:
            self.files.add(stem, name)
        return has_captions

    def read_beside(self, root: Path, image: str) -> tuple[str, ...]:
        """Reads the captions of an image of the folder `root`: in the files with its name, with or
        without the image's extension, `a.txt` or `a.jpg.txt`, and in tables."""
        files = self.files.find(os.path.splitext(image)[0]) + self.files.find(image)
        files.sort(key=lambda name: (not name.lower().endswith(".txt"), name))
        rows = self.rows.find(image)
        self.claimed.update(files, rows)
        found = [self.parse(escape_name(str(root / n)), (root / n).read_bytes()) for n in files]
        return tidy(chain(*found, *(captions for _, _, captions in rows)))

    def parse(self, place: str, content: bytes) -> tuple[str, ...]:
        """Returns the captions in the content of a file: of a text its lines, or all of it as one;
        JSON has a text, a list of texts, or an object with one of these under a key of
        `CAPTION_NAMES`. `place` is the name of the file. Raises UserError for other content."""
        is_json = place.lower().endswith(".json")
        try:
            text = content.decode("utf-8-sig")
            value = json.loads(text) if is_json else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place} holds no captions in UTF-8 ({error}); mend it.") from error
        captions = find_captions(place, value) if is_json else self.split(place, text)
        if not captions:
            kind = f"{describe_kind(place)} that hold none of {', '.join(ALL_NAMES)}"
            keys = ", ".join(value)[:80] if isinstance(value, dict) else "empty"
            self.unused.add(kind, f"{place}: {keys}")
        return captions

    def split(self, place: str, text: str) -> tuple[str, ...]:
        """Returns the captions of a text (see the class)."""
        lines = [line.strip() for line in split_lines(text)]
        has_gap = "\n\n" in "\n".join(lines).strip("\n")
        if self.lines is None and has_gap:
            self.paragraphs.add(place)
        whole = has_gap if self.lines is None else self.lines == CaptionLines.whole
        return tidy([" ".join(filter(None, lines))] if whole else lines)

    def finish(self, images: ImageList) -> None:
        """Counts the files and rows of captions that no image has claimed, and notes in `images`
        the texts that were taken whole."""
        for name in chain(*self.files.values.values()):
            if name not in self.claimed:
                self.unused.add(f"{describe_kind(name)} beside no image of that name", name)
        for image, rows in self.rows.values.items():
            if self.claimed.isdisjoint(rows):
                self.unused.add(f"rows of {rows[0][0]} that name no image", image)
        if self.outside.kinds:
            images.notes.append(f"links out of the source, which are followed: {self.outside}")
        if self.paragraphs:
            images.notes.append(
                f"{len(self.paragraphs)} texts have an empty line between others, as "
                f"{min(self.paragraphs)} has, and each of these texts is one caption; "
                "caption_lines=each takes each line as one, whole takes all texts whole"
            )


def fold(name: str) -> str:
    """Returns a name as it is compared: in one case, and with composed accents, as macOS does not
    store them."""
    return unicodedata.normalize("NFC", name).casefold()


def tidy(lines: Iterable[str]) -> tuple[str, ...]:
    """Returns the lines without spaces around them, each once, and none that is empty. A ? replaces
    what has no code in UTF-8: one half of a surrogate pair, which JSON may hold."""
    tidied = (line.encode(errors="replace").decode().strip() for line in lines)
    return tuple(dict.fromkeys(filter(None, tidied)))


def tidy_value(place: str, value: Any) -> tuple[str, ...]:
    """Returns the captions of a text or a list of texts, none for None; UserError for any other
    value."""
    lines = value if isinstance(value, list) else [value]
    lines = [line for line in lines if line is not None]
    if not all(isinstance(line, str) for line in lines):
        raise UserError(
            f"{place} must hold a caption or a list of captions, or an object with them as "
            f"{' or '.join(CAPTION_NAMES)}."
        )
    return tidy(lines)


def find_captions(place: str, value: Any) -> tuple[str, ...]:
    """Returns the captions of a JSON value, or of a row of a table."""
    if not isinstance(value, Mapping):
        return tidy_value(place, value)
    found = (tidy_value(place, value.get(name)) for name in CAPTION_NAMES)
    tags = value.get("tags")
    words = tags if isinstance(tags, list) else [tags]
    tagged = tidy([", ".join(word for word in words if isinstance(word, str))])
    return next(filter(None, found), tagged)


def read_caption_column(path: Path, dataset: Any) -> list[tuple[str, ...]]:
    """Returns the captions of each row of a folder of `datasets`."""
    names = [name for name in ALL_NAMES if name in dataset.features]
    if not names:
        raise UserError(
            f"source={path} has no column of captions ({', '.join(ALL_NAMES)}); rename "
            "one, or take captions=<file of templates>."
        )
    rows = enumerate(dataset.select_columns(names))
    return [find_captions(f"source={path}: row {i}", row) for i, row in rows]


def read_table(file: Path) -> dict[str, tuple[str, ...]]:
    """Reads a table of captions: .jsonl or .csv with the image's name in a column of `FILE_NAMES`,
    or .json with a list of such rows or in COCO's format. Returns name -> captions of all its rows;
    empty if no row has both. UserError for any other content."""
    found: dict[str, tuple[str, ...]] = {}
    try:
        for row in read_rows(file):
            name = next((str(row[key]) for key in FILE_NAMES if row.get(key)), "")
            if None in row:
                raise ValueError(f"the row of {name} has more values than there are columns")
            name = name.replace("\\", "/").encode(errors="replace").decode()
            captions = find_captions(f"{file}: the row of {name}", row) if name else ()
            found[name] = tidy((*found.get(name, ()), *captions))
    except UserError:
        raise
    except (*READ_ERRORS, csv.Error) as error:
        raise UserError(
            f"{file} cannot be read as a table of captions ({shorten_error(error)}); it must be "
            ".jsonl, .csv or COCO's .json."
        ) from error
    return found if any(found.values()) else {}


def read_rows(file: Path) -> Iterable[Any]:
    """Returns the rows of a table, each as a dict; of COCO's annotations those with a caption."""
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix.lower() == ".csv":
        return csv.DictReader(io.StringIO(text))
    if file.suffix.lower() == ".jsonl":
        return [json.loads(line) for line in split_lines(text) if line.strip()]
    content = json.loads(text)
    if isinstance(content, list):
        return content
    names = {image["id"]: image["file_name"] for image in content["images"]}
    return [row | {"file_name": names.get(row["image_id"])} for row in content["annotations"]]


def add_rows(images: ImageList, rows: Mapping[str, tuple[str, ...]], place: str) -> ImageList:
    """Returns the images with the captions of the `rows` that name them, by their path in the
    source or, if only one image has it, by their name alone. Notes the other rows."""
    paths = Names()
    names = Names()
    for index, entry in enumerate(images.entries):
        path = entry.key.removeprefix(f"{Path(entry.file).name}:")  # of a tar
        paths.add(path, index)
        names.add(path.rpartition("/")[2], index)

    entries = [*images.entries]
    lost = []
    for name, captions in rows.items():
        path = escape_name(os.path.normpath(name))
        found = paths.find(path) or names.find(path)
        if len(found) == 1:
            own = entries[found[0]]
            entries[found[0]] = replace(own, captions=tidy((*own.captions, *captions)))
        else:
            lost.append(path)
    if lost:
        images.notes.append(
            f"{len(lost)} of {len(rows)} names in {place} belong to no image, or to several, such "
            f"as {min(lost)[:200]}"
        )
    return replace(images, entries=entries)


def add_captions(images: ImageList, file: str) -> ImageList:
    """Returns the images with the captions of `file`, a table (see `read_table`) or templates."""
    path = Path(file).expanduser()
    if path.suffix.lower() not in TABLE_EXTENSIONS:
        return fill_templates(images, file)
    found = add_rows(images, read_table(path), f"captions={file}")
    if not any(entry.captions for entry in found.entries):
        raise UserError(
            f"captions={file} gives no image a caption; its rows need the name of an image, such "
            f"as {images.entries[0].key}, in a column of {', '.join(FILE_NAMES)}, and a caption in "
            f"one of {', '.join(ALL_NAMES)}."
        )
    return found


def fill_templates(images: ImageList, file: str) -> ImageList:
    """Returns the images with captions made of their classes' names: each line of `file` is a
    template, in which the name replaces {}. Underscores in names become spaces."""
    path = Path(file).expanduser()
    try:
        templates = tidy(split_lines(path.read_text(encoding="utf-8-sig")))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"captions={file} must be given, a table ({', '.join(TABLE_EXTENSIONS)}), or a text "
            f"file with a template such as 'a photo of {{}}' on each line ({error})."
        ) from error
    if not templates or not all("{}" in template for template in templates):
        raise UserError(f"captions={file}: each line must have {{}}, where the class's name goes.")
    if not images.class_names:
        raise UserError(f"captions={file}: the source has no classes; take captions=given.")
    names = [name.replace("_", " ") for name in images.class_names]
    filled = [tuple(t.replace("{}", name) for t in templates) for name in names]
    entries = [replace(entry, captions=filled[entry.label]) for entry in images.entries]
    return replace(images, entries=entries)


def settle_missing(images: ImageList, rule: CaptionsMissing | None) -> ImageList:
    """Returns the images, by `rule` without those that have no caption. UserError if the rule
    refuses them, without a rule if they are more than half, and if they are all."""
    lacking = [entry.key for entry in images.entries if not entry.captions]
    if not lacking:
        return images
    total = len(images.entries)
    share = f"{len(lacking)} of {total} images have no caption, such as {lacking[0]}"
    too_many = len(lacking) > (total / 2 if rule is None else total - 1)
    if too_many or rule == CaptionsMissing.refuse:
        unused = f" Not used: {images.unused}." if images.unused.kinds else ""
        raise UserError(
            f"{share}; put a .txt or .json with the image's name beside it, take captions=<table, "
            "or file of templates>, or say captions_missing=empty (they get the empty caption) or "
            f"drop (they are left out).{unused}"
        )
    if rule != CaptionsMissing.drop:
        return images
    images.notes.append(f"{share}; they are left out")
    return replace(images, entries=[entry for entry in images.entries if entry.captions])


def read_caption_list(file: str, total: int) -> list[tuple[str, ...]]:
    """Reads the captions of `total` samples from a JSON file, a list with a text or a list of texts
    for each sample."""
    try:
        values = read_rows(Path(file).expanduser())
    except READ_ERRORS as error:
        raise UserError(f"captions={file} cannot be read ({shorten_error(error)}).") from error
    if not isinstance(values, list) or len(values) != total:
        raise UserError(f"captions={file} must be a list with {total} entries, one a sample.")
    return [find_captions(f"captions={file}: entry {i}", value) for i, value in enumerate(values)]
