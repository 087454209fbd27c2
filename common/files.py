"""Writes files so that a kill or a power cut leaves the old or the new content, and locks folders,
or parts of folders, for one process.

All other modules write files through this one, which follows no link: where a file is to be written
and a link has its name, the file replaces the link, and the link's target stays as it is. Links to
folders are followed. metrics.jsonl, and the log of benchmarks, are appended to by their modules,
which replace them first. A few modules write to a temporary folder that they have just made.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import socket
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
"""Root folder of this repository's checkout."""
LOCK_FILE = ".lock"
"""Name of a lock file: to lock a folder, a process locks the file of this name in the folder."""
LOCK_PARTS = 2**30
"""Number of parts of a folder that `lock_folder` can lock separately."""


def write_atomically(file: Path, text: str) -> None:
    """Replaces the content of `file` by `text`, all or nothing."""
    with replace_file(file) as temporary:
        temporary.write_text(text)


def create_file(file: Path) -> BinaryIO:
    """Opens an empty file, for bytes. If a link has this name, removes it first."""
    if file.is_symlink():
        file.unlink()
    return file.open("wb")


@contextlib.contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """Yields the path of a new temporary file, which the `with` block must write; then flushes that
    file to disk and renames it to `file`. If the block fails, removes the temporary file."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        create_file(temporary).close()
        yield temporary
        with contextlib.suppress(FileNotFoundError):  # another process has renamed it
            sync_path(temporary)
        rename(temporary, file)
        sync_path(file.parent)
    except OSError as error:
        # Add the file's name, so that the error message can name the file: `write` leaves it out,
        # for example if the disk is full.
        error.filename = error.filename or str(file)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_json(file: Path, content: Any) -> None:
    """Replaces the content of `file` atomically by `content` as JSON, one value per line."""
    write_atomically(file, json.dumps(content, indent=1) + "\n")


def rename(source: Path, target: Path) -> None:
    """Renames a file or folder, and replaces a file or an empty folder at `target`. Raises OSError
    if the renaming failed.

    NFS can rename a file and still report an error, if it receives the request twice. So an error
    is ignored if `source` is gone and `target` exists.
    """
    try:
        source.replace(target)
    except OSError:
        if source.exists() or not target.exists():
            raise


def read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises UserError if the file holds anything else, OSError
    if the file cannot be read."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read as JSON ({error}); restore it or delete it."
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object; restore it or delete it.")
    return content


def refuse_changes(
    place: str,
    earlier: Mapping[str, Any],
    job: Mapping[str, Any],
    keys: Iterable[str],
    remedy: str = "choose another out, or delete this folder if you need nothing in it",
) -> None:
    """Raises UserError if one of `keys` has another value in `job`, the settings of this command,
    than in `earlier`, those of the command that began the work in the folder `place`."""
    changes = [
        f"{key} was {earlier.get(key)}, is {job.get(key)}"
        for key in sorted(keys)
        if earlier.get(key) != job.get(key)
    ]
    if changes:
        raise UserError(
            f"{place} holds the work of another command ({'; '.join(changes)}); {remedy}."
        )


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, and flushes them to disk, so that they survive a
    power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # the parent may lack read permission
            sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """Flushes a file to disk, or a folder's list of files, so that renames in the folder survive a
    power cut; does nothing if the file system cannot flush folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def hash_file(file: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_content(content: Any, *, sort_keys: bool = False) -> str:
    """Returns the sha256 of `content` as JSON, in hexadecimal digits; with `sort_keys` it does not
    depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=sort_keys).encode()).hexdigest()


def find_cache_folder(name: str) -> Path:
    """Returns the path of fastlatent's cache folder `name`, in $XDG_CACHE_HOME or ~/.cache. The
    folder may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastlatent" / name


class FolderLock:
    """An open and locked lock file. `close()` unlocks the file; so does the end of this object or
    of the process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.works = True
        """False if the file system has no locks."""
        self.close = weakref.finalize(self, os.close, descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def take_turn(self) -> Iterator[None]:
        """Waits until no other process that holds a part of the folder runs such a `with` block.
        Does not wait if the file system has no locks."""
        import fcntl

        if self.works:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1, LOCK_PARTS)
        yield
        if self.works:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, LOCK_PARTS)


def lock_folder(folder: Path, refusal: str, start: int = 0, length: int = 0) -> FolderLock:
    """Locks an existing folder for this process. Raises UserError with the message `refusal` if
    another process holds the lock, and with another one if the lock file is a link; only warns if
    the file system has no locks.

    Processes that share the work in a folder each lock `length` of its `LOCK_PARTS` parts, from
    part `start` on; a length of 0 means all that follow. A part is a byte of the lock file, which
    need not be that long.

    The lock is a POSIX lock: it works on NFS, forked worker processes do not inherit it, and the
    system releases it when its process is killed.
    """
    import fcntl  # imported here, as only POSIX systems have fcntl

    file = folder / LOCK_FILE
    if file.is_symlink():
        raise UserError(f"{file} is a link, and a lock must be a file; delete the link.")
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    lock = FolderLock(descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.pread(descriptor, 1000, 0).decode()
            lock.close()
            raise UserError(f"{refusal} {f'It is {holder}.' if holder else ''}".strip()) from error
        lock.works = False
        print(
            f"warning: {folder} cannot be locked ({error.strerror}); make sure that no other "
            "process writes there",
            flush=True,
        )
    else:
        # Name this process to others that are refused, unless it is one of several holders.
        os.ftruncate(descriptor, 0)
        if not length:
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return lock


def write_to_cache(file: Path, content: Any) -> None:
    """Writes `content` as JSON to a cache file. If writing fails, only warns that the next run must
    compute `content` again."""
    with go_on_without(file, "the next run repeats this work"):
        make_folder(file.parent)
        write_json(file, content)


@contextlib.contextmanager
def go_on_without(file: Path, consequence: str = "the run continues without it") -> Iterator[None]:
    """Runs the `with` block, which writes a file, or a file in the folder `file`, that no run
    depends on. If an OSError ends the block, only warns of the consequence, once."""
    try:
        yield
    except OSError as error:
        warn_once(f"{file} cannot be written ({error.strerror or error}); {consequence}.")


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
