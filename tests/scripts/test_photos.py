"""The judge of photos: the packed file, and a case of `bench photos` on a small set."""

from pathlib import Path
from zipfile import ZipFile

from PIL import Image

from common.files import ROOT
from scripts.bench import TABLES, Case, photos
from scripts.bench.cases import plan_job
from scripts.bench.measure import measure_case
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_tiny_autoencoder
from tests.harness.words import TINY_JOB, TINY_RUN


def test_packed_photos_are_trained_on_and_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = plan_job("photos", [])
    figures = [measure_case(case, job.cfg) for case in job.cases]
    assert ["photos.zip is not here" in case["reason"] for case in figures] == [True, True]

    # Pack 72 grey pictures of two classes, which are not square.
    for number in range(72):
        file = tmp_path / "photos" / "ab"[number % 2] / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (200, 300), 3 * number).save(file)
    pack = ["source=photos", f"encoder={save_tiny_autoencoder('AutoencoderKL', tmp_path / 'vae')}"]
    photos.pack_photos(pack)
    with ZipFile("photos.zip") as content:
        assert "encoder/diffusion_pytorch_model.safetensors" in content.namelist()
        picture = Image.open(content.open("pictures/b/000071.jpg"))
        assert picture.size == (128, 128)
        assert picture.getpixel((9, 64)) == (213, 213, 213)

    # Train on them, and compare few samples.
    lines = {
        "before": [
            "-m zipfile -e photos.zip latents/judge",
            f"{ROOT}/precompute_latents.py source=latents/judge/pictures out=latents/judge/8"
            f" encoder.path=latents/judge/encoder {' '.join(TINY_JOB)} held_out=24 resolution=8",
            f"{ROOT}/train.py {{words}} run_dir={{run}}",
        ],
        "evaluate": TABLES["photos"]["evaluate"] | {"guidance": [1, 3], "count": 80, "steps": 1},
        "sample": TABLES["photos"]["sample"] | {"steps": 1},
    }
    monkeypatch.setitem(TABLES, "photos", lines)
    words = ["data=resident", "data.path=latents/judge/8", *TINY_RUN, "save_every=2"]
    figures = measure_case(Case("tiny", photos.measure_photos, words), job.cfg)
    assert figures["fd"] <= figures["unguided_fd"]
    assert 0.0 <= figures["copied"] <= 1.0
    drawn = {file.suffix for file in tmp_path.glob("bench/photos_photos128/tiny/drawn.*")}
    assert drawn >= {".png", ".html"}

    # A damaged picture is named, and the earlier file stays.
    packed = Path("photos.zip").read_bytes()
    Path("photos/a/00.png").write_bytes(b"no image")
    with expect_refusal("source=photos: a/00.png.*remove or mend it"):
        photos.pack_photos(pack)
    assert Path("photos.zip").read_bytes() == packed
