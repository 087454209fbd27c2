"""Samples by the thousand: formats, chunks that survive a kill, and shares of processes."""

import numpy as np
import pytest
import torch
from PIL import Image

from common.distributed.ranks import SINGLE, Ranks
from common.files import read_object
from scripts.sample import Format, SampleConfig, sample_run
from tests.harness.draws import draw_samples, kill_at_piece, make_job
from tests.harness.refusals import expect_refusal


def read_pixels(file):
    with Image.open(file) as image:
        return np.asarray(image)


@pytest.fixture(scope="module")
def drawn(trained, tmp_path_factory):
    """1,100 images with a grid. Read only."""
    return draw_samples(trained, tmp_path_factory.mktemp("drawn") / "a", grid=40)


def test_an_npz_has_labels_a_grid_and_a_description(drawn):
    arrays = np.load(drawn)
    images = arrays["arr_0"]
    assert images.shape == (1100, 8, 8, 3)
    assert images.dtype == np.uint8
    assert arrays["labels"].tolist() == [*range(10)] * 110
    # a row a class, 8 pixels and a border, enlarged, right of the names
    grid = read_pixels(drawn.with_suffix(".png"))
    assert (grid[4:36:4, -36:-4:4] == images[30]).all()
    assert grid.shape[0] == 10 * 40
    assert (grid[:, : -4 * 40] < 128).any()
    settings = {"count": 1100, "solver": "heun", "steps": 2, "labels": "balanced"}
    assert settings.items() <= read_object(drawn.with_suffix(".json")).items()
    assert not list(drawn.parent.glob("*.parts"))


def test_every_format_holds_the_same_samples(drawn, trained, tmp_path, monkeypatch):
    images = np.load(drawn)["arr_0"]
    part = draw_samples(trained, tmp_path / "some", count=70)
    assert (np.load(part)["arr_0"] == images[:70]).all()
    assert not part.with_suffix(".png").exists()  # only when asked
    monkeypatch.setattr("sampling.draw.CHUNK_SAMPLES", 64)
    folder = draw_samples(trained, tmp_path / "pngs", count=70, format=Format.png)
    assert (read_pixels(folder / "0006" / "000066.png") == images[66]).all()
    with expect_refusal("pngs is there already"):
        draw_samples(trained, tmp_path / "pngs", count=5, format=Format.png)
    file = draw_samples(trained, tmp_path / "latents", count=25, format=Format.latents)
    pixels = ((np.load(file)["latents"].clip(-1, 1) + 1) * 127.5).round()
    assert (pixels[:, 0] == images[:25, ..., 0]).all()


def test_samples_of_other_settings_never_replace_each_other(trained, tmp_path, monkeypatch, capsys):
    """Without `out` they are in the run's folder, under the step and a hash of the settings."""
    monkeypatch.chdir(tmp_path)
    files = [
        sample_run(SampleConfig(run_dir=str(trained), count=4, grid=4, steps=1, seed=seed))
        for seed in (0, 1, 0)
    ]
    assert files[0] == files[2] != files[1]
    assert {file.parent for file in files} == {trained / "drawn"}
    assert all(file.name.startswith("step-8-") for file in files)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [str(files[0]), str(files[0].with_suffix(".png"))]


@pytest.mark.usefixtures("quick_compiler")
def test_a_killed_command_goes_on_to_the_same_bytes(drawn, trained, tmp_path):
    def dies(number, folder):
        (folder / "000001-tmp").write_bytes(b"half")
        return number == 1

    out = tmp_path / "stopped"
    kill_at_piece(dies, lambda: draw_samples(trained, out))
    parts = tmp_path / "stopped.parts"
    (chunk,) = parts.glob("000000-*.safetensors")
    with expect_refusal(r"count was 1100, is 1200\); choose another out, or delete"):
        draw_samples(trained, out, count=1200)
    with expect_refusal("techniques was"):
        draw_samples(trained, out, runtime={"compile": True})
    # a chunk that a disk damaged is drawn again
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    assert draw_samples(trained, out).read_bytes() == drawn.read_bytes()
    assert not parts.exists()


def test_processes_draw_their_share(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "wait_for_all", lambda self: None)

    def draw(folder, ranks=SINGLE):
        job = make_job(trained, "count=1100", "batch_size=64", ranks=ranks)
        return job.run(tmp_path / folder, {}, lambda labels, latents: {"latents": latents})

    alone = draw("one")
    for rank in (1, 2, 0):
        several = draw("three", Ranks(rank, 3))
        assert several.list_rank_chunks() == [rank]
        several.close()
    assert len(alone.parts) == 3
    for one, other in zip(alone, several, strict=True):
        assert torch.equal(one["latents"], other["latents"])
    next((tmp_path / "one").glob("000001-*")).unlink()
    with expect_refusal("piece 1 is gone or damaged"):
        alone.read(1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"count": 0}, "count=0 must be at least 1"),
        ({"grid": 5000}, "grid=5000 must be at most 1024"),
        ({"grid": 5, "format": Format.latents}, "grid=5 is made of images"),
        ({"weights": "x"}, "both set"),
    ],
)
def test_impossible_settings_are_refused(changes, sentence, trained, tmp_path):
    with expect_refusal(sentence):
        draw_samples(trained, tmp_path / "x", **changes)
