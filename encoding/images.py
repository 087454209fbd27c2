"""Lists, reads, decodes and crops images. encoding/sources.py and encoding/tars.py find the images
of a source.

Letters: H W height and width of the output in pixels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import re
import textwrap
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageChops, ImageCms, ImageFile, ImageOps, UnidentifiedImageError, features
from torch import Tensor

from common.config.contradictions import list_sides
from common.config.schema import PrecomputeConfig
from common.errors import UserError
from common.libraries import silence_stderr
from common.text import escape_unprintable, shorten_error

FORMATS = {
    "JPEG": ".jpg .jpeg .jfif .jpe",
    "PNG": ".png",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "GIF": ".gif",
    "TIFF": ".tif .tiff",
    "AVIF": ".avif",
    "JPEG2000": ".jp2 .j2k .jpx .jpf .j2c .jpc",
    "PPM": ".ppm .pgm .pbm .pnm",
}
"""Pillow's name of each image format that a source may use -> the file extensions of the format.
From an animation or a document only the first frame or page is read."""
EXTENSIONS = {extension: name for name, text in FORMATS.items() for extension in text.split()}
"""Each of these extensions -> its format."""
OPTIONAL_CODECS = {
    "WEBP": "webp",
    "TIFF": "libtiff",
    "AVIF": "avif",
    "JPEG2000": "jpg_2000",
    "JPEG": "jpg",
    "PNG": "zlib",
}
"""Codecs that a build of Pillow may lack: format -> the name under which `PIL.features.check` knows
its codec."""
PLUGINS = dict.fromkeys(
    (".heic", ".heif", ".hif"), ("pillow_heif.HeifImagePlugin", "pillow-heif")
) | {".jxl": ("pillow_jxl.JpegXLImagePlugin", "pillow-jxl-plugin")}
"""Each extension of a format that Pillow reads only with another package -> the module that adds
the format to Pillow when it is imported, and the package's name."""
Conversion = ImageCms.ImageCmsTransform | None
"""How Pillow converts the colours of an image to sRGB; None: their values are read as sRGB."""
RESIZE = "box-halving, bicubic, center crop"
CONVERTED = "; colour profiles converted to sRGB"
"""Text that a job appends to `RESIZE` in its manifest if it converts colour profiles."""
MAX_NAMES_SHOWN = 20
"""Largest number of names, or of kinds of unused files, that a message lists; if there are more,
the message states only how many."""
MAX_CLASSES_SHOWN = 100
"""Largest number of classes for which `ImageList.describe` prints each class with its number of
images; if there are more classes, it prints only the smallest and the largest one."""


@dataclass(frozen=True)
class ImageEntry:
    """One image: its name `key`, its class index `label`, and where its bytes are: in a whole file
    (offset 0), in `size` bytes at `offset` of a tar, or in row `offset` of a folder that Hugging
    Face `datasets` saved (size 0)."""

    key: str
    label: int
    file: str
    offset: int
    size: int
    captions: tuple[str, ...] = ()


class Unused:
    """Counts the files that an image list does not use, by kind, with an example of each."""

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, name: str) -> None:
        """Counts one more file of this kind. The kind's example is the file whose name sorts
        first."""
        number, example = self.kinds.get(kind, (0, name))
        self.kinds[kind] = (number + 1, min(name, example))

    def __str__(self) -> str:
        """Lists the kinds, the most frequent first: "2 .txt (e.g. cat/a.txt); 1 hidden (e.g.
        .cache)"."""
        ordered = sorted(self.kinds.items(), key=lambda item: (-item[1][0], item[0]))
        shown = [
            f"{number} {kind} (e.g. {escape_name(name)})"
            for kind, (number, name) in ordered[:MAX_NAMES_SHOWN]
        ]
        rest = ordered[MAX_NAMES_SHOWN:]
        if rest:
            shown.append(f"{sum(number for _, (number, _) in rest)} of {len(rest)} more kinds")
        return "; ".join(shown)


@dataclass(frozen=True)
class ImageList:
    """The images of a source in a fixed order."""

    entries: list[ImageEntry]
    class_names: list[str]
    """Name of class i at index i; empty if there are no classes and every label is 0."""
    unused: Unused = field(default_factory=Unused)
    notes: list[str] = field(default_factory=list)
    """Sentences that point out possible mistakes, such as a class folder that is named like a split
    of the set (`train`)."""
    held_out: list[ImageEntry] = field(default_factory=list)
    """Images of another source, which a job encodes as the held-out split."""

    def sha256(self) -> str:
        """Returns a hash of the images' keys, labels and sizes in their order, and of the class
        names. Captions do not count."""
        lines = [f"{e.key}\t{e.label}\t{e.size}" for e in self.entries + self.held_out]
        lines += self.class_names
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def describe(self, source: str, planned: int) -> str:
        """Returns a text about the images, classes, unused files and notes of `source`. `planned`
        is the number of images that the job will encode."""
        counts = Counter(entry.label for entry in self.entries)
        numbers = [(counts[label], name) for label, name in enumerate(self.class_names)]
        images = f"{len(self.entries)} image{'s' * (len(self.entries) != 1)}"
        classes = (
            f"of {len(numbers)} class{'es' * (len(numbers) != 1)}" if numbers else "without classes"
        )
        lines = [f"{images} {classes} in {source}, {planned} to encode"]
        if len(numbers) > MAX_CLASSES_SHOWN:
            fewest, rarest_class = min(numbers)
            most, largest_class = max(numbers)
            lines.append(f"  from {fewest} images ({rarest_class}) to {most} ({largest_class})")
        elif numbers:
            sizes = ", ".join(f"{name}: {number}" for number, name in numbers)
            lines.append(textwrap.fill(sizes, 120, initial_indent="  ", subsequent_indent="  "))

        empty_classes = [name for number, name in numbers if not number]
        if empty_classes:
            lines.append(f"  classes without images: {join_few(empty_classes)}")
        if self.unused.kinds:
            lines.append(f"  not used: {self.unused}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def join_few(names: list[str]) -> str:
    """Joins the first `MAX_NAMES_SHOWN` names to one text, and says how many more there are."""
    first_names = ", ".join(names[:MAX_NAMES_SHOWN])
    if len(names) <= MAX_NAMES_SHOWN:
        return first_names
    return f"{first_names} and {len(names) - MAX_NAMES_SHOWN} more"


def is_image(extension: str) -> bool:
    """Tells whether a file with this extension, in lower case, is read as an image."""
    return find_obstacle(extension) is None


def describe_kind(name: str) -> str:
    """Returns the kind of an unused file, for messages: its extension, or the reason why a file
    with an image's extension is not used."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    if not suffixes:
        return "without extension"
    if suffixes[-2:-1] == [".tar"]:
        return "".join(suffixes[-2:])
    if suffixes[-1] in PLUGINS:
        _, package = PLUGINS[suffixes[-1]]
        return f"{suffixes[-1]} (read in folders, after pip install {package})"
    # In a WebDataset tar the extension begins at the first dot: `x.seg.png` has the extension
    # `.seg.png`, so it is not used as the image of the sample x.
    return find_obstacle(suffixes[-1]) or "images with two dots in their names"


def escape_name(name: str) -> str:
    r"""Returns a file's name as one line that can be printed, hashed and stored: bytes that are not
    UTF-8 become \xff."""
    return escape_unprintable(
        name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    )


@functools.lru_cache
def find_obstacle(extension: str) -> str | None:
    """Returns None if files with this extension are read as images: their format is in `FORMATS`,
    and the installed Pillow has the codec; or a package of `PLUGINS` reads them, which this
    function imports. Otherwise returns the extension, with what is missing to read such images."""
    if extension in PLUGINS:
        with suppress(ImportError):
            plugin = importlib.import_module(PLUGINS[extension][0])
            # Each worker decodes on one core; the package for JXL would use all in each of them.
            vars(plugin)["DECODE_THREADS"] = 1
            return None
    name = EXTENSIONS.get(extension)
    if name in OPTIONAL_CODECS and not features.check(OPTIONAL_CODECS[name]):
        return f"{extension} (this Pillow has no {name})"
    return None if name else extension


class UnusableError(ValueError):
    """An image that the job skips; the text of the error is the reason."""


@functools.cache
def open_dataset(path: str) -> tuple[Any, str, list[str]]:
    """Opens a folder that Hugging Face `datasets` saved, without decoding its images. Returns the
    data set, the name of its image column, and the names of its label columns.

    Raises UserError if the folder cannot be opened, or if it has no column of images or several.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"source={path} needs the package datasets: pip install 'fastlatent[datasets]'."
        ) from error
    try:
        dataset = datasets.load_from_disk(path).with_format(None)
    except Exception as error:  # libraries raise many kinds of errors for a damaged folder
        raise UserError(
            f"source={path} is a broken folder of datasets ({shorten_error(error)}); save it again."
        ) from error

    kinds = dataset.features.items()
    images = [name for name, kind in kinds if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in kinds if isinstance(kind, datasets.ClassLabel)]
    labels = labels or [name for name in ("label", "labels", "cls") if name in dataset.features]
    if len(images) != 1:
        columns = ", ".join(dataset.features)
        raise UserError(
            f"source={path} has {len(images)} columns of images among {columns}; keep exactly one."
        )
    return dataset.cast_column(images[0], datasets.Image(decode=False)), images[0], labels


def read_image(entry: ImageEntry) -> bytes:
    """Reads the encoded bytes of an image (JPEG, PNG, …) from its file, its tar, or its folder of
    Hugging Face `datasets`."""
    if entry.size == 0 and Path(entry.file).is_dir():
        dataset, images, _ = open_dataset(entry.file)
        cell = dataset[entry.offset][images] or {}
        if cell.get("bytes") is None and cell.get("path"):
            return Path(cell["path"]).read_bytes()
        return cell.get("bytes") or b""
    with open(entry.file, "rb") as stream:
        stream.seek(entry.offset)
        return stream.read(entry.size)


def read_with_retries(entry: ImageEntry) -> bytes:
    """Reads the encoded bytes of an image, in up to four attempts with pauses, because a network
    drive may recover. Raises OSError if the file is missing, or if all attempts fail."""
    for pause in (0.1, 0.4, 1.6):
        try:
            return read_image(entry)
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(pause)
    return read_image(entry)


def open_image(content: bytes, key: str) -> ImageFile.ImageFile:
    """Opens an image of `FORMATS`, or of the format of its extension if `PLUGINS` has that, without
    decoding it. `key` is the image's name."""
    # Switch off Pillow's own limit, which may be lower than max_megapixels.
    Image.MAX_IMAGE_PIXELS = None
    formats = list(FORMATS)
    extension = PurePosixPath(key).suffix.lower()
    if extension in PLUGINS:
        find_obstacle(extension)  # imports the package: a spawned worker has listed no images
        formats.append(Image.EXTENSION[extension])
    return Image.open(io.BytesIO(content), formats=formats)


@functools.lru_cache
def build_conversion(profile: bytes, mode: str) -> Conversion:
    """Builds the conversion of colours of this mode from an ICC profile to sRGB; None if that is
    the profile of sRGB, under any name. Raises PyCMSError for one that is broken or for other
    modes."""
    conversion = ImageCms.buildTransform(
        io.BytesIO(profile),
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        # It keeps white, and the colours that sRGB has too. For a profile of three primaries, such
        # as those of cameras and screens, perceptual and saturation do the same.
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
    )

    # The profile of sRGB changes none of 256 arbitrary colours by more than rounding does.
    values = hashlib.shake_128().digest(256 * Image.getmodebands(mode))
    colours = Image.frombytes(mode, (256, 1), values)
    change = ImageChops.difference(conversion.apply(colours), colours.convert("RGB"))
    return conversion if np.asarray(change).max() > 1 else None


def find_conversion(image: Image.Image) -> Conversion:
    """Returns the conversion by the colour profile that an opened image embeds. Returns None if its
    colours are read as sRGB: it has no profile, or one with which `build_conversion` converts
    nothing."""
    mode = Image.getmodebase(image.mode).replace("P", "RGB")
    if image.mode in ("CMYK", "LAB"):
        mode = image.mode
    # A tag of a TIFF may hold something else than bytes.
    with suppress(KeyError, TypeError, ImageCms.PyCMSError):
        return build_conversion(image.info["icc_profile"], mode)
    return None


def has_other_profile(content: bytes, key: str) -> bool:
    """Tells whether an image, whose name is `key`, has another colour profile than sRGB, by which
    `decode_image` converts it; false if it cannot be opened."""
    with suppress(Exception), open_image(content, key) as image:
        return find_conversion(image) is not None
    return False


def decode_image(
    content: bytes,
    resolution: int | list[int],
    background: str = PrecomputeConfig.background,
    max_megapixels: float = PrecomputeConfig.max_megapixels,
    convert_profile: bool = PrecomputeConfig.convert_profile,
    key: str = "",
) -> UInt8[Tensor, "3 H W"]:
    """Decodes an image, whose name is `key`, turns it upright by its EXIF data, converts it to sRGB
    by its colour profile (unless `convert_profile` is false), lays transparent pixels on
    `background`, resizes it to the smallest size that covers `resolution`, [height, width] or the
    side of a square, and crops the centre.

    A box filter halves the image while both sides are at least twice those of the output, then a
    bicubic filter resizes it: for squares the crop of ADM (Dhariwal & Nichol 2021), with which DiT
    and its successors made their latents. Colours are converted between the two, where an image is
    small; if it has transparent pixels, before both. Raises UnusableError for an image of more than
    `max_megapixels`, before anything is decoded (but the package for JXL decodes when it opens a
    file), and for one so narrow that it would be as large before the crop.
    """
    with open_image(content, key) as image:
        if image.width * image.height > 1e6 * max_megapixels:
            raise UnusableError(
                f"{image.width}×{image.height} pixels are above max_megapixels={max_megapixels:g}"
            )
        conversion = find_conversion(image) if convert_profile else None
        mend_colour_key(image)
        # libtiff prints up to hundreds of lines about a damaged file.
        with silence_stderr() if image.format == "TIFF" else nullcontext():
            image.load()
        ImageOps.exif_transpose(image, in_place=True)
        transparent = image.has_transparency_data
        image = convert_mode(image, background, conversion)

    height, width = list_sides(resolution)
    while image.height >= 2 * height and image.width >= 2 * width:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    if conversion and not transparent:
        image = conversion.apply(image)
    scale = max(height / image.height, width / image.width)
    rows = max(height, round(image.height * scale))
    columns = max(width, round(image.width * scale))
    if columns * rows > max(1e6 * max_megapixels, 16 * height * width):
        raise UnusableError(
            f"{columns}×{rows} pixels before the crop are above max_megapixels={max_megapixels:g}"
        )
    pixels = np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC))
    top = (rows - height) // 2
    left = (columns - width) // 2
    cropped = pixels[top : top + height, left : left + width].copy()
    return torch.from_numpy(cropped).permute(2, 0, 1)


def mend_colour_key(image: ImageFile.ImageFile) -> None:
    """Scales to 8 bits the colour or grey value that a PNG declares to be transparent, because
    Pillow scales only the pixels."""
    key = image.info.get("transparency")
    raw = image.tile[0].args if image.format == "PNG" and image.tile else None
    if key is not None and raw == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in key)
    elif key is not None and raw in ("L;2", "L;4"):
        image.info["transparency"] = key * (85 if raw == "L;2" else 17)


def convert_mode(image: Image.Image, background: str, conversion: Conversion) -> Image.Image:
    """Converts an opaque image to the mode that `conversion` takes, or to RGB if that is None; and
    one with transparent pixels to RGB, its colours by `conversion`, composited on `background`.

    Raises UnusableError for 32-bit or floating-point grey, since no file states its range.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        # Keep the high byte. Pillow's own conversion clips 16-bit grey at 255, which makes nearly
        # all of the image white.
        values = np.asarray(image)
        key = image.info.get("transparency")
        image = Image.fromarray((values >> 8).astype(np.uint8))
        if key is not None:
            image.putalpha(Image.fromarray(values != key))
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise UnusableError(
            f"grey of mode {image.mode} has no known range; save it with 8 or 16 bits"
        )
    mode = conversion.input_mode if conversion else "RGB"
    if not image.has_transparency_data:
        return image.convert(mode)

    image = image.convert("RGBA")
    colours = image.convert(mode)
    if conversion:
        colours = conversion.apply(colours)
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(colours, mask=image)
    return canvas


def describe_error(error: Exception) -> str:
    """Says in one line why an image cannot be decoded, in words that are the same in every run and
    on every machine."""
    if isinstance(error, UnusableError):
        return str(error)
    # Replace this error's own text: it contains a memory address, which differs in every run.
    if isinstance(error, UnidentifiedImageError):
        return f"no image of a format that is read ({', '.join(FORMATS)})"
    return re.sub(r"<[^<>]*>|0x[0-9a-fA-F]+", "…", f"damaged ({shorten_error(error)})")
