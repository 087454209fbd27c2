"""precompute_latents.py: what it stores, that it continues exactly, and what it refuses."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from accel.techniques.compilation import Compile
from accel.techniques.cudnn_benchmark import CudnnBenchmark
from common.errors import UserError
from common.files import write_json
from data.manifest import read_manifest
from data.resident import InMemoryLatents, ResidentLatents
from encoding.images import DecodedImages, collate, decode_image
from encoding.job import claim_folder, describe_job, read_finished
from encoding.sources import list_images
from models.autoencoders import WEIGHTS_FILE, DiffusersAutoencoder
from models.images import psnr
from precompute_latents import precompute
from tests.harness.sets import Job
from tests.harness.words import CPU
from training.config.compose import compose


def load_set(folder: Path, **settings: Any) -> InMemoryLatents:
    loader = ResidentLatents(path=str(folder), batch_size=4, seed=0, device=CPU, **settings).loader
    assert isinstance(loader, InMemoryLatents)
    return loader


def pixels_of(file: Path) -> Tensor:
    return (decode_image(file.read_bytes(), 16).float() / 127.5 - 1.0).unsqueeze(0)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != ".lock"
    }


def matches(found: Tensor, expected: Tensor, tolerance: float = 2e-2) -> list[int]:
    """For each of `expected` the index of the equal sample in `found`; all of `found` must be used,
    once each."""
    distance = (found.flatten(1).float()[None] - expected.flatten(1)[:, None]).abs().amax(2)
    assert distance.amin(1).max() < tolerance
    index = distance.argmin(1).tolist()
    assert sorted(index) == list(range(len(found)))
    return index


def all_of(loader: InMemoryLatents, name: str) -> Tensor:
    return torch.cat([getattr(loader.train, name), getattr(loader.held_out_split, name)])


# What is stored


def test_the_manifest_says_what_was_done(job: Job, photos: Path, vae: Path):
    manifest = read_manifest(job())
    assert (manifest.count, manifest.held_out, manifest.skipped) == (16, 4, [])
    assert [(shard.split, shard.count) for shard in manifest.shards] == [
        ("held_out", 4),
        ("train", 6),
        ("train", 6),
        ("train", 4),
    ]
    assert manifest.class_names == ["cat", "dog"]
    assert (manifest.channels, manifest.height, manifest.width) == (2, 8, 8)
    assert (manifest.kind, manifest.dtype, manifest.flips, manifest.resolution) == (
        "mean_std",
        "float16",
        False,
        16,
    )
    assert (manifest.scaling_factor, manifest.shift_factor) == (0.5, 0.25)
    assert manifest.encoder["path"] == str(vae)
    assert manifest.encoder_class == "AutoencoderKL"
    assert manifest.encoder_sha256 == hashlib.sha256((vae / WEIGHTS_FILE).read_bytes()).hexdigest()
    assert manifest.source == str(photos)


def test_psnr_is_that_of_the_first_sixteen_images(job: Job, photos: Path, vae: Path):
    first = torch.cat([pixels_of(file) for file in sorted(photos.rglob("*.*"))[:16]])
    autoencoder = DiffusersAutoencoder(str(vae))
    expected = psnr(autoencoder.decode(autoencoder.encode(first)[0]), first)
    assert abs(read_manifest(job()).psnr_db - expected) < 1e-3


@pytest.mark.parametrize("flips", [False, True])
def test_statistics_are_those_of_what_training_sees(job: Job, flips: bool):
    folder = job(f"flips={flips}")
    train = load_set(folder).train
    manifest = read_manifest(folder)
    means = torch.cat([train.latents, train.mirrored] if flips else [train.latents]).double()
    stds = torch.cat([train.std, train.mirrored_std] if flips else [train.std]).double()
    mean = means.mean((0, 2, 3))
    variance = (means - mean.view(-1, 1, 1)).square().mean((0, 2, 3)) + stds.square().mean(
        (0, 2, 3)
    )
    torch.testing.assert_close(
        torch.tensor(manifest.mean, dtype=torch.float64), mean, rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(
        torch.tensor(manifest.std, dtype=torch.float64), variance.sqrt(), rtol=1e-9, atol=1e-9
    )


def test_training_sees_normalised_latents(job: Job):
    loader = load_set(job("flips=true"))
    stream = torch.cat([next(loader).latents for _ in range(400)])
    assert stream.mean((0, 2, 3)).abs().max() < 0.02
    assert (stream.std((0, 2, 3)) - 1.0).abs().max() < 0.02


def test_latents_and_labels_are_those_of_the_images(job: Job, photos: Path, vae: Path):
    loader = load_set(job("dtype=float32"))
    autoencoder = DiffusersAutoencoder(str(vae))
    files = sorted(photos.rglob("*.*"))
    encoded = [autoencoder.encode(pixels_of(file)) for file in files]
    index = matches(all_of(loader, "latents"), torch.cat([mean for mean, _ in encoded]), 1e-4)
    std = torch.cat([std for _, std in encoded if std is not None])
    torch.testing.assert_close(all_of(loader, "std")[index], std, rtol=1e-3, atol=1e-4)
    assert all_of(loader, "labels")[index].tolist() == [0] * 10 + [1] * 10


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_is_what_is_stored(job: Job, dtype: str):
    assert load_set(job(f"dtype={dtype}")).train.latents.dtype == getattr(torch, dtype)


def test_flips_are_encodings_of_mirrored_images(job: Job, photos: Path, vae: Path):
    loader = load_set(job("flips=true", "dtype=float32"))
    autoencoder = DiffusersAutoencoder(str(vae))
    files = sorted(photos.rglob("*.*"))
    plain = torch.cat([autoencoder.encode(pixels_of(file))[0] for file in files])
    index = matches(all_of(loader, "latents"), plain, 1e-4)
    for stored, part in ((all_of(loader, "mirrored"), 0), (all_of(loader, "mirrored_std"), 1)):
        expected = torch.cat([autoencoder.encode(pixels_of(file).flip(3))[part] for file in files])
        torch.testing.assert_close(stored[index], expected, rtol=1e-3, atol=1e-4)
    assert (all_of(loader, "mirrored")[index] - plain.flip(3)).abs().max() > 0.01


def test_no_flips_unless_asked_for(job: Job):
    assert load_set(job()).train.mirrored is None


def test_a_sample_is_one_standard_normal_draw_from_the_posterior(job: Job):
    posterior = load_set(job("dtype=float32"))
    drawn = load_set(job("kind=sample", "dtype=float32", out="drawn"))
    assert drawn.train.std is None
    noise = (all_of(drawn, "latents") - all_of(posterior, "latents")) / all_of(posterior, "std")
    assert noise.mean().abs() < 5 / noise.numel() ** 0.5
    assert (noise.var() - 1.0).abs() < 5 * (2 / noise.numel()) ** 0.5


def test_samples_are_the_same_each_time_and_at_any_batch_size(job: Job):
    first, again, other = (
        load_set(job("kind=sample", "dtype=float32", f"batch_size={size}", out=f"out{i}"))
        for i, size in enumerate((4, 4, 3))
    )
    assert torch.equal(all_of(first, "latents"), all_of(again, "latents"))
    torch.testing.assert_close(
        all_of(first, "latents"), all_of(other, "latents"), rtol=1e-4, atol=1e-4
    )


def test_a_damaged_image_does_not_move_the_draws_of_others(job: Job, more_photos: Path):
    """A draw belongs to the image's place in the list, which is also what no other image shares."""
    settings = ["kind=sample", "dtype=float32", "held_out=0", "batch_size=20", "shard_size=20"]
    intact = load_set(job(*settings, source=more_photos)).train.as_floating()
    (more_photos / "cat" / "004.jpg").write_bytes(b"no image at all")
    rest = load_set(job(*settings, source=more_photos, out="rest")).train.as_floating()
    distance = (rest.flatten(1)[:, None] - intact.flatten(1)[None]).abs().amax(2)
    assert len(rest) == 19
    assert distance.amin(1).max() < 1e-3


def test_limit_and_seed_choose_the_images(job: Job):
    whole, some = (
        load_set(job("dtype=float32", "held_out=0", *limit, out=f"out{len(limit)}"))
        for limit in ([], ["limit=7"])
    )
    other = load_set(job("dtype=float32", "held_out=0", "limit=7", "seed=1", out="seed1"))
    assert some.spec.count == 7
    torch.testing.assert_close(some.train.latents, whole.train.latents[:7], rtol=1e-4, atol=1e-4)
    assert not torch.equal(some.train.latents, other.train.latents)


def test_nothing_held_out(job: Job):
    loader = load_set(job("held_out=0"))
    assert loader.spec.count == 20
    assert list(loader.held_out(4)) == []


def test_worker_processes_change_nothing(job: Job):
    alone = job("flips=true")
    helped = job("flips=true", "num_workers=2", out="helped")
    assert contents(alone) == contents(helped)


def test_a_model_trains_on_the_result_and_decodes_a_grid(
    job: Job, run: Callable[..., dict[str, Any]], tmp_path: Path
):
    folder = job("flips=true")
    small = ["sample_every=1", "eval_every=1", "sampling.steps=2", "sampling.per_class=3"]
    run("data=resident", f"data.path={folder}", *small)
    for step in (1, 2):
        with Image.open(tmp_path / "run" / "samples" / f"step-{step}.png") as grid:
            # two classes with names, three samples of each
            assert grid.height * 3 / 2 < grid.width < grid.height * 3
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(np.isfinite(line["eval_loss"]) for line in metrics)


def test_other_encoder_weights_do_not_decode(
    job: Job, run: Callable[..., dict[str, Any]], vae: Path, tmp_path: Path
):
    moved = Path(shutil.copytree(vae, tmp_path / "vae"))
    folder = job(f"encoder.path={moved}")
    content = bytearray((moved / WEIGHTS_FILE).read_bytes())
    content[-1] ^= 1
    (moved / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"{moved} has other weights"):
        run("data=resident", f"data.path={folder}", "sample_every=1")


# The same command again


def test_a_finished_job_is_not_encoded_again(job: Job, capsys: pytest.CaptureFixture[str]):
    folder = job()
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.tar")}
    capsys.readouterr()
    job()
    assert "20 of 20 images are already encoded" in capsys.readouterr().out
    assert {file.name: file.stat().st_mtime_ns for file in folder.glob("*.tar")} == before


@pytest.mark.parametrize("damage", ["delete", "flip", "no sidecar"])
def test_only_a_lost_or_damaged_shard_is_rebuilt(
    job: Job, capsys: pytest.CaptureFixture[str], damage: str
):
    folder = job("flips=true")
    before = contents(folder)
    times = {file: file.stat().st_mtime_ns for file in folder.glob("*.tar")}
    (folder / "manifest.json").unlink()
    lost = folder / "train-00001.tar"
    if damage == "delete":
        lost.unlink()
    elif damage == "flip":
        lost.write_bytes(lost.read_bytes()[:-1] + b"\1")
    else:
        lost.with_name("train-00001.tar.json").unlink()
    capsys.readouterr()
    job("flips=true")
    assert "14 of 20 images are already encoded" in capsys.readouterr().out
    assert contents(folder) == before
    assert [file for file, time in times.items() if file.stat().st_mtime_ns != time] == [lost]


def test_a_finished_job_of_an_earlier_version_is_not_encoded_again(
    job: Job, capsys: pytest.CaptureFixture[str]
):
    folder = job()
    described = json.loads((folder / "job.json").read_text())
    older = {
        key: value
        for key, value in described.items()
        if key not in ("classes", "background", "max_megapixels")
    }
    (folder / "job.json").write_text(json.dumps(older))
    for file in folder.glob("*.tar.json"):
        sidecar = json.loads(file.read_text())
        del sidecar["sha256"]
        file.write_text(json.dumps(sidecar))
    capsys.readouterr()
    job()
    assert "20 of 20 images are already encoded" in capsys.readouterr().out
    (folder / "manifest.json").unlink()
    with pytest.raises(
        ValueError, match=r"holds latents of another job .*background was None, is white"
    ):
        job()


class CrashError(Exception):
    """What the tests stop a job with."""


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`crash_at(n)`: the n-th time that something is made durable (a file or a rename), the job
    dies."""
    fsync = os.fsync
    calls = iter(())

    def counted(descriptor: int) -> None:
        if next(calls, None) == "crash":
            raise CrashError
        fsync(descriptor)

    def set_crash(count: int) -> None:
        nonlocal calls
        calls = iter(["pass"] * (count - 1) + ["crash"])

    monkeypatch.setattr(os, "fsync", counted)
    return set_crash


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the files that a dead job leaves open
# 1, 6, 11: folder, shard, set
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_job_that_dies_at_any_write_continues_to_the_same_bytes(
    step: int, job: Job, crash_at: Callable[[int], None]
):
    expected = contents(job("held_out=0.5", "shard_size=10"))
    assert not [name for name in expected if name.endswith(".tmp")]
    # The folder; file and rename of each: job.json, two shards with a sidecar each, the manifest.
    writes = 1 + 2 + 2 * (2 + 2) + 2
    for count in range(1, writes + 1, step):
        crash_at(count)
        with pytest.raises(CrashError):
            job("held_out=0.5", "shard_size=10", out=f"crash{count}")
        gc.collect()
        assert contents(job("held_out=0.5", "shard_size=10", out=f"crash{count}")) == expected
    crash_at(writes + 1)
    job("held_out=0.5", "shard_size=10", out="uninterrupted")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_encoder_that_dies_within_a_shard_leaves_no_half_shard(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    expected = contents(job("batch_size=2"))
    folder = tmp_path / "again"
    encode = DiffusersAutoencoder.encode
    calls = iter(range(1000))

    def dies_in_the_second_shard(self: DiffusersAutoencoder, images: Tensor) -> Any:
        if (folder / "train-00001.tar.tmp").exists() and next(calls) == 2:
            raise CrashError
        return encode(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(DiffusersAutoencoder, "encode", dies_in_the_second_shard)
        with pytest.raises(CrashError):
            job("batch_size=2", out="again")
    gc.collect()
    assert [file.name for file in sorted(folder.glob("*.tar"))] == [
        "held_out-00000.tar",
        "train-00000.tar",
    ]
    assert contents(job("batch_size=2", out="again")) == expected


# with 1 the damaged image has a shard to itself, which stays empty
@pytest.mark.parametrize("shard_size", [6, 1])
def test_images_that_cannot_be_decoded_are_listed_and_left_out(
    job: Job, more_photos: Path, shard_size: int
):
    (more_photos / "cat" / "broken.jpg").write_bytes(b"no image at all")
    whole = (more_photos / "dog" / "001.png").read_bytes()
    (more_photos / "dog" / "cut.png").write_bytes(whole[: len(whole) // 2])
    settings = ["held_out=0", f"shard_size={shard_size}"]
    folder = job(*settings, source=more_photos)
    manifest = read_manifest(folder)
    assert sorted(line.split(":")[0] for line in manifest.skipped) == [
        "cat/broken.jpg",
        "dog/cut.png",
    ]
    assert any("cat/broken.jpg: no image of a format" in line for line in manifest.skipped)
    assert manifest.count == 20
    intact = load_set(job("held_out=0", out="intact"))
    index = matches(load_set(folder).train.latents, intact.train.latents.float())
    assert torch.equal(load_set(folder).train.labels[index], intact.train.labels)
    before = contents(folder)
    job(*settings, source=more_photos)
    assert contents(folder) == before


def test_a_source_of_damaged_images_only_is_refused(job: Job, tmp_path: Path):
    (tmp_path / "damaged" / "cat").mkdir(parents=True)
    (tmp_path / "damaged" / "cat" / "a.jpg").write_bytes(b"no image at all")
    with pytest.raises(
        ValueError, match=f"source={tmp_path / 'damaged'}: none of the 1 images can be decoded"
    ):
        job(source=tmp_path / "damaged")


def test_a_training_split_of_damaged_images_only_is_refused(job: Job, tmp_path: Path):
    folder = tmp_path / "damaged" / "cat"
    folder.mkdir(parents=True)
    held_out = torch.randperm(5, generator=torch.Generator().manual_seed(0))[0]
    for i in range(5):
        if i == held_out:
            Image.new("RGB", (16, 16)).save(folder / f"{i}.png")
        else:
            (folder / f"{i}.png").write_bytes(b"no image at all")
    with pytest.raises(
        ValueError, match=r"source=.*damaged: no training image can be decoded, such as "
    ):
        job(source=folder.parent)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_latents_that_overflow_float16_are_refused(
    job: Job, more_photos: Path, monkeypatch: pytest.MonkeyPatch
):
    Image.new("RGB", (16, 16), "white").save(more_photos / "dog" / "white.png")
    encode = DiffusersAutoencoder.encode

    def bright_is_huge(self: DiffusersAutoencoder, images: Tensor) -> tuple[Tensor, Tensor | None]:
        mean, std = encode(self, images)
        return torch.where((images > 0.99).all((1, 2, 3), keepdim=True), 1e6, mean), std

    monkeypatch.setattr(DiffusersAutoencoder, "encode", bright_is_huge)
    with pytest.raises(
        ValueError,
        match=r"dog/white\.png has latents that are too large for dtype=float16; use dtype=bfl",
    ):
        job(source=more_photos)
    gc.collect()
    assert load_set(job("dtype=bfloat16", source=more_photos, out="bf16")).spec.count == 17


# WebDataset tars


def write_tar(file: Path, members: dict[str, bytes]) -> None:
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def tars(photos: Path, tmp_path: Path) -> Path:
    """The photos as two WebDataset tars."""
    files = sorted(photos.rglob("*.*"))
    for part in range(2):
        members = {}
        for i, file in enumerate(files[part::2]):
            members[f"{i:04d}{file.suffix}"] = file.read_bytes()
            members[f"{i:04d}.cls"] = b"0" if file.parent.name == "cat" else b"1\n"
            members[f"{i:04d}.json"] = b"{}"
        write_tar(tmp_path / "tars" / f"{part}.tar", members)
    return tmp_path / "tars"


def test_tars_give_the_latents_of_the_class_folder(job: Job, tars: Path):
    of_folder = load_set(job("dtype=float32"))
    of_tars = load_set(job("dtype=float32", source=tars, out="of_tars"))
    index = matches(all_of(of_tars, "latents"), all_of(of_folder, "latents"), 1e-4)
    assert torch.equal(all_of(of_tars, "labels")[index], all_of(of_folder, "labels"))
    assert of_tars.spec.class_names == ["0", "1"]


def test_one_tar_is_a_source_too(job: Job, tars: Path):
    assert read_manifest(job("held_out=0", source=tars / "1.tar")).count == 10


def test_a_tar_without_labels_is_refused(job: Job, photos: Path, tmp_path: Path):
    write_tar(tmp_path / "tars" / "a.tar", {"0001.png": (photos / "cat" / "001.png").read_bytes()})
    with pytest.raises(
        ValueError, match=r"a\.tar: 0001\.png has no label; a member named 0001\.cls must hold it"
    ):
        job(source=tmp_path / "tars")


def test_a_label_that_is_no_index_is_refused(job: Job, photos: Path, tmp_path: Path):
    image = (photos / "cat" / "001.png").read_bytes()
    write_tar(tmp_path / "tars" / "a.tar", {"0001.png": image, "0001.cls": b"cat"})
    with pytest.raises(ValueError, match=r"a\.tar: 0001\.cls must hold a class index, not 'cat'"):
        job(source=tmp_path / "tars")


# What is left out


def test_with_files_that_are_skipped_the_bytes_are_the_same_each_time(
    job: Job, more_photos: Path, capsys
):
    whole = (more_photos / "dog" / "001.png").read_bytes()
    (more_photos / "cat" / "text.png").write_bytes(b"no image at all")
    (more_photos / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (more_photos / "dog" / "damaged.png").write_bytes(whole[:40] + b"junk" * 9 + whole[76:])
    Image.new("RGB", (200, 100)).save(more_photos / "dog" / "large.png")
    settings = ["max_megapixels=0.01", "held_out=0"]
    expected = contents(job(*settings, source=more_photos))
    assert (
        "skipped dog/large.png: 200×100 pixels are above max_megapixels=0.01"
        in capsys.readouterr().out
    )
    assert contents(job(*settings, "num_workers=1", source=more_photos, out="again")) == expected
    manifest = read_manifest(more_photos.parent / "out")
    assert sorted(line.split(":")[0] for line in manifest.skipped) == [
        "cat/cut.png",
        "cat/text.png",
        "dog/damaged.png",
        "dog/large.png",
    ]


def test_the_plan_is_said_once_before_the_encoder_is_looked_for(
    job: Job, more_photos: Path, capsys
):
    (more_photos / "cat" / "notes.txt").write_text("mine")
    plan = (
        "20 images of 2 classes in {}, 20 to encode\n  cat: 10, dog: 10\n  not used: 1 .txt "
        "(e.g. cat/notes.txt)\n"
    )
    job("dry_run=true", source=more_photos)
    assert capsys.readouterr().out.count(plan.format(more_photos)) == 1
    with pytest.raises(ValueError, match=r"encoder\.path"):
        job("encoder.path=/nowhere/at/all", source=more_photos)
    assert capsys.readouterr().out.startswith(plan.format(more_photos))


def test_a_flat_folder_becomes_a_set_without_classes(job: Job, photos: Path):
    manifest = read_manifest(job("classes=none", source=photos / "cat"))
    assert (manifest.class_names, manifest.count + manifest.held_out) == ([], 10)


def test_a_shard_with_a_broken_sidecar_is_encoded_again(job: Job):
    folder = job()
    expected = contents(folder)
    sidecar = folder / "train-00001.tar.json"
    whole = sidecar.read_bytes()
    assert read_finished(folder, "train-00001.tar") is not None
    broken = (
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b'{"shard": 5}',
        b"\xff",
        whole[:-9],
    )
    for content in (
        *broken,
        whole.replace(b'"skipped": []', b'"skipped": {}'),
        whole.replace(b"0", b"1", 1),
    ):
        sidecar.write_bytes(content)
        assert read_finished(folder, "train-00001.tar") is None
    assert contents(job()) == expected


@pytest.mark.parametrize("content", [b"", b"{", b"5", b'"x"', b"\xff", b"[1]"])
def test_a_broken_job_file_is_a_sentence(tmp_path: Path, content: bytes):
    (tmp_path / "job.json").write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"job\.json is broken, so nothing says which job this folder belongs to; cho",
    ):
        claim_folder(tmp_path, {})


# Refusals


def test_a_poor_reconstruction_is_refused_before_anything_is_written(job: Job, tmp_path: Path):
    with pytest.raises(
        ValueError,
        match=r"reconstructs the first 16 images at .* dB, below min_psnr=60\.0; check enc",
    ):
        job("min_psnr=60")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("resolution=8", "resolution was 16, is 8"),
        ("kind=sample", "kind was mean_std, is sample"),
        ("flips=true", "flips was False, is True"),
        ("seed=1", "seed was 0, is 1"),
        ("limit=19", "limit was None, is 19"),
        ("same_bytes=false", "same_bytes was True, is False"),
    ],
)
def test_the_folder_of_another_job_is_refused(job: Job, change: str, sentence: str):
    folder = job()
    before = contents(folder)
    with pytest.raises(
        ValueError,
        match=f"{folder} holds latents of another job .{sentence}.; choose another folder",
    ):
        job(change)
    assert contents(folder) == before


@pytest.mark.parametrize("change", ["background=black", "max_megapixels=9", "classes=none"])
def test_what_images_are_taken_for_is_part_of_the_job(photos: Path, change: str):
    words = [f"source={photos}", "out=x", "encoder.path=x"]
    listed = list_images(photos)
    one, other = (compose(given, "precompute_latents").cfg for given in (words, [*words, change]))
    assert describe_job(listed, one, None, "fp32") != describe_job(listed, other, None, "fp32")


def test_changed_images_are_another_job(job: Job, more_photos: Path):
    job(source=more_photos)
    (more_photos / "cat" / "000.jpg").unlink()
    with pytest.raises(ValueError, match="source_sha256 was"):
        job(source=more_photos)


def test_changed_weights_are_another_job(job: Job, vae: Path, tmp_path: Path):
    job()
    other = Path(shutil.copytree(vae, tmp_path / "vae"))
    content = bytearray((other / WEIGHTS_FILE).read_bytes())
    content[-1] ^= 1
    (other / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="encoder_sha256 was"):
        job(f"encoder.path={other}")


def test_a_folder_with_other_files_is_refused(job: Job, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=f"out={tmp_path / 'out'} is not empty .* choose another folder"
    ):
        job()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_file_as_out_is_refused(job: Job, tmp_path: Path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match=f"out={tmp_path / 'out'} cannot be made or read"):
        job()


def test_a_source_that_does_not_exist_is_refused(job: Job, tmp_path: Path):
    with pytest.raises(
        ValueError, match=f"source={tmp_path / 'nowhere'} is no folder and no tar; give a folder"
    ):
        job(source=tmp_path / "nowhere")


def test_a_source_without_images_is_refused(job: Job, tmp_path: Path):
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    (tmp_path / "empty" / "cat" / "readme.txt").write_text("no image")
    with pytest.raises(
        ValueError, match=r"source=.*empty holds no images .*\.jpg.* in class folders and no \.tar"
    ):
        job(source=tmp_path / "empty")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["out=x"], "source is not set; say which: source=<a folder of images or tars>"),
        (["source=x"], "out is not set; say which: out=<the folder for the latents>"),
        (["source=x", "out=y", "batch_size=0"], "batch_size=0 must be at least 1"),
        (["source=x", "out=y", "held_out=1.0"], "held_out=1.0 must be below 1"),
        (["source=''", "out=y"], "source is not set"),
        (["source=x", "out=y", "background=5"], "background=5 is no opaque colour; give a name"),
        (
            ["source=x", "out=y", "background='#ffffff80'"],
            "background=#ffffff80 is no opaque colour",
        ),
        (["source=x", "out=y", "max_megapixels=-1"], "max_megapixels=-1.0 must be above 0"),
        (["source=x", "out=y", "max_megapixels=nan"], "max_megapixels=nan is no finite number"),
        (["source=x", "out=y", "classes=some"], "classes=some must be given, none, or a number"),
        (["source=x", "out=y", "min_psnr=nan"], "min_psnr=nan is no finite number"),
        (["source=x", "out=y", f"seed={2**64}"], "does not fit into 64 bits"),
    ],
)
def test_settings_that_no_job_can_have_are_refused(overrides: list[str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        compose(overrides, "precompute_latents")


def test_an_encoder_without_a_path_is_refused(job: Job):
    with pytest.raises(ValueError, match=r"encoder\.path=None must be a valid string"):
        job("encoder.path=null")


def test_holding_everything_out_is_refused(job: Job):
    with pytest.raises(
        ValueError, match=r"held_out=0\.99 of 20 images leaves none to train on; lower it"
    ):
        job("held_out=0.99")


# The real thing


def test_photos_through_taef2(assets: Path, tmp_path: Path):
    settings = [
        f"source={assets / 'images' / 'grocery'}",
        f"encoder.path={assets / 'vae' / 'taef2'}",
        "limit=24",
    ]
    small = ["encoder=local", "runtime=eager", "resolution=128", "num_workers=0", "batch_size=8"]
    file = precompute(compose([*small, *settings, f"out={tmp_path / 'out'}"], "precompute_latents"))
    manifest = read_manifest(file.parent)
    assert manifest.psnr_db > 24.0
    assert (manifest.channels, manifest.height, manifest.width) == (32, 16, 16)
    assert manifest.count + manifest.held_out == 24
    assert load_set(file.parent).train.std is None


def test_the_ledger_sees_a_compiled_encoder(job: Job, capsys, monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    job("runtime.compile=true", "runtime.on_unavailable=error")
    assert re.search(r"compile +on +on ", capsys.readouterr().out)


def test_the_autotuner_is_told_what_lets_it_on(job: Job, capsys, monkeypatch):
    """Off with the key that gives equal bytes up, or on; never dropped without a word."""
    monkeypatch.setattr(CudnnBenchmark, "find_obstacle", lambda self: None)
    job("runtime.cudnn_benchmark=true")
    told = " ".join(capsys.readouterr().out.split())
    assert "! cudnn_benchmark on off off here: it chooses algorithms by their time" in told
    assert "same_bytes=false gives that up" in told
    set_to = []
    monkeypatch.setattr(CudnnBenchmark, "on_process", lambda self: set_to.append(self.value))
    job("runtime.cudnn_benchmark=true", "same_bytes=false", out="new")
    assert set_to == [True]


def test_a_job_of_an_earlier_version_goes_on_with_the_same_bytes(tmp_path: Path):
    write_json(tmp_path / "job.json", {"seed": 0})
    claim_folder(tmp_path, {"seed": 0, "same_bytes": True})
    with pytest.raises(UserError, match="same_bytes was True, is False"):
        claim_folder(tmp_path, {"seed": 0, "same_bytes": False})


def test_a_resolution_that_the_encoder_does_not_divide_is_refused(job: Job):
    with pytest.raises(ValueError, match=r"resolution=17: .* multiple of its downsampling"):
        job("resolution=17")


def test_one_hundred_images_a_batch_need_few_file_descriptors(photos: Path):
    entries = list_images(photos).entries
    batch = collate([DecodedImages(entries, 16)[i] for i in range(len(entries))])
    assert batch.pixels.shape == (len(entries), 3, 16, 16)
    assert batch.places == list(range(len(entries)))
