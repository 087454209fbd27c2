"""Finds checkpoints on the disk, and compares their hashes before anything is loaded."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from data.shards import file_sha256

BROKEN = (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first. A half-written one has another name."""
    return sorted((p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdecimal()), key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def damage(folder: Path) -> str | None:
    """The damage of a checkpoint, in words; None if every file has the size and hash that its manifest says."""
    try:
        for name, expected in json.loads((folder / "manifest.json").read_text())["files"].items():
            file = folder / Path(name).name
            if file.stat().st_size != expected["bytes"] or file_sha256(file) != expected["sha256"]:
                return f"{name} does not match its sha256"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    except OSError as error:
        if error.errno not in BROKEN:  # a server that is away for a moment is no damage
            raise
        return f"it is incomplete ({error})"
    return None


def goes_on(folder: Path) -> str:
    """For messages after a failure: from where the same command goes on."""
    found = complete(folder)
    return f"the same command goes on from {found[-1].name}" if found else "nothing was saved yet"


def verified(folder: Path) -> Path:
    """The checkpoint itself; ValueError if it is damaged."""
    if problem := damage(folder):
        raise ValueError(f"{folder} is no usable checkpoint: {problem}. Choose another step of the same run.")
    return folder


def description(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint."""
    return json.loads((folder / "state.json").read_text())


def checkpoints_of(path: str) -> list[Path]:
    """The checkpoints that a user means by a path, oldest first: the one that it is, or those of a run."""
    given = Path(path).expanduser()
    return (
        complete(given / "checkpoints") or complete(given) or ([given] if (given / "manifest.json").is_file() else [])
    )


def newest(path: str) -> Path:
    """The checkpoint that `resume=path` means: itself, or the newest one of a run; ValueError if there is none."""
    if not (found := checkpoints_of(path)):
        raise ValueError(f"resume={path} is or has no usable checkpoint; name a run folder, or a checkpoint in it.")
    return found[-1].resolve()


def weights_file(path: str, key: str) -> Path:
    """The safetensors file that `key=path` means: the file itself, or the averages of a checkpoint or a run's latest.

    ValueError if there is none, or if it lies in a checkpoint that is damaged.
    """
    given = Path(path).expanduser()
    if given.suffix == ".safetensors" and given.is_file():
        return verified(given.parent) / given.name if (given.parent / "manifest.json").is_file() else given
    if not (found := checkpoints_of(path)):
        raise ValueError(f"{key}={path} is neither a .safetensors file, a checkpoint, nor a run that has one.")
    return verified(found[-1]) / "ema.safetensors"
