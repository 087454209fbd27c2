"""Disks that are full, broken or read-only, files that are damaged, and two runs in one folder."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.files import ROOT, rename, write_atomically
from tests.harness.outcomes import TWELVE_STEPS, read_outcome
from tests.harness.words import TINY_RUN
from tests.harness.zygote import HANG, Start, read_output
from train import train
from training.checkpoint import save
from training.checkpoint.files import DTYPE_NAMES, WEIGHTS_FILES, Staged, write_tensors
from training.checkpoint.load import (
    find_damage,
    find_newest_verified,
    hash_from_disk,
    list_complete,
    list_expected_files,
)
from training.checkpoint.save import Checkpoints, Save
from training.config.compose import compose
from training.distributed.ranks import Ranks

FILES = [
    "model.safetensors",
    "ema.safetensors",
    "rank-0-of-1.safetensors",
    "state.json",
    "manifest.json",
]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "one bit flipped": flip,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.fault(
    "a file of a checkpoint with one bit flipped, truncated, empty or missing",
    "set aside with a warning; the one before is loaded, and the run ends with the same bits",
)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_seen(kind: str, file: str, whole: Callable[..., Path], tmp_path: Path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole() / "checkpoints", folder)
    before, newest = list_complete(folder)[-2:]
    assert find_damage(newest) is None
    DAMAGES[kind](newest / file)
    if kind == "one bit flipped" and file == "manifest.json":
        assert find_damage(newest)  # whichever bit: a hash, a size, a name or the JSON is wrong
    with pytest.warns(
        UserWarning, match=r"step-12: .*; moved to step-12\.corrupt, trying the one before"
    ):
        assert find_newest_verified(folder) == before
    assert [f.name for f in list_complete(folder)][-1] == before.name
    assert (folder / "step-12.corrupt").is_dir()


@pytest.mark.fault("the newest checkpoint damaged, the same command", "ends with the same bits")
def test_a_run_goes_on_from_the_one_before(
    zygote: Start, whole: Callable[..., Path], tmp_path: Path
):
    folder = tmp_path / "run"
    shutil.copytree(whole(), folder)
    flip(list_complete(folder / "checkpoints")[-1] / "rank-0-of-1.safetensors")
    assert zygote(folder) == [0]
    assert (
        "rank-0-of-1.safetensors does not match its sha256; moved to step-12.corrupt"
        in read_output(folder)
    )
    assert read_outcome(folder) == read_outcome(whole())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def free(disk: Path) -> int:
    return shutil.disk_usage(disk).free


def fill(disk: Path, leave: int) -> Path:
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, free(disk) - leave)))
    return filler


def started(folder: Path, *words: str) -> dict:
    return train(compose([*TINY_RUN, *TWELVE_STEPS, *words, f"run_dir={folder}"]))


@pytest.mark.fault(
    "too little room on the disk before a save", "stops in a sentence with what is needed; goes on"
)
def test_room_is_looked_for_first(small_disk: Path, whole: Callable[..., Path]):
    folder = small_disk / "run"
    filler = fill(small_disk, leave=1_000_000)
    with pytest.raises(
        ValueError,
        match=r"step-2 cannot be saved \(it needs .* GiB, .* GiB are free\).*nothing was",
    ):
        started(folder)
    assert not list((folder / "checkpoints").iterdir())
    filler.unlink()
    started(folder)
    assert read_outcome(folder) == read_outcome(whole())


@pytest.mark.fault(
    "the disk full at each stage of a save",
    "stops in a sentence; the checkpoint before loads; goes on to the same bits",
)
@pytest.mark.parametrize(
    "background",
    [
        pytest.param(True, id="background"),
        pytest.param(False, id="foreground", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fills_up_in_a_save(
    background: bool, small_disk: Path, whole: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    # somebody else takes the room that was there
    monkeypatch.setattr("training.checkpoint.save.FREE_SPACE_FACTOR", 0.0)
    size = sum(f.stat().st_size for f in list_complete(whole() / "checkpoints")[-1].iterdir())
    stages = [0.0, 0.5, 0.9]
    for number, share in enumerate(stages):
        folder = small_disk / f"run-{number}"
        started(folder, "total_samples=16")
        filler = fill(small_disk, leave=int(share * size) + 40_000)  # config.yaml and its like
        with pytest.raises(
            ValueError, match=r"step-4 cannot be saved .*the same command goes on from step-2"
        ):
            started(folder, f"async_checkpoints={background}")
        assert [f.name for f in (folder / "checkpoints").glob("step-*")] == ["step-2"]
        assert find_damage(folder / "checkpoints" / "step-2") is None
        filler.unlink()
        if number in (0, len(stages) - 1):
            started(folder, f"async_checkpoints={background}")
            assert read_outcome(folder).state == read_outcome(whole()).state
        shutil.rmtree(folder)


@pytest.mark.fault(
    "the disk full at the last, small files of a save",
    "stops in a sentence; what is complete loads",
)
@pytest.mark.parametrize(("name", "newest"), [("state.json", 2), ("manifest.json", 2)])
def test_the_last_files_of_a_save(
    name: str, newest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(file: Path, text: str) -> None:
        if file.name == name and ("4" in str(file.parent.name) or "step-4" in text):
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write_atomically(file, text)

    monkeypatch.setattr("common.files.write_atomically", full)
    with pytest.raises(
        ValueError,
        match=rf"step-4 cannot be saved \(No space.*goes on from step-{newest}; \d+ samples",
    ):
        started(tmp_path / "run")
    assert find_damage(tmp_path / "run" / "checkpoints" / f"step-{newest}") is None
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))


@pytest.mark.fault(
    "the disk full outside of saves", "stops in a sentence; the checkpoint before loads"
)
def test_a_full_disk_before_and_beside_saves(small_disk: Path, monkeypatch: pytest.MonkeyPatch):
    folder = small_disk / "run"
    started(folder, "total_samples=16")
    fill(small_disk, leave=0)
    with pytest.raises(
        ValueError,
        match=r"step 2: .*/run/environment.json cannot be written \(No space .*goes on from step-2",
    ):
        started(folder)
    assert find_damage(folder / "checkpoints" / "step-2") is None


@pytest.mark.fault(
    "the file system turns read-only", "stops in a sentence; the checkpoint before loads"
)
def test_a_read_only_folder(small_disk: Path):
    folder = small_disk / "run"
    started(folder, "total_samples=16")
    (folder / "checkpoints").rename(folder / "kept")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(
        ValueError, match=r"run_dir=.* cannot be written to \(Read-only file system\)"
    ):
        started(folder)
    with pytest.raises(OSError, match="Read-only file system"):
        Save(folder / "checkpoints" / "step-1", Staged({}, {}, {}, {}), {}, 0, Ranks()).prepare()
    assert find_damage(folder / "kept" / "step-2") is None


@pytest.mark.fault(
    "a second run in the same folder",
    "refused in a sentence that names the first; that one is unharmed",
)
def test_two_runs_in_one_folder(whole: Callable[..., Path], tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(whole(), folder)
    hold = (
        "import sys; from pathlib import Path; from common.files import lock_folder; h = "
        "lock_folder(Path(sys.argv[1]), '');"
    )
    command = [sys.executable, "-c", hold + "print('held', flush=True); input()", str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            ValueError, match=rf"another run writes to it.* It is process {other.pid} on "
        ):
            started(folder, "total_samples=104")
        assert read_outcome(folder) == read_outcome(whole())
        other.kill()
    started(folder, "total_samples=104")


@pytest.mark.fault(
    "leftovers of a save or of a removal that was killed", "cleared away; the complete ones stay"
)
def test_leftovers_go(whole: Callable[..., Path], tmp_path: Path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole() / "checkpoints", folder)
    names = sorted(f.name for f in folder.iterdir())
    for name in ("step-14.tmp", "step-2.removed"):
        shutil.copytree(folder / "step-12", folder / name)
    assert find_newest_verified(folder) == folder / "step-12"
    assert sorted(f.name for f in folder.iterdir()) == names


@pytest.mark.parametrize(
    ("words", "kept"), [(["keep_every=4"], {4, 8, 10, 12}), (["keep_checkpoints=1"], {12})]
)
def test_what_is_kept(words: list[str], kept: set[int], whole: Callable[..., Path], tmp_path: Path):
    """The newest, every K-th, and the one with the lowest held-out loss."""
    folder = tmp_path / "run"
    started(folder, *words)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = min((line for line in lines if "eval_loss" in line), key=lambda line: line["eval_loss"])
    found = {int(f.name.removeprefix("step-")) for f in list_complete(folder / "checkpoints")}
    assert found == kept | {best["step"]}


@pytest.mark.parametrize(("best_by", "best"), [("eval_loss", "step-4"), ("fd_random", "step-8")])
def test_the_best_one_stays(best_by: str, best: str, whole: Callable[..., Path], tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for step, loss in ((2, float("nan")), (4, 0.1), (6, None), (8, 0.7), (10, None), (12, 0.6)):
        shutil.copytree(list_complete(whole() / "checkpoints")[-1], folder / f"step-{step}")
        file = folder / f"step-{step}" / "state.json"
        scores = {"eval_loss": loss, "fd_random": None if loss is None else 1.0 - loss}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"scores": scores}))
    shutil.copytree(list_complete(whole() / "checkpoints")[-1], folder / "step-14")
    Checkpoints(folder, keep=2, best_by=best_by).remove_old(folder / "step-14")
    assert [f.name for f in list_complete(folder)] == [best, "step-12", "step-14"]


def test_nothing_is_removed_for_a_checkpoint_that_cannot_be_read_back(
    whole: Callable[..., Path], tmp_path: Path, capsys
):
    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        shutil.copytree(list_complete(whole() / "checkpoints")[-1], folder / f"step-{step}")
    flip(folder / "step-6" / "ema.safetensors")
    Checkpoints(folder, keep=1).remove_old(folder / "step-6")
    assert (
        "not removed (step-6 was read back and ema.safetensors does not match its sha256)"
        in capsys.readouterr().out
    )
    assert len(list_complete(folder)) == 3


@pytest.mark.fault(
    "an older checkpoint that is damaged or cannot be removed", "a warning; the run goes on"
)
def test_trouble_with_older_ones_is_a_warning(
    whole: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        shutil.copytree(list_complete(whole() / "checkpoints")[-1], folder / f"step-{step}")
    (folder / "step-2" / "state.json").write_text("{")
    (folder / "step-4" / "state.json").unlink()
    checkpoints = Checkpoints(folder, keep=2)
    monkeypatch.setattr(
        "training.checkpoint.save.remove_checkpoint", lambda old: old.rename(folder / "step-6")
    )
    checkpoints.remove_old(folder / "step-6")
    assert "older checkpoints are not removed" in capsys.readouterr().out
    monkeypatch.undo()
    checkpoints.remove_old(folder / "step-6")
    assert [f.name for f in list_complete(folder)] == ["step-4", "step-6"]


@pytest.mark.fault(
    "a sector of the newest checkpoint that cannot be read", "set aside; the one before is loaded"
)
@pytest.mark.fault(
    "a disk that answers with an error once", "read again; the newest checkpoint is loaded"
)
@pytest.mark.parametrize("failures", [1, 1000], ids=["once", "always"])
def test_a_bad_sector(
    failures: int, whole: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole() / "checkpoints", folder)
    before, newest = list_complete(folder)[-2:]
    left = [failures]

    def read(file: Path, advance: Callable[[], None]) -> tuple[int, str]:
        if file.parent == newest and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error", str(file))
        return hash_from_disk(file, advance)

    monkeypatch.setattr("training.checkpoint.load.hash_from_disk", read)
    if failures == 1:
        assert find_newest_verified(folder) == newest
    else:
        with pytest.warns(UserWarning, match="Input/output error"):
            assert find_newest_verified(folder) == before


@pytest.mark.fault(
    "a page cache that has other bytes than the disk", "the disk is read, before an old one goes"
)
def test_what_is_read_back_is_not_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    advise = os.posix_fadvise
    left = []
    with file.open("rb") as stream:
        advise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(file):
        pytest.skip("this file system lies in memory")
    file.read_bytes()
    assert resident(file) > 0

    def advised(*arguments: int) -> None:
        advise(*arguments)
        left.append(resident(file))

    monkeypatch.setattr(os, "posix_fadvise", advised)
    hash_from_disk(file, lambda: None)
    assert left == [0]


def resident(file: Path) -> int:
    """Pages of a file that lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = file.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), size) as mapped:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.fault(
    "a manifest of a checkpoint that names none or too few of its files", "it does not verify"
)
@pytest.mark.parametrize(
    "name", ["all", "model.safetensors", "rank-0-of-1.safetensors", "state.json"]
)
def test_a_manifest_must_name_the_files_that_belong_there(
    name: str, whole: Callable[..., Path], tmp_path: Path
):
    folder = tmp_path / "step-12"
    shutil.copytree(list_complete(whole() / "checkpoints")[-1], folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {k: v for k, v in manifest["files"].items() if name not in ("all", k)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert find_damage(folder) is not None
    assert "its manifest lacks or adds" in str(find_damage(folder))


def test_the_files_of_several_processes_belong_together():
    parts = {f"rank-{rank}-of-3.safetensors" for rank in range(3)}
    assert list_expected_files(parts) == {*parts, *WEIGHTS_FILES, "state.json"}
    assert list_expected_files(parts - {"rank-0-of-3.safetensors"}) != {
        *parts,
        *WEIGHTS_FILES,
        "state.json",
    }


@pytest.mark.fault(
    "the disk full for a moment", "the save is tried again after a pause; the run goes on"
)
@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_save_is_tried_again(
    background: bool,
    whole: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
):
    write = Save.write_files
    failures = [2]

    def full(self: Save, *arguments):
        if self.folder.name == "step-4" and failures[0]:
            failures[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device", "ema.safetensors")
        return write(self, *arguments)

    monkeypatch.setattr(Save, "write_files", full)
    started(tmp_path / "run", f"async_checkpoints={background}")
    told = capsys.readouterr().out
    assert (
        told.count(
            "step-4 cannot be saved (No space left on device: ema.safetensors); it is tried "
            "again in"
        )
        == 2
    )
    assert read_outcome(tmp_path / "run").state == read_outcome(whole()).state


@pytest.mark.fault(
    "a rename that was carried out and answered with an error", "it counts as done; the run goes on"
)
def test_a_rename_that_happened_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace = Path.replace

    def answered_wrongly(source: Path, target: Path) -> Path:
        replace(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr(Path, "replace", answered_wrongly)
    train(compose([*TINY_RUN, "save_every=1", "keep_checkpoints=2", f"run_dir={tmp_path / 'run'}"]))
    assert [folder.name for folder in list_complete(tmp_path / "run" / "checkpoints")] == [
        "step-1",
        "step-2",
    ]


@pytest.mark.fault(
    "a checkpoint that a failed save has left under its final name", "the next attempt replaces it"
)
def test_a_save_that_failed_after_its_rename_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    failures = iter([True, True])
    sync = save.sync_folder

    def failing(folder: Path) -> None:
        if next(failures, False):
            raise OSError(errno.EIO, "Input/output error")
        sync(folder)

    def renamed_once(source: Path, target: Path) -> None:
        if source.suffix != ".tmp" and next(failures, False):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(save, "sync_folder", failing)
    monkeypatch.setattr(save, "rename", renamed_once)
    monkeypatch.setattr(save, "RETRY_PAUSES", (0.0,))
    train(compose([*TINY_RUN, "save_every=1", "total_samples=8", f"run_dir={tmp_path / 'run'}"]))
    found = list_complete(tmp_path / "run" / "checkpoints")
    assert [folder.name for folder in found] == ["step-1"]
    assert find_damage(found[0]) is None


@pytest.mark.fault(
    "a file system that cannot flush folders (EINVAL)", "saved without it; the run goes on"
)
def test_a_file_system_that_flushes_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    train(compose([*TINY_RUN, "save_every=2", f"run_dir={tmp_path / 'run'}"]))
    assert [folder.name for folder in list_complete(tmp_path / "run" / "checkpoints")] == ["step-2"]


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is written is the state of the step that was saved, whatever the steps do that come
    meanwhile."""
    go_on = threading.Event()
    ended = []
    write = Save.write_files

    def slowly(self: Save, *arguments):
        go_on.wait(HANG)
        ended.append(threading.current_thread().name)
        return write(self, *arguments)

    monkeypatch.setattr(Save, "write_files", slowly)
    save = Checkpoints.save

    def seen(self: Checkpoints, state, *arguments):
        if state.step == 12:
            assert not ended, "the first save was waited for"  # ten steps were taken beside it
            go_on.set()
        return save(self, state, *arguments)

    monkeypatch.setattr(Checkpoints, "save", seen)
    summary = started(tmp_path / "one", "save_every=7", "keep_checkpoints=9")
    assert ended == ["checkpoint-7", "checkpoint-12"]
    assert summary["save_stall_seconds"] > 0
    monkeypatch.undo()
    started(tmp_path / "two", "save_every=7", "keep_checkpoints=9", "async_checkpoints=false")
    for name in ("model", "ema", "rank-0-of-1"):
        one, two = (
            load_file(tmp_path / run / "checkpoints" / "step-7" / f"{name}.safetensors")
            for run in ("one", "two")
        )
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.fault(
    "a disk that hangs in a save of one process", "given up after runtime.parallel.timeout_minutes"
)
def test_a_disk_that_hangs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run asks nothing more of that disk: it neither deletes what it began there nor lists what
    is there."""
    over = threading.Event()

    def hang(*_: object) -> None:
        over.wait(60)

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the disk was asked")

    monkeypatch.setattr(Save, "write_files", hang)
    monkeypatch.setattr("training.checkpoint.save.describe_resume", asked)
    words = [
        "runtime.parallel.timeout_minutes=0.02",
        "save_every=4",
        "total_samples=800000",
        "log_every=0",
    ]
    with pytest.raises(
        ValueError,
        match=r"step-4 cannot be saved \(process 0 has written nothing for 1 s\); the same",
    ):
        started(tmp_path / "run", *words)
    over.set()
    assert (tmp_path / "run" / "checkpoints" / "step-4.tmp").is_dir()


def test_a_save_that_failed_is_heard_of_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(Save, "write_files", full)
    with pytest.raises(
        ValueError, match=r"step-50 cannot be saved \(No space left on device: model.safetensors\)"
    ):
        started(tmp_path / "run", "save_every=50", "total_samples=800000", "log_every=1")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) < 60


def test_the_stall_is_logged(tmp_path: Path):
    started(tmp_path / "run")
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if line.get("save_stall_s", 0) > 0] == [3, 6, 8, 9, 12]


def test_the_written_format_is_safetensors(tmp_path: Path):
    """Every dtype and shape, read by the library; the hash is that of the file."""
    tensors = {str(dtype): torch.arange(6).view(3, 2).to(dtype) for dtype in DTYPE_NAMES}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(6.0).view(2, 3).T,
    }
    file = tmp_path / "x.safetensors"
    described = write_tensors(file, tensors, {"a": "b"})
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[k], tensors[k]) and found[k].dtype == tensors[k].dtype for k in tensors
    )
    assert hash_from_disk(file, lambda: None) == (described["bytes"], described["sha256"])
    with pytest.raises(TypeError, match="complex64"):
        write_tensors(file, {"c": torch.zeros(1, dtype=torch.complex64)}, {})
