"""The judge of photos: the packed file, and a case of `bench photos` on a small set."""

from zipfile import ZipFile

import pytest
from PIL import Image

from common.files import ROOT
from scripts.bench import TABLES, Case, photos
from scripts.bench.cases import plan_job
from scripts.bench.measure import measure_case
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_tiny_autoencoder
from tests.harness.words import TINY_JOB, TINY_RUN

COUNT = 72


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A folder with photos.zip, which holds smooth pictures of two classes, that are not square."""
    for number in range(COUNT):
        file = tmp_path / "photos" / "ab"[number % 2] / f"{number:02}.png"
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
        assert picture.getpixel((120, 10)) == pytest.approx((3 * 71, 200, 40), abs=8)
    assert sum(name.startswith("pictures/") for name in names) == COUNT
    assert "encoder/diffusion_pytorch_model.safetensors" in names
    (packed / "photos" / "a" / "00.png").write_bytes(b"no image")
    before = (packed / "photos.zip").read_bytes()
    with expect_refusal("source=photos: a/00.png.*remove or mend it"):
        photos.pack_photos(["source=photos", "encoder=vae"])
    assert (packed / "photos.zip").read_bytes() == before


def test_a_case_trains_and_compares_its_samples(packed, monkeypatch):
    draw = {
        name: TABLES["photos"][name]
        .replace("steps=20", "steps=1")
        .replace("count=5000", "count=80")
        for name in ("evaluate", "sample")
    }
    job = " ".join(TINY_JOB)
    before = [
        "-m zipfile -e photos.zip latents/judge",
        f"{ROOT}/precompute_latents.py source=latents/judge/pictures out=latents/judge/16"
        f" encoder.path=latents/judge/encoder {job} held_out=24 resolution=8",
        f"{ROOT}/train.py {{words}} run_dir={{run}}",
    ]
    monkeypatch.setitem(TABLES, "photos", draw | {"before": before, "guidances": [1.0, 3.0]})
    words = ["data=resident", "data.path=latents/judge/16", *TINY_RUN, "save_every=2"]
    case = Case("tiny", photos.measure_photos, words)
    figures = measure_case(case, plan_job("photos", ["setting=photos128"]).cfg)
    print(figures)
    assert 0


def test_without_photos_there_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = plan_job("photos", ["setting=photos128"])
    reason = "photos.zip is not here; python -m scripts.bench pack writes it"
    assert [measure_case(case, job.cfg) for case in job.cases] == 2 * [{"reason": reason}]
