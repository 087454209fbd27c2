"""Encoding as a job: several processes, kills, full disks, two jobs at once, dry runs, `datasets`
as a source."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from common.files import ROOT
from data.manifest import read_manifest
from encoding import images
from encoding.encoder import ShardEncoder
from encoding.job import Plan, ShardWriter
from tests.encoding.test_precompute import all_of, contents, load_set, matches
from tests.harness.sets import Job
from tests.harness.words import TINY_JOB
from training.distributed.ranks import Ranks

MANY = ["shard_size=1", "batch_size=1", "block_size=1"]


def command(vae: Path, source: Path, out: Path, *words: str, ranks: int = 1) -> list[str]:
    settings = [*TINY_JOB, f"encoder.path={vae}", f"source={source}", f"out={out}", *words]
    if ranks == 1:
        return [sys.executable, "precompute_latents.py", *settings]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    return [sys.executable, *launcher, "precompute_latents.py", *settings]


def start(words: list[str]) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def kill(process: subprocess.Popen) -> None:
    """With all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def whole_files(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in found.items() if not name.endswith(".tmp")}


@pytest.mark.slow  # two ranks, one of them killed, are below
def test_three_ranks_write_the_bytes_of_one(vae: Path, photos: Path, tmp_path: Path, job: Job):
    expected = contents(job())
    process = start(command(vae, photos, tmp_path / "ranks", ranks=3))
    output, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    assert contents(tmp_path / "ranks") == expected
    assert output.decode().count("training and 4 held-out latents in") == 1


def test_ranks_are_taken_from_the_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(0, 1, 0)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(5, 8, 1)
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ValueError, match="RANK=8 does not fit WORLD_SIZE=8"):
        Ranks.from_environment()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="must be numbers"):
        Ranks.from_environment()


@pytest.fixture(scope="module")
def many_photos(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("many")
    for i in range(20):
        shutil.copytree(photos, source / f"{i:02d}")
    return source


def killed_until_done(words: list[str], out: Path, kills: int, seed: int) -> None:
    """Kills the job once a random number of further shards is there, or in the middle of nothing,
    then lets it end."""
    draw = random.Random(seed)
    for _ in range(kills):
        process = start(words)
        wanted = len(list(out.glob("*.tar.json"))) + draw.randint(0, 12)
        while process.poll() is None and len(list(out.glob("*.tar.json"))) < wanted:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.02))
        if process.poll() is None:
            kill(process)
        else:  # it was done; its pipes are closed
            process.communicate()
    process = start(words)
    output, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    assert output.decode().count(" held-out latents in ") == 1  # only one of several ranks speaks


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_anywhere_it_continues_to_the_same_bytes(
    vae: Path, many_photos: Path, tmp_path: Path, job: Job, ranks: int
):
    expected = contents(job(*MANY, "limit=60", source=many_photos))
    words = command(vae, many_photos, tmp_path / "killed", *MANY, "limit=60", ranks=ranks)
    killed_until_done(words, tmp_path / "killed", kills=2 if ranks == 1 else 1, seed=ranks)
    assert whole_files(contents(tmp_path / "killed")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_kills_change_nothing(
    vae: Path, many_photos: Path, tmp_path: Path, job: Job, ranks: int
):
    expected = contents(job(*MANY, source=many_photos))
    killed_until_done(
        command(vae, many_photos, tmp_path / "killed", *MANY, ranks=ranks),
        tmp_path / "killed",
        kills=20,
        seed=ranks,
    )
    assert whole_files(contents(tmp_path / "killed")) == expected


HOLD = (
    "import sys, encoding.job as p; from pathlib import Path; held = p.locked(Path(sys.argv[1]));"
    "print('held', flush=True); input()"
)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_jobs_do_not_write_into_one_folder(vae: Path, photos: Path, tmp_path: Path, ranks: int):
    out = tmp_path / "out"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert holder.stdout
    assert holder.stdout.readline(), "it never held the folder"
    second = start(command(vae, photos, out, ranks=ranks))
    _, errors = second.communicate()
    assert second.returncode != 0
    assert "another process is encoding into it; wait for it" in errors.decode()
    assert [file.name for file in out.iterdir()] == [".lock"]
    kill(holder)
    again = start(command(vae, photos, out))
    _, errors = again.communicate()
    assert again.returncode == 0, errors.decode()


def test_a_job_holds_its_folder_while_it_encodes(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = []
    run = ShardEncoder.run

    def with_another(self: ShardEncoder, plan: Plan) -> None:
        command = [sys.executable, "-c", HOLD, str(self.out)]
        said.append(
            subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL
            ).stderr
        )
        run(self, plan)

    monkeypatch.setattr(ShardEncoder, "run", with_another)
    job()
    assert "another process is encoding into it" in said[0]


def test_an_image_that_cannot_be_read_stops_the_job_and_is_not_left_out(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    """Unlike one that cannot be decoded: it may be there again in a moment."""
    read = images.read_image
    failing = iter([True] * 4)

    def on_a_bad_day(entry: images.ImageEntry) -> bytes:
        if entry.key.endswith("dog/009.png") and next(failing, False):
            raise OSError(errno.EIO, "Input/output error")
        return read(entry)

    monkeypatch.setattr(images, "read_image", on_a_bad_day)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(
        ValueError, match=r"dog/009\.png: .*Input/output error\. Finished shards are kept"
    ):
        job()
    assert read_manifest(job()).count == 16
    failing = iter([True] * 3)
    assert read_manifest(job(out="patient")).skipped == []


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_full_disk_leaves_nothing_half_named(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int
):
    """The disk is full once so many blocks are written; what is there then is whole, and the job
    goes on from it."""
    expected = contents(job())
    write = ShardWriter.write_block
    written = iter(range(100))

    def until_full(self: ShardWriter) -> None:
        if next(written) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write_block", until_full)
        with pytest.raises(
            ValueError,
            match=r"no space is left for .*tar \(No space left on device\); .*dry_run=true",
        ):
            job(out="full")
    left = contents(tmp_path / "full")
    assert not [name for name in left if name.endswith(".tmp")]
    assert all(expected[name] == content for name, content in left.items())
    assert contents(job(out="full")) == expected


def test_a_dry_run_says_what_it_takes_and_writes_nothing(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job("dry_run=true", "limit=10", out="dry")
    said = capsys.readouterr().out
    assert not (tmp_path / "dry").exists()
    assert "nothing is written: 10 of 20 images, 2 of them held out, in 3 shards" in said
    size = sum(file.stat().st_size for file in job("limit=10", out="real").glob("*.tar"))
    assert f"about {10 * (2 * 2 * 8 * 8 * 2 + 8) / 2**30:.2f} GiB" in said
    assert size > 10 * 2 * 2 * 8 * 8 * 2
    assert "minutes: decoding" in said


# `datasets`


@pytest.fixture
def rows(photos: Path, tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    files = sorted(photos.rglob("*.*"))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    columns = {
        "image": [{"bytes": file.read_bytes(), "path": None} for file in files],
        "label": [file.parent.name for file in files],
    }
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "rows" / "train")
    return tmp_path / "rows" / "train"


def test_a_folder_of_datasets_gives_the_latents_of_the_class_folder(job: Job, rows: Path):
    of_folder = load_set(job("dtype=float32"))
    of_rows = load_set(job("dtype=float32", source=rows, out="rows_out"))
    index = matches(all_of(of_rows, "latents"), all_of(of_folder, "latents"), 1e-4)
    assert torch.equal(all_of(of_rows, "labels")[index], all_of(of_folder, "labels"))
    assert of_rows.spec.class_names == ["cat", "dog"]
    assert read_manifest(job("num_workers=1", source=rows, out="workers")).count == 16


def test_a_folder_of_splits_asks_which(job: Job, rows: Path):
    with pytest.raises(ValueError, match=r"holds the splits train; name one: source=.*train"):
        job(source=rows.parent)


def test_columns_that_cannot_be_told_apart_are_refused(job: Job, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    image = Image.new("RGB", (20, 20))
    for name, columns in (
        ("two", {"a": [image], "b": [image], "label": [0]}),
        ("none", {"a": [image], "text": ["x"]}),
    ):
        images = {key: datasets.Image() for key in columns if key in "ab"}
        features = datasets.Dataset.from_dict(columns).features | images
        datasets.Dataset.from_dict(columns, features=datasets.Features(features)).save_to_disk(
            tmp_path / name
        )
    with pytest.raises(
        ValueError, match=r"has 2 columns of images among a, b, label; keep exactly one"
    ):
        job(source=tmp_path / "two")
    with pytest.raises(
        ValueError, match=r"has 0 columns of class labels among a, text; keep exactly one"
    ):
        job(source=tmp_path / "none")
