"""Finds images on disk, decodes and crops them.

Letters: S side of the square output in pixels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import Dataset

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
RESIZE = "box-halving, bicubic, center crop"


@dataclass(frozen=True)
class ImageEntry:
    """One image: a whole file, `size` bytes at `offset` of a tar, or row `offset` of a folder of `datasets`."""

    key: str
    label: int
    file: str
    offset: int
    size: int


@dataclass(frozen=True)
class ImageList:
    """The images of a source in a fixed order."""

    entries: list[ImageEntry]
    class_names: list[str]

    def sha256(self) -> str:
        """Hashes names, labels and sizes, in order."""
        lines = [f"{e.key}\t{e.label}\t{e.size}" for e in self.entries] + self.class_names
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def list_images(source: str | Path) -> ImageList:
    """Lists the images of a folder with a subfolder per class, of WebDataset tars (a folder of them or one), both by
    name, or of a folder that Hugging Face `datasets` saved.

    ValueError if there is no such source, no image in it, or one without a label.
    """
    path = Path(source).expanduser()
    if not path.is_dir() and path.suffix != ".tar":
        raise ValueError(
            f"source={source} is no folder and no tar; "
            f"give a folder with one subfolder a class, WebDataset tars, or a folder of datasets."
        )
    if (path.is_dir() and any(path.glob("dataset_info.json"))) or any(path.glob("*/dataset_info.json")):
        return list_rows(path)
    tars = [path] if path.suffix == ".tar" else sorted(path.glob("*.tar"))
    images = list_tars(tars) if tars else list_class_folder(path)
    if not images.entries:
        raise ValueError(
            f"source={source} holds no images ({', '.join(EXTENSIONS)}) in class folders and no .tar files."
        )
    return images


def list_class_folder(path: Path) -> ImageList:
    """Lists a folder with a subfolder per class; ignores hidden subfolders and those without images."""
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    found = {f.name: sorted(p for p in f.rglob("*") if p.suffix.lower() in EXTENSIONS) for f in folders}
    classes = [name for name, files in found.items() if files]
    entries = [
        ImageEntry(str(file.relative_to(path)), label, str(file), 0, file.stat().st_size)
        for label, name in enumerate(classes)
        for file in found[name]
    ]
    return ImageList(entries, classes)


def sample_key(name: str) -> tuple[str, str]:
    """Splits the name of a tar's member as WebDataset does: the sample's key ends at the first dot of the file name."""
    folder, _, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}/{stem}".lstrip("/"), extension


def list_tars(tars: list[Path]) -> ImageList:
    """Lists the images of WebDataset tars: a key is a name up to its first dot, a label the integer in `<key>.cls`."""
    entries = []
    for file in tars:
        with tarfile.open(file, "r:") as tar:  # uncompressed, because images are read by their offset
            members: dict[str, dict[str, tarfile.TarInfo]] = {}
            for member in filter(tarfile.TarInfo.isreg, tar):  # no links, no devices
                key, extension = sample_key(member.name)
                parts = members.setdefault(key, {})
                if f".{extension.lower()}" in parts:
                    raise ValueError(
                        f"{file}: {member.name} is there twice; every sample of a tar needs a key of its own."
                    )
                parts[f".{extension.lower()}"] = member
            for key, parts in members.items():
                images = [member for extension, member in parts.items() if extension in EXTENSIONS]
                if not images:
                    continue
                if len(images) > 1:
                    raise ValueError(f"{file}: {key} has {len(images)} images; give each a key of its own.")
                image = images[0]
                if ".cls" not in parts:
                    raise ValueError(f"{file}: {image.name} has no label; a member named {key}.cls must hold it.")
                text = tar.extractfile(parts[".cls"]).read().decode().strip()  # pyright: ignore[reportOptionalMemberAccess]
                if not text.isdecimal():
                    raise ValueError(f"{file}: {parts['.cls'].name} must hold a class index, not {text!r}.")
                entries.append(
                    ImageEntry(f"{file.name}:{image.name}", int(text), str(file), image.offset_data, image.size)
                )
    return ImageList(entries, [str(i) for i in range(max((e.label for e in entries), default=-1) + 1)])


def list_rows(path: Path) -> ImageList:
    """Lists the rows of a folder made by `Dataset.save_to_disk`, with one column of images and one of class labels."""
    splits = sorted(folder.name for folder in path.iterdir() if (folder / "dataset_info.json").is_file())
    if splits:
        raise ValueError(f"source={path} holds the splits {', '.join(splits)}; name one: source={path / splits[0]}.")
    dataset, images, labels = opened_dataset(str(path))
    column = dataset[labels]
    names = getattr(dataset.features[labels], "names", None) or [str(i) for i in range(max(column, default=-1) + 1)]
    if wrong := [i for i, label in enumerate(column) if label is None or not 0 <= label < len(names)]:
        raise ValueError(f"source={path}: row {wrong[0]} has no label; remove it, or give it one.")
    content = dataset._fingerprint  # of the data, so that another set of the same length is another job
    return ImageList(
        [ImageEntry(f"{content}:{images}:{i}", label, str(path), i, 0) for i, label in enumerate(column)], names
    )


@functools.cache
def opened_dataset(path: str) -> tuple[Any, str, str]:
    """Opens a folder of `datasets`, its images left encoded; returns also the names of its image and label columns."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(f"source={path} needs the package datasets: pip install 'fastlatent[datasets]'.") from error
    dataset = datasets.load_from_disk(path)
    images = [name for name, kind in dataset.features.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in dataset.features.items() if isinstance(kind, datasets.ClassLabel)]
    labels = labels or [name for name in ("label", "labels", "cls") if name in dataset.features]
    for what, found in (("images", images), ("class labels", labels)):
        if len(found) != 1:
            columns = ", ".join(dataset.features)
            raise ValueError(f"source={path} has {len(found)} columns of {what} among {columns}; keep exactly one.")
    return dataset.cast_column(images[0], datasets.Image(decode=False)), images[0], labels[0]


def read_image(entry: ImageEntry) -> bytes:
    """Reads the encoded image."""
    if entry.size == 0 and Path(entry.file).is_dir():
        dataset, images, _ = opened_dataset(entry.file)
        found = dataset[entry.offset][images]
        return found["bytes"] if found["bytes"] is not None else Path(found["path"]).read_bytes()
    with open(entry.file, "rb") as stream:
        stream.seek(entry.offset)
        return stream.read(entry.size)


def read_again(entry: ImageEntry) -> bytes:
    """Reads the encoded image, with pauses between attempts, for the network may come back. OSError in the end."""
    for pause in (0.1, 0.4, 1.6):
        try:
            return read_image(entry)
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(pause)
    return read_image(entry)


def decode_image(content: bytes, side: int) -> UInt8[Tensor, "3 S S"]:
    """Decodes, turns upright by EXIF, resizes the shorter side to `side` and crops the centre.

    Halving by box filter while the image is twice too large, then bicubic: the crop of ADM
    (Dhariwal & Nichol 2021), which DiT and its successors made their latents with.
    """
    import numpy as np
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content)) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey at 255: nearly all of it white
            image = image.point(lambda value: value / 256).convert("L")
        image = image.convert("RGB")
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = side / min(image.size)
    size = (max(side, round(image.width * scale)), max(side, round(image.height * scale)))
    pixels = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    top, left = (size[1] - side) // 2, (size[0] - side) // 2
    return torch.from_numpy(pixels[top : top + side, left : left + side].copy()).permute(2, 0, 1)


class DecodedImages(Dataset):
    """Decodes images to 8-bit tensors.

    An item is text, name and reason, if Pillow cannot decode the image, and an OSError that says both if no attempt
    read it.
    """

    def __init__(self, entries: list[ImageEntry], side: int) -> None:
        self.entries, self.side = entries, side

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Tensor | str | OSError:
        entry = self.entries[index]
        try:
            content = read_again(entry)
        except OSError as error:
            return OSError(f"{entry.key}: {error}")
        try:
            return decode_image(content, self.side)
        except Exception as error:  # Pillow raises many kinds for damaged files; the caller lists them
            return f"{entry.key}: {type(error).__name__}: {error}"


class Decoded(NamedTuple):
    """A worker's batch. It has one tensor for all images, because each tensor costs a file descriptor."""

    pixels: Tensor
    """8 bits, (n, 3, S, S)."""
    places: list[int]
    """Index of each of these n images in the batch."""
    reasons: list[str]
    """Name of each other image, and the reason why Pillow cannot decode it."""
    unread: str | None
    """Name of the first image that no attempt could read, and the reason."""


def collate(items: list[Tensor | str | OSError]) -> Decoded:
    """Joins items of `DecodedImages` to one batch."""
    images = {i: item for i, item in enumerate(items) if isinstance(item, Tensor)}
    pixels = torch.stack(list(images.values())) if images else torch.empty(0, dtype=torch.uint8)
    reasons = [item for item in items if isinstance(item, str)]
    unread = next((str(item) for item in items if isinstance(item, OSError)), None)
    return Decoded(pixels, list(images), reasons, unread)
