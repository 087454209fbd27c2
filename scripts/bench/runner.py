"""Runs cases in child processes, and writes each result to its own file.

A case is not measured again if a result for this hardware, these versions of torch and Triton, its
overrides, keys and code exists, even if the result is an error. A child process measures cases, and
ends when its parent ends. A case that fails, hangs or crashes ends its child, and the next case
starts a new child. The time limit of a case does not include the start of a child.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from math import inf
from multiprocessing import active_children, get_context, set_start_method
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from common import workers
from common.environment import describe_environment
from common.errors import UserError
from common.files import (
    find_cache_folder,
    lock_folder,
    make_folder,
    replace_file,
    write_atomically,
    write_json,
)
from common.text import shorten_error
from scripts.bench import Case, Figures, Words
from scripts.bench.cases import Job, hash_code
from scripts.bench.measure import device_of, measure_case
from scripts.bench.rows import identify

START_SECONDS = 300.0
"""Seconds that the parent waits until a child is ready to measure."""
MAX_SECONDS = 1e6
"""Largest time limit of a case in seconds; the operating system refuses an infinite one."""
SPAWN = get_context("spawn")
Task = tuple[Job, Case]


def pack_results(folder: Path, archive: Path) -> None:
    """Writes the results in `folder` to a tar archive (.tar.gz), which replaces the earlier one as
    a whole: results with their ledgers and the reports of failed tests, drawn samples, the log, and
    the findings of kernels' trials. Leaves out weights, traces and caches."""
    make_folder(archive.parent)
    with replace_file(archive) as temporary, tarfile.open(temporary, "w:gz") as tar:
        for file in (*folder.glob("*/*.json"), *folder.glob("*/*/drawn.*"), folder / "log.txt"):
            tar.add(file, file.relative_to(folder))
        for file in find_cache_folder("kernels").glob("*.json"):
            tar.add(file, f"trials/kernels/{file.name}")


def prepare_child(words: Words, folder: Path, parent: int) -> Figures:
    """Prepares this process, a child, for measuring cases, and describes the machine."""
    # Reset the start method, which is "spawn" in this process, so that the workers of a measured
    # loader start by the same method as in train.py.
    set_start_method(None, force=True)
    workers.end_with_parent(parent)
    with (folder / "log.txt").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    tempfile.tempdir = str(folder / "tmp")
    # Compilers keep their code beside `tmp`, which is removed after each child: later cases use it.
    for name in ("TORCHINDUCTOR", "TRITON"):
        os.environ.setdefault(f"{name}_CACHE_DIR", str(folder / "caches" / name.lower()))

    # Run an operation on the device, so that a GPU that no longer works fails here, not in a case.
    device = device_of(words)
    torch.zeros(1, device=device).item()
    # PyTorch may compile the same code more often, because this one process has many models.
    torch._dynamo.config.recompile_limit = 64
    return describe_environment(device) | {"device": device.type}


class Child:
    """A child process that measures cases: an executor with one process. UserError if the process
    does not become ready."""

    def __init__(self, words: Words, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        self.executor = ProcessPoolExecutor(1, SPAWN)
        others = active_children()
        # The first task starts the process, as the leader of its own process group.
        self.executor.submit(os.setsid)
        (self.process,) = {*active_children()} - {*others}
        self.machine, refusal = self.ask(START_SECONDS, prepare_child, words, folder, os.getpid())
        if refusal:
            self.end()
            raise UserError(
                f"no process can measure here: {refusal}. Finished results are kept; see "
                f"{folder / 'log.txt'}, then run the same command again."
            )

    def ask(self, limit: float, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
        """Lets the child call a function. Returns its result and ""; or None and why there is no
        result: it takes longer than `limit` seconds, raises an error, or ends the child."""
        future = self.executor.submit(function, *arguments)
        try:
            error = future.exception(min(limit, MAX_SECONDS))
        except TimeoutError:
            return None, f"not done after {limit:.0f} s"
        if error is None:
            return future.result(), ""
        if not isinstance(error, BrokenExecutor):
            with (self.folder / "log.txt").open("a") as log:
                print(error.__cause__, file=log)  # the child's traceback
            return None, f"{type(error).__name__}: {shorten_error(error)}"

        self.end()
        code = self.process.exitcode or 0
        if code < 0:
            return None, f"the process was ended by {signal.Signals(-code).name}"
        return None, f"the process ended with status {code}"

    def measure(self, case: Case, cfg: Any, limit: float) -> Figures:
        """Lets the child measure a case and returns the figures, or only an `error`."""
        figures, error = self.ask(limit, measure_case, case, cfg)
        return {"error": error} if error else figures

    def end(self) -> None:
        """Kills the child process and all its own children, and removes their temporary files."""
        # Kill also the child itself, which may not lead a process group yet.
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(self.process.pid or 0, signal.SIGKILL)
        self.executor.shutdown()
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)


@dataclass
class Runner:
    """Runs jobs one after the other, and writes their results to a folder.

    `limit` is the time limit of a case in seconds, `deadline` the Unix time at which the last case
    must end.
    """

    folder: Path
    limit: float = inf
    deadline: float = inf
    child: Child | None = None
    pack: Path | None = None
    """Archive in which the results are packed after each case."""
    machine: Figures = field(default_factory=dict)
    """Description of the machine, as the latest child sent it; empty before the first child
    starts."""
    published: dict[str, Figures] = field(default_factory=dict)
    """Results of docs/benchmarks that count as measured, by what identifies them."""

    def ensure_child(self, case: Case) -> Child:
        """Returns the running child process, or starts a new one on the device that the case's
        overrides name."""
        if not self.child:
            self.child = Child(case.overrides, self.folder)
            self.machine = self.child.machine
        return self.child

    def close(self) -> None:
        """Ends the child process, if one runs."""
        if self.child:
            self.child.end()
        self.child = None

    def run(self, tasks: Sequence[Task], again: str | None = None) -> list[Task]:
        """Measures the cases that need it, and returns those for which the time before the deadline
        did not suffice."""
        if again not in (None, "all", "failed"):
            raise UserError(f"again={again}: choose all, failed, or leave it out.")
        return [task for task in self.order(tasks, again) if not self.measure(*task)]

    def list_entries(self, job: Job) -> list[Figures]:
        """Lists the figures of the cases that have a result."""
        results = [self.find_result(job, case) for case in job.cases]
        return [result["entry"] for result in results if result]

    def order(self, tasks: Sequence[Task], again: str | None) -> list[Task]:
        """Lists the cases that need a measurement, the greatest need first: those without a result,
        those that failed with other code (with `again` = "failed" also with this code), those whose
        result is of other code, and with `again` = "all" the others. Within each kind the oldest
        come first."""
        ranked: list[tuple[int, str, int]] = []
        for number, (job, case) in enumerate(tasks):
            result = self.find_result(job, case)
            if result is None:
                ranked.append((0, "", number))
                continue
            date = result["environment"]["date"]
            changed = result["environment"]["code"] != hash_code(case.overrides)
            if "error" in result["entry"] and (changed or again):
                ranked.append((1, date, number))
            elif changed or again == "all":
                ranked.append((3 - changed, date, number))
        return [tasks[number] for *_, number in sorted(ranked)]

    def find_result(self, job: Job, case: Case) -> Figures | None:
        """Returns the stored or published result of a case; None if there is none."""
        file = self.find_file(job, case)
        if file.is_file():
            return json.loads(file.read_text())
        return self.published.get(identify(case.name, self.describe_identity(job, case)))

    def measure(self, job: Job, case: Case) -> Figures | None:
        """Measures a case and stores the result; None if the time before the deadline is too
        short."""
        if self.estimate_seconds(job) > self.deadline - time.time():
            return None

        # After a failure end the child process, so that the next case starts in a new one. Do not
        # store a failure that happens after the deadline, because it only shows that the time was
        # too short.
        began = time.time()
        child = self.ensure_child(case)
        limit = min(self.limit, self.deadline - time.time())
        figures = child.measure(case, job.cfg, limit)
        if "error" in figures or figures.get("not_on"):
            self.close()
            if time.time() >= self.deadline:
                return None

        entry = {"name": case.name, **case.labels, **figures}
        environment = {
            **self.describe_identity(job, case),
            "code": hash_code(case.overrides),
            "device": self.machine["device"],
            "git": self.machine["git"],
            "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "seconds": round(time.time() - began, 2),
            "command": job.command,
        }
        result = {"benchmark": job.cfg.name, "entry": entry, "environment": environment}
        file = self.find_file(job, case)
        file.parent.mkdir(exist_ok=True)
        write_json(file, result)
        if self.pack:
            pack_results(self.folder, self.pack)
        outcome = entry.get("error") or entry.get("reason") or "measured"
        print(f"{job.cfg.name}, {case.name}: {outcome}", flush=True)
        return result

    def estimate_seconds(self, job: Job) -> float:
        """Estimates the seconds of one of a job's cases: the mean of those that were measured, or
        what the queue states."""
        results = [self.find_result(job, other) for other in job.cases]
        seconds = [
            r["environment"].get("seconds", job.seconds)
            for r in results
            if r and not {"reason", "error"} & r["entry"].keys()
        ]
        return mean(seconds or [job.seconds])

    def describe_identity(self, job: Job, case: Case) -> Figures:
        """Returns the facts that identify a result (see `identify`), and all versions."""
        if not self.machine:
            self.ensure_child(case)
        keys = asdict(replace(job.cfg, out="", again=None, name=None))
        # Leave out the choice of rows: it says which cases to measure, not how.
        del keys["rows"]
        return {
            "hardware": self.machine["hardware"],
            "versions": self.machine["versions"],
            "words": shlex.join(case.overrides),
            "baseline": shlex.join(case.baseline),
            "keys": keys,
        }

    def find_file(self, job: Job, case: Case) -> Path:
        """Returns the path of the file for a case's result; the file's name contains a hash of the
        facts that identify the result."""
        digest = identify(case.name, self.describe_identity(job, case))
        stem = re.sub(r"[^\w+-]+", "_", case.name)[:60]
        return self.folder / str(job.cfg.name) / f"{stem}-{digest}.json"


@contextmanager
def open_runner(out: str, limit: float = inf, seconds: float = inf) -> Iterator[Runner]:
    """Yields a runner that writes results to the folder `out`; no other bench can write there until
    the context ends. The children write their output to log.txt in that folder."""
    began = time.time()
    folder = Path(out).expanduser().absolute()
    make_folder(folder)
    refusal = f"out={out}: another bench measures into it; wait for it, or stop it."
    with lock_folder(folder, refusal):
        write_atomically(folder / "log.txt", "")
        runner = Runner(folder, limit, began + seconds)
        try:
            yield runner
        finally:
            runner.close()
            if runner.pack:
                pack_results(folder, runner.pack)
