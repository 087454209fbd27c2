"""Writes checkpoints atomically in the background, and verifies each before it removes older ones.

`checkpoints/step-N/` holds `model.safetensors` and `ema.safetensors` (unsharded tensors and the
model's description, all that sampling needs), `rank-R-of-W.safetensors` (rank R's part of all other
tensors, such as moments and generators), `state.json` (counters and configuration) and
`manifest.json` (size and sha256 of all other files). Every rank writes its files to the folder
`step-N.tmp` and computes their hashes; then rank 0 writes the manifest and renames the folder to
`step-N`.
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
from typing import Any

from common.clock import CLOCK
from common.distributed.ranks import SINGLE, JointWork, Ranks
from common.errors import UserError
from common.files import hash_file, make_folder, rename, sync_path, write_json
from common.output import Progress
from common.text import format_bytes, replace_non_finite
from training.checkpoint.files import RANK_FILE, Staged, make_header, stage, write_tensors
from training.checkpoint.load import (
    FORMAT_VERSION,
    describe_resume,
    find_damage,
    list_complete,
    read_score,
    step_of,
)
from training.state import TrainState

FREE_SPACE_FACTOR = 1.1
"""Free disk space required before saving, as a multiple of the checkpoint's size."""
RETRY_PAUSES = (2.0, 10.0, 50.0)
"""Seconds to wait before each new attempt of a failed save."""
STALL_TIMEOUT = timedelta(minutes=30)
"""Longest time that a rank may write nothing during a save; after this time the save fails."""


@dataclass
class Save:
    """One rank's part of the work of writing a checkpoint."""

    folder: Path
    staged: Staged
    described: dict[str, Any]
    """Content of `state.json`."""
    size: int
    """Size in bytes of the tensors of all ranks together."""
    ranks: Ranks

    @property
    def temporary(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.tmp")

    def prepare(self) -> None:
        """Creates the empty folder `temporary` to write to; OSError if the disk has too little
        space."""
        make_folder(self.folder.parent)
        free = shutil.disk_usage(self.folder.parent).free
        needed = FREE_SPACE_FACTOR * self.size
        if free < needed:
            raise OSError(f"it needs {format_bytes(needed)}, {format_bytes(free)} are free")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()

    def write_files(self, wrote: Callable[[int], None]) -> dict[str, Any]:
        """Writes this rank's files; returns file name -> {"bytes": its size, "sha256": its
        hash}."""
        contents = {
            f"{kind}.safetensors": (tensors, make_header(self.described, kind))
            for kind, tensors in self.staged.whole.items()
        }
        name = RANK_FILE.format(rank=self.ranks.rank, world_size=self.ranks.world_size)
        contents[name] = (self.staged.rank_tensors, {"rows": json.dumps(self.staged.rows)})
        files = {
            name: write_tensors(self.temporary / name, *content, wrote)
            for name, content in contents.items()
        }
        if self.ranks.first:
            file = self.temporary / "state.json"
            write_json(file, replace_non_finite(self.described))
            files[file.name] = {"bytes": file.stat().st_size, "sha256": hash_file(file)}
        return files

    def commit(self, files: dict[str, Any]) -> None:
        """Turns the files that all ranks have written into a checkpoint: writes their sizes and
        hashes, `files`, to the manifest, and renames the folder."""
        # Flush the metrics to the disk first: after a power cut, metrics.jsonl must not end before
        # the step of the newest checkpoint.
        metrics = self.folder.parents[1] / "metrics.jsonl"
        with contextlib.suppress(OSError), metrics.open("rb") as stream:
            os.fsync(stream.fileno())

        write_json(self.temporary / "manifest.json", {"format": FORMAT_VERSION, "files": files})
        # Remove the checkpoint of an earlier attempt at this save, which can exist if that attempt
        # failed after it renamed the folder.
        if self.folder.exists():
            remove_checkpoint(self.folder)
        rename(self.temporary, self.folder)
        try:
            sync_path(self.folder.parent)
        except OSError:
            rename(self.folder, self.temporary)
            raise


@dataclass
class Checkpoints:
    """The checkpoints of a run: `folder/step-N` after N steps.

    A run keeps the newest `keep` checkpoints, each one whose step is a multiple of `keep_every` (0:
    none), and the one with the lowest value of the score that `best_by` names; it removes all other
    checkpoints.

    If `in_background` is true, `save` returns once the state is copied, and a thread writes the
    copy to the disk; at most one save runs at a time. If a rank writes nothing for `patience`, the
    save fails on all ranks.
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
        self.joint_work = JointWork(self.ranks, self.patience)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.samples = 0
        """Number of samples that training had seen when it last saved or waited for a save."""
        self.size = 0
        """Number of bytes that this rank writes in the latest save."""
        self.logged_stall = CLOCK.count_seconds("saving")
        """Total seconds that training had waited for saves at the last call of `report_times`."""
        self.save_seconds = 0.0
        """Duration of the last save in seconds."""

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for a save that a thread is still writing. If an exception ends the run, the method
        only prints a failure of the save as a warning, so that the failure does not hide the
        exception."""
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
        """Saves a checkpoint, removes those that the run no longer keeps (see the class), and
        returns the folder of the new one.

        `run` is the description of this run that `describe_run` returns. It goes into `state.json`,
        with the `scores` measured at this step (name -> value). All ranks must call the method. A
        failed save is retried after each of `RETRY_PAUSES`, but not after a timeout. Raises
        UserError if the save fails in the end; with `in_background`, the next call of `save` or
        `finish` raises it. A failed save leaves complete checkpoints as they are.
        """
        self.finish(state.samples)
        staged = stage(state.state_dict(), state.layouts, self.ranks.first, self.in_background)
        described = {
            "format": FORMAT_VERSION,
            "step": state.step,
            "scores": dict(scores or {}),
            "best_by": self.best_by,
            "parts": list(state.parts),
            "world_size": self.ranks.world_size,
        }
        described |= staged.values | run

        self.size = staged.nbytes
        size = sum(self.ranks.gather_objects(self.size))
        save = Save(self.folder / f"step-{state.step}", staged, described, size, self.ranks)
        self.thread = threading.Thread(
            target=self.write, args=(save,), name=f"checkpoint-{state.step}"
        )
        self.thread.start()
        if not self.in_background:
            self.finish()
        return save.folder

    @CLOCK.count_as("saving")
    def finish(self, samples: int | None = None) -> None:
        """Waits for the save that a thread is still writing, if any, and shows its progress.

        UserError if the save failed. `samples` is the number of samples that training has seen by
        now, which the message about lost samples needs; None: the number is unchanged.
        """
        if samples is not None:
            self.samples = samples
        self.wait()
        failure = self.failure
        self.failure = None
        # After a timeout the disk may hang, so do not read the checkpoints for this message.
        if isinstance(failure, TimeoutError):
            raise UserError(
                f"{failure}; the same command continues from the newest checkpoint."
            ) from failure
        if isinstance(failure, OSError):
            resume = describe_resume(self.folder, self.samples)
            raise UserError(f"{failure}. Free space or mend the folder; {resume}.") from failure
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Waits for the save that a thread is still writing, if any, and shows its progress. Does
        not raise the error of a failed save; `finish` does."""
        if self.thread is None:
            return
        progress = Progress(
            self.size >> 20,
            f"MiB of {self.thread.name}",
            self.joint_work.done >> 20,
            silent=not self.ranks.first,
            lasting=False,
        )
        while self.thread.is_alive():
            self.thread.join(0.5)
            progress.advance((self.joint_work.done >> 20) - progress.count)
        progress.close()
        self.thread = None

    def is_best(self, scores: Mapping[str, float]) -> bool:
        """Says whether `scores` has a better score of `best_by` than all checkpoints."""
        score = scores.get(self.best_by)
        if score is None:
            return False
        others = self.ranks.broadcast_result(self.read_scores)
        return all(score < other for other in others.values())

    def read_scores(self) -> dict[Path, float]:
        """Returns the score of `best_by` of each complete checkpoint, oldest first."""
        return {folder: read_score(folder, self.best_by) for folder in list_complete(self.folder)}

    def has_failed(self) -> bool:
        """Says whether a save in the background has failed; the next call of `save` or `finish`
        raises its error."""
        return self.failure is not None

    def report_times(self) -> dict[str, float]:
        """Returns `save_stall_s`, the seconds that training waited for saves since the last call,
        and `save_s`, the duration of the last save; empty if training did not wait."""
        waited = CLOCK.count_seconds("saving")
        stall = waited - self.logged_stall
        self.logged_stall = waited
        return {"save_stall_s": stall, "save_s": self.save_seconds} if stall else {}

    def write(self, save: Save) -> None:
        """Tries the save, and, except after a timeout, tries again after each pause of
        `RETRY_PAUSES` until the save succeeds. The method runs in a thread on each rank. It stores
        the error of a failed save in `failure`; `finish` raises that error."""
        began = time.perf_counter()
        try:
            save.staged.wait()
            for pause in (*RETRY_PAUSES, None):
                problem = self.try_save(save)
                if problem is None:
                    break
                sentence = f"{save.folder} cannot be saved ({problem})"
                if isinstance(problem, TimeoutError):
                    raise TimeoutError(sentence) from problem
                if pause is None:
                    raise OSError(
                        f"{sentence}; it was tried {1 + len(RETRY_PAUSES)} times"
                    ) from problem
                self.ranks.say(f"warning: {sentence}; it is tried again in {pause:g} s")
                time.sleep(pause)
        except BaseException as failure:
            self.failure = failure
        self.save_seconds = time.perf_counter() - began

    def try_save(self, save: Save) -> OSError | None:
        """Tries once to write a checkpoint. Returns None on success; if a rank fails with an
        OSError, returns that same error on all ranks."""
        first = self.ranks.first
        work = self.joint_work
        work.done = 0

        def commit() -> None:
            save.commit({name: file for files in rank_files for name, file in files.items()})
            self.remove_old(save.folder)

        try:
            work.run_everywhere(lambda: save.prepare() if first else None)
            rank_files = work.run_everywhere(lambda: save.write_files(work.advance))
            work.run_everywhere(lambda: commit() if first else None)
        except OSError as problem:
            # Remove the incomplete files, except after a timeout, because a thread may still be
            # writing them.
            if first and not isinstance(problem, TimeoutError):
                shutil.rmtree(save.temporary, ignore_errors=True)
            return problem
        return None

    def remove_old(self, newest: Path) -> None:
        """Removes the checkpoints that the run no longer keeps (see the class). First it reads the
        newest checkpoint back from the disk and verifies it. An error only causes a warning."""
        try:
            scores = self.read_scores()
            folders = list(scores)
            best = min(folders, key=scores.__getitem__)
            kept = {*folders[-self.keep :], *([best] if scores[best] < math.inf else [])}
            if self.keep_every:
                kept |= {folder for folder in folders if step_of(folder) % self.keep_every == 0}
            old = [folder for folder in folders if folder not in kept]

            problem = find_damage(newest, self.joint_work.advance) if old else None
            if problem:
                raise OSError(f"{newest.name} was read back and {problem}")
            for folder in old:
                remove_checkpoint(folder)
        except OSError as error:
            print(
                f"warning: {self.folder}: older checkpoints are not removed ({error}).", flush=True
            )


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint. The function renames the folder first, so that an interrupted removal
    leaves no incomplete folder with the name step-<number>, which marks a complete checkpoint."""
    removed = folder.with_name(folder.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    rename(folder, removed)
    shutil.rmtree(removed)
