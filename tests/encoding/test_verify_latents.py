"""scripts.verify_latents: silent where all is well, precise where not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from data.manifest import read_manifest
from data.source import open_source
from models.autoencoders import DiffusersAutoencoder
from scripts.verify_latents import VerifyConfig, read_first_latents, read_originals, verify
from tests.harness.sets import Job, random_samples, save_latent_set


def problems(folder: Path, **settings: object) -> list[str]:
    return verify(VerifyConfig(path=str(folder), **{"count": 0} | settings))  # pyright: ignore[reportArgumentType]


def test_a_set_of_ours_has_none(job: Job, capsys: pytest.CaptureFixture[str]):
    folder = job("flips=true", "limit=15")
    assert problems(folder) == []
    assert (
        "12 training and 3 held-out latents of 2×8×8 in float16, 2 classes, 3 shards"
        in capsys.readouterr().out
    )


def test_decoded_latents_stand_beside_their_originals(
    job: Job, photos: Path, vae: Path, tmp_path: Path, capsys
):
    out = tmp_path / "grid.png"
    folder = job()
    assert problems(folder, count=3, source=str(photos), out=str(out)) == []
    assert (
        "the first 3 training latents decoded, each right of its original, at"
        in capsys.readouterr().out
    )
    with Image.open(out) as grid:
        assert grid.width == 6 * grid.height  # three pairs in a row
    source = open_source(folder)
    manifest = read_manifest(source)
    with torch.no_grad():
        mean, _ = DiffusersAutoencoder(str(vae)).encode(
            read_originals(str(photos), source, manifest, 3)
        )
    latents = read_first_latents(source, manifest, 3)
    torch.testing.assert_close(mean, latents.float(), rtol=0.0, atol=2e-2)


def test_the_grid_lies_in_the_set_and_not_in_the_current_folder(
    job: Job, tmp_path: Path, capsys, monkeypatch
):
    folder = job()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert problems(folder, count=2) == []
    assert f"{folder}/latents_check.png: the first 2 training latents" in capsys.readouterr().out
    assert problems(folder) == []
    monkeypatch.setattr("os.access", lambda *_: False)
    assert problems(folder, count=2) == []
    assert "runs/latents_check.png: the first 2 training latents" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "here").rglob("*")] == ["runs", "latents_check.png"]


def test_other_images_are_refused(job: Job, tmp_path: Path):
    folder = job()
    with pytest.raises(ValueError, match=r"is not what .* was made of"):
        problems(folder, count=3, source=str(other_images(tmp_path)), out=str(tmp_path / "x.png"))


def other_images(tmp_path: Path) -> Path:
    (tmp_path / "other" / "cat").mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(tmp_path / "other" / "cat" / "0.png")
    return tmp_path / "other"


@pytest.fixture
def folder(job: Job) -> Path:
    return job()


def edited(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(raw | changes))


def test_each_problem_is_said(folder: Path):
    content = bytearray((folder / "train-00001.tar").read_bytes())
    content[1200] ^= 1
    (folder / "train-00001.tar").write_bytes(content)
    (folder / "train-00002.tar").unlink()
    (folder / "leftover.tmp").write_text("")
    found = problems(folder)
    assert any("train-00001.tar (samples 6–9 of train) is damaged" in line for line in found)
    assert any("train-00002.tar (samples 12–15 of train) is missing" in line for line in found)
    assert any("train-00001.tar: size or sha256 differs" in line for line in found)
    assert any("leftover.tmp is not in the manifest" in line for line in found)
    assert len(found) == 4


def test_wrong_statistics_and_labels_are_said(folder: Path):
    mean = json.loads((folder / "manifest.json").read_text())["mean"]
    edited(folder, mean=[value + 0.01 for value in mean])
    (found,) = problems(folder)
    assert "manifest.json: mean is" in found
    edited(folder, mean=mean, class_names=["cat"])
    found = problems(folder)
    assert found
    assert all("labels from" in line and "to 1, but there are 1 classes" in line for line in found)


def test_a_set_without_a_path_is_asked_for():
    with pytest.raises(ValueError, match=r"path is not set; say which latent set"):
        verify(VerifyConfig())


def test_latents_made_elsewhere_are_checked_too(tmp_path: Path):
    save_latent_set(tmp_path / "set", [("train", random_samples(9, 0))])
    (found,) = [line for line in problems(tmp_path / "set") if "mean is" in line]
    assert str(open_source(tmp_path / "set")) in found
