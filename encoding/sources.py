"""Finds the images of a source: a folder with a subfolder per class, WebDataset tars, or a folder
of `datasets`.

Whatever lies there and is not used is counted, and what looks like a mistake is refused or noted.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from common.errors import UserError
from encoding.images import (
    EXTENSIONS,
    ImageEntry,
    ImageList,
    Unused,
    describe_kind,
    escape_name,
    is_image,
    join_few,
    open_dataset,
)
from encoding.tars import list_tars, name_classes

Classes = int | Literal["given", "none"]
SPLIT_NAME = re.compile(
    r"(train|training|val|valid|validation|test|testing|eval|evaluation)([-_ ]?(set|data|\d{4}))?",
    re.I,
)
"""Names of folders that hold a part of a set, not a class."""
POSSIBLE_SPLIT_NAME = re.compile(
    r"(.*[-_ ])?(train|val|valid|test|dev|extra|unlabell?ed)([-_ ].*)?", re.I
)
"""Names that may be such ones."""
BROKEN_LINK_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Of a symlink: what it names is not there, or is itself."""


def list_images(
    source: str | Path, classes: Classes = "given", allow_cut: bool = False
) -> ImageList:
    """Lists the images of a folder with a subfolder per class, of WebDataset tars (a folder of them
    or one), both by name, or of a folder that Hugging Face `datasets` saved.

    classes="none": of a flat folder, of tars without .cls, of `datasets` without labels too; all
    labels are 0. A number says how many classes there are where the source does not name them: in a
    part of a set some may lack images. ValueError if there is no such source, no image in it, one
    without a label, or if it is not clear what is meant; for a tar that is cut or damaged, unless
    `allow_cut`.
    """
    path = Path(source).expanduser()
    plain = path.is_file() and path.suffix.lower() == ".tar"
    if not path.is_dir() and not plain:
        if path.is_file() and ".tar" in path.suffixes:
            raise UserError(
                f"source={source} is a compressed tar, and images are read from their place in the "
                "file; decompress it."
            )
        raise UserError(
            f"source={source} is no folder and no tar; give a folder with one subfolder a class, "
            "WebDataset tars, or a folder of datasets."
        )
    try:
        if plain:
            images = list_tars([path], classes, allow_cut, Unused())
        elif any(path.glob("dataset_info.json")) or any(path.glob("*/dataset_info.json")):
            images = list_rows(path, classes)
        else:
            images = list_folder(path, classes, allow_cut)
    except OSError as error:
        raise UserError(
            f"source={source}: {escape_name(str(error.filename or path))} cannot be read "
            f"({error.strerror}); make it readable, or move it away."
        ) from error
    if not images.entries:
        there = f" What is there: {images.unused}." if images.unused.kinds else ""
        raise UserError(
            f"source={source} holds no images ({', '.join(EXTENSIONS)}) in class folders and no "
            f".tar files with images.{there}"
        )
    return images


def walk_files(root: Path, unused: Unused) -> Iterator[tuple[str, int]]:
    """Name below `root` and size of every plain file that is not hidden; follows symlinks, except
    in circles."""
    found = root.stat()
    todo = [("", {(found.st_dev, found.st_ino)})]
    while todo:
        folder, above = todo.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                if entry.name.startswith(".") or entry.name == "lost+found":
                    unused.add("hidden", name)
                    continue
                try:
                    found = entry.stat()
                except OSError as error:
                    if not entry.is_symlink() or error.errno not in BROKEN_LINK_ERRORS:
                        raise
                    unused.add("symlinks to nothing or in a circle", name)
                    continue
                place = (found.st_dev, found.st_ino)
                if stat.S_ISREG(found.st_mode):
                    yield name, found.st_size
                elif not stat.S_ISDIR(found.st_mode):
                    unused.add("neither file nor folder", name)
                elif place in above:
                    unused.add("symlinks to nothing or in a circle", name)
                else:
                    if is_image(PurePosixPath(name).suffix.lower()):
                        unused.add("folders named like images (only what is in them)", name)
                    todo.append((f"{name}/", above | {place}))


def list_folder(path: Path, classes: Classes, allow_cut: bool) -> ImageList:
    """Lists a folder of tars, or one with a subfolder per class; without classes: images anywhere
    below it."""
    unused = Unused()
    tars, found = sort_files(path, unused)
    if tars and found:
        raise UserError(
            f"source={path} holds both {escape_name(tars[0].name)} and images such as "
            f"{escape_name(next(iter(found.values()))[0][0])}; take the tar, "
            f"source={escape_name(str(tars[0]))}, or move it away."
        )
    if tars:
        return list_tars(tars, classes, allow_cut, unused)
    names = [escape_name(name) for name in sorted(found) if name]
    if classes == "none":
        splits = [name for name in names if SPLIT_NAME.fullmatch(name)]
        notes = [f"images of {join_few(splits)} are all used"] if splits else []
        return make_image_list(
            path, [[file for files in found.values() for file in files]], [], unused, notes
        )

    # The top folders are the classes.
    in_root = found.pop("", [])
    if in_root and not found:
        raise UserError(
            f"source={path} holds {len(in_root)} images and no class folders; put each class into "
            "a subfolder, or take classes=none to train without classes."
        )
    for name, _ in in_root:
        unused.add("images in the root beside class folders", name)
    for folder in path.iterdir():
        if folder.name not in found and folder.is_dir() and not folder.name.startswith("."):
            unused.add("top folders without images", folder.name)
    if classes not in ("given", len(found)):
        raise UserError(
            f"source={path} has {len(found)} class folders; leave classes={classes} out."
        )
    folders = [found[name] for name in sorted(found)]
    return make_image_list(path, folders, names, unused, check_class_folders(path, folders, names))


Files = list[tuple[str, int]]
"""Names below the source, and sizes."""


def sort_files(path: Path, unused: Unused) -> tuple[list[Path], dict[str, Files]]:
    """The tars right in a folder, and the images below it by top folder ("" for those right in
    it)."""
    tars = []
    found: dict[str, Files] = {}
    for name, size in walk_files(path, unused):
        top, slash, _ = name.partition("/")
        extension = PurePosixPath(name).suffix.lower()
        if extension == ".tar" and not slash:
            tars.append(path / name)
        elif not is_image(extension):
            unused.add(describe_kind(name), name)
        elif not size:
            unused.add("empty files", name)
        else:
            found.setdefault(top if slash else "", []).append((name, size))
    return sorted(tars), found


def make_image_list(
    path: Path, folders: list[Files], names: list[str], unused: Unused, notes: list[str]
) -> ImageList:
    """The list of the files in folders, one a class; `names` are those of the classes, if any."""
    entries = [
        ImageEntry(escape_name(name), label, str(path / name), 0, size)
        for label, files in enumerate(folders)
        for name, size in sorted(files, key=lambda file: file[0].split("/"))
    ]
    return ImageList(entries, names, unused, notes)


def check_class_folders(path: Path, folders: list[Files], names: list[str]) -> list[str]:
    """What the class folders could be instead; ValueError if most of them have the names of
    splits."""
    splits = [name for name in names if SPLIT_NAME.fullmatch(name)]
    if 2 * len(splits) > len(names):
        first = min(splits, key=lambda name: (not name.lower().startswith("train"), name))
        raise UserError(
            f"source={path} holds {join_few(splits)}, which are parts of a set and no classes; name "
            f"one: source={path / first}."
        )
    odd = [
        name for name in names if SPLIT_NAME.fullmatch(name) or POSSIBLE_SPLIT_NAME.fullmatch(name)
    ]
    notes = [f"{join_few(odd)} among the class folders: parts of a set, or classes?"] if odd else []

    # Of each class, the subfolders that have images.
    inside = [
        len({name.split("/")[1] for name, _ in files if name.count("/") > 1}) for files in folders
    ]
    merged = [name for name, number in zip(names, inside, strict=True) if number > 1]
    if merged:
        notes.append(
            f"{sum(number for number in inside if number > 1)} subfolders are merged into "
            f"{len(merged)} class{'es' * (len(merged) > 1)} ({join_few(merged)}); "
            "if the subfolders are the classes, take one folder, "
            f"source={path / merged[0]}, or move them up one level"
        )
    return notes


def list_rows(path: Path, classes: Classes) -> ImageList:
    """Lists the rows of a folder made by `Dataset.save_to_disk`, with a column of images and one of
    class labels."""
    splits = sorted(
        folder.name for folder in path.iterdir() if (folder / "dataset_info.json").is_file()
    )
    if splits:
        raise UserError(
            f"source={path} holds the splits {', '.join(splits)}; name one: "
            f"source={path / splits[0]}."
        )
    dataset, images, columns = open_dataset(str(path))
    labels: list[Any] = [0] * len(dataset)
    names: list[str] = []
    if classes != "none":
        if len(columns) != 1:
            raise UserError(
                f"source={path} has {len(columns)} columns of class labels among "
                f"{', '.join(dataset.features)}; keep exactly one, or take classes=none to train "
                "without classes."
            )
        labels = list(dataset[columns[0]])
        given = getattr(dataset.features[columns[0]], "names", None)
        if given and classes not in ("given", len(given)):
            raise UserError(
                f"source={path} names {len(given)} classes; leave classes={classes} out."
            )
        told = [(f"source={path}: row {i}", label) for i, label in enumerate(labels)]
        names = name_classes(told, classes, given)

    # of the data, so that another set of the same length is another job
    content = dataset._fingerprint
    entries = [
        ImageEntry(f"{content}:{images}:{i}", label, str(path), i, 0)
        for i, label in enumerate(labels)
    ]
    return ImageList(entries, names)
