"""scripts.verify_latents finds no problem in a good set, and names each problem of another."""

import json
import re

from PIL import Image

from scripts.verify_latents import VerifyConfig, verify
from tests.harness.refusals import expect_refusal
from tests.harness.sets import edit_manifest, flip_byte


def find_problems(folder, **settings):
    return verify(VerifyConfig(path=str(folder), **{"count": 0} | settings))  # pyright: ignore[reportArgumentType]


def test_a_grid_of_the_first_latents_is_decoded(encoded, tmp_path, capsys):
    out = tmp_path / "grid.png"
    folder = encoded("flips=true", "limit=15")
    assert find_problems(folder, count=3, out=str(out)) == []
    assert "12 training and 3 held-out latents of 2×8×6 in float16" in capsys.readouterr().out
    with Image.open(out) as grid:
        assert grid.width / grid.height == 3 * (12 + 2) / (16 + 2)  # each tile has a frame


def test_the_grid_lies_in_the_set_and_not_in_the_current_folder(done, tmp_path, monkeypatch):
    folder = done()
    monkeypatch.chdir(tmp_path)
    assert find_problems(folder, count=2) == []
    assert (folder / "latents_check.png").is_file()
    assert [*tmp_path.iterdir()] == [folder]


def test_each_problem_is_said(done):
    folder = done()
    flip_byte(folder / "train-00001.tar", 1200)
    (folder / "train-00002.tar").unlink()
    (folder / "leftover.tmp").write_text("")
    problems = find_problems(folder)
    texts = (
        "train-00001.tar (samples 6–9 of train) is damaged",
        "train-00002.tar (samples 12–15 of train) is missing",
        "train-00001.tar: size or sha256 differs",
        "leftover.tmp is not in the manifest",
    )
    for text, problem in zip(texts, problems, strict=True):
        assert text in problem


def test_wrong_statistics_and_labels_are_said(done):
    folder = done()
    mean = json.loads((folder / "manifest.json").read_text())["mean"]
    edit_manifest(folder, mean=[value + 0.01 for value in mean])
    (problem,) = find_problems(folder)
    assert "manifest.json: mean is" in problem
    edit_manifest(folder, mean=mean, class_names=["cat"])
    assert "labels from 0 to 1, but there are 1 classes" in " ".join(find_problems(folder))


def test_other_images_in_the_source_are_said(job, more_photos):
    (more_photos / "cat" / "none.png").write_bytes(b"is left out of the set")
    for _ in range(2):
        folder = job("limit=12", source=more_photos)
    assert find_problems(folder, source=str(more_photos)) == []
    for file in more_photos.rglob("*.png"):
        flip_byte(file)
    assert find_problems(folder) == []
    (problem,) = find_problems(folder, source=str(more_photos))
    assert re.fullmatch(r"source=.*: \d+ images are not those that were encoded", problem)


def test_a_set_without_a_path_is_asked_for():
    with expect_refusal("path is not set; say path=<folder or URL"):
        verify(VerifyConfig())
