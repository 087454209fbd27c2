"""Measures the rows of a benchmark one at a time, and keeps each in a folder as soon as it is
measured.

A folder holds `rows.jsonl`, one line a row, with the hardware, versions, state of the code and
command of each. Folders are merged by joining these files. `plan.json` says what each benchmark
planned last, how long that should take, and at which row it is.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel.techniques.cuda_graph import CapturedUpdate
from common.errors import UserError
from common.files import ROOT, write_atomically
from common.text import first_line
from scripts.bench.report import Bar
from scripts.bench.settings import BenchConfig
from training.environment import describe_environment

LOST_DEVICE = 70
"""Exit status of a process whose GPU answers no more; a new process can go on."""
CAPTURE_FAILED = 71
"""Exit status of a process in which a CUDA graph could not be captured; only a new process measures
rightly."""
LEFT_OUT = "left out: inductor=false"
"""Why a row that compiles was not measured, where the command said so."""
OF_THE_PROCESS = ("out", "until", "limit_s", "again")
"""Keys that say nothing of what is measured."""


class Row(NamedTuple):
    """One measurement that a benchmark plans."""

    name: str
    measure: Callable[[], dict[str, Any]]
    """Returns the figures, or {"reason": sentence} where it cannot be had here."""
    seconds: float = 15.0
    """How long it should take, until it has been measured once."""
    labels: dict[str, Any] = {}  # noqa: RUF012  # never changed
    """What is known without measuring."""


class Benchmark(NamedTuple):
    """What a command measures and how it is shown."""

    config: type[BenchConfig]
    plan: Callable[[Any, list[str], torch.device], Iterable[Row]]
    """From the command's keys, the training overrides and the device. ValueError for a mistake in
    the words."""
    texts: Callable[[Sequence[dict[str, Any]]], list[str]]
    """Tables of any of its entries, also of none; on any machine."""
    help: str
    bars: Callable[[Sequence[dict[str, Any]]], tuple[str, list[Bar]]] | None = None
    """Title and bars of a chart."""


ALSO = {
    "tests": ("tests", "training", "data", "scripts"),
    "data": ("data", "encoding"),
    "saves": ("training",),
}
"""Benchmark -> folders that it measures, beside those of all."""
Line = dict[str, Any]
"""A line of rows.jsonl."""
PLANNING = "(planning)"
"""The row at which a process is until it has planned the others."""


class Results:
    """The rows in a folder, by benchmark, name and hardware."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "rows.jsonl"
        self.plan_file = folder / "plan.json"

    def lines(self) -> list[Line]:
        """All whole lines; the last one of a process that was killed may be a part. ValueError for
        a damaged one."""
        texts = self.file.read_bytes().splitlines(keepends=True) if self.file.is_file() else []
        found: list[Line] = []
        for number, text in enumerate((text for text in texts if text.endswith(b"\n")), start=1):
            try:
                found.append(json.loads(text))
            except ValueError:
                raise UserError(
                    f"{self.file}, line {number}: this is no JSON; remove the line, it is "
                    "measured anew."
                ) from None
        return found

    def newest(self, benchmark: str, hardware: str) -> dict[str, Line]:
        """Row -> its last line."""
        lines = self.lines()
        mine = (
            line
            for line in lines
            if line["benchmark"] == benchmark and line["run"]["hardware"] == hardware
        )
        return {line["entry"]["name"]: line for line in mine}

    def of(self, benchmark: str) -> list[dict[str, Any]]:
        """The entries of a benchmark that are shown, in the order of its plan."""
        lines = shown(line for line in self.lines() if line["benchmark"] == benchmark)
        return [line["entry"] for line in sorted(lines, key=lambda line: line["order"])]

    def add(self, line: Line) -> None:
        """Appends a line and waits until it is on the disk; a half-written one, of a process that
        was killed, goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab+") as stream:
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def plans(self) -> dict[str, dict[str, Any]]:
        """Benchmark -> its newest plan: its `time`; `run`, what its rows were to be measured with;
        `seconds` by row; `at`, the row that has begun and not ended; when it `began`, the seconds
        of its `limit`, and whether it is the `first` of its process."""
        return json.loads(self.plan_file.read_text()) if self.plan_file.is_file() else {}

    def note(self, benchmark: str, **facts: Any) -> None:
        """Changes the plan of a benchmark."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plans = self.plans()
        plans[benchmark] = plans.get(benchmark, {}) | facts
        write_atomically(self.plan_file, json.dumps(plans, indent=1) + "\n")

    def left(self, benchmark: str, limit: float) -> dict[str, float]:
        """Row -> seconds it should take, of the rows that are planned and not measured in that way;
        each has `limit` seconds."""
        plan = self.plans()[benchmark]
        newest = self.newest(benchmark, plan["run"]["hardware"])
        run = plan["run"]
        rows = {name: (seconds, newest.get(name)) for name, seconds in plan["seconds"].items()}
        return {
            name: expected(*row, limit)
            for name, row in rows.items()
            if not is_measured(row[1], run, limit)
        }

    def fail(self, benchmark: str, error: str | None) -> str | None:
        """Keeps the row at which a process was when it ended, with the reason; None is that its
        time was over.

        Returns the row and the sentence; None if no row had begun, or it was kept already.
        """
        plan = self.plans().get(benchmark, {})
        name = plan.get("at")
        if name is None:
            return None
        self.note(benchmark, at=None)
        newest = self.newest(benchmark, plan["run"]["hardware"]).get(name)
        # the process ended between keeping the row and saying so
        if newest and newest["time"] == plan["began"]:
            return None
        taken = round(time.time() - plan["began"], 2)
        limit = {} if error else {key: plan[key] for key in ("limit", "first")}
        error = error or f"not done after {taken:.0f} s"
        order = list(plan["seconds"]).index(name)
        facts = {
            "benchmark": benchmark,
            "order": order,
            "seconds": taken,
            "time": plan["began"],
        } | limit
        self.add(
            facts | {"entry": {"name": name, **plan["labels"], "error": error}, "run": plan["run"]}
        )
        return f"{name}: {error}"

    def size(self) -> int:
        """Bytes of all rows."""
        return self.file.stat().st_size if self.file.is_file() else 0

    def compact(self) -> None:
        """Drops lines that newer ones have replaced, but none that is shown."""
        lines = self.lines()
        newest = {key_of(line): line for line in lines}
        kept = {id(line) for line in (*newest.values(), *shown(lines))}
        text = "".join(json.dumps(line) + "\n" for line in lines if id(line) in kept)
        if len(text.encode()) < self.size():
            write_atomically(self.file, text)


def key_of(line: Line) -> tuple[str, str, str]:
    return line["benchmark"], line["entry"]["name"], line["run"]["hardware"]


def shown(lines: Iterable[Line]) -> list[Line]:
    """One line for each benchmark, row and hardware: the newest, but a failure replaces no
    figures."""
    found: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        old = found.get(key_of(line))
        if old is None or rank(line) > rank(old):
            found[key_of(line)] = line
    return list(found.values())


def rank(line: Line) -> tuple[bool, float]:
    return "error" not in line["entry"], line["time"]


def expected(stated: float, line: Line | None, limit: float) -> float:
    """Seconds that a row should take: what it took last; a quarter more than it had where it did
    not end.

    At least a quarter of what is stated: what rows share, the first one pays. At most `limit` for a
    row that did not end, since it is ended then.
    """
    if line is None or not (
        "limit" in line or line["entry"].keys().isdisjoint({"error", "reason"})
    ):
        return stated
    return min(1.25 * line["limit"], limit) if "limit" in line else max(line["seconds"], stated / 4)


def is_measured(
    line: Line | None, run: Mapping[str, Any], limit: float, failed_too: bool = True
) -> bool:
    """Whether a line was measured with the same code, hardware, versions and keys, and ended.

    A row that ran out of time counts if it was the first of its process and had the `limit` that it
    would have now.
    """
    same = ("code", "hardware", "versions", "keys", "overrides")
    if line is None or (not failed_too and "error" in line["entry"]):
        return False
    if "limit" in line and not (line.get("first") and line["limit"] >= limit):
        return False
    return all(line["run"][key] == run[key] for key in same)


@cache
def code_hash(file: Path) -> str:
    """16 digits of the SHA-256 over what is measured (accel/, models/, conf/, training/step.py, and
    what ALSO says) and over the benchmark `file` with what it imports from scripts/."""
    folders = ("accel", "models", "conf", *ALSO.get(file.stem, ()))
    parts = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    digest = hashlib.sha256()
    for path in sorted({*parts, ROOT / "training" / "step.py", *with_imports(file)}):
        if path.suffix in (".py", ".yaml"):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def with_imports(file: Path, found: frozenset[Path] = frozenset()) -> frozenset[Path]:
    """A file and the modules of scripts/ that it imports, but for those that only show and keep
    results."""
    found |= {file}
    for package, names in re.findall(
        r"^from (scripts[\w.]*) import ([\w, ]+)", file.read_text(), re.MULTILINE
    ):
        base = ROOT.joinpath(*package.split("."))
        modules = [
            base.with_suffix(".py"),
            *(base / f"{name.split()[0]}.py" for name in names.split(",")),
        ]
        for module in modules:
            if (
                module.is_file()
                and module.name not in ("report.py", "rows.py")
                and module not in found
            ):
                found |= with_imports(module, found)
    return found


def named(git: Mapping[str, Any]) -> str:
    """A commit in 10 digits, with + where files differ from it."""
    return git["commit"][:10] + ("+" if git["uncommitted_changes"] else "")


def describe(
    benchmark: Benchmark, cfg: BenchConfig, overrides: list[str], device: torch.device
) -> dict[str, Any]:
    """With what rows are measured: code, hardware, versions, keys, and the command that does it
    again."""
    environment = describe_environment(device)
    git = environment.pop("git")
    words = [
        word for word in environment.pop("argv")[1:] if word.partition("=")[0] not in OF_THE_PROCESS
    ]
    return environment | {
        "device": device.type,
        "code": code_hash(Path(sys.modules[benchmark.plan.__module__].__file__ or "")),
        "commit": named(git) if git else "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m scripts.bench", *words]),
        "keys": {
            key: value for key, value in asdict(cfg).items() if key not in (*OF_THE_PROCESS, "name")
        },
        "overrides": overrides,
    }


def measure_rows(
    benchmark: Benchmark, cfg: BenchConfig, overrides: list[str], device: torch.device
) -> list[dict[str, Any]]:
    """Measures the rows that this code has not measured here yet and that should end before
    `cfg.until`.

    Returns the entries of all planned rows that there are. A row that raises, or exhausts the
    memory, is kept with its sentence, and the next one follows.
    """
    assert cfg.name is not None
    results = Results(Path(cfg.out).expanduser())
    run = describe(benchmark, cfg, overrides, device)
    torch._dynamo.config.recompile_limit = 64  # many models pass through the same code
    began = time.time()
    results.note(cfg.name, run=run, seconds={PLANNING: 30.0}, time=began)
    results.note(
        cfg.name,
        at=PLANNING,
        began=began,
        limit=min(cfg.limit_s, cfg.until - began),
        labels={},
        first=True,
    )
    rows = list(benchmark.plan(cfg, overrides, device))
    results.note(cfg.name, seconds={row.name: row.seconds for row in rows}, at=None)
    newest = results.newest(cfg.name, run["hardware"])
    first = True
    for order, row in enumerate(rows):
        line = newest.get(row.name)
        if (
            line
            and cfg.again != "all"
            and is_measured(line, run, cfg.limit_s, failed_too=cfg.again != "failed")
        ):
            print(
                f"{row.name}: measured {line['run']['date']} with this code; again=all measures "
                "it anew",
                flush=True,
            )
            continue
        began = time.time()
        limit = min(cfg.limit_s, cfg.until - began)
        if expected(row.seconds, line, cfg.limit_s) > limit:
            continue
        results.note(
            cfg.name, at=row.name, began=began, limit=limit, labels=row.labels, first=first
        )
        first = False
        entry = {"name": row.name, **row.labels, **figures_of(row)}
        facts = {"order": order, "seconds": round(time.time() - began, 2), "time": began}
        results.add({"benchmark": cfg.name, **facts, "entry": entry, "run": run})
        results.note(cfg.name, at=None)
        said = entry.get("error") or entry.get("reason") or f"measured in {facts['seconds']:.0f} s"
        print(f"{row.name}: {said}", flush=True)
        leave_if_broken(device)
    newest = results.newest(cfg.name, run["hardware"])
    return [newest[row.name]["entry"] for row in rows if row.name in newest]


def figures_of(row: Row) -> dict[str, Any]:
    """What `row.measure` returns, or its exception as one sentence; the traceback goes to
    stderr."""
    try:
        return row.measure()
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory: {first_line(error)}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


def leave_if_broken(device: torch.device) -> None:
    """Gives the GPU's memory back; ends the process where the next row would be measured wrongly or
    not at all: after a failed capture, or if the GPU answers no more, as after an illegal
    access."""
    if CapturedUpdate.failed:
        print(
            "a CUDA graph could not be captured, so this process ends; the same command goes on",
            file=sys.stderr,
        )
        sys.exit(CAPTURE_FAILED)
    if device.type == "cuda":
        gc.collect()
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            print(
                f"the GPU is lost to this process ({first_line(error)}); the same command goes on",
                file=sys.stderr,
            )
            sys.exit(LOST_DEVICE)
