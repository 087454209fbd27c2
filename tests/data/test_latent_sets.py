"""Shards and manifests: the manifest describes what the writer wrote, and a reader refuses every
other set by name."""

import pytest
import torch
from safetensors.torch import load

from common.files import read_object
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.batches import LOADERS, chunked, join, resident
from tests.harness.captions import save_captioned_set
from tests.harness.refusals import expect_refusal
from tests.harness.sets import (
    draw_random_samples,
    edit_manifest,
    flip_byte,
    save_latent_set,
    save_random_set,
    write_shard,
)

SAMPLES = draw_random_samples(11, seed=0)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the tar open
def test_plain_webdataset_reads_a_shard(tmp_path):
    import webdataset

    file = tmp_path / "train-00000.tar"
    write_shard(file, SAMPLES)
    members = list(webdataset.WebDataset(str(file), shardshuffle=False))
    assert [member["__key__"] for member in members] == [f"train-00000-{i:06d}" for i in range(3)]
    blocks = [load(member["safetensors"]) for member in members]
    for name, tensor in SAMPLES.items():
        assert torch.equal(torch.cat([block[name] for block in blocks]), tensor), name


# Refusals

AGAIN = "precompute_latents.py again"


@pytest.fixture
def folder(tmp_path):
    """Nine training samples and three held-out ones, of shape (3, 4, 2)."""
    return save_random_set(tmp_path, 9, held_out=3)


def read_refusal(folder, kind="resident", **settings):
    """Returns the message with which a loader refuses the set."""
    with expect_refusal(".") as error:
        LOADERS[kind](folder, **settings)
    return str(error.value)


def assert_says(message, *parts):
    for part in parts:
        assert str(part) in message


def test_a_folder_without_manifest_is_refused(tmp_path):
    assert_says(read_refusal(tmp_path), tmp_path / "manifest.json", "precompute_latents.py source=")


@pytest.mark.parametrize("kind", ["resident", "webdataset"])
@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("encoder", "someone/other-vae", "someone/some-vae"),
        ("latent_scale", 0.18215, 0.5),
        ("normalisation", "whiten", "scale_shift"),
    ],
)
def test_a_set_of_another_encoder_or_scale_is_refused(folder, kind, key, wrong, right):
    assert_says(read_refusal(folder, kind, **{key: wrong}), f"data.{key}={wrong}")
    LOADERS[kind](folder, **{key: right})


def test_scale_shift_without_a_scaling_factor_is_refused(folder):
    edit_manifest(folder, scaling_factor=None)
    message = read_refusal(folder, normalisation="scale_shift")
    assert_says(message, "data.normalisation=scale_shift", "no scaling factor")


FAULTS = [
    ("format", 9, "format 9"),
    ("mean", [0.0], "mean has 1 values, and there are 3 channels"),
    ("std.1", 0.0, "std.1 should be greater than 0.000000000001, and is 0.0"),
    ("mean.1", float("inf"), "mean.1 should be a finite number"),
    # normalised latents would overflow fp32
    ("std.0", 1e300, "std.0 should be"),
    ("channels", 0, "channels should be greater than or equal to 1"),
    ("count", 12, "the train shards hold 9 samples, and it says 12"),
    ("shards.0.file", "../train-00000.tar", "'../train-00000.tar' is outside its folder"),
    ("shards.0.file", "a.tar?b", "'a.tar?b' is outside its folder or no .tar"),
    ("shards.1.file", "train-00000.tar", "the shard train-00000.tar is there 2 times"),
    ("shards.1.split", "train", "the train shards hold 12 samples, and it says 9"),
    ("shards.0.count", 8, "the blocks of train-00000.tar do not hold its count"),
    ("shards.0.bytes", 2000, "lie beyond its 2000 bytes"),
    ("shards.0.blocks.0.0", 5000, "the blocks of train-00000.tar overlap"),
    ("shards.0.blocks.1.1", 100, "a block of train-00000.tar is too small for its"),
    ("shards.0.blocks.1.2", 2**70, "shards.0.blocks.1.2 should be less than"),
]
"""Place of a value in the manifest, another value, and what the reader then says."""


@pytest.mark.parametrize(("place", "value", "sentence"), FAULTS)
def test_a_manifest_that_contradicts_itself_is_refused(folder, place, value, sentence):
    raw = node = read_object(folder / "manifest.json")
    *parents, key = [int(key) if key.isdigit() else key for key in place.split(".")]
    for parent in parents:
        node = node[parent]
    node[key] = value
    edit_manifest(folder, **raw)
    assert_says(read_refusal(folder), folder / "manifest.json", sentence, AGAIN)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"channels": 3,', "not valid JSON"),
        (b'{"format": 2}', "lacks channels"),
        (b"\xff\xfe", ""),
        (b"[" * 10**6, ""),
    ],
)
def test_a_manifest_that_is_none_is_refused(folder, content, words):
    (folder / "manifest.json").write_bytes(content)
    assert_says(read_refusal(folder), folder / "manifest.json", words, AGAIN)


BLOCKS = [
    ("labels", lambda labels: labels + 1, "labels from 1 to 3, but there are 3 classes"),
    ("latents", torch.Tensor.float, "latents float32[4, 3, 4, 2], the manif"),
    ("std", torch.neg, "holds std below 0"),
    ("std", lambda std: std / 0, "holds std that are not finite"),
    ("mirrored", None, "holds labels, latents, mirrored_std, std, but a block of"),
    ("std mirrored_std", None, "holds labels, latents, mirrored, but"),
    ("\n\x1b[31m", lambda _: torch.zeros(4), r"holds \n\x1b[31m, labels, latents"),
]
"""Names of tensors of a block, other values or None for a block without them, and what the reader
then says."""


@pytest.mark.parametrize(("names", "change", "sentence"), BLOCKS)
def test_a_block_with_a_right_hash_and_wrong_content_is_refused(tmp_path, names, change, sentence):
    """Another tool wrote it."""
    tensors = draw_random_samples(4, seed=1)
    for name in names.split(" "):
        tensor = tensors.pop(name, None)
        if change:
            tensors[name] = change(tensor)
    save_latent_set(tmp_path, [("train", draw_random_samples(4, seed=0)), ("train", tensors)])
    assert_says(read_refusal(tmp_path), "train-00001.tar (samples 4–7 of train)", sentence, AGAIN)
    assert any(sentence in problem for problem in verify(VerifyConfig(path=str(tmp_path), count=0)))


@pytest.mark.parametrize("open_set", [resident, lambda path, **on: chunked(path, 4, **on)])
def test_a_held_out_sample_that_stands_in_keeps_its_own_id(tmp_path, open_set):
    save_random_set(tmp_path, 8, held_out=8)
    flip_byte(tmp_path / "held_out-00001.tar", 600)
    batch = join(open_set(tmp_path, on_corrupt="skip").held_out(8))
    assert batch.ids.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    assert batch.position.tolist() == list(range(8))


def test_the_fingerprint_tells_sets_and_orders_apart(folder, tmp_path):
    loaders = [
        resident(save_random_set(tmp_path / "other", 5)),
        resident(folder),
        resident(folder, normalisation="scale_shift"),
        resident(folder, storage="int8"),
        LOADERS["webdataset"](folder),
        LOADERS["webdataset"](folder, window=7),
    ]
    for changes in ({"std": [2.0] * 3}, {"class_names": [*"abcd"]}, {"class_names": [*"abc\n"]}):
        edit_manifest(folder, **changes)
        loaders.append(resident(folder))
    captioned = save_captioned_set(tmp_path / "captioned", 5)
    text = read_object(captioned / "manifest.json")["text"]
    for sha256 in "01":
        edit_manifest(captioned, text=text | {"encoder_sha256": 64 * sha256})
        loaders.append(resident(captioned))
    assert len({loader.spec.fingerprint for loader in loaders}) == len(loaders)
