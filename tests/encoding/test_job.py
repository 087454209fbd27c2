"""Encoding as a job: after a kill, a crash or a full disk the same command continues to the same
bytes, and no two jobs share a folder."""

import errno
import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock

import pytest

from common.config.compose import compose
from common.files import LOCK_PARTS, ROOT, hash_content, read_object, write_json
from data.manifest import read_manifest
from encoding import images
from encoding.encoder import ShardEncoder
from encoding.job import claim_folder
from encoding.shards import Part, ShardWriter, read_finished
from models.autoencoders import WEIGHTS_FILE
from precompute_latents import precompute
from tests.harness.captions import plan_captions
from tests.harness.limits import lock_elsewhere, start_fork
from tests.harness.parts import run_parts
from tests.harness.refusals import expect_refusal
from tests.harness.sets import flip_byte, read_contents
from tests.harness.words import TINY_JOB, slow

SECOND = "train-00001.tar"


def read_times(folder):
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.tar")}


def edit(change, name=f"{SECOND}.json"):
    """Damages a file of a job."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGES = [
    lambda folder: (folder / SECOND).unlink(),
    edit(lambda content: content[:-1] + b"x", SECOND),
    lambda folder: (folder / f"{SECOND}.json").unlink(),
    edit(lambda content: b"[" * 100_000),
    edit(lambda content: b'{"sha256": "", "shard": 5}'),
    edit(lambda content: content.replace(b"0", b"1", 1)),
]


def test_only_a_lost_or_damaged_shard_is_encoded_again(done, job, capsys):
    folder = done()
    contents = read_contents(folder)
    times = read_times(folder)
    assert read_times(job()) == times
    assert "20 of 20 images are already encoded" in capsys.readouterr().out
    for damage in DAMAGES:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        assert read_finished(folder, SECOND) is not None
        damage(folder)
        assert read_finished(folder, SECOND) is None
    times = read_times(folder)
    (folder / "manifest.json").unlink()
    job()
    assert "14 of 20 images are already encoded" in capsys.readouterr().out
    assert read_contents(folder) == contents
    rebuilt = [name for name, time in read_times(folder).items() if times[name] != time]
    assert rebuilt == [SECOND]


def test_a_job_of_an_earlier_version_goes_on_with_the_same_bytes(tmp_path):
    claim_folder(tmp_path, {"seed": 0})
    claim_folder(tmp_path, {"seed": 0, "same_bytes": True})
    with expect_refusal("same_bytes was True, is False"):
        claim_folder(tmp_path, {"seed": 0, "same_bytes": False})


# Crashes


class CrashError(Exception):
    """Stops a job in a test."""


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a dead job leaves files open
# with 5: in the folder, in a shard, in the set
@pytest.mark.parametrize("step", [5, slow(1)])
def test_a_job_that_dies_at_any_write_continues_to_the_same_bytes(step, job, monkeypatch):
    """It dies when it makes a file or a rename durable for the n-th time."""
    settings = ["held_out=0.5", "shard_size=10"]
    fsync = os.fsync
    writes = Mock(wraps=fsync)
    monkeypatch.setattr(os, "fsync", writes)
    expected = read_contents(job(*settings, out="uninterrupted"))
    assert writes.call_count == 13
    for count in range(1, 14, step):
        endings = chain(repeat(DEFAULT, count - 1), [CrashError], repeat(DEFAULT))
        monkeypatch.setattr(os, "fsync", Mock(wraps=fsync, side_effect=endings))
        with pytest.raises(CrashError):
            job(*settings, out=f"crash{count}")
        gc.collect()
        assert read_contents(job(*settings, out=f"crash{count}")) == expected


def test_a_full_disk_leaves_nothing_half_named(job, encoded, monkeypatch, tmp_path):
    """The disk is full after two blocks, in the second shard; the files that are there then are
    whole, and the job continues from them."""
    expected = read_contents(encoded())
    write_block = ShardWriter.write_block
    written = []

    def write_until_full(self):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(self)
        write_block(self)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write_block", write_until_full)
        with expect_refusal(r"no space is left for .*tar \(No space left on dev.*dry_run=true"):
            job()
    contents = read_contents(tmp_path / "out")
    assert contents.items() <= expected.items()
    assert "held_out-00000.tar" in contents
    assert read_contents(job()) == expected


def test_an_image_that_cannot_be_read_stops_the_job_and_is_not_left_out(job, monkeypatch):
    """Unlike one that cannot be decoded, it may be there again in a moment."""
    read_image = images.read_image
    failures = 4

    def fail_at_first(entry):
        nonlocal failures
        if entry.key.endswith("dog/009.png") and failures:
            failures -= 1
            raise OSError(errno.EIO, "Input/output error")
        return read_image(entry)

    monkeypatch.setattr(images, "read_image", fail_at_first)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with expect_refusal(r"dog/009\.png: .*Input/output error\. Finished shards are kept"):
        job()
    failures = 3
    manifest = read_manifest(job())
    assert (manifest.count, manifest.skipped) == (16, [])


# Ranks, and other processes


@pytest.mark.slow
def test_ranks_of_torchrun_make_the_bytes_of_one_job(vae, photos, tmp_path, job):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [f"encoder.path={vae}", f"source={photos}", f"out={tmp_path / 'ranks'}"]
    done = subprocess.run(
        [*launcher, "precompute_latents.py", *TINY_JOB, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" held-out latents in ") == 1  # one rank reports for all
    assert read_contents(tmp_path / "ranks") == read_contents(job())


TURN = range(LOCK_PARTS, LOCK_PARTS + 1)


@contextmanager
def held(folder, part):
    """Another process wants a part of the folder's shards, or the turn, and holds it while the
    `with` block runs; yields what it hears."""
    chosen = TURN if part == "turn" else Part.parse(part).find_range(LOCK_PARTS)
    with lock_elsewhere(folder, start=chosen.start, length=len(chosen)) as (_, answer):
        yield answer


def test_two_jobs_do_not_write_the_same_shards(job, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for part, words in (("1/2", []), ("0/1", ["part=1/3"])):
        with held(folder, part), expect_refusal("another process works on these shards; wait for"):
            job(*words)
    assert [file.name for file in folder.iterdir()] == [".lock"]


def test_a_part_holds_its_shards_while_it_encodes(job, monkeypatch):
    refused = []
    run = ShardEncoder.run

    def run_beside_others(self, plan):
        for other in ("1/3", "0/3", "1/2", "0/1"):
            with held(self.out, other) as answer:
                if answer != "locked":
                    refused.append(other)
        run(self, plan)

    monkeypatch.setattr(ShardEncoder, "run", run_beside_others)
    job("part=1/3")
    assert refused == ["1/3", "1/2", "0/1"]


def test_parts_write_and_compare_settings_one_after_the_other(job, monkeypatch):
    answers = []

    def write_beside_others(file, content):
        with held(file.parent, "turn") as answer:
            answers.append(answer)
        write_json(file, content)

    monkeypatch.setattr("encoding.job.write_json", write_beside_others)
    out = job("part=0/3")
    assert answers == ["Busy."]
    with held(out, "turn") as answer:
        assert answer == "locked"


def test_a_rank_that_cannot_be_is_refused(job, tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with expect_refusal("MASTER_ADDR is not set, and WORLD_SIZE is 8"):
        job()
    assert not (tmp_path / "out").exists()


# Parts


def finish(out, *words):
    return precompute(compose([f"out={out}", "finish=true", *words], "precompute_latents"))


@pytest.fixture(scope="module")
def captioned_words(vae, photos, tmp_path_factory):
    """Words of a job of 40 shards of images and 7 of captions."""
    folder = tmp_path_factory.mktemp("captioned")
    for i in range(2):
        shutil.copytree(photos, folder / "photos" / str(i))
    templates = folder / "templates.txt"
    templates.write_text("a {}\nthe {}\nmy {}\n")
    words = [*TINY_JOB, f"encoder.path={vae}", f"source={folder / 'photos'}"]
    words += ["shard_size=1", "batch_size=1", "block_size=1"]
    return [*words, "text_encoder=wordllama", f"captions={templates}"]


@pytest.fixture(scope="module")
def undivided(captioned_words, tmp_path_factory):
    """Runs that job as one command, and returns the contents of the files that it writes."""
    out = tmp_path_factory.mktemp("undivided") / "out"
    return read_contents(
        precompute(compose([*captioned_words, f"out={out}"], "precompute_latents")).parent
    )


@pytest.mark.parametrize(
    ("parts", "kills"), [(2, 1), *(slow(*row) for row in [(1, 9), (4, 3), (8, 1), (8, 2)])]
)
def test_parts_make_the_bytes_of_one_job(parts, kills, captioned_words, undivided, tmp_path):
    """They start in the same moment in a folder that is not there yet, and are killed. Another
    command, which sees neither the images nor the encoder, writes the manifest."""
    out = tmp_path / "out"
    process = start_fork(run_parts, parts, kills, str(out), captioned_words)
    process.join()
    assert process.exitcode == 0
    finish(out)
    contents = read_contents(out)
    job = json.loads(contents.pop("job.json"))
    own = {"parts": parts, "sha256": job["sha256"]}
    assert job == json.loads(undivided["job.json"]) | own
    whole = {name: content for name, content in contents.items() if not name.endswith(".tmp")}
    assert whole == {name: undivided[name] for name in undivided if name != "job.json"}


def test_a_fault_in_a_part_is_named_at_the_end(job, capsys):
    for part in ("0/3", "2/3"):
        out = job(f"part={part}", "shard_size=3")
        assert (
            f"part={part} is encoded. When all parts are encoded, run: " in capsys.readouterr().out
        )
    with expect_refusal(r"shards of part=1/3 \(train-00000.tar, …\) are absent or damaged; run"):
        finish(out)

    job("part=1/3", "shard_size=3")
    flip_byte(out / "train-00005.tar")
    with expect_refusal(r"shards of part=2/3 \(train-00005.tar\) are absent or damaged"):
        finish(out)
    assert not (out / "manifest.json").exists()
    job("part=7/8", "shard_size=3")
    assert read_manifest(finish(out).parent).count == 16
    assert "16 training and 4 held-out latents" in capsys.readouterr().out


@pytest.mark.fault("images replaced between two parts of a job", "refused in one sentence")
def test_images_replaced_between_two_parts_are_another_job(job, more_photos):
    """They have the names and sizes of the earlier ones; only a hash tells."""
    out = job("part=0/2", source=more_photos)
    for file in more_photos.rglob("*.png"):
        flip_byte(file)
    with expect_refusal("has the latents of another .*; encode into"):
        job("part=1/2", source=more_photos)
    # Jobs of earlier versions, whose sidecars have no hashes of images, go on.
    for file in out.glob("*.tar.json"):
        sidecar = read_finished(out, file.stem)
        del sidecar["images"]
        write_json(file, sidecar | {"sha256": hash_content(sidecar)})
    job("part=1/2", source=more_photos)


def test_what_finishes_no_job(done, tmp_path):
    folder = done()
    with held(folder, "1/2"), expect_refusal("another process works on these shards; wait for it"):
        finish(folder)
    with expect_refusal("finish=true needs only out; leave resolution=32 part=0/2 out"):
        finish(folder, "resolution=32", "part=0/2")
    with expect_refusal("has no job.json; encode its parts first: part=0/8"):
        finish(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    job = read_object(folder / "job.json")
    job["shards"]["images"].pop()
    write_json(folder / "job.json", job)
    with expect_refusal("job.json is broken, so nothing says which job"):
        finish(folder)


def test_ranks_divide_a_part():
    assert Part(1, 2).divide(0, 3) == Part(3, 6)


def test_captions_are_shared_too(tmp_path):
    job = plan_captions([["one", "two", "three"]], shard_size=1)
    assert [shard.file for shard in job.run(tmp_path, Part(1, 2))] == job.shards[2:]


def test_a_file_system_without_locks_is_a_warning(job, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
    assert read_manifest(job()).count == 16
    assert "cannot be locked (No locks); make sure that no other process" in capsys.readouterr().out


def test_the_lock_file_of_another_user_is_a_sentence(done, monkeypatch):
    folder = done()
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr("encoding.job.lock_folder", Mock(side_effect=denied))
    with expect_refusal(r"\.lock cannot be opened \(Permission denied\); run this command as the"):
        finish(folder)


# Other jobs


@pytest.mark.parametrize("content", [b"", b"5", b"\xff"])
def test_a_broken_job_file_is_a_sentence(tmp_path, content):
    (tmp_path / "job.json").write_bytes(content)
    with expect_refusal("job.json is broken, so nothing says which job this folder belongs to"):
        claim_folder(tmp_path, {})


def test_a_square_is_one_job_however_it_is_given(job):
    job("resolution=[16,16]")
    assert read_manifest(job("resolution=16")).resolution == 16


def test_changed_images_or_weights_are_another_job(
    done, job, vae, more_photos, tmp_path, monkeypatch
):
    """But not an encoder that was moved."""
    done()
    moved = shutil.copytree(vae, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert read_manifest(job("encoder.path=moved")).encoder["path"] == str(moved)
    flip_byte(moved / WEIGHTS_FILE)
    with expect_refusal("encoder_sha256 was"):
        job(f"encoder.path={moved}")
    (more_photos / "cat" / "000.jpg").rename(more_photos / "dog" / "000_.jpg")
    with expect_refusal("source_sha256 was"):
        job(source=more_photos)


def test_a_folder_with_other_files_is_refused(job, tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    with expect_refusal(f"out={out} cannot be made or read"):
        job()
    out.unlink()
    out.mkdir()
    for names in (["thesis.txt"], [".lock", "checkpoints"]):
        for name in names:
            (out / name).write_text("mine")
        with expect_refusal(f"out={out} is not empty .* choose another folder"):
            job()
        contents = {file.name: file.read_text() for file in out.iterdir()}
        assert contents == dict.fromkeys(names, "mine")
        (out / names[-1]).unlink()
    (out / "job.json.tmp").write_text("left by a kill, beside .lock")
    assert read_manifest(job()).count == 16
