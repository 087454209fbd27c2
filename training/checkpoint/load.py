"""Finds checkpoints on the disk, compares their hashes, and loads the newest one that verifies, or
the one that is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError

from common.errors import UserError
from common.files import read_object, rename
from common.text import shorten_error
from training.checkpoint.files import CHUNK_BYTES, RANK_FILE, WEIGHTS_FILES, assemble_state, flatten
from training.config.schema import RuntimeConfig
from training.distributed.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    from training.state import TrainState

DAMAGE_ERRNOS = (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR)
RETRY_PAUSES = (0.2, 1.0, 5.0)
"""Seconds before a file that could not be read is read again."""
READ_ATTEMPTS = 3
"""At reading the newest checkpoint of a run that may save, and remove it, meanwhile."""
MALFORMED_ERRORS = (
    *(SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RuntimeError),
)
"""What reading values of another type or shape ends with."""
HASH_DIGITS = 64
"""Hexadecimal digits with which the fingerprint of a latent set begins; its order and statistics
follow."""
Result = TypeVar("Result")


def list_complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first. A half-written one has another name."""
    return sorted(
        (p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdecimal()), key=step_of
    )


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def find_damage(folder: Path, advance: Callable[[], None] = lambda: None) -> str | None:
    """The damage of a checkpoint, in words; None if every file has the size and hash that its
    manifest says.

    The files are read from the disk, not from the page cache, and again after a pause where that
    fails. `advance` is called as it gets on.
    """
    try:
        files = retry_read(lambda: read_object(folder / "manifest.json"))["files"]
        strange = files.keys() ^ list_expected_files(files)
        if strange:
            return f"its manifest lacks or adds {', '.join(sorted(strange)[:3])}"
        for name, expected in files.items():
            found = retry_read(partial(hash_from_disk, folder / name, advance))
            if found != (expected["bytes"], expected["sha256"]):
                return f"{name} does not match its sha256"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    except OSError as error:
        if error.errno not in DAMAGE_ERRNOS:  # a server that is away for a moment is no damage
            raise
        return f"it is incomplete ({error})"
    return None


def list_expected_files(files: Collection[str]) -> set[str]:
    """The files of a checkpoint that has as many parts as `files` names."""
    world_size = max(1, sum(name.startswith("rank-") for name in files))
    parts = {RANK_FILE.format(rank=rank, world_size=world_size) for rank in range(world_size)}
    return parts | {*WEIGHTS_FILES, "state.json"}


def retry_read(read: Callable[[], Result]) -> Result:
    """What `read` returns; it is called again, after pauses, while the disk answers with an
    input/output error."""
    for pause in RETRY_PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            time.sleep(pause)
    return read()


def hash_from_disk(file: Path, advance: Callable[[], None]) -> tuple[int, str]:
    """Size and sha256 of what the disk gives: the page cache is asked to forget the file first."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):  # Linux
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while content := stream.read(CHUNK_BYTES):
            digest.update(content)
            advance()
        return stream.tell(), digest.hexdigest()


def describe_resume(folder: Path, samples: int) -> str:
    """Says, after a failure, from where the same command goes on, and what of `samples` is lost."""
    found = list_complete(folder)
    if not found:
        return f"nothing was saved yet, so {samples} samples are lost"
    told = f"the same command goes on from {found[-1].name}"
    try:
        lost = samples - read_state_file(found[-1])["counters"]["samples"]
    except (OSError, ValueError, KeyError, TypeError):  # of a damaged one
        return told
    return f"{told}; {lost} samples after it are lost" if lost else told


def verify(folder: Path) -> Path:
    """The checkpoint itself; ValueError if it is damaged."""
    problem = find_damage(folder)
    if problem:
        raise UserError(
            f"{folder} is no usable checkpoint: {problem}. Choose another step of the same run."
        )
    return folder


def read_state_file(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint; ValueError or OSError where it cannot be read."""
    return read_object(folder / "state.json")


def find_checkpoints(path: str) -> list[Path]:
    """The checkpoints that a user means by a path, oldest first: the one that it is, or those of a
    run."""
    given = Path(path).expanduser()
    if (given / "state.json").is_file():
        return [given]
    return list_complete(given / "checkpoints") or list_complete(given)


def find_branch(resume: str, own: Path) -> Path | None:
    """The checkpoint that `resume` names: itself, or the newest one of a run. None for `auto` and
    `never`; ValueError if there is none, or if it is an older one of `own` folder."""
    if resume in ("auto", "never"):
        return None
    named = find_checkpoints(resume)
    if not named:
        raise UserError(
            f"resume={resume} is or has no usable checkpoint; name a run folder, or a checkpoint "
            "in it."
        )
    branch = named[-1].resolve()
    found = list_complete(own)
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
    for _ in range(READ_ATTEMPTS - 1):
        before = find_checkpoints(path)
        try:
            return read()
        except (OSError, ValueError):
            if find_checkpoints(path) == before:
                raise
    return read()


def find_weights_file(path: str, key: str) -> Path:
    """The safetensors file that `key=path` means: the file itself, or the averages of a checkpoint
    or a run's latest.

    ValueError if there is none, or if it lies in a checkpoint that is damaged.
    """
    given = Path(path).expanduser()
    if given.suffix == ".safetensors" and given.is_file():
        if (given.parent / "manifest.json").is_file():
            verify(given.parent)
        return given
    found = find_checkpoints(path)
    if not found:
        raise UserError(
            f"{key}={path} is neither a .safetensors file, a checkpoint, nor a run that has one."
        )
    return verify(found[-1]) / "ema.safetensors"


def find_newest_verified(folder: Path) -> Path | None:
    """The newest checkpoint that verifies, None where there is no checkpoint.

    One that does not verify is renamed to `step-N.corrupt`, with a warning, and the one before is
    tried. ValueError if there were some and none verifies: starting over is for the user to decide.
    Clears half-done saves and removals away: the caller holds the lock.
    """
    for half in (*folder.glob("step-*.tmp"), *folder.glob("step-*.removed")):
        shutil.rmtree(half, ignore_errors=True)

    for found in reversed(list_complete(folder)):
        problem = find_damage(found)
        if not problem:
            return found
        quarantine = found.with_name(found.name + ".corrupt")
        try:
            shutil.rmtree(quarantine, ignore_errors=True)
            rename(found, quarantine)
        except OSError as error:
            raise UserError(
                f"{found}: {problem}, and it cannot be set aside ({error.strerror})."
            ) from error
        warnings.warn(
            f"{found}: {problem}; moved to {quarantine.name}, trying the one before.", stacklevel=3
        )

    if any(folder.glob("step-*.corrupt")):
        raise UserError(f"{folder} holds no checkpoint that verifies; start over in a new run_dir.")
    return None


def select_identity(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a run cannot change, of its configuration; of the data, whose content is not looked at
    here, the seed."""
    return {
        "model": config.get("model") or {},
        "data": {"seed": config.get("seed")},
        "objective": config.get("objective") or {},
        "optimizer": {"class": (config.get("optim") or {}).get("_target_")},
        "adapter": config.get("adapter") or {},
    }


MUST_MATCH = tuple(select_identity({}))
ADDED_KEYS = ("mixer.window", "mixer.shift")
"""Keys that earlier versions did not have; null is what those did."""


def load(folder: Path, state: TrainState, run: dict[str, Any], ranks: Ranks = SINGLE) -> str:
    """Loads a checkpoint that was verified, and returns the settings changed since; ValueError if
    it belongs to another run, or to no version of ours."""
    try:
        described = {"adapter": {}} | read_state_file(folder)  # earlier versions had none
        other = find_mismatch(described, run)
        content = {} if other else assemble_state(folder, described, state.layouts, ranks)
        # What an earlier version did not know was as it is by default.
        settings = described["settings"]
        if "runtime" in settings:
            settings = settings | {"runtime": asdict(RuntimeConfig()) | settings["runtime"]}
        changed = describe_difference(settings, run["settings"])
    except torch.OutOfMemoryError:
        raise
    except MALFORMED_ERRORS as error:
        raise UserError(
            f"{folder} is no checkpoint of this version of ours ({shorten_error(error)}); use "
            "another step."
        ) from error

    if other:
        instead = f", or init_from={folder} to start from its weights"
        raise UserError(
            f"{folder} was made with another {other}. Use a new run_dir"
            f"{'' if described['adapter'] else instead}."
        )
    try:
        state.load_state_dict(content)
    except torch.OutOfMemoryError:
        raise
    except MALFORMED_ERRORS as error:
        told = str(error) if isinstance(error, ValueError) else shorten_error(error)
        raise UserError(f"{folder} does not fit this run: {told}") from error
    return changed


def find_mismatch(described: dict[str, Any], run: dict[str, Any]) -> str | None:
    """The first part in which a checkpoint is of another run, with the difference."""
    for name in MUST_MATCH:
        then = flatten_known(described[name])
        now = flatten_known(json.loads(json.dumps(run[name])))
        if then == now or (name == "data" and is_same_set(described, run)):
            continue
        told = f"{name}: {describe_difference(then, now)}"
        return told + describe_other_order(then, now) if name == "data" else told
    return None


def flatten_known(part: dict[str, Any]) -> dict[str, Any]:
    """Flattens a part of a description, and leaves out keys of `ADDED` that are null."""
    return {
        key: value for key, value in flatten(part) if value is not None or key not in ADDED_KEYS
    }


def describe_other_order(then: dict[str, Any], now: dict[str, Any]) -> str:
    """For data of the same latents in another order or storage, a sentence on that."""
    was = str(then.get("fingerprint"))
    new = str(now.get("fingerprint"))
    same = was[:HASH_DIGITS] == new[:HASH_DIGITS] and re.fullmatch("[0-9a-f]+", was[:HASH_DIGITS])
    if was == new or not same:
        return ""
    return (
        ". The latents are the same: their order, normalisation or storage was "
        f"{was[HASH_DIGITS + 1 :]} and is {new[HASH_DIGITS + 1 :]}, as data=, data.window, "
        "data.normalisation and data.storage choose it"
    )


def is_same_set(described: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether a checkpoint of an earlier version has the run's data: its fingerprint left out mean
    and std."""
    then = described["spec"]
    now = run["spec"]
    earlier = {"fingerprint": now["earlier_fingerprint"], "seed": run["data"]["seed"]}
    return described["data"] == earlier and (then["mean"], then["std"]) == (now["mean"], now["std"])


def describe_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The keys in which two descriptions differ, with both values."""
    was = dict(flatten(old))
    now = dict(flatten(new))
    keys = sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
    return ", ".join(f"{k} was {was.get(k)}, is {now.get(k)}" for k in keys)
