"""Finds the images of a source: a folder with a subfolder per class, WebDataset tars, or a folder
that Hugging Face `datasets` saved. This module counts the files that it does not use. It raises a
UserError for what is surely a mistake, and adds a sentence to `ImageList.notes` for what may be a
mistake.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from common.config.schema import CaptionLines, CaptionsMissing, PrecomputeConfig
from common.errors import UserError
from encoding.caption_files import CaptionReader, add_captions, read_caption_column, settle_missing
from encoding.images import (
    EXTENSIONS,
    ImageEntry,
    ImageList,
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
"""Matches names of folders that surely hold a split of a set (train, test, …), not a class."""
POSSIBLE_SPLIT_NAME = re.compile(
    r"(.*[-_ ])?(train|val|valid|test|dev|extra|unlabell?ed)([-_ ].*)?", re.I
)
"""Matches names of folders that may hold a split of a set, or may be a class."""
BROKEN_LINK_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Values of `OSError.errno` for a symlink that leads to no file, or back to itself."""
EARLIER_CAPTIONS = {"caption_lines": CaptionLines.each, "captions_missing": CaptionsMissing.empty}
"""Rules for captions of a job that began before they were keys: job.json lacks them."""


def list_job_images(
    cfg: PrecomputeConfig, earlier: Mapping[str, Any]
) -> tuple[ImageList, PrecomputeConfig]:
    """Lists the images of a job, with captions if it has a text encoder. `earlier` is job.json, or
    empty if the job is new: a job keeps the order of its classes and its rules for captions, and
    one that began before they were keys keeps `EARLIER_CAPTIONS`. A job that began without the
    conversion of colour profiles, as all did before that was a key, goes on without. Also returns
    `cfg` with these rules."""
    if earlier:
        rules = {k: vars(cfg)[k] or earlier.get(k, v) for k, v in EARLIER_CAPTIONS.items()}
        cfg = replace(cfg, **rules)
    given = bool(cfg.text_encoder) and cfg.captions == "given"

    def list_source(source: str, order: Sequence[str]) -> ImageList:
        reader = CaptionReader(cfg.caption_lines, given)
        images = list_images(source, cfg.classes, cfg.allow_cut, reader, order)
        if cfg.text_encoder:
            images = images if given else add_captions(images, cfg.captions)
            images = settle_missing(images, cfg.captions_missing)
        return images

    images = list_source(str(cfg.source), earlier.get("manifest", {}).get("class_names", ()))
    if earlier and cfg.convert_profile and not earlier.get("convert_profile"):
        cfg = replace(cfg, convert_profile=False)
        images.notes.append("the job goes on as it began: colour profiles are not converted")
    if not isinstance(cfg.held_out, str):
        return images, cfg

    # Take the held-out images from their own source, and their classes by name.
    other = list_source(cfg.held_out, images.class_names)
    strange = [name for name in other.class_names if name not in images.class_names]
    if strange or bool(other.class_names) != bool(images.class_names):
        raise UserError(
            f"held_out={cfg.held_out} has other classes than source={cfg.source} "
            f"({join_few(strange) or 'none'}); name its folders as those of the source."
        )
    labels = [images.class_names.index(name) for name in other.class_names] or [0]
    held_out = [replace(entry, label=labels[entry.label]) for entry in other.entries]
    images.notes.extend(f"held_out={cfg.held_out}: {note}" for note in other.notes)
    return replace(images, held_out=held_out), cfg


def list_images(
    source: str | Path,
    classes: Classes = "given",
    allow_cut: bool = False,
    reader: CaptionReader | None = None,
    order: Sequence[str] = (),
) -> ImageList:
    """Lists the images of a folder with a subfolder per class, of one WebDataset tar, of a folder
    of such tars, or of a folder that Hugging Face `datasets` saved. The list is in the order of the
    files' names.

    With classes="none" all labels are 0, and the source may also be a folder without subfolders,
    tars without .cls, or `datasets` without labels. If the source does not name its classes,
    `classes` may give their number: the largest label does not show it, because a part of a set may
    lack images of some classes. `order` may give the order of all class folders; else they are in
    the order of their names, or of their numbers if all names are numbers. `reader` also reads the
    captions of the images. Raises UserError if the source is absent, has no image, has an image
    without a label, or has both tars and images. Also raises it if a tar is truncated or damaged,
    unless `allow_cut` is true.
    """
    path = Path(source).expanduser()
    if not path.is_dir() and not path.is_file():
        raise UserError(
            f"source={source} is no folder and no tar; give a folder with one subfolder a class, "
            "WebDataset tars, or a folder of datasets."
        )

    reader = reader or CaptionReader(wanted=False)
    try:
        if path.is_file():
            images = list_tars([path], classes, allow_cut, reader)
        elif any(path.glob("dataset_info.json")) or any(path.glob("*/dataset_info.json")):
            images = list_rows(path, classes, bool(reader.extensions))
        else:
            images = list_folder(path, classes, allow_cut, reader, order)
        reader.finish(images)
    except OSError as error:
        raise UserError(
            f"source={source}: {escape_name(str(error.filename or path))} cannot be read "
            f"({error.strerror}); make it readable, or move it away."
        ) from error

    if not images.entries:
        content = f" It holds: {images.unused}." if images.unused.kinds else ""
        if ".tar" in images.unused.kinds:
            content += " Name the folder of these tars; if a tar holds them, unpack it first."
        if ".parquet" in images.unused.kinds:
            content += (
                f' Save it with datasets: load_dataset("{source}", split="train")'
                '.save_to_disk("<new>"), and take source=<new>.'
            )
        raise UserError(
            f"source={source} holds no images ({', '.join(EXTENSIONS)}) in class folders and no "
            f".tar files with images.{content}"
        )
    return images


def walk_files(root: Path, reader: CaptionReader) -> Iterator[tuple[str, int]]:
    """Yields (path relative to `root`, size in bytes) of every plain file below `root` that is not
    hidden. Follows symlinks, except those that lead back to a folder that contains them, and counts
    in `reader.outside` those that lead out of `root`."""
    unused = reader.unused
    top = os.path.realpath(root)
    status = root.stat()
    todo = [("", {(status.st_dev, status.st_ino)})]
    while todo:
        folder, parents = todo.pop()
        here = os.path.realpath(root / folder)
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name = f"{folder}{entry.name}"
                if entry.name.startswith(".") or entry.name == "lost+found":
                    unused.add("hidden", name)
                    continue
                try:
                    status = entry.stat()
                except OSError as error:
                    if not entry.is_symlink() or error.errno not in BROKEN_LINK_ERRORS:
                        raise
                    unused.add("symlinks to nothing or in a circle", name)
                    continue

                # Follow one link only, which is quick: a link that it leads to has its own turn.
                if entry.is_symlink():
                    target = os.path.normpath(os.path.join(here, os.readlink(entry.path)))
                    if os.path.commonpath([top, target]) != top:
                        reader.outside.add(PurePosixPath(name).suffix or "folders", name)

                # Compare folders by device and inode, not by path: a symlink that leads back to a
                # folder has another path.
                place = (status.st_dev, status.st_ino)
                if stat.S_ISREG(status.st_mode):
                    yield name, status.st_size
                elif not stat.S_ISDIR(status.st_mode):
                    unused.add("neither file nor folder", name)
                elif place in parents:
                    unused.add("symlinks to nothing or in a circle", name)
                else:
                    if is_image(PurePosixPath(name).suffix.lower()):
                        unused.add("folders named like images (only what is in them)", name)
                    todo.append((f"{name}/", parents | {place}))


def list_folder(
    path: Path, classes: Classes, allow_cut: bool, reader: CaptionReader, order: Sequence[str]
) -> ImageList:
    """Lists the images of a folder of tars, or of a folder with a subfolder per class; with
    classes="none", all images anywhere below the folder."""
    unused = reader.unused
    tars, files_by_folder = sort_files(path, reader)
    if tars and files_by_folder:
        raise UserError(
            f"source={path} holds both {escape_name(tars[0].name)} and images such as "
            f"{escape_name(next(iter(files_by_folder.values()))[0][0])}; take the tar, "
            f"source={escape_name(str(tars[0]))}, or move it away."
        )
    if tars:
        return list_tars(tars, classes, allow_cut, reader)
    folders = sort_class_names([name for name in files_by_folder if name], order)
    names = [escape_name(name) for name in folders]
    if classes == "none":
        splits = [name for name in names if SPLIT_NAME.fullmatch(name)]
        notes = [f"images of {join_few(splits)} are all used"] if splits else []
        files = [file for files in files_by_folder.values() for file in files]
        return ImageList(list_entries(path, [files], reader), [], unused, notes)

    # If the images have classes, each direct subfolder of the source is one class. Images directly
    # in the source have no class, so they are not used.
    in_root = files_by_folder.pop("", [])
    if in_root and not files_by_folder:
        raise UserError(
            f"source={path} holds {len(in_root)} images and no class folders; put each class into "
            "a subfolder, or take classes=none to train without classes."
        )
    for name, _ in in_root:
        unused.add("images in the root beside class folders", name)
    for folder in path.iterdir():
        hidden = folder.name.startswith(".")
        if folder.name not in files_by_folder and folder.is_dir() and not hidden:
            unused.add("top folders without images", folder.name)
    if classes not in ("given", len(files_by_folder)):
        raise UserError(
            f"source={path} has {len(files_by_folder)} class folders; leave classes={classes} out."
        )
    files = [files_by_folder[name] for name in folders]
    notes = check_class_folders(path, files, names)
    return ImageList(list_entries(path, files, reader), names, unused, notes)


def sort_class_names(names: list[str], order: Sequence[str]) -> list[str]:
    """Returns the names of class folders in `order` if that has just these; else sorted, by their
    numbers if all are numbers: then a class 0, 1, … has the number that is its name."""
    places = {name: place for place, name in enumerate(order)}
    if {*map(escape_name, names)} == places.keys():
        return sorted(names, key=lambda name: places[escape_name(name)])
    numbered = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if numbered else 0, name))


Files = list[tuple[str, int]]
"""List of files, each as (path relative to the source, size in bytes)."""


def sort_files(path: Path, reader: CaptionReader) -> tuple[list[Path], dict[str, Files]]:
    """Returns the tars directly in the folder `path`, and a dict: name of a direct subfolder -> all
    images below it; the name "" stands for images directly in `path`. Notes files of captions in
    `reader`, and counts all other files in its `unused`."""
    unused = reader.unused
    tars = []
    images: dict[str, Files] = {}
    for name, size in walk_files(path, reader):
        top, slash, _ = name.partition("/")
        extension = PurePosixPath(name).suffix.lower()
        if extension == ".tar" and not slash:
            tars.append(path / name)
        elif not is_image(extension):
            if not reader.note_file(path, name):
                unused.add(describe_kind(name), name)
        elif not size:
            unused.add("empty files", name)
        else:
            images.setdefault(top if slash else "", []).append((name, size))
    return sorted(tars), images


def list_entries(path: Path, folders: list[Files], reader: CaptionReader) -> list[ImageEntry]:
    """Lists the images in `folders`; the index of a folder is the label of its images."""
    return [
        ImageEntry(
            escape_name(name), label, str(path / name), 0, size, reader.read_beside(path, name)
        )
        for label, files in enumerate(folders)
        for name, size in sorted(files, key=lambda file: file[0].split("/"))
    ]


def check_class_folders(path: Path, folders: list[Files], names: list[str]) -> list[str]:
    """Returns notes on class folders that may be splits of the set, or may hold several classes.
    Raises UserError if more than half of the folders are named like splits (train, test, …)."""
    splits = [name for name in names if SPLIT_NAME.fullmatch(name)]
    if 2 * len(splits) > len(names):
        raise UserError(
            f"source={path} holds {join_few(splits)}, which are parts of a set and no classes; "
            f"name {suggest_splits(path, splits)}."
        )
    doubtful = [name for name in names if name in splits or POSSIBLE_SPLIT_NAME.fullmatch(name)]
    notes = []
    if doubtful:
        notes.append(f"{join_few(doubtful)} among the class folders: parts of a set, or classes?")

    # All images below a class folder get the folder's label. Note each class folder with several
    # subfolders, because the subfolders may be the real classes.
    subfolders = [
        len({name.split("/")[1] for name, _ in files if name.count("/") > 1}) for files in folders
    ]
    merged = [name for name, number in zip(names, subfolders, strict=True) if number > 1]
    if merged:
        notes.append(
            f"{sum(number for number in subfolders if number > 1)} subfolders are merged into "
            f"{len(merged)} class{'es' * (len(merged) > 1)} ({join_few(merged)}); "
            "if the subfolders are the classes, take one folder, "
            f"source={path / merged[0]}, or move them up one level"
        )
    return notes


def suggest_splits(path: Path, splits: list[str]) -> str:
    """Returns words that take one split for training and one as held-out images, if there are
    several; those for training and validation first."""
    ordered = sorted(
        splits,
        key=lambda name: (not re.match("train", name, re.I), not re.match("val", name, re.I), name),
    )
    words = zip(("source", "held_out"), ordered, strict=False)
    return " ".join(f"{key}={path / name}" for key, name in words)


def list_rows(path: Path, classes: Classes, captioned: bool) -> ImageList:
    """Lists the images of a folder that `Dataset.save_to_disk` of Hugging Face `datasets` wrote:
    one image per row, with one column of images and, unless classes="none", one column of class
    labels."""
    splits = sorted(
        folder.name for folder in path.iterdir() if (folder / "dataset_info.json").is_file()
    )
    if splits:
        raise UserError(
            f"source={path} holds the splits {', '.join(splits)}; name "
            f"{suggest_splits(path, splits)}."
        )
    dataset, images, columns = open_dataset(str(path))
    labels: list[Any] = [0] * len(dataset)
    names = []
    if classes != "none":
        if len(columns) != 1:
            raise UserError(
                f"source={path} has {len(columns)} columns of class labels among "
                f"{', '.join(dataset.features)}; keep exactly one, or take classes=none to train "
                "without classes."
            )
        labels = list(dataset[columns[0]])
        class_names = getattr(dataset.features[columns[0]], "names", None)
        if class_names and classes not in ("given", len(class_names)):
            raise UserError(
                f"source={path} names {len(class_names)} classes; leave classes={classes} out."
            )
        labelled_rows = [(f"source={path}: row {i}", label) for i, label in enumerate(labels)]
        names = name_classes(labelled_rows, classes, class_names)

    # Put the hash by which `datasets` identifies the data into each image's key. A job recognises
    # its images by their keys, and row numbers alone are equal for any two data sets of the same
    # length.
    fingerprint = dataset._fingerprint
    captions = read_caption_column(path, dataset) if captioned else [()] * len(labels)
    entries = [
        ImageEntry(f"{fingerprint}:{images}:{i}", label, str(path), i, 0, texts)
        for i, (label, texts) in enumerate(zip(labels, captions, strict=True))
    ]
    return ImageList(entries, names)
