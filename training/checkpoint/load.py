"""Finds checkpoints on the disk, verifies their hashes, and loads the newest intact one, or the one
that the user names."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from common.config.build import fill_defaults
from common.config.schema import EmaConfig, RuntimeConfig, TrainConfig
from common.distributed.ranks import SINGLE, Ranks
from common.errors import READ_ERRORS, UserError
from common.files import read_object, rename
from common.text import shorten_error
from common.trees import flatten
from training.checkpoint.files import CHUNK_BYTES, RANK_FILE, WEIGHTS_FILES, assemble_state
from training.optim.schedule import Schedule
from training.state import TrainState

DAMAGE_ERRNOS = (errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR)
"""Error numbers that, when a file of a checkpoint is read, mean that the checkpoint is damaged. Any
other error may be a temporary fault of a file server, so `find_damage` raises it."""
RETRY_PAUSES = (0.2, 1.0, 5.0)
"""Seconds to wait before each new attempt to read a file, after an input/output error."""
READ_ATTEMPTS = 3
"""Number of attempts to read the newest checkpoint of a run; a run that is training may remove the
checkpoint during an attempt."""
MALFORMED_ERRORS = (*READ_ERRORS, SafetensorError, ArithmeticError, RuntimeError)
"""Errors that loading raises if a checkpoint holds values of an unexpected type or shape."""
HASH_DIGITS = 64
"""Number of hexadecimal digits of the hash at the start of a latent set's fingerprint; after the
hash follow the names of the latents' normalisation, order and storage."""
FORMAT_VERSION = 3
"""Number of the format of a run's state. It rises with a change that makes old state wrong, not
with a new key that has a default."""
Result = TypeVar("Result")


def list_complete(folder: Path) -> list[Path]:
    """Lists the complete checkpoints in `folder`, oldest first. A folder of an incomplete
    checkpoint is left out: its name is not step-<number>, but, for example, step-400.tmp."""
    folders = folder.glob("step-*")
    complete = [path for path in folders if path.name.removeprefix("step-").isdecimal()]
    return sorted(complete, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def find_damage(folder: Path, advance: Callable[[], None] = lambda: None) -> str | None:
    """Returns the end of a sentence about the damage of the checkpoint in `folder`; None if every
    file has the size and the hash that manifest.json states.

    The function reads the files from the disk, not from the page cache, and after an input/output
    error it pauses and tries again. It calls `advance` after each part that it has read, so that
    the caller can note that the work makes progress.
    """
    try:
        files = retry_read(lambda: read_object(folder / "manifest.json"))["files"]
        unexpected = files.keys() ^ list_expected_files(files)
        if unexpected:
            return f"its manifest lacks or adds {', '.join(sorted(unexpected)[:3])}"
        for name, expected in files.items():
            size_and_hash = retry_read(partial(hash_from_disk, folder / name, advance))
            if size_and_hash != (expected["bytes"], expected["sha256"]):
                return f"{name} does not match its sha256"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    except OSError as error:
        if error.errno not in DAMAGE_ERRNOS:
            raise
        return f"it is incomplete ({error})"
    return None


def list_expected_files(files: Collection[str]) -> set[str]:
    """Returns the names of the files that a checkpoint must have; the function takes the number of
    rank files in `files` as the number of ranks that wrote the checkpoint."""
    world_size = max(1, sum(name.startswith("rank-") for name in files))
    rank_files = {RANK_FILE.format(rank=rank, world_size=world_size) for rank in range(world_size)}
    return rank_files | {*WEIGHTS_FILES, "state.json"}


def retry_read(read: Callable[[], Result]) -> Result:
    """Calls `read` and returns its result. After an input/output error (EIO) it pauses and calls
    `read` again, at most once for each of `RETRY_PAUSES`."""
    for pause in RETRY_PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            time.sleep(pause)
    return read()


def hash_from_disk(file: Path, advance: Callable[[], None]) -> tuple[int, str]:
    """Returns the size in bytes and the sha256 of a file, read from the disk; on Linux the function
    bypasses the page cache. It calls `advance` after every `CHUNK_BYTES` bytes."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        # Drop the file from the page cache, so that the following reads reach the disk.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for content in iter(partial(stream.read, CHUNK_BYTES), b""):
            digest.update(content)
            advance()
        return stream.tell(), digest.hexdigest()


def describe_resume(folder: Path, samples: int) -> str:
    """Returns the end of a message about a failure of a run: from which checkpoint the same command
    continues, and how many of the `samples` that training has seen are lost."""
    checkpoints = list_complete(folder)
    if not checkpoints:
        return f"nothing was saved yet, so {samples} samples are lost"
    newest = checkpoints[-1]
    sentence = f"the same command continues from {newest.name}"
    try:
        lost = samples - read_state_file(newest)["counters"]["samples"]
    except READ_ERRORS:  # the checkpoint is damaged
        return sentence
    return f"{sentence}; {lost} samples after it are lost" if lost else sentence


def verify(folder: Path) -> Path:
    """Returns `folder` if the checkpoint in it is intact; UserError if the checkpoint is
    damaged."""
    problem = find_damage(folder)
    if problem:
        raise UserError(
            f"{folder} is no usable checkpoint: {problem}. Choose another step of the same run."
        )
    return folder


def read_state_file(folder: Path) -> dict[str, Any]:
    """Reads `state.json` of a checkpoint; UserError or OSError if that fails."""
    return read_object(folder / "state.json")


def find_checkpoints(path: str) -> list[Path]:
    """Finds the checkpoints that `path` names, oldest first: if `path` is a checkpoint, only that
    one; if it is a run, all complete checkpoints of the run."""
    folder = Path(path).expanduser()
    if (folder / "state.json").is_file():
        return [folder]
    return list_complete(folder / "checkpoints") or list_complete(folder)


def find_branch(resume: str, folder: Path) -> Path | None:
    """Finds the checkpoint that the setting `resume` names, or, if `resume` names a run, the newest
    checkpoint of that run; None for `auto` and `never`.

    `folder` holds the checkpoints of the run that resumes. UserError if `resume` names no
    checkpoint, or a checkpoint in `folder` that is not the newest one there.
    """
    if resume in ("auto", "never"):
        return None
    named = find_checkpoints(resume)
    if not named:
        raise UserError(
            f"resume={resume} is or has no usable checkpoint; name a run folder, or a checkpoint "
            "in it."
        )
    branch = named[-1].resolve()
    own = list_complete(folder)
    if own and branch.parent == folder.resolve() and branch != own[-1].resolve():
        raise UserError(
            f"resume={resume}: run_dir holds a later checkpoint, {own[-1].name}; use a new run_dir "
            "to branch off."
        )
    return branch


def read_newest(path: str, read: Callable[[], Result]) -> Result:
    """Calls `read`, which reads the newest checkpoint of the run at `path`, and returns its result.

    If `read` fails and the list of the run's checkpoints has changed meanwhile, the function calls
    `read` again: a run that is training may have removed the checkpoint during the call.
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
    """Returns the path of the safetensors file that the setting `key=path` names: `path` itself, or
    `ema.safetensors` (averaged parameters) of a checkpoint, or of the newest checkpoint of a run.

    UserError if there is no such file, or if the checkpoint that holds it is damaged.
    """
    file = Path(path).expanduser()
    if file.suffix == ".safetensors" and file.is_file():
        if (file.parent / "manifest.json").is_file():
            verify(file.parent)
        return file
    checkpoints = find_checkpoints(path)
    if not checkpoints:
        raise UserError(
            f"{key}={path} is neither a .safetensors file, a checkpoint, nor a run that has one."
        )
    return verify(checkpoints[-1]) / "ema.safetensors"


def read_score(folder: Path, name: str) -> float:
    """Returns the score `name` of the checkpoint in `folder`; infinity if it is absent or not
    finite."""
    try:
        score = read_state_file(folder)["scores"][name]
    except READ_ERRORS:
        return math.inf
    return score if isinstance(score, float) and math.isfinite(score) else math.inf


def choose_checkpoint(path: str, which: str) -> tuple[str, str]:
    """Returns the path of the checkpoint `which` of a run, `best` by the score that `keep_best`
    named, or a step; for `last`, `path` itself. Also returns a note if the best checkpoint is
    better than the last by more than two standard errors, else "". UserError if there is no such
    checkpoint."""
    folders = find_checkpoints(path)
    steps = {folder.name.removeprefix("step-"): folder for folder in folders}
    last = read_state_file(folders[-1]) if folders else {}
    name = last.get("best_by", "eval_loss")
    scores = {"": math.inf} | {step: read_score(f, name) for step, f in steps.items()}
    best = min(scores, key=scores.__getitem__)
    if which != "last":
        step = best if which == "best" else which
        if step not in steps:
            raise UserError(
                f"checkpoint={which}: {path} has only steps {', '.join(steps) or 'none'}; best "
                f"needs one with {name}, which held-out images give."
            )
        return str(steps[step]), ""

    # Compare the losses in equal parts of the held-out split, whose noise and t are the same.
    worse = []
    if best and name == "eval_loss":
        states = (last, read_state_file(steps[best]))
        parts = zip(*(state.get("parts", ()) for state in states), strict=False)
        worse = [of_last - of_best for of_last, of_best in parts]
    if len(worse) < 2 or fmean(worse) <= 2.0 * stdev(worse) / math.sqrt(len(worse)):
        return path, ""
    return path, f"note: the best eval_loss is {scores[best]:.4g}, at step {best}: checkpoint=best"


def read_finished_summary(cfg: TrainConfig, folder: Path) -> dict[str, Any] | None:
    """Reads the summary of the run in `folder`; returns None if there is none, or if the run has
    not yet seen `cfg.total_samples` samples, so that training must continue."""
    try:
        summary = read_object(folder / "summary.json")
        damaged = summary.get("skipped_data") or {}
        known = all(type(count) is int for count in damaged.values())
        if not known or summary["samples"] < cfg.total_samples:
            return None
        # Return None also if the newest checkpoint is damaged or gone, because the run then
        # continues from an earlier checkpoint.
        if cfg.save_every:
            newest = verify(list_complete(folder / "checkpoints")[-1])
            if read_state_file(newest)["counters"]["samples"] < cfg.total_samples:
                return None
        return summary
    except READ_ERRORS:
        return None


def find_newest_verified(folder: Path) -> Path | None:
    """Returns the newest intact checkpoint in `folder`; None if there is no checkpoint.

    If a checkpoint is damaged, the function warns, renames it to `step-N.corrupt` and tries the
    next older checkpoint. UserError if all are damaged: the user must decide to start over. The
    function also deletes folders that an interrupted save or removal has left, so the caller must
    hold the lock on the run's folder.
    """
    for incomplete in (*folder.glob("step-*.tmp"), *folder.glob("step-*.removed")):
        shutil.rmtree(incomplete, ignore_errors=True)

    for checkpoint in reversed(list_complete(folder)):
        problem = find_damage(checkpoint)
        if not problem:
            return checkpoint
        quarantine = checkpoint.with_name(checkpoint.name + ".corrupt")
        try:
            shutil.rmtree(quarantine, ignore_errors=True)
            rename(checkpoint, quarantine)
        except OSError as error:
            raise UserError(
                f"{checkpoint}: {problem}, and it cannot be renamed to {quarantine.name} "
                f"({error.strerror})."
            ) from error
        warnings.warn(
            f"{checkpoint}: {problem}; moved to {quarantine.name}, trying the one before.",
            stacklevel=3,
        )

    if any(folder.glob("step-*.corrupt")):
        raise UserError(f"{folder} holds no checkpoint that verifies; start over in a new run_dir.")
    return None


def select_identity(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Selects the parts of a configuration that must not change when a run resumes: name of the
    part -> its keys and values. The part `data` has only the seed, because the configuration does
    not hold the fingerprint of the latents; `describe_run` adds it."""
    return {
        "model": config.get("model") or {},
        "data": {"seed": config.get("seed")},
        "objective": config.get("objective") or {},
        "optimizer": {"class": (config.get("optim") or {}).get("_target_")},
        "adapter": config.get("adapter") or {},
    }


MUST_MATCH = tuple(select_identity({}))
"""Names of the parts of the configuration that must be equal in a checkpoint and the run that loads
it."""


def load(folder: Path, state: TrainState, run: dict[str, Any], ranks: Ranks = SINGLE) -> str:
    """Loads the verified checkpoint in `folder` into `state`. Returns text that lists the
    settings that have changed since the checkpoint was saved; "" if none has.

    Raises UserError if the checkpoint belongs to another run, has another format, or cannot be
    read. `run` is the description of this run that `describe_run` returns.
    """
    try:
        described = read_state_file(folder)
        mismatch = find_mismatch(described, run)
        content = {} if mismatch else assemble_state(folder, described, state.layouts, ranks)
        settings = {} if mismatch else described["settings"]

        # A run that lacks a newer key behaved as with the key's default, so compare with that.
        for name, defaults in (("runtime", RuntimeConfig()), ("ema", EmaConfig())):
            settings = settings | {name: asdict(defaults) | settings.get(name, {})}
        changed = describe_difference(settings, run["settings"])
    except torch.OutOfMemoryError:
        raise
    except MALFORMED_ERRORS as error:
        raise UserError(
            f"{folder} is no checkpoint that this version can read ({shorten_error(error)}); use "
            "another step."
        ) from error

    if mismatch:
        alternative = f", or init_from={folder} to start from its weights"
        raise UserError(
            f"{folder} was made {mismatch}. Use a new run_dir"
            f"{'' if described.get('adapter') else alternative}."
        )
    try:
        state.load_state_dict(content)
    except torch.OutOfMemoryError:
        raise
    except MALFORMED_ERRORS as error:
        reason = str(error) if isinstance(error, ValueError) else shorten_error(error)
        raise UserError(f"{folder} does not fit this run: {reason}") from error
    return changed and changed + describe_rates(settings, run["settings"], state.samples)


def describe_rates(then: dict[str, Any], now: dict[str, Any], samples: int) -> str:
    """Returns the end of a sentence if the learning rate after `samples` samples differs between
    the settings of a checkpoint and of the run, as it does if a cosine gets longer; else ""."""

    def find_rate(settings: dict[str, Any]) -> float:
        schedule = Schedule(total_samples=settings["total_samples"], **settings["schedule"])
        return settings["optim"]["lr"] * schedule(samples, settings["batch_size"])

    try:
        old = find_rate(then)
        new = find_rate(now)
    except MALFORMED_ERRORS:  # no rate, or a value that refers to another key
        return ""
    return "" if old == new else f"; so the learning rate at this step was {old:.2g}, is {new:.2g}"


def find_mismatch(described: dict[str, Any], run: dict[str, Any]) -> str:
    """Returns text about the format, or else the first part of `MUST_MATCH`, in which the
    checkpoint, `described`, and the run differ, such as "with another model: depth was 8, is 12";
    "" if they agree."""
    if described.get("format") != FORMAT_VERSION:
        return "by an earlier checkout"
    other = describe_other_part(described, run)
    return other and f"with {other}"


def describe_other_part(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns text about the first part of `MUST_MATCH` in which the descriptions of two runs
    differ, such as "another model: depth was 8, is 12"; "" if they agree."""
    for name in MUST_MATCH:
        then = fill_defaults(old[name], name)
        now = fill_defaults(json.loads(json.dumps(new[name])), name)
        difference = describe_difference(then, now)
        if difference:
            return f"another {name}: {difference}{describe_other_order(then, now)}"
    return ""


def describe_other_order(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns a sentence if the checkpoint and the run use the same latents in another order,
    normalisation or storage; otherwise "". `then` and `now` are a part of their descriptions, of
    which only `data` has a fingerprint."""
    old = str(then.get("fingerprint"))
    new = str(now.get("fingerprint"))
    old_hash = old[:HASH_DIGITS]
    same = old_hash == new[:HASH_DIGITS] and re.fullmatch("[0-9a-f]+", old_hash)
    if old == new or not same:
        return ""
    return (
        ". The latents are the same, but their order, normalisation or storage was "
        f"{old[HASH_DIGITS + 1 :]} and is {new[HASH_DIGITS + 1 :]}; data=, data.window, "
        "data.normalisation and data.storage choose it"
    )


def describe_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Returns text that lists the keys in which two nested dicts differ, with both values; "" if
    they are equal."""
    before = flatten(old)
    after = flatten(new)
    keys = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    return ", ".join(f"{k} was {before.get(k)}, is {after.get(k)}" for k in keys)
