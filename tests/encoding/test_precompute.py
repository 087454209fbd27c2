"""precompute_latents.py: the latents it stores are those of the images, and it refuses sources and
settings that no job can have."""

import re
import shutil

import pytest
import torch

from accel.techniques.compilation import Compile
from accel.techniques.cudnn_benchmark import CudnnBenchmark
from common.config.compose import compose
from common.files import hash_file
from data.manifest import read_manifest
from encoding.images import decode_image
from models.autoencoders import WEIGHTS_FILE, DiffusersAutoencoder
from models.images import psnr
from tests.harness.foreign import read_set
from tests.harness.refusals import expect_refusal
from tests.harness.sets import flip_byte, match

EXACT = "dtype=float32"


@pytest.fixture(scope="module")
def pixels(photos):
    """The photos, cropped, in [-1, 1]."""
    images = [decode_image(file.read_bytes(), [16, 12]) for file in sorted(photos.rglob("*.*"))]
    return torch.stack(images).float() / 127.5 - 1.0


@pytest.fixture(scope="module")
def autoencoder(vae):
    return DiffusersAutoencoder(str(vae))


# Stored latents


def test_the_manifest_says_what_was_done(encoded, photos, vae):
    manifest = read_manifest(encoded())
    shards = [("held_out", 4), ("train", 6), ("train", 6), ("train", 4)]
    assert [(shard.split, shard.count) for shard in manifest.shards] == shards
    expected = {
        "class_names": ["cat", "dog"],
        "kind": "mean_std",
        "dtype": "float16",
        "flips": False,
        "resolution": [16, 12],
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


def test_statistics_are_those_of_what_training_sees(encoded):
    folder = encoded("flips=true")
    train = {name: tensor[:16].double() for name, tensor in read_set(folder).items()}
    manifest = read_manifest(folder)
    means = torch.cat([train["latents"], train["mirrored"]])
    stds = torch.cat([train["std"], train["mirrored_std"]])
    mean = means.mean((0, 2, 3))
    variance = (means - mean.view(-1, 1, 1)).square() + stds.square()
    std = variance.mean((0, 2, 3)).sqrt()
    assert manifest.mean == pytest.approx(mean.tolist(), rel=1e-9, abs=1e-9)
    assert manifest.std == pytest.approx(std.tolist(), rel=1e-9)


def test_latents_labels_and_flips_are_those_of_the_images(encoded, pixels, autoencoder):
    tensors = read_set(encoded("flips=true", EXACT))
    mean, std = autoencoder.encode(pixels)
    mirrored, mirrored_std = autoencoder.encode(pixels.flip(3))
    index = match(mean, tensors["latents"], 1e-4)
    for name, expected in (
        ("std", std),
        ("mirrored", mirrored),
        ("mirrored_std", mirrored_std),
        ("labels", torch.arange(2).repeat_interleave(10)),
    ):
        torch.testing.assert_close(tensors[name][index], expected, rtol=1e-3, atol=1e-4)
    assert (mirrored - mean.flip(3)).abs().max() > 0.01


def test_a_sample_is_one_standard_normal_draw_from_the_posterior(encoded):
    posterior = read_set(encoded(EXACT))
    drawn = read_set(encoded("kind=sample", EXACT))
    assert "std" not in drawn
    noise = (drawn["latents"] - posterior["latents"]) / posterior["std"]
    assert noise.mean().abs() < 5 / noise.numel() ** 0.5
    assert (noise.var() - 1.0).abs() < 5 * (2 / noise.numel()) ** 0.5

    # each image has a draw of its own
    assert (noise[1:] - noise[:-1]).flatten(1).abs().amax(1).min() > 0.1


def test_a_damaged_image_does_not_move_the_draws_of_others(encoded, job, more_photos):
    """A draw belongs to the image's place in the list, at any batch size."""
    settings = ["kind=sample", EXACT, "held_out=0", "shard_size=20"]
    intact = read_set(encoded(*settings, "batch_size=20"))["latents"]
    (more_photos / "cat" / "004.jpg").write_bytes(b"no image at all")
    rest = read_set(job(*settings, "batch_size=6", source=more_photos))["latents"]
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


def test_other_encoder_weights_do_not_decode(job, run, vae, tmp_path):
    other = shutil.copytree(vae, tmp_path / "vae")
    folder = job(f"encoder.path={other}")
    flip_byte(other / WEIGHTS_FILE)
    with expect_refusal(f"{other} has other weights"):
        run("data=resident", f"data.path={folder}", "sample_every=1")


# Reports


def test_the_plan_is_said_once_before_the_encoder_is_looked_for(job, more_photos, capsys):
    (more_photos / "cat" / "notes.txt").write_text("mine")
    plan = f"20 images of 2 classes in {more_photos}, 20 to encode\n  cat: 10, dog: 10\n"
    job("dry_run=true", source=more_photos)
    assert capsys.readouterr().out.count(plan) == 1
    with expect_refusal(r"encoder\.path"):
        job("encoder.path=/nowhere/at/all", source=more_photos)
    assert capsys.readouterr().out.startswith(plan)


def test_the_ledger_sees_a_compiled_encoder(job, capsys, monkeypatch):
    monkeypatch.setattr(Compile, "backend", "eager")
    job("runtime.compile=true", "runtime.on_unavailable=error")
    assert re.search(r"compile +on +on ", capsys.readouterr().out)


def test_the_autotuner_is_told_what_lets_it_on(job, capsys, monkeypatch):
    """The job says when it leaves the autotuner off, and which key turns it on at the cost of equal
    bytes."""
    monkeypatch.setattr(CudnnBenchmark, "find_obstacle", lambda self: None)
    job("runtime.cudnn_benchmark=true")
    assert "same_bytes=false gives that up" in " ".join(capsys.readouterr().out.split())
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
        (["resolution=17"], "resolution=17: .* multiples of its downsampling"),
        (["resolution=[16,17]"], r"=\[16, 17\]: .* of 16×16 pixels back"),
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
        (["background=5"], "background=5 is no opaque colour; give a name"),
        (["max_megapixels=-1"], "max_megapixels=-1.0 must be above 0"),
        (["min_psnr=nan"], "min_psnr=nan is not finite; give"),
        (["part=8/8"], "part=8/8 must be i/n with i below n, such as part=0/8"),
        (["resolution=[16]"], r"resolution=\[16\] must be a number of pixels, or two"),
        (["part=3"], "part=3 must be i/n with i below n"),
        (["classes=some"], "classes=some must be given, none, or a number"),
        ([f"seed={2**64}"], "does not fit into 64 bits"),
    ],
)
def test_settings_that_no_job_can_have_are_refused(words, sentence):
    with expect_refusal(sentence):
        compose(["source=x", "out=y", *words], "precompute_latents")
