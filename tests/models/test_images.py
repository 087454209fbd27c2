"""Finding and decoding images."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageFile, UnidentifiedImageError

from encoding.images import (
    FORMATS,
    DecodedImages,
    ImageEntry,
    UnusableError,
    decode_image,
    describe_error,
)
from encoding.sources import list_images
from models.images import psnr, to_uint8


def encoded(image: Image.Image, **settings: object) -> bytes:
    """The image as a file: PNG, or TIFF where PNG cannot hold it."""
    stream = io.BytesIO()
    image.save(stream, "TIFF" if image.mode == "CMYK" else "PNG", **settings)
    return stream.getvalue()


@pytest.mark.parametrize("size", [(64, 64), (200, 64), (64, 333), (5, 9), (32, 33), (1000, 20)])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
def test_any_image_becomes_a_square(size: tuple[int, int], mode: str):
    pixels = decode_image(encoded(Image.new("RGB", size, (255, 0, 0)).convert(mode)), 32)
    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == torch.uint8
    assert (pixels == pixels[:, :1, :1]).all()
    if mode not in ("L", "CMYK"):
        assert pixels[:, 0, 0].tolist() == [255, 0, 0]


def test_the_centre_is_kept():
    image = Image.new("RGB", (300, 100))
    image.paste((0, 255, 0), (100, 0, 200, 100))
    assert (decode_image(encoded(image), 50)[1, 1:-1, 1:-1] > 200).all()


def test_images_are_turned_upright():
    image = Image.new("RGB", (32, 32))
    image.paste((255, 255, 255), (0, 0, 32, 16))  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    pixels = decode_image(encoded(image, exif=exif), 32).float()
    assert pixels[:, :, 16:].min() > 250
    assert pixels[:, :, :16].max() < 5


FORMATS_OUT = {
    "JPEG": {"quality": 95},
    "PNG": {},
    "WEBP": {"lossless": True},
    "BMP": {},
    "GIF": {},
    "TIFF": {"compression": "tiff_lzw"},
    "AVIF": {"quality": 95},
    "JPEG2000": {},
    "PPM": {},
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_decoded_and_of_several_frames_the_first(name: str):
    first = Image.new("RGB", (32, 32), (0, 128, 255))
    second = Image.new("RGB", (32, 32), "red")
    settings = FORMATS_OUT[name] | (
        {"save_all": True, "append_images": [second]} if name in ("GIF", "TIFF", "WEBP") else {}
    )
    stream = io.BytesIO()
    first.save(stream, name, **settings)
    pixels = decode_image(stream.getvalue(), 16)
    assert (pixels.int() - torch.tensor([0, 128, 255]).view(3, 1, 1)).abs().max() <= 4


def test_a_format_that_is_not_listed_is_not_decoded():
    """Pillow would start another program for some of them."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "EPS")
    with pytest.raises(UnidentifiedImageError):
        decode_image(stream.getvalue(), 8)


def with_alpha(mode: str) -> bytes:
    """32 × 16 pixels as a file: the left half hidden red or grey, the right half opaque and of the
    same colour."""
    left = Image.new("RGBA", (32, 16), (200, 40, 40, 255))
    left.paste((200, 40, 40, 0), (0, 0, 16, 16))
    if mode == "P":
        palette = Image.new("P", (32, 16), 1)
        palette.putpalette([200, 40, 40, 200, 40, 40])
        palette.paste(0, (0, 0, 16, 16))
        return encoded(palette, transparency=0)
    stream = io.BytesIO()
    left.convert(mode).save(stream, "TIFF" if mode == "PA" else "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_pixels_show_the_background_and_not_what_is_hidden_in_them(mode: str):
    for background, colour in (("white", [255, 255, 255]), ("#102030", [16, 32, 48])):
        pixels = decode_image(with_alpha(mode), 16, background)  # the centre of the image
        assert pixels[:, 8, 1].tolist() == colour
        assert (
            decode_image(with_alpha(mode), 16)[:, 8, -2].tolist()
            == pixels[:, 8, -2].tolist()
            != colour
        )


def test_half_transparent_pixels_are_mixed():
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    assert decode_image(encoded(image), 8, "blue")[:, 0, 0].tolist() == [128, 0, 127]


def raw_png(size: tuple[int, int], bits: int, colour: int, rows: bytes, key: bytes) -> bytes:
    """A PNG of a kind that Pillow does not write, with the transparent colour `key`."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = struct.pack(">IIBBBBB", *size, bits, colour, 0, 0, 0)
    parts = [(b"IHDR", head), (b"tRNS", key), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize(
    "content",
    [
        raw_png(
            (1, 1),
            16,
            2,
            b"\0" + struct.pack(">HHH", 0x8000, 0x1234, 0),
            struct.pack(">HHH", 0x8000, 0x1234, 0),
        ),
        raw_png((1, 1), 2, 0, b"\0\x40", b"\0\1"),
        raw_png((1, 1), 4, 0, b"\0\x70", b"\0\7"),
        raw_png((1, 1), 16, 0, b"\0\x80\0", b"\x80\0"),
    ],
    ids=["16 bits a colour", "2 bits", "4 bits", "16 bits of grey"],
)
def test_a_transparent_colour_of_any_depth_shows_the_background(content: bytes):
    assert decode_image(content, 1, "#0000ff").flatten().tolist() == [0, 0, 255]


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch):
    huge = raw_png((13_000, 13_000), 8, 0, b"", b"\0\0")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(UnusableError, match=r"^13000×13000 pixels are above max_megapixels=80$"):
        decode_image(huge, 8)


def test_max_megapixels_is_the_only_limit(monkeypatch: pytest.MonkeyPatch):
    # Pillow's own: it warns above it, and raises above twice of it
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    assert decode_image(encoded(Image.new("RGB", (8, 8))), 8).shape == (3, 8, 8)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_of_unknown_range_is_refused_and_not_clipped(mode: str):
    stream = io.BytesIO()
    Image.new(mode, (8, 8), 1000).save(stream, "TIFF")
    with pytest.raises(UnusableError, match=f"grey of mode {mode} has no known range"):
        decode_image(stream.getvalue(), 8)


def test_16_bit_pgm_is_scaled_and_not_clipped():
    assert (decode_image(b"P5 1 1 65535\n\x40\x00", 1) == 0x40).all()


def test_reasons_hold_no_addresses_and_no_paths(tmp_path: Path):
    """They are part of the manifest, which two runs must write alike."""
    whole = encoded(Image.effect_noise((64, 64), 50))
    contents = {
        "text.png": b"hello",
        "cut.png": whole[:2000],
        "damaged.png": whole[:60] + b"junk" * 9 + whole[100:],
    }
    said = []
    for folder in (tmp_path / "a", tmp_path / "b" / "c"):
        folder.mkdir(parents=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        entries = [
            ImageEntry(name, 0, str(folder / name), 0, len(content))
            for name, content in contents.items()
        ]
        said.append([item for item in DecodedImages(entries, 8) if isinstance(item, str)])
    assert said[0] == said[1]
    assert len(said[0]) == 3
    assert not [
        text for text in said[0] if "0x" in text or str(tmp_path) in text or "object at" in text
    ]
    assert (
        describe_error(OSError("bad <_io.BytesIO object at 0x7f00> and 0x7f01"))
        == "damaged (bad … and …)"
    )


def test_an_image_for_which_memory_does_not_suffice_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.png").write_bytes(encoded(Image.new("RGB", (8, 8))))

    def full(self: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", full)
    item = DecodedImages([ImageEntry("a.png", 0, str(tmp_path / "a.png"), 0, 100)], 8)[0]
    assert isinstance(item, OSError)


def test_16_bit_grey_is_scaled_and_not_clipped():
    pixels = decode_image(encoded(Image.new("I;16", (32, 32), 0x4000)), 32)
    assert (pixels == 0x40).all()


def test_values_become_the_nearest_of_256():
    values = torch.tensor([-2.0, -1.0, 1.6 / 127.5 - 1.0, 2.4 / 127.5 - 1.0, 0.9999, 1.0]).view(
        1, 1, 2, 3
    )
    assert to_uint8(values)[0, ..., 0].tolist() == [[0, 0, 2], [2, 255, 255]]


def test_psnr_is_of_a_peak_to_peak_of_two():
    black = torch.full((1, 3, 4, 4), -1.0)
    nearly = torch.full((1, 3, 4, 4), -0.98)
    # an error of a hundredth of the range
    assert psnr(black, nearly) == pytest.approx(40.0, abs=1e-3)
    assert psnr(black - 5.0, black) > 100.0  # what lies outside is shown as the nearest colour


def test_class_folders_are_listed_by_name(tmp_path: Path):
    for name in ("b/2.png", "b/10.PNG", "a/deep/x.jpeg", "a/notes.txt", "c/readme", "top.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    images = list_images(tmp_path)
    assert [(entry.key, entry.label) for entry in images.entries] == [
        ("a/deep/x.jpeg", 0),
        ("b/10.PNG", 1),
        ("b/2.png", 1),
    ]
    assert images.class_names == ["a", "b"]  # an empty folder is no class
    before = images.sha256()
    (tmp_path / "b" / "2.png").write_bytes(b"123456")
    assert list_images(tmp_path).sha256() != before
