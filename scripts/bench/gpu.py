"""Measures everything in slots of minutes: the cheapest and most telling first, each row kept as
soon as it is there.

    python -m scripts.bench gpu out=bench/gpu budget_minutes=9
    python -m scripts.bench gpu only=[ladder,techniques_bf16]
    python -m scripts.bench gpu setting=tiny
    python -m scripts.bench publish bench/gpu

The same command goes on where it stopped: rows that the same code has measured on the same hardware
with the same versions are left alone, and so are failed ones without again=failed. Each benchmark
is a process of its own. A row that raises, exhausts the memory, crashes or hangs is kept with its
sentence, and the next one follows. A row begins only if it should end within the budget; the last
lines say what remains. `publish` makes pages, charts and the README's tables of the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common import lock
from common.errors import UserError
from common.files import ROOT
from common.processes import end
from scripts.bench.__main__ import BENCHMARKS
from scripts.bench.rows import LOST_DEVICE, Results, code_hash
from scripts.bench.settings import SCRATCH
from training.config.compose import from_words

LIMIT = 480.0
"""Seconds after which a row is ended, and a process that has not begun with its rows."""
START_UP = 15.0
"""Seconds that must be left to start a process that has not planned its rows yet."""
LOG_BYTES = 2**20
TINY = ["setting=tiny"]
QUICK = [*TINY, "inductor=false"]


@dataclass(frozen=True)
class GpuConfig:
    """Keys of the queue."""

    out: str = "bench/gpu"
    """The folder that keeps the results: rows.jsonl, plan.json, log.txt."""
    budget_minutes: float = 9.0
    only: list[str] = field(default_factory=list)
    """Names of items or of commands; empty: all."""
    setting: str | None = None
    """tiny: everything at a size for two CPU cores; null: the sizes that are published."""
    again: str | None = None
    """failed: measures rows again that failed with this code, once."""
    limit_s: float = LIMIT
    """Seconds after which a row is ended, from its beginning, and its process with it. It is tried
    once more where its process had measured others before."""


class Item(NamedTuple):
    """One benchmark of the queue."""

    name: str
    what: str
    words: list[str]
    """The command and its keys."""
    tiny: list[str] | None
    """Its keys at setting=tiny; None: it would repeat another."""
    seconds: float
    """How long it should take on an H100, until it has been planned once."""

    @property
    def command(self) -> str:
        return " ".join(["python -m scripts.bench", *self.words, f"name={self.name}"])


WIDE = ["batch_size=64", "data.height=64", "data.width=64"]
ITEMS = (
    Item("doctor", "the machine and its rates", ["doctor", "setting=s32"], TINY, 20),
    Item(
        "tests_smoke",
        "draws, kernels, a captured step, ledgers, loaders",
        ["tests", "setting=s32", "select=smoke"],
        [*TINY, "select=smoke"],
        120,
    ),
    Item(
        "tests_rest",
        "the other tests on a GPU; compute-sanitizer last",
        ["tests", "setting=s32", "select=rest"],
        None,
        900,
    ),
    Item(
        "calibration",
        "which fused kernels win",
        ["calibration", "setting=s256", "runtime=production"],
        TINY,
        200,
    ),
    Item("kernels", "operators beside their definitions", ["kernels", "setting=s256"], QUICK, 150),
    Item(
        "hotspots",
        "where the time of a step goes",
        ["hotspots", "setting=b256", "batch_size=64"],
        TINY,
        60,
    ),
    Item(
        "ladder_s32",
        "from a newcomer's loop to `max`: 33 M parameters, 32×32×4 latents, 50,000 samples, "
        "batch 32",
        ["ladder", "setting=s32"],
        [*TINY, "num_workers=0"],
        400,
    ),
    Item(
        "techniques_bf16",
        "each technique alone over eager in bf16, and removed from `max`",
        ["techniques", "setting=s256", "precisions=[bf16]"],
        [*QUICK, "precisions=[bf16]"],
        900,
    ),
    Item(
        "mixers_256",
        "mixers, 33 M parameters, 256 tokens",
        ["mixers", "setting=s256", "size=s", "runtime=production"],
        [*QUICK, "size=xs", "runtime=fast"],
        400,
    ),
    Item("ladder_s256", "the ladder at batch 256", ["ladder", "setting=s256"], None, 500),
    Item(
        "claims",
        "claims of guides: [techniques](../techniques.md)",
        ["claims", "setting=s32"],
        QUICK,
        400,
    ),
    Item(
        "techniques_fp32",
        "each technique alone over eager in fp32",
        ["techniques", "setting=s256", "precisions=[fp32]"],
        [*TINY, "precisions=[fp32]"],
        700,
    ),
    Item(
        "data",
        "loaders beside the usual pipelines; precompute by parts",
        ["data", "setting=s256"],
        TINY,
        330,
    ),
    Item(
        "plan",
        "what `scripts.plan` predicts beside what is measured",
        ["plan", "setting=b256"],
        QUICK,
        240,
    ),
    Item(
        "saves",
        "what a checkpoint costs, in the background and not",
        ["saves", "setting=b256", "batch_size=64", "runtime=production"],
        [*TINY, "runtime=fast"],
        120,
    ),
    Item(
        "precision",
        "fp32, bf16 and fp16 over three seeds, on digits",
        ["precision", "setting=s256", "data=digits", "steps=500"],
        [*TINY, "data=digits", "steps=50"],
        300,
    ),
    Item(
        "memory",
        "small optimizer states, bf16 weights, fp8, offload, on digits: loss, bytes, seconds",
        ["memory", "setting=s256", "data=digits", "steps=200"],
        [*TINY, "data=digits", "steps=50"],
        400,
    ),
    Item(
        "step",
        "one step by phases",
        ["step", "setting=s256", "runtime=fast"],
        [*TINY, "runtime=fast"],
        60,
    ),
    Item(
        "antipatterns",
        "what mistakes cost",
        ["antipatterns", "setting=s32", "runtime=fast"],
        [*QUICK, "runtime=fast"],
        400,
    ),
    Item(
        "mixers_1024",
        "mixers at 1,024 tokens",
        ["mixers", "setting=s256", "size=s", *WIDE, "runtime=production"],
        None,
        400,
    ),
    Item("ladder_b256", "the ladder at the size of DiT-B/2", ["ladder", "setting=b256"], None, 700),
)
"""What the queue measures, in its order. Tests come first: whatever they find is mended, and rows
that were measured before that count for nothing."""


def chosen(cfg: GpuConfig) -> list[Item]:
    """The items of the setting that `only` names; ValueError for a name that there is not."""
    if cfg.setting not in (None, "tiny"):
        raise UserError(
            f"setting={cfg.setting}: the queue has setting=tiny, and null for the published sizes."
        )
    tiny = cfg.setting == "tiny"
    items = [
        i._replace(name=f"{i.name}_tiny", words=[i.words[0], *i.tiny]) if tiny and i.tiny else i
        for i in ITEMS
    ]
    items = [item for item in items if not tiny or item.tiny]
    known = {name for item in items for name in (item.name, item.words[0])}
    for name in cfg.only:
        if name not in known:
            raise UserError(
                f"only=[{name}]: there is no such item; choose some of "
                f"{', '.join(i.name for i in items)}."
            )
    return [item for item in items if not cfg.only or {item.name, item.words[0]} & {*cfg.only}]


class Queue:
    """Runs items one after the other until the budget is used up."""

    def __init__(self, cfg: GpuConfig) -> None:
        self.results = Results(Path(cfg.out).expanduser().absolute())
        self.limit = cfg.limit_s
        self.results.folder.mkdir(parents=True, exist_ok=True)
        self.results.compact()
        shutil.rmtree(self.results.folder / SCRATCH, ignore_errors=True)
        self.log = self.results.folder / "log.txt"
        self.deadline = time.time() + 60 * cfg.budget_minutes
        self.here: dict[str, Any] = {}
        """Hardware and versions, as the first process of this start found them."""
        self.again = cfg.again
        self.lost = 0

    def planned(self, item: Item) -> bool:
        """Whether this code has planned the item, on this hardware with these versions."""
        run = self.results.plans().get(item.name, {}).get("run", {})
        same = {
            "code": code_hash(ROOT / "scripts" / "bench" / f"{BENCHMARKS[item.words[0]]}.py"),
            **self.here,
        }
        return run.get("command") == item.command and all(
            run[key] == value for key, value in same.items()
        )

    def left(self, item: Item) -> dict[str, float]:
        """Row -> seconds, of what is to be measured; all of the item where it is not planned."""
        return (
            self.results.left(item.name, self.limit)
            if self.planned(item)
            else {f"all of {item.name}": item.seconds}
        )

    def time_left(self) -> float:
        return self.deadline - time.time()

    def measure(self, item: Item) -> None:
        """Starts the item's process, again after each crash or limit, until nothing is left of it
        that fits."""
        again = self.again
        while self.time_left() > 0 and (not self.here or again or self.fitting(item)):
            began = time.time()
            before = self.results.size()
            status = self.start(item, again)
            again = None
            plan = self.results.plans()[item.name]
            if plan.get("time", 0.0) >= began:
                self.here = {key: plan["run"][key] for key in ("hardware", "versions")}
            if self.results.size() == before:
                if status != 0:
                    print(
                        f"{item.name}: no row; status {status}: {last_line(self.log)}", flush=True
                    )
                return
            good = any(
                line["time"] >= began and "error" not in line["entry"]
                for line in self.results.lines()
            )
            self.lost = self.lost + 1 if status == LOST_DEVICE and not good else 0
            if self.lost == 2:
                raise UserError(
                    "two processes lost the GPU at their first row; see log.txt, and start again."
                )

    def fitting(self, item: Item) -> bool:
        """Whether a row of the item may fit; which ones do, its process knows when it has
        planned."""
        seconds = self.left(item).values() if self.planned(item) else [START_UP]
        return bool(seconds) and min(seconds) <= min(self.time_left(), self.limit)

    def start(self, item: Item, again: str | None) -> int | None:
        """One process, until it ends or its time is over; then the row that it was at is kept with
        the reason.

        Returns the exit status; None if its time was over.
        """
        words = [*item.command.split()[1:], f"out={self.results.folder}"]
        words += [
            f"until={self.deadline}",
            f"limit_s={self.limit}",
            *([f"again={again}"] if again else []),
        ]
        # a queue that was killed left the row at which it was
        self.results.note(item.name, at=None, began=time.time(), limit=min(LIMIT, self.time_left()))
        with self.log.open("ab") as log:
            log.write(f"\n{item.command}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,  # its end tells the process that the queue is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, (str(ROOT), os.getenv("PYTHONPATH")))
                    )
                },
                start_new_session=True,
            )
            try:
                status = self.ended(process, item)
            finally:
                end(process)
                shutil.rmtree(self.results.folder / SCRATCH, ignore_errors=True)
        cut_to_last(self.log, LOG_BYTES)
        if status is None:
            reason = None
        elif status < 0:
            reason = f"the process was ended by {signal.Signals(-status).name}"
        else:
            reason = f"the process ended with status {status}: {last_line(self.log)}"
        if failed := self.results.fail(item.name, reason):
            print(f"{item.name}, {failed}", flush=True)
        return status

    def ended(self, process: subprocess.Popen[bytes], item: Item) -> int | None:
        """The exit status of a process, once it ends; None when the row that it told last has had
        its limit."""
        while True:
            told = self.results.plans()[item.name]
            left = told["began"] + told["limit"] - time.time()
            if left <= 0:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, 1.0))

    def all(self, items: list[Item]) -> None:
        """Measures what fits, and says what remains."""
        for item in items:
            began = time.time()
            self.measure(item)
            lines = self.results.newest(item.name, self.here.get("hardware", "")).values()
            new = sum(line["time"] >= began for line in lines)
            failed = sum("error" in line["entry"] for line in lines)
            took = time.time() - began
            print(
                f"{item.name}: {len(lines)} rows, {new} new, {failed} failed, {took:.0f} s",
                flush=True,
            )
        remaining = {item.name: left for item in items if (left := self.left(item))}
        for name, left in remaining.items():
            print(
                f"remains: {name}, {len(left)} rows, about {sum(left.values()) / 60:.1f} min: "
                f"{', '.join(left)}"
            )
        minutes = sum(sum(left.values()) for left in remaining.values()) / 60
        print(
            f"{f'about {minutes:.0f} minutes remain' if remaining else 'nothing remains'}; "
            f"{self.results.file}"
        )


def cut_to_last(file: Path, size: int) -> None:
    """Leaves the last `size` bytes of a file that has grown beyond three times that."""
    if file.is_file() and file.stat().st_size > 3 * size:
        file.write_bytes(file.read_bytes()[-size:])


def last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def main(words: list[str]) -> None:
    cfg = from_words(GpuConfig, words, __doc__ or "")
    if cfg.again not in (None, "failed"):
        raise UserError(f"again={cfg.again}: the queue has again=failed.")
    if cfg.budget_minutes <= 0 or cfg.limit_s <= 0:
        raise UserError(
            f"budget_minutes={cfg.budget_minutes} and limit_s={cfg.limit_s} must be above 0."
        )
    items = chosen(cfg)
    folder = Path(cfg.out).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(
        lock.held(
            folder, f"out={cfg.out}: another queue measures into it; wait for it, or stop it."
        )
    ):
        Queue(cfg).all(items)
