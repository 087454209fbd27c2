"""Shards and manifests: what is written is what is described, and every mistake is refused by name."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from data.resident import ResidentLatents
from data.shards import ShardWriter, file_sha256
from tests.helpers import CPU, random_samples, save_latent_set, write_shard


def test_equal_samples_make_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shards = []
    for folder, parts, clock in (("a", 5, 1e9), ("b", 3, 2e9)):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        shards.append(write_shard(tmp_path / folder / "train-00000.tar", random_samples(11, seed=0), parts=parts))
    assert shards[0] == shards[1]
    assert (tmp_path / "a" / shards[0].file).read_bytes() == (tmp_path / "b" / shards[0].file).read_bytes()
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
    assert (shard.count, shard.bytes, shard.sha256) == (11, len(content), file_sha256(tmp_path / shard.file))
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
    save_latent_set(tmp_path, [("train", random_samples(9, seed=0)), ("held_out", random_samples(3, seed=1))])
    return tmp_path


def edit_manifest(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(raw | changes))


def refusal(folder: Path | None, **settings: object) -> str:
    """The message with which the set is refused."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        ResidentLatents(path=folder if folder is None else str(folder), batch_size=2, seed=0, device=CPU, **settings)
    return str(caught.value)


def assert_says(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message


AGAIN = "precompute_latents.py again"


def test_no_path_is_refused():
    assert_says(refusal(None), "data.path=<folder of latents>", "precompute_latents.py", "data=digits")


def test_a_folder_without_manifest_is_refused(tmp_path: Path):
    assert_says(refusal(tmp_path), str(tmp_path / "manifest.json"), "data.path", "precompute_latents.py source=")


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
    assert_says(message, "data.encoder=someone/other-vae", str(small_set), "someone/some-vae", "change one of them")
    ResidentLatents(path=str(small_set), encoder="someone/some-vae", batch_size=2, seed=0, device=CPU)


def test_another_latent_scale_is_refused(small_set: Path):
    message = refusal(small_set, latent_scale=0.18215)
    assert_says(message, "data.latent_scale=0.18215", str(small_set), "0.5", "change one of them")
    ResidentLatents(path=str(small_set), latent_scale=0.5, batch_size=2, seed=0, device=CPU)


def test_scale_shift_without_a_scaling_factor_is_refused(small_set: Path):
    edit_manifest(small_set, scaling_factor=None)
    message = refusal(small_set, normalisation="scale_shift")
    assert_says(message, "data.normalisation=scale_shift", str(small_set), "no scaling factor", "use channel")


def test_an_unknown_normalisation_is_refused(small_set: Path):
    message = refusal(small_set, normalisation="whiten")
    assert_says(message, "data.normalisation=whiten", "channel or scale_shift")


@pytest.mark.parametrize("name", ["../train-00000.tar", "/etc/hostname", "deeper/train-00000.tar"])
def test_a_shard_outside_the_folder_is_refused(small_set: Path, name: str):
    shards = json.loads((small_set / "manifest.json").read_text())["shards"]
    shards[0]["file"] = name
    edit_manifest(small_set, shards=shards)
    assert_says(refusal(small_set), str(small_set / "manifest.json"), name, "outside its folder", AGAIN)


@pytest.mark.parametrize(("key", "split", "found"), [("count", "train", 9), ("held_out", "held_out", 3)])
def test_counts_that_do_not_add_up_are_refused(small_set: Path, key: str, split: str, found: int):
    edit_manifest(small_set, **{key: 12})
    assert_says(refusal(small_set), str(small_set), f"{split} shards hold {found} samples", "says 12", AGAIN)
