"""Decoding images to one size."""

import io
import re
import struct
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from encoding.decoding import DecodedImages
from encoding.images import FORMATS, ImageEntry, UnusableError, decode_image, describe_error
from encoding.shapes import describe_shapes, read_aspect
from tests.harness.sets import PNG, encode_image


@pytest.mark.parametrize("size", [(200, 64), (64, 333), (5, 9)])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
def test_any_image_becomes_a_square(size, mode):
    image = Image.new("RGB", size, (255, 0, 0)).convert(mode)
    pixels = decode_image(encode_image(image, "TIFF" if mode == "CMYK" else "PNG"), 32)
    assert pixels.shape == (3, 32, 32)
    assert (pixels == pixels[:, :1, :1]).all()
    if mode not in ("L", "CMYK"):
        assert pixels[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("resolution", [[12, 8], [8, 12], [24, 6]])
def test_a_crop_keeps_rows_and_columns(resolution):
    """As Pillow's own crop to an aspect does."""
    rows, columns = np.mgrid[:60, :40]
    pixels = np.stack([4 * rows, 6 * columns, 0 * rows], 2).astype(np.uint8)
    image = Image.fromarray(pixels)
    fitted = ImageOps.fit(image, resolution[::-1], Image.Resampling.BICUBIC)
    ours = decode_image(encode_image(image), resolution).permute(1, 2, 0).numpy()
    assert np.abs(ours - np.asarray(fitted, np.int16)).max() <= 4


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_header_tells_the_aspect_of_the_upright_image(kind, orientation, monkeypatch):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    content = encode_image(Image.new("RGB", (30, 20)), kind, exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        upright = ImageOps.exif_transpose(image)
    monkeypatch.delattr(ImageFile.ImageFile, "load")
    assert read_aspect(PNG, "a") == 1.0
    assert read_aspect(content, "a") == upright.width / upright.height
    assert read_aspect(content[:4], "a") is None


def test_a_resolution_that_keeps_more_is_named():
    aspects = [3 / 4] * 3 + [4 / 3]
    said = describe_shapes(aspects, 256, [32, 32])
    assert "patch_size may be 1, 2, 4, 8, 16, 32\n" in said
    assert "of the first 4 images 75% are portrait, 25% landscape: resolution=[256,256]" in said
    # 288 / 224 keeps 0.75 · 9/7 of the portraits and 3/4 · 7/9 of the landscape
    assert said.endswith(" keeps 75% of their pixels, [288,224] would keep 87%")
    assert describe_shapes([4 / 3, 3 / 4], 64, [8, 8]).endswith("keeps 75% of their pixels")


def test_images_are_turned_upright():
    image = Image.new("RGB", (32, 32))
    image.paste((255, 255, 255), (0, 0, 32, 16))  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    pixels = decode_image(encode_image(image, exif=exif), 32)
    assert pixels[:, :, 16:].min() > 250
    assert pixels[:, :, :16].max() < 5


SETTINGS = {"JPEG": {"quality": 95}, "AVIF": {"quality": 95}, "WEBP": {"lossless": True}}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_decoded_and_of_several_frames_the_first(name):
    settings = SETTINGS.get(name, {})
    if name in ("GIF", "TIFF", "WEBP"):
        settings = settings | {
            "save_all": True,
            "append_images": [Image.new("RGB", (32, 32), "red")],
        }
    content = encode_image(Image.new("RGB", (32, 32), (0, 128, 255)), name, **settings)
    pixels = decode_image(content, 16)
    assert (pixels.int() - torch.tensor([0, 128, 255]).view(3, 1, 1)).abs().max() <= 4


def test_a_format_that_is_not_listed_is_not_decoded():
    """Pillow would start another program for some of them."""
    with pytest.raises(UnidentifiedImageError):
        decode_image(encode_image(Image.new("RGB", (8, 8)), "EPS"), 8)


def encode_with_alpha(mode):
    """32 × 16 pixels: the left half transparent, the right half opaque and of the same colour."""
    if mode == "P":
        palette = Image.new("P", (32, 16), 1)
        palette.putpalette([200, 40, 40, 200, 40, 40])
        palette.paste(0, (0, 0, 16, 16))
        return encode_image(palette, transparency=0)
    image = Image.new("RGBA", (32, 16), (200, 40, 40, 255))
    image.paste((200, 40, 40, 0), (0, 0, 16, 16))
    return encode_image(image.convert(mode), "TIFF" if mode == "PA" else "PNG")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
@pytest.mark.parametrize(
    ("background", "colour"), [("white", [255] * 3), ("#102030", [16, 32, 48])]
)
def test_transparent_pixels_show_the_background_and_not_their_own_colour(mode, background, colour):
    pixels = decode_image(encode_with_alpha(mode), 16, background)
    assert pixels[:, 8, 1].tolist() == colour
    assert pixels[:, 8, -2].tolist() != colour


def make_png(size, bits, colour, rows, key):
    """A PNG of a kind that Pillow does not write, with the transparent colour `key`."""
    head = struct.pack(">IIBBBBB", *size, bits, colour, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    chunks = {b"IHDR": head, b"tRNS": key, b"IDAT": zlib.compress(rows), b"IEND": b""}
    for kind, content in chunks.items():
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        png += struct.pack(">I", len(content)) + kind + content + checksum
    return png


@pytest.mark.parametrize(
    ("bits", "colour", "row", "key"),
    [
        (16, 2, b"\x80\0\x12\x34\0\0", b"\x80\0\x12\x34\0\0"),
        (16, 0, b"\x80\0", b"\x80\0"),
        (4, 0, b"\x70", b"\0\7"),
    ],
    ids=["16 bits a colour", "16 bits of grey", "4 bits"],
)
def test_a_transparent_colour_of_any_depth_shows_the_background(bits, colour, row, key):
    content = make_png((1, 1), bits, colour, b"\0" + row, key)
    assert decode_image(content, 1, "#0000ff").flatten().tolist() == [0, 0, 255]


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    huge = make_png((13_000, 13_000), 8, 0, b"", b"\0\0")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(UnusableError, match=r"^13000×13000 pixels are above max_megapixels=80$"):
        decode_image(huge, 8)


def test_max_megapixels_is_the_only_limit(monkeypatch):
    # Pillow warns above its own limit, and raises above twice of it
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    assert decode_image(PNG, 8).shape == (3, 8, 8)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_of_unknown_range_is_refused_and_not_clipped(mode):
    with pytest.raises(UnusableError, match=f"grey of mode {mode} has no known range"):
        decode_image(encode_image(Image.new(mode, (8, 8), 1000), "TIFF"), 8)


@pytest.mark.parametrize(
    "content", [b"P5 1 1 65535\n\x40\x00", encode_image(Image.new("I;16", (8, 8), 0x4000))]
)
def test_16_bit_grey_is_scaled_and_not_clipped(content):
    assert (decode_image(content, 1) == 0x40).all()


def test_reasons_hold_no_addresses_and_no_paths(tmp_path):
    """Reasons are part of the manifest, which two runs must write alike."""
    whole = encode_image(Image.effect_noise((64, 64), 50))
    file = tmp_path / "a.png"
    for content in (b"hello", whole[:2000], whole[:60] + b"junk" * 9 + whole[100:]):
        file.write_bytes(content)
        ((_, text),) = DecodedImages([ImageEntry("a.png", 0, str(file), 0, len(content))], 8)
        assert not re.search(f"0x|object at|{tmp_path}", text)
    error = OSError("bad <_io.BytesIO object at 0x7f00> and 0x7f01")
    assert describe_error(error) == "damaged (bad … and …)"


def test_an_image_for_which_memory_does_not_suffice_is_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(PNG)
    monkeypatch.setattr(ImageFile.ImageFile, "load", Mock(side_effect=MemoryError))
    _, item = DecodedImages([ImageEntry("a.png", 0, str(tmp_path / "a.png"), 0, 100)], 8)[0]
    assert isinstance(item, OSError)
