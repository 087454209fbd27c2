"""Shards and manifests: what is written is what is described, and every mistake is refused by
name."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from common.files import hash_file
from data.manifest import read_manifest
from data.resident import ResidentLatents
from encoding.job import ShardWriter
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.refusals import expect_refusal
from tests.harness.sets import random_samples, save_latent_set, write_shard
from tests.harness.words import CPU


def test_equal_samples_make_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shards = []
    for folder, parts, clock in (("a", 5, 1e9), ("b", 3, 2e9)):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        shards.append(
            write_shard(
                tmp_path / folder / "train-00000.tar", random_samples(11, seed=0), parts=parts
            )
        )
    assert shards[0] == shards[1]
    assert (tmp_path / "a" / shards[0].file).read_bytes() == (
        tmp_path / "b" / shards[0].file
    ).read_bytes()
    other = write_shard(tmp_path / "a" / "train-00000.tar", random_samples(11, seed=1))
    assert other.sha256 != shards[0].sha256


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the tar open
def test_plain_webdataset_reads_a_shard(tmp_path: Path):
    import webdataset

    samples = random_samples(11, seed=0)
    write_shard(tmp_path / "train-00000.tar", samples)
    members = list(webdataset.WebDataset(str(tmp_path / "train-00000.tar"), shardshuffle=False))
    assert [member["__key__"] for member in members] == [f"train-00000-{i:06d}" for i in range(3)]
    blocks = [load(member["safetensors"]) for member in members]
    for name, tensor in samples.items():
        assert torch.equal(torch.cat([block[name] for block in blocks]), tensor), name


def test_the_description_of_a_shard_is_true(tmp_path: Path):
    samples = random_samples(11, seed=0)
    shard = write_shard(tmp_path / "train-00000.tar", samples)
    content = (tmp_path / "train-00000.tar").read_bytes()
    assert (shard.count, shard.bytes, shard.sha256) == (
        11,
        len(content),
        hash_file(tmp_path / shard.file),
    )
    assert [block.samples for block in shard.blocks] == [4, 4, 3]
    payloads = [load(content[block.offset : block.offset + block.size]) for block in shard.blocks]
    assert torch.equal(torch.cat([payload["labels"] for payload in payloads]), samples["labels"])


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the abandoned file
def test_an_abandoned_writer_leaves_no_shard(tmp_path: Path):
    writer = ShardWriter(tmp_path / "train-00000.tar", "train", block_size=2)
    writer.add(random_samples(5, seed=0))
    assert list(tmp_path.glob("*.tar")) == []
    del writer
    assert list(tmp_path.glob("*.tar")) == []


# Refusals


@pytest.fixture
def small_set(tmp_path: Path) -> Path:
    save_latent_set(
        tmp_path, [("train", random_samples(9, seed=0)), ("held_out", random_samples(3, seed=1))]
    )
    return tmp_path


def edit_manifest(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(raw | changes))


def refusal(folder: Path | None, **settings: object) -> str:
    """The message with which the set is refused."""
    with expect_refusal(r"\w") as caught:
        ResidentLatents(
            path=folder if folder is None else str(folder),
            batch_size=2,
            seed=0,
            device=CPU,
            **settings,
        )
    return str(caught.value)


def assert_says(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message


AGAIN = "precompute_latents.py again"


def test_no_path_is_refused():
    assert_says(
        refusal(None), "data.path=<folder of latents>", "precompute_latents.py", "data=digits"
    )


def test_a_folder_without_manifest_is_refused(tmp_path: Path):
    assert_says(
        refusal(tmp_path),
        str(tmp_path / "manifest.json"),
        "data.path",
        "precompute_latents.py source=",
    )


def test_broken_json_is_refused(small_set: Path):
    (small_set / "manifest.json").write_text('{"channels": 3,')
    assert_says(refusal(small_set), str(small_set / "manifest.json"), "not valid JSON", AGAIN)


def test_another_format_is_refused(small_set: Path):
    edit_manifest(small_set, format=9)
    assert_says(refusal(small_set), str(small_set / "manifest.json"), "format 9", AGAIN)


def test_a_manifest_that_lacks_a_field_is_refused(small_set: Path):
    raw = json.loads((small_set / "manifest.json").read_text())
    del raw["mean"]
    (small_set / "manifest.json").write_text(json.dumps(raw))
    assert_says(refusal(small_set), str(small_set / "manifest.json"), "lacks mean", AGAIN)


def test_another_encoder_is_refused(small_set: Path):
    message = refusal(small_set, encoder="someone/other-vae")
    assert_says(
        message,
        "data.encoder=someone/other-vae",
        str(small_set),
        "someone/some-vae",
        "change one of them",
    )
    ResidentLatents(
        path=str(small_set), encoder="someone/some-vae", batch_size=2, seed=0, device=CPU
    )


def test_another_latent_scale_is_refused(small_set: Path):
    message = refusal(small_set, latent_scale=0.18215)
    assert_says(message, "data.latent_scale=0.18215", str(small_set), "0.5", "change one of them")
    ResidentLatents(path=str(small_set), latent_scale=0.5, batch_size=2, seed=0, device=CPU)


def test_scale_shift_without_a_scaling_factor_is_refused(small_set: Path):
    edit_manifest(small_set, scaling_factor=None)
    message = refusal(small_set, normalisation="scale_shift")
    assert_says(
        message,
        "data.normalisation=scale_shift",
        str(small_set),
        "no scaling factor",
        "use channel",
    )


def test_an_unknown_normalisation_is_refused(small_set: Path):
    message = refusal(small_set, normalisation="whiten")
    assert_says(message, "data.normalisation=whiten", "channel or scale_shift")


@pytest.mark.parametrize("name", ["../train-00000.tar", "/etc/hostname", "deeper/train-00000.tar"])
def test_a_shard_outside_the_folder_is_refused(small_set: Path, name: str):
    shards = json.loads((small_set / "manifest.json").read_text())["shards"]
    shards[0]["file"] = name
    edit_manifest(small_set, shards=shards)
    assert_says(
        refusal(small_set), str(small_set / "manifest.json"), name, "outside its folder", AGAIN
    )


def shard_with(**changes: object) -> Callable[[dict], None]:
    return lambda raw: raw["shards"][0].update(changes)


def block_with(place: int, value: object) -> Callable[[dict], None]:
    def change(raw: dict) -> None:
        raw["shards"][0]["blocks"][1][place] = value

    return change


def other_order(raw: dict) -> None:
    raw["shards"][0]["blocks"].reverse()


def moved_to_training(raw: dict) -> None:
    raw["shards"][1]["split"] = "train"


def shard_twice(raw: dict) -> None:
    raw["shards"].append(raw["shards"][0])


FAULTS: dict[str, tuple[dict | Callable[[dict], None], str]] = {
    "mean of one value": ({"mean": [0.0]}, "mean has 1 values, and there are 3 channels"),
    "std of four values": ({"std": [1.0] * 4}, "std has 4 values, and there are 3 channels"),
    "std of 0": (
        {"std": [1.0, 0.0, 1.0]},
        "std.1 should be greater than 0.000000000001, and is 0.0",
    ),
    "std that is not finite": ({"std": [1.0, float("nan"), 1.0]}, "std.1 should be"),
    "mean that is not finite": (
        {"mean": [1.0, float("inf"), 1.0]},
        "mean.1 should be a finite number",
    ),
    "scaling factor of 0": ({"scaling_factor": 0.0}, "scaling_factor should be greater than 0"),
    "no channels": ({"channels": 0}, "channels should be greater than or equal to 1"),
    "text for a number": ({"height": "4"}, 'height should be a valid integer, and is "4"'),
    "a number for text": ({"class_names": ["a", 1]}, "class_names.1 should be a valid string"),
    "another dtype": ({"dtype": "float64"}, "dtype should be 'float16', 'bfloat16' or 'float32'"),
    "a list for the encoder": ({"encoder": []}, "encoder should be an object"),
    "a shard that is text": ({"shards": ["train-00000.tar"]}, "shards.0 should be an object"),
    "a split that there is not": (
        shard_with(split="test"),
        "shards.0.split should be 'train' or 'held_out'",
    ),
    "a count below 0": (
        shard_with(count=-1),
        "shards.0.count should be greater than or equal to 1",
    ),
    "a count that its blocks do not have": (
        shard_with(count=8),
        "the blocks of train-00000.tar do not hold its count",
    ),
    "a shard that is shorter than its blocks": (
        shard_with(bytes=2000),
        "lie beyond its 2000 bytes",
    ),
    "a URL's query in a name": (
        shard_with(file="a.tar?b"),
        "'a.tar?b' is outside its folder or no .tar",
    ),
    "a shard named twice": (shard_twice, "the shard train-00000.tar is there 2 times"),
    "blocks in another order": (other_order, "the blocks of train-00000.tar overlap"),
    "a block too small for its samples": (
        block_with(1, 100),
        "a block of train-00000.tar is too small for its",
    ),
    "a block of 2^70 samples": (block_with(2, 2**70), "shards.0.blocks.1.2 should be less than"),
    "a block without hash": (block_with(3, None), "shards.0.blocks.1.3 should be a valid string"),
    "a held-out shard among the training ones": (
        moved_to_training,
        "the train shards hold 12 samples, and it says 9",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_manifest_that_contradicts_itself_is_refused(small_set: Path, name: str):
    change, sentence = FAULTS[name]
    raw = json.loads((small_set / "manifest.json").read_text())
    raw.update(change) if isinstance(change, dict) else change(raw)
    (small_set / "manifest.json").write_text(json.dumps(raw))
    assert_says(refusal(small_set), str(small_set / "manifest.json"), sentence, AGAIN)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"null", b"[]", b"[" * 10**6, b'{"a":' * 10**5, b"\x00" * 100]
)
def test_a_manifest_that_is_none_is_refused(small_set: Path, content: bytes):
    (small_set / "manifest.json").write_bytes(content)
    assert_says(refusal(small_set), str(small_set / "manifest.json"), AGAIN)


BLOCKS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict], str]] = {
    "a label above the classes": (
        lambda b: {"labels": b["labels"] + 1},
        "labels from 1 to 3, but there are 3 classes",
    ),
    "a label below 0": (
        lambda b: {"labels": b["labels"] - 1},
        "holds labels from -1 to 1, but there are 3 classes",
    ),
    "labels that are fractions": (
        lambda b: {"labels": b["labels"] / 2},
        "holds labels float32[4], the manifest says",
    ),
    "one-hot labels": (
        lambda b: {"labels": torch.eye(4).long()},
        "holds labels int64[4, 4], the manifest says int64",
    ),
    "latents in another dtype": (
        lambda b: {"latents": b["latents"].float()},
        "latents float32[4, 3, 4, 2], the manif",
    ),
    "latents of another size": (
        lambda b: {"latents": b["latents"][:, :2].clone()},
        "latents float16[4, 2, 4, 2], the",
    ),
    "latents of other samples": (
        lambda b: {"mirrored": b["mirrored"][:2].clone()},
        "mirrored float16[2, 3, 4, 2], th",
    ),
    "a std below 0": (lambda b: {"std": -b["std"]}, "holds std below 0"),
    "a std that is not finite": (lambda b: {"std": b["std"] / 0}, "holds std that are not finite"),
    "a tensor too many": (
        lambda b: {"more": b["labels"] + 0},
        "holds labels, latents, mirrored, mirrored_std, more",
    ),
    "no mirrored latents": (
        lambda b: {"mirrored": None},
        "holds labels, latents, mirrored_std, std, and a block of",
    ),
    "some blocks without std": (
        lambda b: {"std": None, "mirrored_std": None},
        "holds labels, latents, mirrored, and",
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_with_a_right_hash_and_wrong_content_is_refused(tmp_path: Path, name: str):
    """Somebody's own tool wrote it."""
    change, sentence = BLOCKS[name]
    good, bad = (random_samples(4, seed) for seed in (0, 1))
    bad = {key: tensor for key, tensor in (bad | change(bad)).items() if tensor is not None}
    save_latent_set(tmp_path, [("train", good), ("train", good)])
    rewrite_block(tmp_path, 1, save(bad))
    assert_says(refusal(tmp_path), "train-00001.tar (samples 4–7 of train)", sentence, AGAIN)
    assert any(sentence in problem for problem in verify(VerifyConfig(path=str(tmp_path), count=0)))


def rewrite_block(folder: Path, shard: int, payload: bytes) -> None:
    """Replaces a shard by one block, and describes it truly: length and hash are right."""
    raw = json.loads((folder / "manifest.json").read_text())
    described = raw["shards"][shard]
    content = bytes(512) + payload
    (folder / described["file"]).write_bytes(content)
    described["blocks"] = [
        [512, len(payload), described["count"], hashlib.sha256(payload).hexdigest()]
    ]
    described |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("key", "value"), [("std", 1e-40), ("std", 1e300), ("mean", -1e300), ("mean", 3.5e38)]
)
def test_statistics_that_overflow_fp32_are_refused(small_set: Path, key: str, value: float):
    """Normalised latents would be infinite."""
    edit_manifest(small_set, **{key: [value, 1.0, 1.0]})
    assert_says(refusal(small_set), str(small_set / "manifest.json"), f"{key}.0 should be", AGAIN)


def test_a_tensor_name_cannot_break_a_message(tmp_path: Path):
    save_latent_set(tmp_path, [("train", random_samples(4, seed=0))])
    rewrite_block(tmp_path, 0, save(random_samples(4, seed=0) | {"\n\x1b[31m": torch.zeros(4)}))
    assert_says(refusal(tmp_path), r"holds \n\x1b[31m, labels, latents")


@pytest.mark.parametrize("settings", [{}, {"device_memory_gib": 2e-6}])
def test_a_held_out_sample_that_stands_in_keeps_its_own_id(
    tmp_path: Path, settings: dict[str, float]
):
    save_latent_set(
        tmp_path, [("train", random_samples(8, seed=0)), ("held_out", random_samples(8, seed=1))]
    )
    file = tmp_path / "held_out-00001.tar"
    file.write_bytes(file.read_bytes()[:600] + b"?" + file.read_bytes()[601:])
    loader = ResidentLatents(
        path=str(tmp_path), batch_size=2, seed=0, device=CPU, on_corrupt="skip", **settings
    )
    batches = list(loader.held_out(8))
    assert torch.cat([batch.ids for batch in batches]).tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    assert torch.cat([batch.position for batch in batches]).tolist() == list(range(8))


def test_statistics_and_class_names_are_part_of_the_fingerprint(small_set: Path):
    found = {read_manifest(small_set).compute_fingerprint()}
    for changes in (
        {"std": [2.0] * 3},
        {"mean": [1.0] * 3},
        {"class_names": ["a", "b"]},
        {"class_names": ["a\nb"]},
    ):
        edit_manifest(small_set, **changes)
        found.add(read_manifest(small_set).compute_fingerprint())
    assert len(found) == 5


@pytest.mark.parametrize(
    ("key", "split", "found"), [("count", "train", 9), ("held_out", "held_out", 3)]
)
def test_counts_that_do_not_add_up_are_refused(small_set: Path, key: str, split: str, found: int):
    edit_manifest(small_set, **{key: 12})
    assert_says(
        refusal(small_set), str(small_set), f"{split} shards hold {found} samples", "says 12", AGAIN
    )
