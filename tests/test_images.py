"""Finding and decoding images."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from encoding.images import decode_image
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


def test_16_bit_grey_is_scaled_and_not_clipped():
    pixels = decode_image(encoded(Image.new("I;16", (32, 32), 0x4000)), 32)
    assert (pixels == 0x40).all()


def test_values_become_the_nearest_of_256():
    values = torch.tensor([-2.0, -1.0, 1.6 / 127.5 - 1.0, 2.4 / 127.5 - 1.0, 0.9999, 1.0]).view(1, 1, 2, 3)
    assert to_uint8(values)[0, ..., 0].tolist() == [[0, 0, 2], [2, 255, 255]]


def test_psnr_is_of_a_peak_to_peak_of_two():
    black, nearly = torch.full((1, 3, 4, 4), -1.0), torch.full((1, 3, 4, 4), -0.98)
    assert psnr(black, nearly) == pytest.approx(40.0, abs=1e-3)  # an error of a hundredth of the range
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


def test_a_tar_with_two_samples_of_one_key_is_refused(tmp_path: Path):
    picture = encoded(Image.new("RGB", (8, 8)))
    for names, said in ((("x.jpg", "x.jpg"), "there twice"), (("x.jpg", "x.png"), "has 2 images")):
        with tarfile.open(tmp_path / "images.tar", "w") as tar:
            for name, content in (*((name, picture) for name in names), ("x.cls", b"0")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        with pytest.raises(ValueError, match=said):
            list_images(tmp_path)
