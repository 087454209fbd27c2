"""Finds checkpoints on the disk, and compares their hashes before anything is loaded."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.errors import UserError
from common.files import read_object

WHOLE = ("model.safetensors", "ema.safetensors")
PART = "rank-{rank}-of-{world_size}.safetensors"
BROKEN = (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR)
PAUSES = (0.2, 1.0, 5.0)
"""Seconds before a file that could not be read is read again."""
CHUNK = 1 << 24
TRIES = 3
"""At reading the newest checkpoint of a run that may save, and remove it, meanwhile."""
Result = TypeVar("Result")


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first. A half-written one has another name."""
    return sorted(
        (p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdecimal()), key=step_of
    )


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def damage(folder: Path, advance: Callable[[], None] = lambda: None) -> str | None:
    """The damage of a checkpoint, in words; None if every file has the size and hash that its
    manifest says.

    The files are read from the disk, not from the page cache, and again after a pause where that
    fails. `advance` is called as it gets on.
    """
    try:
        files = retried(lambda: read_object(folder / "manifest.json"))["files"]
        strange = files.keys() ^ belonging(files)
        if strange:
            return f"its manifest lacks or adds {', '.join(sorted(strange)[:3])}"
        for name, expected in files.items():
            found = retried(partial(read_back, folder / name, advance))
            if found != (expected["bytes"], expected["sha256"]):
                return f"{name} does not match its sha256"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    except OSError as error:
        if error.errno not in BROKEN:  # a server that is away for a moment is no damage
            raise
        return f"it is incomplete ({error})"
    return None


def belonging(files: Collection[str]) -> set[str]:
    """The files of a checkpoint that has as many parts as `files` names."""
    world_size = max(1, sum(name.startswith("rank-") for name in files))
    parts = {PART.format(rank=rank, world_size=world_size) for rank in range(world_size)}
    return parts | {*WHOLE, "state.json"}


def retried(read: Callable[[], Result]) -> Result:
    """What `read` returns; it is called again, after pauses, while the disk answers with an
    input/output error."""
    for pause in PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            time.sleep(pause)
    return read()


def read_back(file: Path, advance: Callable[[], None]) -> tuple[int, str]:
    """Size and sha256 of what the disk gives: the page cache is asked to forget the file first."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):  # Linux
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while content := stream.read(CHUNK):
            digest.update(content)
            advance()
        return stream.tell(), digest.hexdigest()


def goes_on(folder: Path, samples: int) -> str:
    """Says, after a failure, from where the same command goes on, and what of `samples` is lost."""
    found = complete(folder)
    if not found:
        return f"nothing was saved yet, so {samples} samples are lost"
    told = f"the same command goes on from {found[-1].name}"
    try:
        lost = samples - description(found[-1])["counters"]["samples"]
    except (OSError, ValueError, KeyError, TypeError):  # of a damaged one
        return told
    return f"{told}; {lost} samples after it are lost" if lost else told


def verified(folder: Path) -> Path:
    """The checkpoint itself; ValueError if it is damaged."""
    problem = damage(folder)
    if problem:
        raise UserError(
            f"{folder} is no usable checkpoint: {problem}. Choose another step of the same run."
        )
    return folder


def description(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint; ValueError or OSError where it cannot be read."""
    return read_object(folder / "state.json")


def checkpoints_of(path: str) -> list[Path]:
    """The checkpoints that a user means by a path, oldest first: the one that it is, or those of a
    run."""
    given = Path(path).expanduser()
    if (given / "state.json").is_file():
        return [given]
    return complete(given / "checkpoints") or complete(given)


def branch_of(resume: str, own: Path) -> Path | None:
    """The checkpoint that `resume` names: itself, or the newest one of a run. None for `auto` and
    `never`; ValueError if there is none, or if it is an older one of `own` folder."""
    if resume in ("auto", "never"):
        return None
    named = checkpoints_of(resume)
    if not named:
        raise UserError(
            f"resume={resume} is or has no usable checkpoint; name a run folder, or a checkpoint "
            "in it."
        )
    branch = named[-1].resolve()
    found = complete(own)
    if found and branch.parent == own.resolve() and branch != found[-1].resolve():
        raise UserError(
            f"resume={resume}: run_dir holds a later checkpoint, {found[-1].name}; use a new "
            "run_dir to branch off."
        )
    return branch


def read_newest(path: str, read: Callable[[], Result]) -> Result:
    """What `read` returns, which reads the newest checkpoint of the run at `path`.

    It is called again if it fails and the run has other checkpoints by then: a run that trains at
    the same time removes old ones.
    """
    for _ in range(TRIES - 1):
        before = checkpoints_of(path)
        try:
            return read()
        except (OSError, ValueError):
            if checkpoints_of(path) == before:
                raise
    return read()


def weights_file(path: str, key: str) -> Path:
    """The safetensors file that `key=path` means: the file itself, or the averages of a checkpoint
    or a run's latest.

    ValueError if there is none, or if it lies in a checkpoint that is damaged.
    """
    given = Path(path).expanduser()
    if given.suffix == ".safetensors" and given.is_file():
        if (given.parent / "manifest.json").is_file():
            verified(given.parent)
        return given
    found = checkpoints_of(path)
    if not found:
        raise UserError(
            f"{key}={path} is neither a .safetensors file, a checkpoint, nor a run that has one."
        )
    return verified(found[-1]) / "ema.safetensors"
