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
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from common.errors import UserError
from common.files import file_sha256, make_folder, rename, sync_folder, write_atomically
from common.progress import Progress
from common.text import as_json
from training.checkpoint.find import PART, complete, damage, description, goes_on, step_of
from training.checkpoint.parts import HostCopies, Kept, Staged, stage
from training.checkpoint.tensor_file import header, write_tensors
from training.distributed.heartbeat import Together
from training.distributed.ranks import SINGLE, Ranks
from training.goodput import CLOCK

FORMAT = 2
MARGIN = 1.1
"""Of the size of a checkpoint, what must be free before it is begun."""
PAUSES = (2.0, 10.0, 50.0)
"""Seconds before a save that failed is tried again."""
PATIENCE = timedelta(minutes=30)


class Savable(Protocol):
    """A state that can be saved; `TrainState` is one."""

    step: int
    samples: int

    @property
    def kept(self) -> Mapping[str, Kept]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """The checkpoints of one run, `folder/step-N` for N = the number of steps done.

    Kept are the newest `keep`, every one whose step is a multiple of `keep_every` (0: none), and
    the one with the lowest score `best_by`. With `in_background` a save returns once the state is
    copied; one is in flight at a time. A process that writes nothing for `patience` ends the save
    of all.
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
        patience: timedelta = PATIENCE,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.best_by = best_by
        self.ranks = ranks
        self.copies = HostCopies() if in_background else None
        self.together = Together(ranks, patience)
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.samples = self.size = 0
        """Of the newest state that was to be saved: samples seen, and bytes of this process's
        share."""
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

    @CLOCK.spending("saving")
    def save(
        self, state: Savable, run: dict[str, Any], scores: Mapping[str, float] | None = None
    ) -> Path:
        """Writes one checkpoint, removes those that are not to be kept, and returns its folder.

        `run` describes the run (see `describe_run`) and goes into `state.json`, with the `scores`
        that were measured at this step. All processes call it. A save that fails is tried again
        after each of `PAUSES`. ValueError if it, or the one before it, cannot be written; complete
        ones stay.
        """
        self.finish(state.samples)
        began = time.perf_counter()
        staged = stage(state.state_dict(), state.kept, self.ranks.first, self.copies)
        told = {
            "format": FORMAT,
            "step": state.step,
            "scores": dict(scores or {}),
            "world_size": self.ranks.world_size,
        }
        described = told | staged.values | run
        self.size = staged.nbytes
        size = int(torch.cat(self.ranks.gathered(torch.tensor([self.size]))).sum())
        self.thread = threading.Thread(
            target=self.write,
            args=(state.step, size, staged, described),
            name=f"checkpoint-{state.step}",
        )
        self.thread.start()
        self.stalled += time.perf_counter() - began
        if self.copies is None:
            self.finish()
        return self.folder / f"step-{state.step}"

    @CLOCK.spending("saving")
    def finish(self, samples: int | None = None) -> None:
        """Waits for the save in flight, if any, and shows how far it is.

        ValueError if it failed, with what is lost of `samples`, which training has seen by now.
        """
        self.samples = self.samples if samples is None else samples
        self.wait()
        self.raise_failure()

    def wait(self) -> None:
        """Waits for the save in flight, if any, and shows how far it is; a failure is kept for
        `finish`."""
        if self.thread is None:
            return
        began = time.perf_counter()
        unit = f"MiB of {self.thread.name}"
        done = self.together.done >> 20
        progress = Progress(self.size >> 20, unit, done, silent=not self.ranks.first, lasting=False)
        while self.thread.is_alive():
            self.thread.join(0.5)
            progress.advance((self.together.done >> 20) - progress.count)
        progress.close()
        self.stalled += time.perf_counter() - began
        self.thread = None

    def failed(self) -> bool:
        """Whether a save in the background has failed; `save` and `finish` say how."""
        return self.failure is not None

    def raise_failure(self) -> None:
        if (failure := self.failure) is None:
            return
        self.failure = None
        if isinstance(failure, TimeoutError):  # nothing of a disk that may hang is looked at
            raise UserError(
                f"{failure}; the same command goes on from the newest checkpoint."
            ) from failure
        if isinstance(failure, OSError):
            raise UserError(
                f"{failure}. Free space or mend the folder; {goes_on(self.folder, self.samples)}."
            ) from failure
        raise failure

    def figures(self) -> dict[str, float]:
        """What saving cost since the last call: seconds that training waited, and how long the last
        save took."""
        found = {"save_stall_s": self.stalled, "save_s": self.seconds} if self.stalled else {}
        self.stalled_in_all = self.stalled_in_all + self.stalled
        self.stalled = 0.0
        return found

    def write(self, step: int, size: int, staged: Staged, described: dict[str, Any]) -> None:
        """All that happens on the disk, in a thread; a failure is kept for `raise_failure`, in all
        processes."""
        began = time.perf_counter()
        pauses = list(PAUSES)
        try:
            while problem := self.attempt(step, size, staged, described):
                told = f"{self.folder / f'step-{step}'} cannot be saved ({problem})"
                if isinstance(problem, TimeoutError):
                    raise TimeoutError(told) from problem
                if not pauses:
                    raise OSError(f"{told}; it was tried {1 + len(PAUSES)} times") from problem
                self.ranks.say(f"warning: {told}; it is tried again in {pauses[0]:g} s")
                time.sleep(pauses.pop(0))
        except BaseException as failure:
            self.failure = failure
        self.seconds = time.perf_counter() - began

    def attempt(
        self, step: int, size: int, staged: Staged, described: dict[str, Any]
    ) -> OSError | None:
        """Writes the checkpoint once; what went wrong with a disk or a process, the same in all
        processes."""
        first = self.ranks.first
        together = self.together
        together.done = 0
        try:
            together.results(lambda: self.prepare(step, size) if first else None)
            shares = together.results(
                lambda: self.write_files(self.temporary(step), staged, described)
            )
            files = {name: of for share in shares for name, of in share.items()}
            together.results(lambda: self.commit(step, files) if first else None)
        except OSError as problem:
            if first and not isinstance(problem, TimeoutError):  # what hangs there is still at work
                shutil.rmtree(self.temporary(step), ignore_errors=True)
            return problem
        return None

    def prepare(self, step: int, size: int) -> None:
        """Room on the disk and an empty folder to write in; OSError otherwise."""
        make_folder(self.folder)
        free = shutil.disk_usage(self.folder).free
        if free < MARGIN * size:
            raise OSError(
                f"it needs {MARGIN * size / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free"
            )
        shutil.rmtree(self.temporary(step), ignore_errors=True)
        self.temporary(step).mkdir()

    def temporary(self, step: int) -> Path:
        return self.folder / f"step-{step}.tmp"

    def write_files(
        self, folder: Path, staged: Staged, described: dict[str, Any]
    ) -> dict[str, Any]:
        """Writes this process's files and returns their sizes and hashes."""
        if self.copies is not None:
            self.copies.ready()
        wrote = self.together.advance
        files: dict[str, Any] = {}
        for kind, tensors in staged.whole.items():
            file = folder / f"{kind}.safetensors"
            files[file.name] = write_tensors(file, tensors, header(described, kind), wrote)
        name = PART.format(rank=self.ranks.rank, world_size=self.ranks.world_size)
        files[name] = write_tensors(
            folder / name, staged.own, {"rows": json.dumps(staged.rows)}, wrote
        )
        if self.ranks.first:
            file = folder / "state.json"
            write_atomically(file, as_json(described, indent=1) + "\n")
            files[file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        return files

    def commit(self, step: int, files: dict[str, Any]) -> None:
        """Makes the files a checkpoint, and removes those that are not to be kept."""
        temporary = self.temporary(step)
        final = self.folder / f"step-{step}"
        metrics = self.folder.parent / "metrics.jsonl"
        with contextlib.suppress(OSError), metrics.open("rb") as stream:
            # lines before this step should not be lost where the step is not
            os.fsync(stream.fileno())
        write_atomically(
            temporary / "manifest.json",
            as_json({"format": FORMAT, "files": files}, indent=1) + "\n",
        )
        if final.exists():  # the attempt before this one got so far, and then failed
            remove(final)
        rename(temporary, final)
        try:
            sync_folder(self.folder)
        except OSError:
            rename(final, temporary)
            raise
        self.remove_old(final)

    def remove_old(self, newest: Path) -> None:
        """Nothing goes before the newest one was read back and is as it was meant to be. Trouble is
        a warning only."""
        try:
            found = complete(self.folder)
            losses = {
                folder: score
                for folder in found
                if (score := score_of(folder, self.best_by)) is not None
            }
            kept = {*found[-self.keep :], *sorted(losses, key=losses.__getitem__)[:1]}
            kept |= {
                folder
                for folder in found
                if self.keep_every and step_of(folder) % self.keep_every == 0
            }
            if not (old := [folder for folder in found if folder not in kept]):
                return
            if problem := damage(newest, self.together.advance):
                raise OSError(f"{newest.name} was read back and {problem}")
            for folder in old:
                remove(folder)
        except OSError as error:
            print(
                f"warning: {self.folder}: older checkpoints are not removed ({error}).", flush=True
            )


def score_of(folder: Path, name: str) -> float | None:
    """A score measured at that step; None if there was none, or none that can be compared."""
    try:
        told = description(folder)
        # older versions wrote `eval_loss` alone, beside the rest
        score = told.get("scores", told)[name]
    except (OSError, ValueError, KeyError):
        return None
    return score if isinstance(score, float) and math.isfinite(score) else None


def remove(folder: Path) -> None:
    """Takes its name away first: half a checkpoint must not look like one."""
    removed = folder.with_name(folder.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    rename(folder, removed)
    shutil.rmtree(removed)
