"""Files that are written all or nothing, and folders that are locked."""

import errno
import os
from pathlib import Path

import pytest

from common.files import (
    LOCK_FILE,
    hash_content,
    hash_file,
    lock_folder,
    make_folder,
    read_object,
    refuse_changes,
    rename,
    sync_path,
    write_atomically,
    write_json,
    write_to_cache,
)
from tests.harness.limits import lock_elsewhere
from tests.harness.refusals import expect_refusal


def fail(*_):
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("stage", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(stage, tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_atomically(file, "old")
    monkeypatch.setattr(stage, fail)
    with pytest.raises(OSError, match="Input/output error") as failure:
        write_atomically(file, "new")
    assert failure.value.filename == str(file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_the_content_is_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    """And the name before the function returns: folders are flushed too."""
    events = []
    fsync = os.fsync
    replace = Path.replace

    def note_flush(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(source, target):
        events.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(Path, "replace", note_rename)
    write_json(tmp_path / "file", {"a": [1]})
    assert events == ["file.tmp", "rename", tmp_path.name]
    assert read_object(tmp_path / "file") == {"a": [1]}
    events.clear()
    make_folder(tmp_path / "a" / "b")
    assert events == [tmp_path.name, "a"]


def test_a_rename_that_did_not_happen_is_an_error(tmp_path):
    """tests/faults/test_saving.py has one that happened and was answered with an error."""
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "absent", tmp_path / "target")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").touch()
    (tmp_path / "source").mkdir()
    with pytest.raises(OSError, match="not empty"):
        rename(tmp_path / "source", tmp_path / "target")


def test_a_disk_that_fails_to_flush_a_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        sync_path(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "cannot be read as JSON"), ("[" * 10**5, "cannot be read as JSON"), ("[1]", "holds no")],
)
def test_a_file_that_holds_no_object_is_refused(content, sentence, tmp_path):
    (tmp_path / "file").write_text(content)
    with expect_refusal(f"file {sentence}"):
        read_object(tmp_path / "file")


def test_another_command_s_folder_is_refused_with_what_differs():
    earlier = {"a": 1, "b": 2, "c": 3}
    refuse_changes("out", earlier, {"a": 1, "b": 0}, ["a"])
    with expect_refusal(r"another command \(b was 2, is 0; c was 3, is None\); choose"):
        refuse_changes("out", earlier, {"a": 1, "b": 0}, "cba")


def test_hashes_are_those_of_sha256(tmp_path):
    (tmp_path / "file").write_bytes(b'["a"]')
    known = "0eb5b8d6f81bc677da8a08567cc4fa9a06a57e9ec8da85ed73a7f62727996002"
    assert hash_file(tmp_path / "file") == hash_content(["a"]) == known
    orders = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    assert len({hash_content(order, sort_keys=True) for order in orders}) == 1
    assert len({hash_content(order) for order in orders}) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot be written .*the next run repeats this work"):
        write_to_cache(tmp_path / "file" / "cache.json", {})


def ask_elsewhere(folder, **part):
    with lock_elsewhere(folder, **part) as (_, answer):
        return answer


def test_a_folder_is_locked_for_one_process_that_others_can_name(tmp_path):
    with lock_folder(tmp_path, "Busy."):
        assert ask_elsewhere(tmp_path).startswith(f"Busy. It is process {os.getpid()} on ")
    assert ask_elsewhere(tmp_path) == "locked"


def test_parts_of_a_folder_are_locked_apart(tmp_path):
    """Processes that share a folder lock out one that wants all of it, and leave no name there."""
    with lock_folder(tmp_path, "Busy.", start=4, length=2):
        answers = [ask_elsewhere(tmp_path, start=k, length=2) for k in (2, 3, 5, 6)]
        assert answers == ["locked", "Busy.", "Busy.", "locked"]
        assert ask_elsewhere(tmp_path) == "Busy."
    assert (tmp_path / LOCK_FILE).read_bytes() == b""
