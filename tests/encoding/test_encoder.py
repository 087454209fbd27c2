"""ShardEncoder: images that it leaves out, latents that it refuses to store, and its estimate."""

import gc

import pytest
import torch
from PIL import Image

from data.manifest import read_manifest
from encoding.images import DecodedImages, collate
from encoding.sources import list_images
from models.autoencoders import DiffusersAutoencoder
from tests.harness.foreign import read_set
from tests.harness.refusals import expect_refusal
from tests.harness.sets import match, read_contents


def damage_photos(photos):
    """Adds three files that are no whole images and a large one, and returns their names."""
    image = (photos / "dog" / "001.png").read_bytes()
    (photos / "cat" / "cut.png").write_bytes(image[: len(image) // 2])
    (photos / "cat" / "text.png").write_bytes(b"no image at all")
    (photos / "dog" / "damaged.png").write_bytes(image[:40] + b"junk" * 9 + image[76:])
    Image.new("RGB", (200, 100)).save(photos / "dog" / "large.png")
    return ["cat/cut.png", "cat/text.png", "dog/damaged.png", "dog/large.png"]


# with 1 a damaged image has a shard to itself, which stays empty
@pytest.mark.parametrize("shard_size", [6, 1])
def test_images_that_cannot_be_decoded_are_listed_and_left_out(
    encoded, job, more_photos, capsys, shard_size
):
    names = damage_photos(more_photos)
    settings = ["held_out=0", f"shard_size={shard_size}", "max_megapixels=0.01"]
    folder = job(*settings, source=more_photos)
    sentence = "skipped dog/large.png: 200×100 pixels are above max_megapixels=0.01"
    assert sentence in capsys.readouterr().out
    manifest = read_manifest(folder)
    assert sorted(line.split(":")[0] for line in manifest.skipped) == names
    assert any("cat/text.png: no image of a format" in line for line in manifest.skipped)
    assert manifest.count == 20
    tensors = read_set(folder)
    intact = read_set(encoded("held_out=0"))
    index = match(tensors["latents"], intact["latents"].float(), 2e-2)
    assert torch.equal(tensors["labels"], intact["labels"][index])

    # neither a second run nor a worker process changes a byte
    contents = read_contents(folder)
    assert read_contents(job(*settings, source=more_photos)) == contents
    again = job(*settings, "num_workers=1", source=more_photos, out="again")
    assert read_contents(again) == contents


def test_a_source_of_damaged_images_only_is_refused(job, tmp_path):
    folder = tmp_path / "damaged"
    (folder / "cat").mkdir(parents=True)
    (folder / "cat" / "0.jpg").write_bytes(b"no image at all")
    with expect_refusal(f"source={folder}: none of the 1 images can be decoded"):
        job(source=folder)

    # the only whole image is the one that is held out
    for i in range(5):
        (folder / "cat" / f"{i}.jpg").write_bytes(b"no image at all")
    held_out = torch.randperm(5, generator=torch.Generator().manual_seed(0))[0]
    Image.new("RGB", (16, 16)).save(folder / "cat" / f"{held_out}.jpg")
    with expect_refusal("source=.*damaged: no training image can be decoded, such as "):
        job(source=folder)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_latents_that_overflow_float16_are_refused(job, more_photos, monkeypatch):
    Image.new("RGB", (16, 16), "white").save(more_photos / "dog" / "white.png")
    encode = DiffusersAutoencoder.encode

    def enlarge_white(self, images):
        mean, std = encode(self, images)
        return torch.where((images > 0.99).all((1, 2, 3), keepdim=True), 1e6, mean), std

    monkeypatch.setattr(DiffusersAutoencoder, "encode", enlarge_white)
    sentence = r"dog/white\.png has latents that are too large for dtype=float16; use dtype=bfl"
    with expect_refusal(sentence):
        job(source=more_photos)
    gc.collect()
    assert read_manifest(job("dtype=bfloat16", source=more_photos, out="bf16")).count == 17


def test_a_dry_run_says_what_it_takes_and_writes_nothing(job, tmp_path, capsys):
    job("dry_run=true", "limit=10")
    output = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert "nothing is written: 10 of 20 images, 2 of them held out, in 3 shards" in output
    estimate = 10 * (2 * 2 * 8 * 8 * 2 + 8)
    assert f"about {estimate / 2**30:.2f} GiB" in output
    assert "minutes: decoding" in output
    size = sum(file.stat().st_size for file in job("limit=10").glob("*.tar"))
    assert size > 10 * 2 * 2 * 8 * 8 * 2


def test_one_hundred_images_a_batch_need_few_file_descriptors(photos):
    """A worker sends one tensor a batch, since each tensor takes a file descriptor."""
    images = DecodedImages(list_images(photos).entries, 16)
    batch = collate([images[i] for i in range(20)])
    assert batch.pixels.shape == (20, 3, 16, 16)
    assert batch.places == list(range(20))
