"""Runs cases in child processes, and keeps each result as a file of its own.

A result exists for this code, hardware and versions: then its case is done, also if it failed. A
child measures the cases of one command. It ends when its parent ends; a case that fails, hangs or
crashes ends it, and the next case has a new one. The limit of a case counts from the moment at
which the child says that it measures.
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
"""Seconds in which a child must be ready to measure."""
MAX_WAIT_SECONDS = 1e6
"""Seconds that the system can wait."""
MEASURED = ("accel", "common", "conf", "data", "encoding", "models", "scripts", "training")
"""Folders whose code decides what is measured."""
UNMEASURED = ("__main__.py", "cases.py", "tables.yaml", "runner.py", "publish.py")
"""Files that plan, keep and show; what they plan is part of each result's identity."""
SPAWN = get_context("spawn")


@cache
def hash_code() -> str:
    """Hashes the code that is measured, in 16 digits."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in MEASURED for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".yaml") and path.name not in UNMEASURED:
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def run_child(connection: Connection, words: Words, folder: Path) -> None:
    """Says what machine this is, then measures the cases that it is sent, as long as its parent
    lives."""
    os.setsid()
    set_start_method(None, force=True)  # its own children begin as those of train.py do
    parent = parent_process()
    assert parent is not None
    workers.end_with_parent(parent.pid or 0)
    with (folder / "log.txt").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    tempfile.tempdir = str(folder / "tmp")
    device = device_of(words)
    torch.zeros(1, device=device).item()  # a lost GPU is told here
    torch._dynamo.config.recompile_limit = 64  # many models pass through the same code
    connection.send(describe_environment(device) | {"device": device.type})
    while True:
        case, cfg = connection.recv()
        connection.send("measuring")
        connection.send(measure_case(case, cfg))


class Child:
    """A process that measures, seen from its parent; ValueError if it does not become ready."""

    def __init__(self, words: Words, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=run_child, args=(theirs, words, folder))
        self.process.start()
        theirs.close()
        self.machine: Figures = self.await_reply()

    def await_reply(self) -> Any:
        try:
            return self.receive(START_SECONDS)
        except (EOFError, OSError) as error:
            self.end()
            raise UserError(
                f"no process can measure here: {self.describe_end(error)}. Nothing is lost, and the "
                f"same command goes on; {self.folder / 'log.txt'} says more."
            ) from error

    def receive(self, limit: float) -> Any:
        """Returns what the child sends; EOFError if it ended, TimeoutError after `limit`."""
        ready = wait([self.connection, self.process.sentinel], min(limit, MAX_WAIT_SECONDS))
        if not ready:
            raise TimeoutError(f"not done after {limit:.0f} s")
        if self.connection not in ready:
            raise EOFError
        return self.connection.recv()

    def measure(self, case: Case, cfg: Any, limit: float) -> Figures:
        """Measures a case; an `error` if that takes longer than `limit` or ends the process."""
        try:
            self.connection.send((case, cfg))
            self.await_reply()
            return self.receive(limit)
        except (EOFError, OSError) as error:
            return {"error": self.describe_end(error)}

    def describe_end(self, error: BaseException) -> str:
        """Says how the process ended, if it did."""
        if isinstance(error, TimeoutError):
            return str(error)
        self.process.join(START_SECONDS)
        code = self.process.exitcode or 0
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process ended with status {code}"

    def end(self) -> None:
        """Ends the process and all that it started, and removes what they left behind."""
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with suppress(ProcessLookupError):
                kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        self.connection.close()
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)


@dataclass
class Runner:
    """Runs jobs one after the other, and keeps their results in a folder.

    `limit` are the seconds of a case, and `deadline` is the Unix time at which the last one ends.
    """

    folder: Path
    limit: float = inf
    deadline: float = inf
    child: Child | None = None
    machine: Figures = field(default_factory=dict)
    """What the first child found."""

    def find_child(self, case: Case) -> Child:
        """Returns the child at work, or a new one."""
        if not self.child:
            self.child = Child(case.overrides, self.folder)
            self.machine = self.child.machine
        return self.child

    def close(self) -> None:
        if self.child:
            self.child.end()
        self.child = None

    def run(self, job: Job, again: str | None = None) -> list[Figures | None]:
        """Returns the result of each case, measured where there is none; None if time is short.

        `again`: all, or failed, measures anew what is done, or what failed.
        """
        if again not in (None, "all", "failed"):
            raise UserError(f"again={again}: choose all, failed, or leave it out.")
        try:
            return [self.find_result(job, case, again) for case in job.cases]
        finally:
            self.close()

    def find_result(self, job: Job, case: Case, again: str | None) -> Figures | None:
        """Returns the result that lies there, or measures the case if that fits the time."""
        file = self.find_file(job, case)
        if file.is_file() and again != "all":
            old = json.loads(file.read_text())["entry"]
            if again is None or "error" not in old:
                return old
        left = self.deadline - time.time()
        if case.expected > left:
            return None

        began = time.time()
        figures = self.find_child(case).measure(case, job.cfg, min(self.limit, left))
        if "error" in figures or figures.get("not_on"):
            self.close()  # what broke here must break nothing else
            if time.time() >= self.deadline:
                return None  # it did not have its time
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
        said = entry.get("error") or entry.get("reason") or f"measured in {seconds:.0f} s"
        print(f"{job.cfg.name}, {case.name}: {said}", flush=True)
        return entry

    def describe_identity(self, job: Job, case: Case) -> Figures:
        """Returns what makes a result this case's: another code, machine or key is another."""
        if not self.machine:
            self.find_child(case)
        keys = asdict(replace(job.cfg, out="", again=None, name=None))
        return {
            "hardware": self.machine["hardware"],
            "versions": self.machine["versions"],
            "code": hash_code(),
            "config": [case.overrides, case.baseline, keys],
        }

    def find_file(self, job: Job, case: Case) -> Path:
        identity = json.dumps(self.describe_identity(job, case), sort_keys=True)
        digest = hashlib.sha256(f"{case.name} {identity}".encode()).hexdigest()[:12]
        plain = re.sub(r"[^\w+-]+", "_", case.name)[:60]
        return self.folder / str(job.cfg.name) / f"{plain}-{digest}.json"


@contextmanager
def open_runner(out: str, limit: float = inf, minutes: float = inf) -> Iterator[Runner]:
    """Yields a runner that has a folder to itself; what its children print is in log.txt."""
    folder = Path(out).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"out={out}: another bench measures into it; wait for it, or stop it."
    with lock_folder(folder, refusal):
        (folder / "log.txt").write_text("")
        yield Runner(folder, limit, time.time() + 60.0 * minutes)


@dataclass(frozen=True)
class GpuConfig:
    """Keys of the queue."""

    out: str = "bench/gpu"
    """The folder that keeps the results, a file each, and log.txt."""
    budget_minutes: float = 9.0
    only: Words = field(default_factory=list)
    """Items, or how their names begin, such as ladder; empty: all."""
    setting: str | None = None
    """tiny: everything at a size for two CPU cores; null: the sizes that are published."""
    again: str | None = None
    """failed: measures cases again that failed with this code, once."""
    limit_s: float = 480.0
    """Seconds after which a case is ended, from the moment at which it is being measured."""


def choose_items(cfg: GpuConfig) -> dict[str, Words]:
    """Returns the words of each item that is wanted; ValueError for one that there is not."""
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
    """Measures what fits the budget, and says what remains; the same command goes on."""
    cfg = parse_words(GpuConfig, words, scripts.bench.__doc__ or "")
    items = choose_items(cfg)
    minutes = 0.0
    with open_runner(cfg.out, cfg.limit_s, cfg.budget_minutes) as runner:
        for name, item in items.items():
            planned = plan_job(item[0], [*item[1:], f"name={name}"])
            results = runner.run(planned, cfg.again)
            for case in (case for case, got in zip(planned.cases, results, strict=True) if not got):
                print(f"remains: {name}, {case.name}, about {case.expected:.0f} s")
                minutes += case.expected / 60.0
    print(f"about {minutes:.0f} minutes remain" if minutes else "nothing remains")
