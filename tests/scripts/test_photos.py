"""The judge of photos: the packed file, and a case of `bench photos` on a small set."""

import os
from zipfile import ZipFile

import pytest
from PIL import Image

from scripts.bench import TABLES, photos
from scripts.bench.cases import plan_job
from scripts.bench.measure import measure_case
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_tiny_autoencoder
from tests.harness.words import TINY_MODEL

COUNT = 72


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A folder with photos.zip, which holds smooth pictures of two classes, that are not square."""
    for number in range(COUNT):
        file = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        colours = Image.new("RGB", (2, 3), (3 * number, 200, 40))
        colours.putpixel((0, 1), (0, 2 * number, 255))
        colours.resize((200, 300), Image.Resampling.BICUBIC).save(file)
    monkeypatch.chdir(tmp_path)
    encoder = save_tiny_autoencoder("AutoencoderKL", tmp_path / "vae")
    photos.pack_photos(["source=photos", f"encoder={encoder}"])
    return tmp_path


def test_pictures_and_their_encoder_travel_in_one_file(packed):
    with ZipFile(packed / "photos.zip") as content:
        names = content.namelist()
        picture = Image.open(content.open("pictures/b/000071.jpg"))
        assert (picture.format, picture.size) == ("JPEG", (128, 128))
        red, green, blue = picture.getpixel((120, 10))
        assert abs(red - 3 * 71) < 8 and abs(green - 200) < 8 and abs(blue - 40) < 8
    assert sum(name.startswith("pictures/") for name in names) == COUNT
    assert "encoder/diffusion_pytorch_model.safetensors" in names
    (packed / "photos" / "a" / "0.png").write_bytes(b"no image")
    before = (packed / "photos.zip").read_bytes()
    with expect_refusal("source=photos: a/0.png.*remove or mend it"):
        photos.pack_photos(["source=photos", "encoder=vae"])
    assert (packed / "photos.zip").read_bytes() == before


