"""Checkpoints that are damaged, left over, or in the way: what is loaded, and what is removed."""

import ctypes
import errno
import mmap
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from common.files import read_object, write_json
from tests.harness.outcomes import list_checkpoints, read_outcome
from tests.harness.refusals import expect_refusal
from tests.harness.sets import edit_json, flip_byte
from tests.harness.zygote import read_output
from training.checkpoint.files import WEIGHTS_FILES
from training.checkpoint.load import find_newest_verified, hash_from_disk, list_complete, verify
from training.checkpoint.save import Checkpoints

FILES = [*WEIGHTS_FILES, "rank-0-of-1.safetensors", "state.json", "manifest.json"]
TOO_FEW = pytest.mark.fault(
    "a manifest of a checkpoint that names none or too few of its files", "it does not verify"
)
OUTSIDE = pytest.mark.fault(
    "a manifest of a checkpoint that names files outside it", "not looked at; it does not verify"
)
DAMAGES = {
    "one bit flipped": lambda file: flip_byte(file, file.stat().st_size // 2),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.fixture
def checkpoints(finished):
    """Checkpoints of a finished run: step-10 and step-12."""
    return finished / "checkpoints"


def copy_newest(run_whole, folder, *steps):
    """Copies the newest checkpoint of a run to these steps."""
    for step in steps:
        shutil.copytree(list_complete(run_whole() / "checkpoints")[-1], folder / f"step-{step}")


def list_names(folder):
    return [checkpoint.name for checkpoint in list_complete(folder)]


@pytest.mark.fault(
    "a file of a checkpoint with one bit flipped, truncated, empty or missing",
    "set aside with a warning; the one before is loaded, and the run ends with the same bits",
)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_seen(kind, file, checkpoints):
    DAMAGES[kind](checkpoints / "step-12" / file)
    with pytest.warns(
        UserWarning, match=r"step-12: .*; moved to step-12\.corrupt, trying the one before"
    ):
        assert find_newest_verified(checkpoints) == checkpoints / "step-10"
    assert (checkpoints / "step-12.corrupt").is_dir()


@pytest.mark.fault("the newest checkpoint damaged, the same command", "ends with the same bits")
def test_a_run_goes_on_from_the_one_before(zygote, run_whole, finished):
    flip_byte(finished / "checkpoints" / "step-12" / "rank-0-of-1.safetensors")
    assert zygote(finished) == [0]
    assert read_outcome(finished) == read_outcome(run_whole())


@pytest.mark.fault("every checkpoint damaged", "refused; nothing is overwritten")
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(zygote, finished):
    for name in list_checkpoints(finished):
        (finished / "checkpoints" / name / "ema.safetensors").write_bytes(b"")
    metrics = (finished / "metrics.jsonl").read_text()
    assert zygote(finished, "total_samples=104") == [1]
    assert "no checkpoint that verifies" in read_output(finished)
    assert (finished / "metrics.jsonl").read_text() == metrics


@pytest.mark.fault(
    "leftovers of a save or of a removal that was killed", "cleared away; the complete ones stay"
)
def test_leftovers_go(checkpoints):
    names = sorted(file.name for file in checkpoints.iterdir())
    for name in ("step-14.tmp", "step-2.removed"):
        shutil.copytree(checkpoints / "step-12", checkpoints / name)
    assert find_newest_verified(checkpoints) == checkpoints / "step-12"
    assert sorted(file.name for file in checkpoints.iterdir()) == names


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"keep": 2, "best_by": "fd_random"}, [8, 12, 14]),
        ({"keep": 1, "keep_every": 6}, [4, 6, 12, 14]),
        ({"keep": 1}, [4, 14]),
    ],
)
def test_the_newest_every_kth_and_the_best_checkpoint_stay(options, steps, run_whole, tmp_path):
    """The newest, every K-th, and the one with the lowest score."""
    losses = {2: float("nan"), 4: 0.1, 6: None, 8: 0.7, 10: None, 12: 0.6}
    copy_newest(run_whole, tmp_path, *losses, 14)
    for step, loss in losses.items():
        file = tmp_path / f"step-{step}" / "state.json"
        scores = {"eval_loss": loss, "fd_random": None if loss is None else 1.0 - loss}
        edit_json(file, {"scores": scores})
    Checkpoints(tmp_path, **options).remove_old(tmp_path / "step-14")
    assert list_names(tmp_path) == [f"step-{step}" for step in steps]


def test_nothing_is_removed_for_a_checkpoint_that_cannot_be_read_back(run_whole, tmp_path, capsys):
    copy_newest(run_whole, tmp_path, 2, 4, 6)
    flip_byte(tmp_path / "step-6" / "ema.safetensors")
    Checkpoints(tmp_path, keep=1).remove_old(tmp_path / "step-6")
    assert "not removed (step-6 was read back and ema.safetensors" in capsys.readouterr().out
    assert len(list_names(tmp_path)) == 3


@pytest.mark.fault(
    "an older checkpoint that is damaged or cannot be removed", "a warning; the run goes on"
)
def test_trouble_with_older_ones_is_a_warning(run_whole, tmp_path, monkeypatch, capsys):
    copy_newest(run_whole, tmp_path, 2, 4, 6)
    (tmp_path / "step-2" / "state.json").write_text("{")
    saver = Checkpoints(tmp_path, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(
            "training.checkpoint.save.remove_checkpoint", Mock(side_effect=OSError("busy"))
        )
        saver.remove_old(tmp_path / "step-6")
    assert "older checkpoints are not removed" in capsys.readouterr().out
    saver.remove_old(tmp_path / "step-6")
    assert list_names(tmp_path) == ["step-4", "step-6"]


@pytest.mark.parametrize(
    ("failures", "newest"),
    [
        pytest.param(
            1,
            "step-12",
            id="once",
            marks=pytest.mark.fault(
                "a disk that answers with an error once",
                "read again; the newest checkpoint is loaded",
            ),
        ),
        pytest.param(
            1000,
            "step-10",
            id="always",
            marks=[
                pytest.mark.filterwarnings("ignore:.*Input/output error"),
                pytest.mark.fault(
                    "a sector of the newest checkpoint that cannot be read",
                    "set aside; the one before is loaded",
                ),
            ],
        ),
    ],
)
def test_a_bad_sector(failures, newest, checkpoints, monkeypatch):
    remaining = [failures]

    def read(file, advance):
        if file.parent.name == "step-12" and remaining[0]:
            remaining[0] -= 1
            raise OSError(errno.EIO, "Input/output error", str(file))
        return hash_from_disk(file, advance)

    monkeypatch.setattr("training.checkpoint.load.hash_from_disk", read)
    assert find_newest_verified(checkpoints) == checkpoints / newest


@pytest.mark.fault(
    "a page cache that has other bytes than the disk", "the disk is read, before an old one goes"
)
def test_what_is_read_back_is_not_the_page_cache(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    advise = os.posix_fadvise
    cached = []
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        advise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(file):
        pytest.skip("this file system lies in memory, or does not say what it caches")
    file.read_bytes()
    assert is_cached(file)

    def advise_and_look(*arguments):
        advise(*arguments)
        cached.append(is_cached(file))

    monkeypatch.setattr(os, "posix_fadvise", advise_and_look)
    hash_from_disk(file, lambda: None)
    assert cached == [False]


def is_cached(file):
    """Says whether the page cache holds the start of a file. A read with RWF_NOWAIT does not tell:
    Linux brings the page in for it, and with a quick disk it is there before the answer."""
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        address = ctypes.byref(ctypes.c_char.from_buffer(memory))
        held = ctypes.c_ubyte()
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(1), ctypes.byref(held)) == 0
        del address  # a mapping that is in use cannot be closed
    return held.value & 1 == 1


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=TOO_FEW) for name in FILES[1:-1]),
        pytest.param("../secret", marks=OUTSIDE),
    ],
)
def test_a_manifest_must_name_the_files_that_belong_there(name, checkpoints):
    file = checkpoints / "step-12" / "manifest.json"
    manifest = read_object(file)
    if manifest["files"].pop(name, None) is None:
        manifest["files"][name] = {"bytes": 1, "sha256": "?"}
    write_json(file, manifest)
    with expect_refusal(f"no usable checkpoint: its manifest lacks or adds {re.escape(name)}"):
        verify(file.parent)
