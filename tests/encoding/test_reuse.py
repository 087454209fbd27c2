"""Tests copy what an earlier set has encoded, and take images for validation from a folder."""

import shutil

import pytest

from data.blocks import open_set
from encoding.encoder import ShardEncoder
from models.text_encoders import WordLlama
from tests.harness.refusals import expect_refusal
from tests.harness.sets import read_contents, save_images


@pytest.fixture
def counted(monkeypatch):
    """Numbers of images, and of captions, in each call of an encoder."""
    calls = {"images": [], "captions": []}
    encode_images = ShardEncoder.encode_latents
    encode_captions = WordLlama.encode

    def count_images(self, images, *rest):
        calls["images"].append(len(images))
        return encode_images(self, images, *rest)

    def count_captions(self, texts, *rest):
        calls["captions"].append(len(texts))
        return encode_captions(self, texts, *rest)

    monkeypatch.setattr(ShardEncoder, "encode_latents", count_images)
    monkeypatch.setattr(WordLlama, "encode", count_captions)
    return calls


@pytest.fixture
def validation(tmp_path):
    return save_images(tmp_path / "validation", ("dog", "bird", "cat"), per_class=2)


def read_images(folder):
    return {file.read_bytes() for file in folder.glob("*/*g")}


def grow(photos):
    """Adds five birds to the photos, and takes a cat away."""
    save_images(photos, ("bird",), per_class=5)
    min(photos.glob("cat/*g")).unlink()


def test_a_grown_set_has_the_bytes_of_a_fresh_one(job, more_photos, validation, counted, capsys):
    """With another class, one image less, other held-out images, mirror images, and a caption that
    is longer than those before, which are padded to its length."""
    for number, file in enumerate(sorted(more_photos.glob("*/*"))):
        file.with_suffix(".txt").write_text(f"picture number {number}")
    words = ("text_encoder=wordllama", "flips=true")
    first = job(*words, source=more_photos)
    before = read_images(more_photos)
    grow(more_photos)
    for file in [*validation.glob("*/*")]:
        file.with_suffix(".txt").write_text("a picture that is new, with many more words")
    words += (f"held_out={validation}",)
    fresh = read_contents(job(*words, source=more_photos, out="fresh"))
    for calls in counted.values():
        calls.clear()
    grown = job(*words, f"reuse={first}", source=more_photos, out="grown")
    assert read_contents(grown) == fresh
    new = (read_images(more_photos) | read_images(validation)) - before
    assert sum(counted["images"]) == 2 * len(new) > 0, "new images and their mirror images"
    assert counted["captions"] == [1, 1, 1], "the empty one; the new one for the mean, and stored"
    assert "20 copied" in capsys.readouterr().out
    train, held_out = open_set("resident", str(grown))[1:]
    assert (train.count, held_out.count) == (24, 6)


def test_classes_of_held_out_images_go_by_name(job, validation, capsys):
    with expect_refusal(r"has other classes than source=.* \(bird\)"):
        job(f"held_out={validation}")
    shutil.rmtree(validation / "bird")
    out = job(f"held_out={validation}")
    held_out = open_set("resident", str(out))[2]
    assert held_out.manifest.class_names == ["cat", "dog"]
    assert sorted(held_out.read(0)["labels"].tolist()) == [0, 0, 1, 1]
    shutil.rmtree(validation / "cat")
    for words, said in (
        ([f"held_out={validation}"], "2 images are held out, none of cat"),
        (["held_out=3"], "17 training and 3 held-out"),
        (["held_out=0"], "0 images are held out"),
    ):
        job(*words, out=words[0][-3:])
        assert said in capsys.readouterr().out


def test_refusals_speak_of_images_before_an_encoder_is_loaded(job, done, more_photos, tmp_path):
    done()
    grow(more_photos)
    nowhere = "encoder.path=nowhere"
    with expect_refusal(r"is a set of 20 images, and the source now has 24; .* reuse=.*/out"):
        job(nowhere, source=more_photos)
    changes = ["resolution=8", "seed=1", "same_bytes=false", "dtype=float32", "held_out=0.5"]
    changes += ["background=black", "max_megapixels=9", "classes=none", "flips=true"]
    with expect_refusal(r"another command .*; encode into another folder") as error:
        job(nowhere, *changes)
    for change in changes:
        assert f"{change.partition('=')[0]} was " in str(error.value)
    reuse = f"reuse={tmp_path / 'out'}"
    with expect_refusal(r"reuse=.*resolution was \[16, 12\], is 32\); leave reuse out"):
        job(nowhere, reuse, "resolution=32", out="new")
    with expect_refusal("held_out=-1 must be a fraction from 0 to below 1, a number of images"):
        job("held_out=-1")
