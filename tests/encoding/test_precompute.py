"""precompute_latents.py: the latents it stores are those of the images, and it refuses sources and
settings that no job can have."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel.techniques.compilation import Compile
from accel.techniques.cudnn_benchmark import CudnnBenchmark
from common.files import hash_file
from data.manifest import read_manifest
from data.resident import InMemoryLatents
from encoding.images import decode_image
from models.autoencoders import WEIGHTS_FILE, DiffusersAutoencoder
from models.images import psnr
from precompute_latents import precompute
from tests.harness.batches import resident, take
from tests.harness.foreign import read_set
from tests.harness.refusals import expect_refusal
from tests.harness.sets import flip_byte, match, read_contents, write_tar
from training.config.compose import compose

EXACT = "dtype=float32"


def load_set(folder):
    loader = resident(folder, batch_size=4).loader
    assert isinstance(loader, InMemoryLatents)
    return loader


def find_photos(photos):
    """The photos in the order of their classes and names."""
    return sorted(photos.rglob("*.*"))


@pytest.fixture(scope="module")
def pixels(photos):
    """The photos, cropped, in [-1, 1]."""
    images = [decode_image(file.read_bytes(), 16) for file in find_photos(photos)]
    return torch.stack(images).float() / 127.5 - 1.0


@pytest.fixture(scope="module")
def autoencoder(vae):
    return DiffusersAutoencoder(str(vae))


def encode(autoencoder, pixels):
    """Means and standard deviations, image by image."""
    posteriors = [autoencoder.encode(image[None]) for image in pixels]
    means, stds = (torch.cat(parts) for parts in zip(*posteriors, strict=True))  # pyright: ignore[reportCallIssue, reportArgumentType]
    return means, stds


# Stored latents


def test_the_manifest_says_what_was_done(encoded, photos, vae):
    manifest = read_manifest(encoded())
    shards = [("held_out", 4), ("train", 6), ("train", 6), ("train", 4)]
    assert [(shard.split, shard.count) for shard in manifest.shards] == shards
    expected = {
        "count": 16,
        "held_out": 4,
        "skipped": [],
        "class_names": ["cat", "dog"],
        "channels": 2,
        "height": 8,
        "width": 8,
        "kind": "mean_std",
        "dtype": "float16",
        "flips": False,
        "resolution": 16,
        "scaling_factor": 0.5,
        "shift_factor": 0.25,
        "encoder_class": "AutoencoderKL",
        "encoder_sha256": hash_file(vae / WEIGHTS_FILE),
        "source": str(photos),
    }
    assert {key: getattr(manifest, key) for key in expected} == expected
    assert manifest.encoder["path"] == str(vae)


def test_psnr_is_that_of_the_first_sixteen_images(encoded, pixels, autoencoder):
    first = pixels[:16]
    expected = psnr(autoencoder.decode(autoencoder.encode(first)[0]), first)
    assert abs(read_manifest(encoded()).psnr_db - expected) < 1e-3


@pytest.mark.parametrize("flips", [False, True])
def test_statistics_are_those_of_what_training_sees(encoded, flips):
    folder = encoded(f"flips={flips}".lower())
    train = load_set(folder).train
    manifest = read_manifest(folder)
    means = torch.cat([train.latents, train.mirrored] if flips else [train.latents]).double()
    stds = torch.cat([train.std, train.mirrored_std] if flips else [train.std]).double()
    mean = means.mean((0, 2, 3))
    variance = (means - mean.view(-1, 1, 1)).square() + stds.square()
    std = variance.mean((0, 2, 3)).sqrt()
    assert manifest.mean == pytest.approx(mean.tolist(), rel=1e-9, abs=1e-9)
    assert manifest.std == pytest.approx(std.tolist(), rel=1e-9)


def test_training_sees_normalised_latents(encoded):
    stream = take(load_set(encoded("flips=true")), 400).latents
    assert stream.mean((0, 2, 3)).abs().max() < 0.02
    assert (stream.std((0, 2, 3)) - 1.0).abs().max() < 0.02


def test_latents_labels_and_flips_are_those_of_the_images(encoded, pixels, autoencoder):
    tensors = read_set(encoded("flips=true", EXACT))
    mean, std = encode(autoencoder, pixels)
    mirrored, mirrored_std = encode(autoencoder, pixels.flip(3))
    index = match(mean, tensors["latents"], 1e-4)
    for name, expected in (
        ("std", std),
        ("mirrored", mirrored),
        ("mirrored_std", mirrored_std),
        ("labels", torch.arange(2).repeat_interleave(10)),
    ):
        torch.testing.assert_close(tensors[name][index], expected, rtol=1e-3, atol=1e-4)
    assert (mirrored - mean.flip(3)).abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_is_what_is_stored(encoded, dtype):
    assert load_set(encoded(f"dtype={dtype}")).train.latents.dtype == getattr(torch, dtype)


def test_a_sample_is_one_standard_normal_draw_from_the_posterior(encoded):
    posterior = read_set(encoded(EXACT))
    drawn = read_set(encoded("kind=sample", EXACT))
    assert "std" not in drawn
    noise = (drawn["latents"] - posterior["latents"]) / posterior["std"]
    assert noise.mean().abs() < 5 / noise.numel() ** 0.5
    assert (noise.var() - 1.0).abs() < 5 * (2 / noise.numel()) ** 0.5

    # each image has a draw of its own
    assert (noise[1:] - noise[:-1]).flatten(1).abs().amax(1).min() > 0.1


def test_samples_are_the_same_each_time_and_at_any_batch_size(encoded, job):
    first = read_set(encoded("kind=sample", EXACT))["latents"]
    assert torch.equal(first, read_set(job("kind=sample", EXACT))["latents"])
    other = read_set(encoded("kind=sample", EXACT, "batch_size=3"))["latents"]
    torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-4)


def test_a_damaged_image_does_not_move_the_draws_of_others(encoded, job, more_photos):
    """A draw belongs to the image's place in the list, which no other image shares."""
    settings = ["kind=sample", EXACT, "held_out=0", "batch_size=20", "shard_size=20"]
    intact = read_set(encoded(*settings))["latents"]
    (more_photos / "cat" / "004.jpg").write_bytes(b"no image at all")
    rest = read_set(job(*settings, source=more_photos))["latents"]
    distance = (rest.flatten(1)[:, None] - intact.flatten(1)[None]).abs().amax(2)
    assert len(rest) == 19
    assert distance.amin(1).max() < 1e-3


def test_limit_and_seed_choose_the_images(encoded):
    whole, part, other = (
        read_set(encoded(EXACT, "held_out=0", *words))["latents"]
        for words in ([], ["limit=7"], ["limit=7", "seed=1"])
    )
    assert len(part) == 7
    torch.testing.assert_close(part, whole[:7], rtol=1e-4, atol=1e-4)
    assert not torch.equal(part, other)


def test_worker_processes_change_nothing(encoded, job):
    assert read_contents(job("num_workers=2")) == read_contents(encoded())


def test_a_model_trains_on_the_result_and_decodes_a_grid(encoded, run, tmp_path):
    words = ["data=resident", f"data.path={encoded('flips=true')}", "sample_every=1"]
    run(*words, "eval_every=1", "sampling.steps=2", "sampling.per_class=3")
    for step in (1, 2):
        with Image.open(tmp_path / "run" / "samples" / f"step-{step}.png") as grid:
            # two classes with names, three samples of each
            assert grid.height * 3 / 2 < grid.width < grid.height * 3
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert np.isfinite(json.loads(line)["eval_loss"])


def test_other_encoder_weights_do_not_decode(job, run, vae, tmp_path):
    other = shutil.copytree(vae, tmp_path / "vae")
    folder = job(f"encoder.path={other}")
    flip_byte(other / WEIGHTS_FILE)
    with expect_refusal(f"{other} has other weights"):
        run("data=resident", f"data.path={folder}", "sample_every=1")


def test_photos_through_taef2(assets, tmp_path):
    words = [
        "encoder=local",
        "runtime=eager",
        "resolution=128",
        "num_workers=0",
        "batch_size=8",
        "limit=24",
        f"source={assets}/images/grocery",
        f"encoder.path={assets}/vae/taef2",
        f"out={tmp_path}/out",
    ]
    folder = precompute(compose(words, "precompute_latents")).parent
    manifest = read_manifest(folder)
    assert manifest.psnr_db > 24.0
    assert (manifest.channels, manifest.height, manifest.width) == (32, 16, 16)
    assert manifest.count + manifest.held_out == 24
    assert load_set(folder).train.std is None


# Other sources


def save_tars(photos, folder):
    """Saves the photos as two WebDataset tars."""
    for part in range(2):
        members = {}
        for i, file in enumerate(find_photos(photos)[part::2]):
            label = b"0" if file.parent.name == "cat" else b"1\n"
            members[f"{i:04d}{file.suffix}"] = file.read_bytes()
            members |= {f"{i:04d}.cls": label, f"{i:04d}.json": b"{}"}
        write_tar(folder / f"{part}.tar", members)
    return folder


def save_rows(photos, folder):
    """Saves the photos as a folder of `datasets`."""
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    rows: dict[str, Any] = {"image": [], "label": []}
    for file in find_photos(photos):
        rows["image"].append({"bytes": file.read_bytes(), "path": None})
        rows["label"].append(file.parent.name)
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)
    return folder


@pytest.mark.parametrize(("save", "names"), [(save_tars, ["0", "1"]), (save_rows, ["cat", "dog"])])
def test_tars_and_datasets_give_the_latents_of_the_class_folder(
    encoded, job, photos, tmp_path, save, names
):
    expected = read_set(encoded(EXACT))
    folder = job(EXACT, "num_workers=1", source=save(photos, tmp_path / "source"))
    tensors = read_set(folder)
    index = match(expected["latents"], tensors["latents"], 1e-4)
    assert torch.equal(tensors["labels"][index], expected["labels"])
    assert read_manifest(folder).class_names == names


# Reports


def test_the_plan_is_said_once_before_the_encoder_is_looked_for(job, more_photos, capsys):
    (more_photos / "cat" / "notes.txt").write_text("mine")
    plan = (
        f"20 images of 2 classes in {more_photos}, 20 to encode\n  cat: 10, dog: 10\n"
        "  not used: 1 .txt (e.g. cat/notes.txt)\n"
    )
    job("dry_run=true", source=more_photos)
    assert capsys.readouterr().out.count(plan) == 1
    with expect_refusal(r"encoder\.path"):
        job("encoder.path=/nowhere/at/all", source=more_photos)
    assert capsys.readouterr().out.startswith(plan)


def test_the_ledger_sees_a_compiled_encoder(job, capsys, monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    job("runtime.compile=true", "runtime.on_unavailable=error")
    assert re.search(r"compile +on +on ", capsys.readouterr().out)


def test_the_autotuner_is_told_what_lets_it_on(job, capsys, monkeypatch):
    """The job says when it leaves the autotuner off, and which key turns it on at the cost of equal
    bytes."""
    monkeypatch.setattr(CudnnBenchmark, "find_obstacle", lambda self: None)
    job("runtime.cudnn_benchmark=true")
    ledger = " ".join(capsys.readouterr().out.split())
    assert "! cudnn_benchmark on off off here: it chooses algorithms by their time" in ledger
    assert "same_bytes=false gives that up" in ledger
    values = []
    monkeypatch.setattr(CudnnBenchmark, "on_process", lambda self: values.append(self.value))
    job("runtime.cudnn_benchmark=true", "same_bytes=false", out="new")
    assert values == [True]


# Refusals


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["min_psnr=60"],
            r"reconstructs the first 16 images at .* dB, below min_psnr=60\.0; check enc",
        ),
        (["encoder.path=null"], r"encoder\.path=None must be a valid string"),
        (["held_out=0.99"], r"held_out=0\.99 of 20 images leaves none to train on; lower it"),
        (["resolution=17"], "resolution=17: .* multiple of its downsampling"),
    ],
)
def test_a_job_that_cannot_be_done_is_refused_before_anything_is_written(
    job, tmp_path, words, sentence
):
    with expect_refusal(sentence):
        job(*words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["source=null"], "source is not set; say which: source=<a folder of images or tars>"),
        (["source=''"], "source is not set"),
        (["out=null"], "out is not set; say which: out=<the folder for the latents>"),
        (["batch_size=0"], "batch_size=0 must be at least 1"),
        (["held_out=1.0"], "held_out=1.0 must be below 1"),
        (["background=5"], "background=5 is no opaque colour; give a name"),
        (["background='#ffffff80'"], "background=#ffffff80 is no opaque colour"),
        (["max_megapixels=-1"], "max_megapixels=-1.0 must be above 0"),
        (["max_megapixels=nan"], "max_megapixels=nan is not finite; give"),
        (["min_psnr=nan"], "min_psnr=nan is not finite; give"),
        (["classes=some"], "classes=some must be given, none, or a number"),
        ([f"seed={2**64}"], "does not fit into 64 bits"),
    ],
)
def test_settings_that_no_job_can_have_are_refused(words, sentence):
    with expect_refusal(sentence):
        compose(["source=x", "out=y", *words], "precompute_latents")
