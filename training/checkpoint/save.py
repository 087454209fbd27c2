"""Checkpoints: written whole or not at all, in the background, verified before they are loaded.

`checkpoints/step-N/` holds `model.safetensors` and `ema.safetensors` (whole, with the model's description: all that
sampling needs), `rank-R-of-W.safetensors` (moments and generators), `state.json` (counters and configuration) and
`manifest.json` (size and sha256 of the others). Every process writes and hashes its own files in `step-N.tmp`; the
first one then writes the manifest, renames the folder, and replaces `latest`, which names it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from data.manifest import sync_folder, write_atomically
from data.shards import file_sha256
from training.checkpoint.find import complete, damage, description, goes_on, step_of, verified
from training.checkpoint.parts import PART, HostCopies, Kept, Staged, assembled, flat, stage
from training.checkpoint.tensor_file import write_tensors
from training.pretrained import header
from training.process.ranks import SINGLE, Ranks

FORMAT = 2
LONGEST_SAVE = timedelta(hours=6)
"""So long one process waits for another's files. The death of one is noticed at once."""
MARGIN = 1.1
"""Of the size of a checkpoint, what must be free before it is begun."""


class Savable(Protocol):
    """A state that can be saved; `TrainState` is one."""

    step: int

    @property
    def kept(self) -> Mapping[str, Kept]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """The checkpoints of one run, `folder/step-N` for N = the number of steps done.

    Kept are the newest `keep`, every one whose step is a multiple of `keep_every` (0: none), and the one with the
    lowest score `best_by`. With `in_background` a save returns once the state is copied; one is in flight at a time.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 1,
        ranks: Ranks = SINGLE,
        *,
        keep_every: int = 0,
        best_by: str = "eval_loss",
        in_background: bool = False,
    ) -> None:
        self.folder, self.keep, self.keep_every, self.best_by, self.ranks = folder, keep, keep_every, best_by, ranks
        self.copies = HostCopies() if in_background else None
        self.group = None if ranks.alone else dist.new_group(backend="gloo", timeout=LONGEST_SAVE)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.stalled = self.stalled_in_all = self.seconds = 0.0

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for a save in flight; its failure must not hide what ended the run."""
        if kind is None:
            self.finish()
            return
        try:
            self.finish()
        except Exception as failure:
            print(f"warning: {failure}", flush=True)

    def save(self, state: Savable, run: dict[str, Any], scores: Mapping[str, float] | None = None) -> Path:
        """Writes one checkpoint, removes those that are not to be kept, and returns its folder.

        `run` describes the run (see `describe_run`) and goes into `state.json`, with the `scores` that were measured
        at this step. All processes call it.
        ValueError if it, or the one before it, cannot be written; complete ones stay.
        """
        began = time.perf_counter()
        self.finish()
        staged = stage(state.state_dict(), state.kept, self.ranks.first, self.copies)
        told = {"format": FORMAT, "step": state.step, "scores": dict(scores or {}), "world_size": self.ranks.world_size}
        described = told | staged.values | run
        sizes = torch.cat(self.ranks.gathered(torch.tensor([staged.nbytes])))
        self.ranks.agreed(lambda: self.prepare(state.step, int(sizes.sum())))
        if self.copies is None:
            self.write(state.step, staged, described)
            self.raise_failure()
        else:
            self.thread = threading.Thread(
                target=self.write, args=(state.step, staged, described), name=f"checkpoint-{state.step}"
            )
            self.thread.start()
        self.stalled += time.perf_counter() - began
        return self.folder / f"step-{state.step}"

    def finish(self) -> None:
        """Waits for the save in flight, if any; ValueError if it failed."""
        if self.thread is not None:
            began = time.perf_counter()
            self.thread.join()
            self.stalled += time.perf_counter() - began
            self.thread = None
        self.raise_failure()

    def failed(self) -> bool:
        """Whether a save in the background has failed; `save` and `finish` say how."""
        return self.failure is not None

    def raise_failure(self) -> None:
        if (failure := self.failure) is None:
            return
        self.failure = None
        if isinstance(failure, OSError):
            raise ValueError(str(failure)) from failure
        raise failure

    def figures(self) -> dict[str, float]:
        """What saving cost since the last call: seconds that training waited, and how long the last save took."""
        found = {"save_stall_s": self.stalled, "save_s": self.seconds} if self.stalled else {}
        self.stalled_in_all, self.stalled = self.stalled_in_all + self.stalled, 0.0
        return found

    def prepare(self, step: int, size: int) -> None:
        """Room on the disk and an empty folder to write in; ValueError otherwise."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free < MARGIN * size:
                raise OSError(f"it needs {MARGIN * size / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free")
            shutil.rmtree(self.temporary(step), ignore_errors=True)
            self.temporary(step).mkdir()
        except OSError as error:
            raise ValueError(self.not_saved(step, error)) from error

    def temporary(self, step: int) -> Path:
        return self.folder / f"step-{step}.tmp"

    def not_saved(self, step: int, error: OSError) -> str:
        reason = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        return (
            f"{self.folder / f'step-{step}'} cannot be saved ({reason}). Free space or mend the folder; "
            f"{goes_on(self.folder)}."
        )

    def write(self, step: int, staged: Staged, described: dict[str, Any]) -> None:
        """All that happens on the disk; a failure is kept for `raise_failure`, the same one in all processes."""
        began = time.perf_counter()
        try:
            written: tuple[dict[str, Any], str] = (self.write_files(self.temporary(step), staged, described), "")
        except OSError as error:
            written = {}, self.not_saved(step, error)
        except BaseException as error:
            self.failure, written = error, ({}, f"step-{step} cannot be saved ({error!r}).")
        try:
            shares = self.exchanged(written)
            problem = next((problem for _, problem in shares if problem), "")
            if self.ranks.first:
                problem = problem or self.commit(step, {name: of for files, _ in shares for name, of in files.items()})
                if problem:
                    shutil.rmtree(self.temporary(step), ignore_errors=True)
            if problem := self.exchanged(problem)[0]:
                self.failure = self.failure or OSError(problem)
            elif self.ranks.first:
                self.remove_old(self.folder / f"step-{step}")
        except BaseException as error:
            self.failure = self.failure or error
        self.seconds = time.perf_counter() - began

    def write_files(self, folder: Path, staged: Staged, described: dict[str, Any]) -> dict[str, Any]:
        """Writes this process's files and returns their sizes and hashes."""
        if self.copies is not None:
            self.copies.ready()
        files: dict[str, Any] = {}
        for kind, tensors in staged.whole.items():
            file = folder / f"{kind}.safetensors"
            files[file.name] = write_tensors(file, tensors, header(described, kind))
        name = PART.format(rank=self.ranks.rank, world_size=self.ranks.world_size)
        files[name] = write_tensors(folder / name, staged.own, {"rows": json.dumps(staged.rows)})
        if self.ranks.first:
            write_atomically(folder / "state.json", json.dumps(described, indent=1) + "\n")
            file = folder / "state.json"
            files[file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        return files

    def exchanged(self, mine: Any) -> list[Any]:
        """What each process has to say, on a group of its own: training goes on beside it."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def commit(self, step: int, files: dict[str, Any]) -> str:
        """Makes the files a checkpoint; a sentence if it cannot."""
        temporary, final = self.temporary(step), self.folder / f"step-{step}"
        metrics = self.folder.parent / "metrics.jsonl"
        try:
            if metrics.is_file():  # lines before this step must not be lost where the step is not
                with metrics.open("rb") as stream:
                    os.fsync(stream.fileno())
            write_atomically(
                temporary / "manifest.json", json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"
            )
            if final.exists():  # only a resumed run that saved this step again and was killed before it went on
                remove(final)
            temporary.rename(final)
            sync_folder(self.folder)
            write_atomically(self.folder / "latest", f"{final.name}\n")
        except OSError as error:
            return self.not_saved(step, error)
        return ""

    def remove_old(self, newest: Path) -> None:
        """Nothing goes before the newest one was read back and is as it was meant to be. Trouble is a warning only."""
        found = complete(self.folder)
        losses = {folder: score for folder in found if (score := score_of(folder, self.best_by)) is not None}
        kept = {*found[-self.keep :], *sorted(losses, key=losses.__getitem__)[:1]}
        kept |= {folder for folder in found if self.keep_every and step_of(folder) % self.keep_every == 0}
        if not (old := [folder for folder in found if folder not in kept]):
            return
        try:
            if problem := damage(newest):
                raise OSError(f"{newest.name} was read back and {problem}")
            for folder in old:
                remove(folder)
        except OSError as error:
            print(f"warning: {self.folder}: older checkpoints are not removed ({error}).", flush=True)

    def load_latest(self, state: Savable, run: dict[str, Any]) -> tuple[Path, str] | None:
        """Loads the newest checkpoint that verifies; returns folder and settings changed since, None without any.

        One that does not verify is renamed to `step-N.corrupt`, with a warning, and the one before is tried. ValueError
        if there were some and none verifies: starting over is for the user to decide.
        """
        folder = self.ranks.agreed(self.newest_verified)
        return None if folder is None else (folder, load_verified(folder, state, run, self.ranks))

    def newest_verified(self) -> Path | None:
        """The newest checkpoint that verifies. Clears half-done saves and removals away: the caller holds the lock."""
        for half in (*self.folder.glob("step-*.tmp"), *self.folder.glob("step-*.removed")):
            shutil.rmtree(half, ignore_errors=True)
        found = complete(self.folder)
        for folder in reversed(found):
            if not (problem := damage(folder)):
                with contextlib.suppress(OSError):
                    write_atomically(self.folder / "latest", f"{folder.name}\n")
                return folder
            quarantine = folder.with_name(folder.name + ".corrupt")
            try:
                shutil.rmtree(quarantine, ignore_errors=True)
                folder.rename(quarantine)
            except OSError as error:
                raise ValueError(f"{folder}: {problem}, and it cannot be set aside ({error.strerror}).") from error
            warnings.warn(f"{folder}: {problem}; moved to {quarantine.name}, trying the one before.", stacklevel=3)
        if found or any(self.folder.glob("step-*.corrupt")):
            raise ValueError(f"{self.folder} holds no checkpoint that verifies; start over in a new run_dir.")
        return None


def score_of(folder: Path, name: str) -> float | None:
    """A score measured at that step; None if there was none, or none that can be compared."""
    try:
        told = description(folder)
        score = told.get("scores", told)[name]  # older versions wrote `eval_loss` alone, beside the rest
    except (OSError, ValueError, KeyError):
        return None
    return score if isinstance(score, float) and math.isfinite(score) else None


def remove(folder: Path) -> None:
    """Takes its name away first: half a checkpoint must not look like one."""
    removed = folder.with_name(folder.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed)


def load(folder: Path, state: Savable, run: dict[str, Any], ranks: Ranks = SINGLE) -> str:
    """Loads a checkpoint, returns the settings changed since; ValueError if it is damaged or belongs to another run."""
    return load_verified(verified(folder), state, run, ranks)


def load_verified(folder: Path, state: Savable, run: dict[str, Any], ranks: Ranks) -> str:
    described = description(folder)
    for name in ("model", "data", "objective", "optimizer"):
        if described[name] != json.loads(json.dumps(run[name])) and not (name == "data" and same_set(described, run)):
            raise ValueError(
                f"{folder} was made with another {name}: {difference(described[name], run[name])}. "
                f"Use a new run_dir, or init_from={folder} to start from its weights."
            )
    try:
        content = assembled(folder, described, state.kept, ranks)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is no checkpoint of this version of ours ({error}); use another step.") from error
    state.load_state_dict(content)
    return difference(described["settings"], run["settings"])


def same_set(described: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether a checkpoint of an earlier version has the run's data: its fingerprint left out mean and std."""
    then, now = described["spec"], run["spec"]
    earlier = {"fingerprint": now["earlier_fingerprint"], "seed": run["data"]["seed"]}
    return described["data"] == earlier and (then["mean"], then["std"]) == (now["mean"], now["std"])


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The keys in which two descriptions differ, with both values."""
    was, now = dict(flat(old)), dict(flat(new))
    keys = sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
    return ", ".join(f"{k} was {was.get(k)}, is {now.get(k)}" for k in keys)
