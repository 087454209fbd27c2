"""Checkpoints: written whole or not at all, in the background, and read back before older ones go.

`checkpoints/step-N/` holds `model.safetensors` and `ema.safetensors` (whole, with the model's
description: all that sampling needs), `rank-R-of-W.safetensors` (moments and generators),
`state.json` (counters and configuration) and `manifest.json` (size and sha256 of the others). Every
process writes and hashes its own files in `step-N.tmp`; the first one then writes the manifest and
renames the folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.files import hash_file, make_folder, rename, sync_folder, write_json
from common.terminal import Progress
from common.text import replace_non_finite
from training.checkpoint.files import RANK_FILE, Staged, make_header, stage, write_tensors
from training.checkpoint.load import (
    describe_resume,
    find_damage,
    list_complete,
    read_state_file,
    step_of,
)
from training.distributed.ranks import SINGLE, JointWork, Ranks
from training.goodput import CLOCK

if TYPE_CHECKING:
    from training.state import TrainState

FORMAT_VERSION = 2
FREE_SPACE_FACTOR = 1.1
"""Free space that is required before a save, as a multiple of the checkpoint's size."""
RETRY_PAUSES = (2.0, 10.0, 50.0)
"""Seconds before a save that failed is tried again."""
STALL_TIMEOUT = timedelta(minutes=30)


@dataclass
class Save:
    """One process's part in writing one checkpoint."""

    folder: Path
    staged: Staged
    described: dict[str, Any]
    """The content of `state.json`."""
    size: int
    """Bytes of all processes together."""
    ranks: Ranks

    @property
    def temporary(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.tmp")

    def prepare(self) -> None:
        """Makes an empty folder to write in; OSError where the disk has too little room."""
        make_folder(self.folder.parent)
        free = shutil.disk_usage(self.folder.parent).free
        needed = FREE_SPACE_FACTOR * self.size
        if free < needed:
            raise OSError(f"it needs {needed / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()

    def write_files(self, wrote: Callable[[int], None]) -> dict[str, Any]:
        """Writes this process's files; returns their sizes and hashes by name."""
        files: dict[str, Any] = {}
        for kind, tensors in self.staged.whole.items():
            file = self.temporary / f"{kind}.safetensors"
            files[file.name] = write_tensors(
                file, tensors, make_header(self.described, kind), wrote
            )

        name = RANK_FILE.format(rank=self.ranks.rank, world_size=self.ranks.world_size)
        rows = {"rows": json.dumps(self.staged.rows)}
        files[name] = write_tensors(self.temporary / name, self.staged.rank_tensors, rows, wrote)

        if self.ranks.first:
            file = self.temporary / "state.json"
            write_json(file, replace_non_finite(self.described))
            files[file.name] = {"bytes": file.stat().st_size, "sha256": hash_file(file)}
        return files

    def commit(self, files: dict[str, Any]) -> None:
        """Makes the files of all processes a checkpoint."""
        # Logged lines before this step should not be lost where the step is not.
        metrics = self.folder.parents[1] / "metrics.jsonl"
        with contextlib.suppress(OSError), metrics.open("rb") as stream:
            os.fsync(stream.fileno())

        write_json(self.temporary / "manifest.json", {"format": FORMAT_VERSION, "files": files})
        if self.folder.exists():  # the attempt before this one got so far, and then failed
            remove_checkpoint(self.folder)
        rename(self.temporary, self.folder)
        try:
            sync_folder(self.folder.parent)
        except OSError:
            rename(self.folder, self.temporary)
            raise


@dataclass
class Checkpoints:
    """The checkpoints of one run, `folder/step-N` for N = the number of steps done.

    Kept are the newest `keep`, every one whose step is a multiple of `keep_every` (0: none), and
    the one with the lowest score `best_by`. With `in_background` a save returns once the state is
    copied; one is in flight at a time. A process that writes nothing for `patience` ends the save
    of all.
    """

    folder: Path
    keep: int = 1
    ranks: Ranks = SINGLE
    _: KW_ONLY
    keep_every: int = 0
    best_by: str = "eval_loss"
    in_background: bool = False
    patience: timedelta = STALL_TIMEOUT

    def __post_init__(self) -> None:
        self.together = JointWork(self.ranks, self.patience)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.samples = 0
        """Samples that training had seen when it last saved or waited."""
        self.size = 0
        """Bytes of this process's share of the save in flight."""
        self.logged_stall = CLOCK.count_seconds("saving")
        """Seconds that training had waited for saves at the last call of `figures`."""
        self.save_seconds = 0.0
        """Seconds that the last save took."""

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for a save in flight; its failure must not hide what ended the run."""
        try:
            self.finish()
        except Exception as failure:
            if kind is None:
                raise
            print(f"warning: {failure}", flush=True)

    @CLOCK.count_as("saving")
    def save(
        self, state: TrainState, run: dict[str, Any], scores: Mapping[str, float] | None = None
    ) -> Path:
        """Writes one checkpoint, removes those that are not to be kept, and returns its folder.

        `run` describes the run (see `describe_run`) and goes into `state.json`, with the `scores`
        that were measured at this step. All processes call it. A save that fails is tried again
        after each of `PAUSES`. ValueError if it, or the one before it, cannot be written; complete
        ones stay.
        """
        self.finish(state.samples)
        staged = stage(state.state_dict(), state.layouts, self.ranks.first, self.in_background)
        described = {
            "format": FORMAT_VERSION,
            "step": state.step,
            "scores": dict(scores or {}),
            "world_size": self.ranks.world_size,
        }
        described |= staged.values | run
        self.size = staged.nbytes
        size = sum(self.ranks.gather_objects(self.size))
        save = Save(self.folder / f"step-{state.step}", staged, described, size, self.ranks)
        name = f"checkpoint-{state.step}"
        self.thread = threading.Thread(target=self.write, args=(save,), name=name)
        self.thread.start()
        if not self.in_background:
            self.finish()
        return save.folder

    @CLOCK.count_as("saving")
    def finish(self, samples: int | None = None) -> None:
        """Waits for the save in flight, if any, and shows how far it is.

        ValueError if it failed, with what is lost of `samples`, which training has seen by now.
        """
        if samples is not None:
            self.samples = samples
        self.wait()
        failure = self.failure
        self.failure = None
        if isinstance(failure, TimeoutError):  # nothing of a disk that may hang is looked at
            raise UserError(
                f"{failure}; the same command goes on from the newest checkpoint."
            ) from failure
        if isinstance(failure, OSError):
            raise UserError(
                f"{failure}. Free space or mend the folder; {describe_resume(self.folder, self.samples)}."
            ) from failure
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Waits for the save in flight, if any, and shows how far it is; a failure is kept for
        `finish`."""
        if self.thread is None:
            return
        unit = f"MiB of {self.thread.name}"
        done = self.together.done >> 20
        progress = Progress(self.size >> 20, unit, done, silent=not self.ranks.first, lasting=False)
        while self.thread.is_alive():
            self.thread.join(0.5)
            progress.advance((self.together.done >> 20) - progress.count)
        progress.close()
        self.thread = None

    def has_failed(self) -> bool:
        """Whether a save in the background has failed; `save` and `finish` say how."""
        return self.failure is not None

    def report_times(self) -> dict[str, float]:
        """What saving cost since the last call: seconds that training waited, and how long the last
        save took."""
        waited = CLOCK.count_seconds("saving")
        stall = waited - self.logged_stall
        self.logged_stall = waited
        return {"save_stall_s": stall, "save_s": self.save_seconds} if stall else {}

    def write(self, save: Save) -> None:
        """Writes to the disk until it succeeds, in a thread; all processes keep a failure for
        `finish`."""
        began = time.perf_counter()
        pauses = list(RETRY_PAUSES)
        try:
            save.staged.wait()
            while problem := self.try_save(save):
                told = f"{save.folder} cannot be saved ({problem})"
                if isinstance(problem, TimeoutError):
                    raise TimeoutError(told) from problem
                if not pauses:
                    raise OSError(
                        f"{told}; it was tried {1 + len(RETRY_PAUSES)} times"
                    ) from problem
                self.ranks.say(f"warning: {told}; it is tried again in {pauses[0]:g} s")
                time.sleep(pauses.pop(0))
        except BaseException as failure:
            self.failure = failure
        self.save_seconds = time.perf_counter() - began

    def try_save(self, save: Save) -> OSError | None:
        """Writes a checkpoint once; returns what went wrong with a disk or a process, the same in
        all processes."""
        first = self.ranks.first
        together = self.together
        together.done = 0

        def commit() -> None:
            save.commit({name: of for share in shares for name, of in share.items()})
            self.remove_old(save.folder)

        try:
            together.run_everywhere(lambda: save.prepare() if first else None)
            shares = together.run_everywhere(lambda: save.write_files(together.advance))
            together.run_everywhere(lambda: commit() if first else None)
        except OSError as problem:
            if first and not isinstance(problem, TimeoutError):  # what hangs there is still at work
                shutil.rmtree(save.temporary, ignore_errors=True)
            return problem
        return None

    def remove_old(self, newest: Path) -> None:
        """Removes the checkpoints that are not to be kept, once the newest one was read back from
        the disk and is as it was meant to be. Trouble is a warning only."""
        try:
            found = list_complete(self.folder)
            scores = {folder: read_score(folder, self.best_by) for folder in found}
            known = {folder: score for folder, score in scores.items() if score is not None}
            kept = {*found[-self.keep :], min(known, key=known.__getitem__, default=newest)}
            if self.keep_every:
                kept |= {folder for folder in found if step_of(folder) % self.keep_every == 0}
            old = [folder for folder in found if folder not in kept]

            problem = find_damage(newest, self.together.advance) if old else None
            if problem:
                raise OSError(f"{newest.name} was read back and {problem}")
            for folder in old:
                remove_checkpoint(folder)
        except OSError as error:
            print(
                f"warning: {self.folder}: older checkpoints are not removed ({error}).", flush=True
            )


def read_score(folder: Path, name: str) -> float | None:
    """A score measured at that step; None if there was none, or none that can be compared."""
    try:
        told = read_state_file(folder)
        # older versions wrote `eval_loss` alone, beside the rest
        score = told.get("scores", told)[name]
    except (OSError, ValueError, KeyError):
        return None
    return score if isinstance(score, float) and math.isfinite(score) else None


def remove_checkpoint(folder: Path) -> None:
    """Takes its name away first: half a checkpoint must not look like one."""
    removed = folder.with_name(folder.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    rename(folder, removed)
    shutil.rmtree(removed)
