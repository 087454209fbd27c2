"""Saves on disks that are full, slow, broken or read-only, and two runs in one folder."""

import errno
import os
import shutil
import subprocess
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from common.config.compose import compose
from common.files import create_file, make_folder, rename
from tests.harness.limits import lock_elsewhere
from tests.harness.outcomes import (
    TWELVE_STEPS,
    are_equal,
    assert_newest_loads,
    assert_tidy,
    list_checkpoints,
    read_lines,
    read_outcome,
)
from tests.harness.refusals import expect_refusal
from tests.harness.words import TINY_RUN, slow
from tests.harness.zygote import HANG
from train import train
from training.assemble import Training
from training.checkpoint import save
from training.checkpoint.files import DTYPE_NAMES, write_tensors
from training.checkpoint.load import hash_from_disk
from training.checkpoint.save import Checkpoints, Save

TWO_PICTURES = ["sample_every=6", "sampling.steps=1"]
BACKGROUND = pytest.mark.parametrize("background", [True, slow(False)])


def start_run(folder, *words):
    return train(compose([*TINY_RUN, *TWELVE_STEPS, *words, f"run_dir={folder}"]))


def refuse_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device", "ema.safetensors")


def refuse_files(monkeypatch, wanted):
    """Leaves no space for new files of which `wanted` is true."""

    def create(file):
        if wanted(file):
            refuse_space()
        return create_file(file)

    monkeypatch.setattr("common.files.create_file", create)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def saved(small_disk, run_whole):
    """A run on a small disk that has ended after its first checkpoint, step-2."""
    return Path(shutil.copytree(run_whole("total_samples=16"), small_disk / "run"))


def fill(disk, leave):
    """Leaves so many bytes of the disk free."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - leave)))
    return filler


@pytest.mark.fault(
    "too little room on the disk before a save", "stops in a sentence with what is needed; goes on"
)
def test_room_is_looked_for_first(small_disk, run_whole):
    folder = small_disk / "run"
    filler = fill(small_disk, leave=1_000_000)
    with expect_refusal(r"step-2 cannot be saved \(it needs .*iB, .*iB are free\)"):
        start_run(folder)
    assert not list((folder / "checkpoints").iterdir())
    filler.unlink()
    start_run(folder)
    assert read_outcome(folder) == read_outcome(run_whole())


@pytest.mark.fault(
    "the disk full at each stage of a save",
    "stops in a sentence; the checkpoint before loads; goes on to the same bits",
)
@BACKGROUND
@pytest.mark.parametrize("share", [0.5, *(slow(share) for share in (0.0, 0.9))])
def test_a_disk_that_fills_up_in_a_save(share, background, saved, run_whole, monkeypatch):
    """Another program takes the room after the run has looked for it."""
    monkeypatch.setattr(save, "FREE_SPACE_FACTOR", 0.0)
    size = sum(file.stat().st_size for file in (saved / "checkpoints" / "step-2").iterdir())
    # Small files, such as config.yaml, need about 40 kB.
    filler = fill(saved.parent, leave=int(share * size) + 40_000)
    with expect_refusal(r"step-4 cannot be saved .*the same command continues from step-2"):
        start_run(saved, f"async_checkpoints={background}")
    assert_tidy(saved)
    assert_newest_loads(saved)
    filler.unlink()
    start_run(saved, f"async_checkpoints={background}")
    assert read_outcome(saved).state == read_outcome(run_whole()).state


@pytest.mark.fault(
    "the disk full at the last, small files of a save",
    "stops in a sentence; what is complete loads",
)
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_the_last_files_of_a_save(name, run_dir, monkeypatch):
    refuse_files(monkeypatch, lambda file: f"/step-4.tmp/{name}" in str(file))
    with expect_refusal(r"step-4 cannot be saved \(No space.*continues from step-2; \d+ samples"):
        start_run(run_dir)
    assert_newest_loads(run_dir)
    assert_tidy(run_dir)


@pytest.mark.fault(
    "the disk full outside of saves", "stops in a sentence; the checkpoint before loads"
)
def test_a_full_disk_before_and_beside_saves(saved):
    fill(saved.parent, leave=0)
    warned = pytest.warns(UserWarning, match=r"cannot be written \(No space .*continues without it")
    with warned, expect_refusal(r"step-4 cannot be saved .*continues from step-2"):
        start_run(saved)
    assert_newest_loads(saved)


@pytest.mark.fault("a disk with room for checkpoints only", "a warning a file; the same bits")
def test_only_checkpoints_need_room(run_whole, tmp_path, monkeypatch):
    """The run tells once what else it cannot write."""
    refuse_files(monkeypatch, lambda file: "checkpoints" not in file.parts)
    with pytest.warns(UserWarning, match="continues without it") as told:
        start_run(tmp_path, *TWO_PICTURES)
    names = "config.yaml environment.json ledger.json metrics.jsonl samples summary.json time.json"
    assert sorted(str(w.message).split()[0].split("/")[-1] for w in told) == names.split()
    assert read_outcome(tmp_path) == read_outcome(run_whole())


@pytest.mark.fault("links at the names that a run writes", "no target is written")
def test_a_run_writes_through_no_link(tmp_path):
    names = (
        "running metrics.jsonl metrics.jsonl.tmp time.json.tmp config.yaml.tmp ledger.json.tmp "
        "environment.json.tmp summary.json.tmp samples/step-12.png samples/step-12.png.tmp "
        "averages/samples-96-0.05.safetensors.tmp averages/samples-96-0.10.safetensors .lock"
    )
    for name in names.split():
        link = tmp_path / name
        make_folder(link.parent)
        link.symlink_to(tmp_path / "target")
    with expect_refusal(r"\.lock is a link"):
        start_run(tmp_path)
    link.unlink()
    start_run(tmp_path, "ema.snapshots=1", *TWO_PICTURES)
    assert not (tmp_path / "target").exists()


@pytest.mark.fault(
    "the file system turns read-only", "stops in a sentence; the checkpoint before loads"
)
def test_a_read_only_folder(saved):
    subprocess.run(["mount", "-o", "remount,ro", str(saved.parent)], check=True)
    with expect_refusal(r"run_dir=.* cannot be written to \(Read-only file system\)"):
        start_run(saved)
    assert_newest_loads(saved)


@pytest.mark.fault(
    "a second run in the same folder",
    "refused in a sentence that names the first; that one is unharmed",
)
def test_two_runs_in_one_folder(run_whole, finished):
    with lock_elsewhere(finished) as (other, _):
        sentence = rf"another run writes to it.* It is process {other.pid} on "
        with expect_refusal(sentence):
            start_run(finished, "total_samples=104")
        assert read_outcome(finished) == read_outcome(run_whole())
    start_run(finished, "total_samples=104")


@pytest.mark.fault(
    "the disk full for a moment", "the save is tried again after a pause; the run goes on"
)
@BACKGROUND
def test_a_save_is_tried_again(background, run_whole, tmp_path, monkeypatch, capsys):
    write = Save.write_files
    failures = iter([True, True])

    def write_later(self, *arguments):
        if self.folder.name == "step-4" and next(failures, False):
            refuse_space()
        return write(self, *arguments)

    monkeypatch.setattr(Save, "write_files", write_later)
    start_run(tmp_path, f"async_checkpoints={background}")
    assert capsys.readouterr().out.count("it is tried again in") == 2
    assert read_outcome(tmp_path).state == read_outcome(run_whole()).state


@pytest.mark.fault(
    "a rename that was carried out and answered with an error", "it counts as done; the run goes on"
)
def test_a_rename_that_happened_is_no_error(run, run_dir, monkeypatch):
    replace = Path.replace

    def replace_and_fail(source, target):
        replace(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(Path, "replace", replace_and_fail)
    run("save_every=1", "keep_checkpoints=2")
    assert list_checkpoints(run_dir) == ["step-1", "step-2"]


@pytest.mark.fault(
    "a checkpoint that a failed save has left under its final name", "the next attempt replaces it"
)
def test_a_save_that_failed_after_its_rename_is_tried_again(run, run_dir, monkeypatch):
    """The flush after the rename fails, and so does the first attempt to rename the folder back."""
    failures = iter([True, True])
    sync = save.sync_path

    def fail_once():
        if next(failures, False):
            raise OSError(errno.EIO, "Input/output error")

    def sync_later(folder):
        fail_once()
        sync(folder)

    def rename_later(source, target):
        if source.suffix != ".tmp":
            fail_once()
        rename(source, target)

    monkeypatch.setattr(save, "sync_path", sync_later)
    monkeypatch.setattr(save, "rename", rename_later)
    monkeypatch.setattr(save, "RETRY_PAUSES", (0.0,))
    run("save_every=1", "total_samples=8")
    assert list_checkpoints(run_dir) == ["step-1"]
    assert_newest_loads(run_dir)


@pytest.mark.fault(
    "a file system that cannot flush folders (EINVAL)", "saved without it; the run goes on"
)
def test_a_file_system_that_flushes_no_folders(run, run_dir, monkeypatch):
    fsync = os.fsync

    def refuse_folders(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    run("save_every=2")
    assert list_checkpoints(run_dir) == ["step-2"]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The first save ends only once step 12 is reached, and still holds the state of step 7."""
    step_12 = threading.Event()
    names = []
    write = Save.write_files
    begin_save = Checkpoints.save

    def write_late(self, *arguments):
        step_12.wait(HANG)
        names.append(threading.current_thread().name)
        return write(self, *arguments)

    def begin_and_signal(self, state, *arguments):
        if state.step == 12:
            assert not names, "the run waited for the first save"
            step_12.set()
        return begin_save(self, state, *arguments)

    words = ["save_every=7", "keep_checkpoints=9", "eval_every=0"]
    with monkeypatch.context() as patch:
        patch.setattr(Save, "write_files", write_late)
        patch.setattr(Checkpoints, "save", begin_and_signal)
        summary = start_run(tmp_path / "background", *words)
    assert names == ["checkpoint-7", "checkpoint-12"]
    assert summary["save_stall_seconds"] > 0
    start_run(tmp_path / "foreground", *words, "async_checkpoints=false")
    for name in ("model", "ema", "rank-0-of-1"):
        file = f"checkpoints/step-7/{name}.safetensors"
        late, direct = (load_file(tmp_path / run / file) for run in ("background", "foreground"))
        assert are_equal(late, direct)


@pytest.mark.fault(
    "a disk that hangs in a save of one process", "given up after runtime.parallel.timeout_minutes"
)
def test_a_disk_that_hangs_is_left_alone(tmp_path, monkeypatch):
    """The run neither deletes what it began on that disk nor lists what is there."""
    done = threading.Event()

    describe_resume = Mock()
    monkeypatch.setattr(Save, "write_files", lambda *_: done.wait(HANG))
    monkeypatch.setattr(save, "describe_resume", describe_resume)
    words = ["runtime.parallel.timeout_minutes=0.02", "save_every=4", "total_samples=800000"]
    with expect_refusal("process 0 has written nothing for 1 s"):
        start_run(tmp_path, *words, "log_every=0")
    done.set()
    assert not describe_resume.called
    assert (tmp_path / "checkpoints" / "step-4.tmp").is_dir()


def test_a_save_that_failed_is_heard_of_at_the_next_step(tmp_path, monkeypatch):
    take_step = Training.take_step

    def step_after_saves(training):
        for thread in threading.enumerate():
            if thread.name.startswith("checkpoint-"):
                thread.join(HANG)
        take_step(training)

    monkeypatch.setattr(Training, "take_step", step_after_saves)
    monkeypatch.setattr(Save, "write_files", refuse_space)
    with expect_refusal("step-5 cannot be saved"):
        start_run(tmp_path, "save_every=5", "log_every=1", "eval_every=0")
    assert len(read_lines(tmp_path)) == 6


def test_the_written_format_is_safetensors(tmp_path):
    """Every dtype and shape, read by the library; the hash is that of the file."""
    tensors = {str(dtype): torch.arange(6).view(3, 2).to(dtype) for dtype in DTYPE_NAMES}
    tensors |= {"empty": torch.zeros(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    file = tmp_path / "x.safetensors"
    described = write_tensors(file, tensors, {"a": "b"})
    copies = load_file(file)
    assert are_equal(copies, tensors)
    assert [copies[name].dtype for name in tensors] == [t.dtype for t in tensors.values()]
    assert hash_from_disk(file, lambda: None) == (described["bytes"], described["sha256"])
