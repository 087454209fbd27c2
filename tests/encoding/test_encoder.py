"""ShardEncoder: images that it leaves out, latents that it refuses to store, and its estimate."""

import gc

import pytest
import torch
from PIL import Image

from data.manifest import read_manifest
from models.autoencoders import DiffusersAutoencoder
from tests.harness.foreign import read_set
from tests.harness.refusals import expect_refusal
from tests.harness.sets import match, read_contents, save_files


# with 1 a damaged image has a shard to itself, which stays empty
@pytest.mark.parametrize("shard_size", [6, 1])
def test_images_that_cannot_be_decoded_are_listed_and_left_out(
    encoded, job, more_photos, capsys, shard_size
):
    # Two files are no whole images, and one is large.
    image = (more_photos / "dog" / "001.png").read_bytes()
    (more_photos / "cat" / "cut.png").write_bytes(image[: len(image) // 2])
    (more_photos / "cat" / "text.png").write_bytes(b"no image at all")
    Image.new("RGB", (200, 100)).save(more_photos / "dog" / "large.png")

    settings = ["held_out=0", f"shard_size={shard_size}", "max_megapixels=0.01"]
    folder = job(*settings, source=more_photos)
    sentence = "skipped dog/large.png: 200×100 pixels are above max_megapixels=0.01"
    assert sentence in capsys.readouterr().out
    manifest = read_manifest(folder)
    names = sorted(line.split(":")[0] for line in manifest.skipped)
    assert names == ["cat/cut.png", "cat/text.png", "dog/large.png"]
    assert manifest.count == 20
    tensors = read_set(folder)
    intact = read_set(encoded("held_out=0"))
    index = match(tensors["latents"], intact["latents"].float(), 2e-2)
    assert torch.equal(tensors["labels"], intact["labels"][index])

    # a worker process changes no byte
    again = job(*settings, "num_workers=1", source=more_photos, out="again")
    assert read_contents(again) == read_contents(folder)


def test_a_source_of_damaged_images_only_is_refused(job, tmp_path):
    damaged = b"no image at all"
    folder = save_files(tmp_path / "damaged", "cat/0.jpg", content=damaged)
    with expect_refusal(f"source={folder}: none of the 1 images can be decoded"):
        job(source=folder)

    # the only whole image is the one that is held out
    save_files(folder, *(f"cat/{i}.jpg" for i in range(5)), content=damaged)
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
    assert "minutes: decoding" in output
    assert "latents of 8×6: model.patch_size may be 1, 2\n  of the first 8 images 100%" in output
