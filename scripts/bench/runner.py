"""Runs cases in child processes, and writes each result to its own file.

A case is not measured again if a result for this code, hardware and versions exists, even if the
result is an error. A child process measures the cases of one command, and ends when its parent
ends. A case that fails, hangs or crashes ends its child, and the next case starts a new child. The
time limit of a case starts when the child reports that it begins to measure.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import inf
from multiprocessing import get_context, parent_process, set_start_method
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import scripts.bench
from common import workers
from common.errors import UserError
from common.files import ROOT, lock_folder, write_json
from scripts.bench import TABLES, Case, Figures, Words
from scripts.bench.cases import Job, plan_job
from scripts.bench.measure import device_of, measure_case
from training.config.compose import parse_words
from training.environment import describe_environment

START_SECONDS = 300.0
"""Seconds that the parent process waits until a child process is ready to measure, begins a case,
or ends."""
MAX_WAIT_SECONDS = 1e6
"""Largest timeout in seconds that is given to the operating system, which refuses an infinite
one."""
MEASURED_FOLDERS = (
    "accel",
    "common",
    "conf",
    "data",
    "encoding",
    "evaluation",
    "models",
    "sampling",
    "scripts",
    "training",
)
"""Folders whose code may change a measurement; `hash_code` hashes their .py and .yaml files."""
UNMEASURED_FILES = ("__main__.py", "cases.py", "tables.yaml", "runner.py", "publish.py")
"""Files that `hash_code` leaves out, because they only plan cases and store or publish results. A
changed plan still gives a new result, because the plan (overrides, baseline, keys) is also part of
the name under which a result is stored."""
SPAWN = get_context("spawn")


@cache
def hash_code() -> str:
    """Returns a hash, in 16 hexadecimal digits, of all code that affects the measurements."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in MEASURED_FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".yaml") and path.name not in UNMEASURED_FILES:
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def run_child(connection: Connection, words: Words, folder: Path) -> None:
    """Main function of a child process: sends the parent a description of this machine, then
    measures each case that the parent sends, until the parent ends."""
    os.setsid()
    # Reset the start method, which is "spawn" in this process, so that the workers of a measured
    # loader start by the same method as in train.py.
    set_start_method(None, force=True)
    parent = parent_process()
    assert parent is not None
    workers.end_with_parent(parent.pid or 0)
    with (folder / "log.txt").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    tempfile.tempdir = str(folder / "tmp")

    # Run an operation on the device, so that a GPU that no longer works fails here, before the
    # child is ready, and not in a case.
    device = device_of(words)
    torch.zeros(1, device=device).item()
    # Raise the number of times that PyTorch may compile the same code, because this one process
    # compiles it for many models.
    torch._dynamo.config.recompile_limit = 64
    connection.send(describe_environment(device) | {"device": device.type})
    while True:
        case, cfg = connection.recv()
        connection.send("measuring")
        connection.send(measure_case(case, cfg))


class Child:
    """A child process that measures cases, as the parent process sees it. The constructor starts
    the process; ValueError if the process does not become ready."""

    def __init__(self, words: Words, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        self.connection, child_end = SPAWN.Pipe()
        self.process = SPAWN.Process(target=run_child, args=(child_end, words, folder))
        self.process.start()
        child_end.close()
        self.machine: Figures = self.await_reply()

    def await_reply(self) -> Any:
        """Returns the child's next message. ValueError if the child ends, or sends no message
        within `START_SECONDS`."""
        try:
            return self.receive(START_SECONDS)
        except (EOFError, OSError) as error:
            self.end()
            raise UserError(
                f"no process can measure here: {self.describe_end(error)}. Finished results are "
                f"kept; see {self.folder / 'log.txt'}, then run the same command again."
            ) from error

    def receive(self, limit: float) -> Any:
        """Returns the child's next message. EOFError if the child has ended, TimeoutError after
        `limit` seconds."""
        ready = wait([self.connection, self.process.sentinel], min(limit, MAX_WAIT_SECONDS))
        if not ready:
            raise TimeoutError(f"not done after {limit:.0f} s")
        if self.connection not in ready:
            raise EOFError
        return self.connection.recv()

    def measure(self, case: Case, cfg: Any, limit: float) -> Figures:
        """Lets the child measure a case and returns the figures; returns only an `error` if the
        measurement takes longer than `limit` seconds or ends the child."""
        try:
            self.connection.send((case, cfg))
            self.await_reply()
            return self.receive(limit)
        except (EOFError, OSError) as error:
            return {"error": self.describe_end(error)}

    def describe_end(self, error: BaseException) -> str:
        """Describes how the child process ended, or that it did not reply in time."""
        if isinstance(error, TimeoutError):
            return str(error)
        self.process.join(START_SECONDS)
        code = self.process.exitcode or 0
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process ended with status {code}"

    def end(self) -> None:
        """Kills the child process and all its own children, and removes their temporary files."""
        # Kill the child's process group, then also the child itself, because a child that has just
        # started may not lead a process group yet.
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        self.connection.close()
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
    machine: Figures = field(default_factory=dict)
    """Description of the machine, as the latest child sent it; empty before the first child
    starts."""

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

    def run(self, job: Job, again: str | None = None) -> list[Figures | None]:
        """Returns the result of each case: the stored result or, if there is none, a new
        measurement; None if the time before the deadline is too short to measure the case. With
        `again` = "all" it measures every case, with "failed" also the cases whose stored result is
        an error."""
        if again not in (None, "all", "failed"):
            raise UserError(f"again={again}: choose all, failed, or leave it out.")
        try:
            return [self.find_result(job, case, again) for case in job.cases]
        finally:
            self.close()

    def find_result(self, job: Job, case: Case, again: str | None) -> Figures | None:
        """Returns the stored result of a case, or measures the case; None if the time before the
        deadline is too short."""
        file = self.find_file(job, case)
        if file.is_file() and again != "all":
            stored = json.loads(file.read_text())["entry"]
            if again is None or "error" not in stored:
                return stored
        seconds_left = self.deadline - time.time()
        if case.expected > seconds_left:
            return None

        # After a failure end the child process, so that the next case starts in a new one. Do not
        # store a failure that happens after the deadline, because it only shows that the time was
        # too short.
        began = time.time()
        figures = self.ensure_child(case).measure(case, job.cfg, min(self.limit, seconds_left))
        if "error" in figures or figures.get("not_on"):
            self.close()
            if time.time() >= self.deadline:
                return None

        entry = {"name": case.name, **case.labels, **figures}
        seconds = round(time.time() - began, 2)
        environment = {
            **self.describe_identity(job, case),
            "device": self.machine["device"],
            "git": self.machine["git"],
            "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "command": job.command,
        }
        order = job.cases.index(case)
        facts = {"benchmark": job.cfg.name, "order": order, "seconds": seconds, "entry": entry}
        file.parent.mkdir(exist_ok=True)
        write_json(file, facts | {"environment": environment})
        outcome = entry.get("error") or entry.get("reason") or f"measured in {seconds:.0f} s"
        print(f"{job.cfg.name}, {case.name}: {outcome}", flush=True)
        return entry

    def describe_identity(self, job: Job, case: Case) -> Figures:
        """Returns the facts that identify a result: hardware, versions, hash of the code, overrides
        and keys. If one of them changes, the case is measured again."""
        if not self.machine:
            self.ensure_child(case)
        keys = asdict(replace(job.cfg, out="", again=None, name=None))
        # Leave out the choice of rows: it says which cases to measure, not how.
        keys.pop("rows", None)
        return {
            "hardware": self.machine["hardware"],
            "versions": self.machine["versions"],
            "code": hash_code(),
            "config": [case.overrides, case.baseline, keys],
        }

    def find_file(self, job: Job, case: Case) -> Path:
        """Returns the path of the file for a case's result; the file's name contains a hash of the
        facts that identify the result."""
        identity = json.dumps(self.describe_identity(job, case), sort_keys=True)
        digest = hashlib.sha256(f"{case.name} {identity}".encode()).hexdigest()[:12]
        stem = re.sub(r"[^\w+-]+", "_", case.name)[:60]
        return self.folder / str(job.cfg.name) / f"{stem}-{digest}.json"


@contextmanager
def open_runner(out: str, limit: float = inf, minutes: float = inf) -> Iterator[Runner]:
    """Yields a runner that writes results to the folder `out`; no other bench can write there until
    the context ends. The children write their output to log.txt in that folder."""
    folder = Path(out).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"out={out}: another bench measures into it; wait for it, or stop it."
    with lock_folder(folder, refusal):
        (folder / "log.txt").write_text("")
        yield Runner(folder, limit, time.time() + 60.0 * minutes)


@dataclass(frozen=True)
class GpuConfig:
    """Keys of the command `gpu`."""

    out: str = "bench/gpu"
    """Folder for the results (a file for each case) and for log.txt, the output of the child
    processes."""
    budget_minutes: float = 9.0
    only: Words = field(default_factory=list)
    """Benchmarks to run: names in the `queue` of tables.yaml, or beginnings of names, such as
    ladder; empty: all."""
    setting: str | None = None
    """tiny: the benchmarks at sizes for two CPU cores; null: at the sizes whose results are
    published."""
    again: str | None = None
    """failed: measures again the cases whose stored result, measured with the present code, is an
    error; all: measures every case again; null: measures only cases without a result."""
    limit_s: float = 480.0
    """Time limit of a case in seconds, from the start of its measurement."""


def choose_items(cfg: GpuConfig) -> dict[str, Words]:
    """Returns name of each selected benchmark of the `queue` -> arguments of its bench command.
    UserError if `only` selects no benchmark, or if `setting` is unknown."""
    queue = TABLES["queue"]
    for only in cfg.only:
        if not any(name.startswith(only) for name in queue):
            choices = ", ".join(queue)
            raise UserError(f"only=[{only}]: there is no such item; choose some of {choices}.")
    if cfg.setting not in (None, "tiny"):
        raise UserError(f"setting={cfg.setting}: the queue has setting=tiny, and null.")

    items = {}
    for name, item in queue.items():
        wanted = not cfg.only or name.startswith(tuple(cfg.only))
        words = item["words"].split()
        if wanted and cfg.setting is None:
            items[name] = words
        elif wanted and "tiny" in item:
            items[f"{name}_tiny"] = [words[0], "setting=tiny", *item["tiny"].split()]
    return items


def run_queue(words: Words) -> None:
    """Runs the command `gpu`: measures the cases for which the budget of minutes suffices, and
    prints the cases that remain for the next call."""
    cfg = parse_words(GpuConfig, words, scripts.bench.__doc__ or "")
    items = choose_items(cfg)
    minutes = 0.0
    with open_runner(cfg.out, cfg.limit_s, cfg.budget_minutes) as runner:
        for name, item in items.items():
            planned = plan_job(item[0], [*item[1:], f"name={name}"])
            results = runner.run(planned, cfg.again)
            pairs = zip(planned.cases, results, strict=True)
            for case in (case for case, result in pairs if not result):
                print(f"remains: {name}, {case.name}, about {case.expected:.0f} s")
                minutes += case.expected / 60.0
    print(f"about {minutes:.0f} minutes remain" if minutes else "nothing remains")
