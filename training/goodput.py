"""Accounts for every second of a run, from its first start on and over all restarts, and says what
to do about waiting.

start: imports, building, loading. warm_up: trials, tuning, compiling, the steps of warm-up. steps:
training; the one productive kind. data_wait: nothing to train on. evaluation, sampling, saving,
logging: training waits for them. redone:
steps that a process took which was killed before it saved them. idle: no process, as far as anyone
knows; what a killed process did since it wrote its account last, seconds before, counts here too.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import write_atomically
from common.require_python import STARTED
from common.text import as_json, is_figure
from training.config.schema import TrainConfig

UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a file of ours ends with where it is not there, or has values of another type."""
FILE = "time.json"
"""Of a run folder."""
KINDS = (
    "start",
    "warm_up",
    "steps",
    "data_wait",
    "evaluation",
    "sampling",
    "saving",
    "logging",
    "redone",
    "idle",
)
EVERY = 5.0
"""Seconds after which the account is written again."""
MOST = 512
"""Steps of which it is kept when they were taken."""
EARLIEST = 1.5e9
"""Unix time before which no run began."""
WAITING = 0.1
BUSY = 0.8
"""Share of a step above which waiting for data, and below which the device's work, counts as what
bounds it."""


class Clock:
    """Seconds of this process by kind. The time between two switches goes to one kind, so the sum
    is the clock's."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, seconds_ago: float = 0.0) -> None:
        """Forgets everything and starts now, or a while ago."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.kind = "start"
        self.since = time.perf_counter() - seconds_ago

    def switch(self, kind: str) -> str:
        """Time from now on is of this kind; returns the one before."""
        now = time.perf_counter()
        before = self.kind
        self.seconds[before] += now - self.since
        self.kind = kind
        self.since = now
        return before

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Time inside is of this kind, but what another one inside takes for itself. Also a
        decorator."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """What was measured otherwise goes to its own kind."""
        self.switch(self.kind)
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


CLOCK = Clock()
"""Of the run that this process is at."""


class Account:
    """The seconds of a run by kind, over all its processes, in `time.json` of its folder."""

    def __init__(self) -> None:
        # the process is this run's
        first = not CLOCK.seconds and Path(sys.argv[0]).name == "train.py"
        CLOCK.begin(time.perf_counter() - STARTED if first else 0.0)
        self.began = self.first = time.time() - (time.perf_counter() - CLOCK.since)
        self.earlier = dict.fromkeys(KINDS, 0.0)
        self.reached: dict[int, float] = {}
        """Step -> productive seconds up to it."""
        self.written = time.perf_counter()
        self.told: set[str] = set()

    def resume(self, file: Path, step: int) -> None:
        """Takes over the account that earlier processes of a run left, which goes on at `step`.

        A damaged one is lost, with a warning: the account then begins with this process.
        """
        if not file.exists():
            return
        try:
            found = json.loads(file.read_text())
            seconds = {kind: float(found["seconds"][kind]) for kind in KINDS}
            reached = {int(at): float(value) for at, value in found["reached"].items()}
            first = float(found["first"])
            last = float(found["last"])
            if not (EARLIEST < first <= last < math.inf) or not all(
                0.0 <= s < math.inf for s in seconds.values()
            ):
                raise UserError("no account has such times")
            redone = min(max(0.0, seconds["steps"] - between(reached, step)), seconds["steps"])
            moved = {"idle": max(0.0, self.began - last), "redone": redone, "steps": -redone}
            self.earlier = {kind: value + moved.get(kind, 0.0) for kind, value in seconds.items()}
            self.first = min(first, self.began)
            self.reached = {at: value for at, value in reached.items() if at <= step}
        except UNREADABLE as error:
            what = (
                f"{file} cannot be read ({type(error).__name__}); the account of the run's time "
                "begins anew."
            )
            warnings.warn(what, stacklevel=3)

    @property
    def seconds(self) -> dict[str, float]:
        """By kind, of all processes."""
        CLOCK.switch(CLOCK.kind)
        return {kind: self.earlier[kind] + CLOCK.seconds[kind] for kind in KINDS}

    @property
    def goodput(self) -> float:
        """The share of steps in all the time since the first start."""
        return self.seconds["steps"] / max(1e-9, sum(self.seconds.values()))

    @property
    def due(self) -> bool:
        """Whether it was not written for a while."""
        return time.perf_counter() - self.written >= EVERY

    def write(self, file: Path, step: int) -> None:
        """Writes the account. A disk that refuses it costs the account."""
        seconds = self.seconds
        self.written = time.perf_counter()
        self.reached[step] = seconds["steps"]
        if len(self.reached) > MOST:  # the older, the farther apart
            items = list(self.reached.items())
            self.reached = dict(items[: -MOST // 2 : 2] + items[-MOST // 2 :])
        found = {
            "first": self.first,
            "last": time.time(),
            "seconds": seconds,
            "reached": self.reached,
        }
        with suppress(OSError):
            write_atomically(file, as_json(found) + "\n")

    def advice(
        self,
        metrics: Mapping[str, Any],
        cfg: TrainConfig,
        busy_ms: float | None,
        left: Collection[str],
    ) -> str:
        """What a window's figures suggest to try, as a line; each bound is told once, and none is
        an empty line."""
        step_ms = (
            1e3 * cfg.batch_size / metrics["samples_per_s"] if metrics.get("samples_per_s") else 0.0
        )
        bound = bound_of(step_ms, metrics["data_wait"] * step_ms, busy_ms)
        if bound is None or bound in self.told:
            return ""
        self.told.add(bound)
        return (
            f"{bound}: {reason_of(bound, step_ms, metrics['data_wait'] * step_ms, busy_ms)}; try "
            + ", ".join(keys_for(bound, left, cfg.data))
        )


def between(reached: Mapping[int, float], step: int) -> float:
    """Productive seconds up to a step: a straight line between the steps that are known."""
    steps = sorted({0: 0.0} | dict(reached))
    known = {0: 0.0} | dict(reached)
    i = bisect_right(steps, step) - 1
    if i + 1 == len(steps):
        return known[steps[i]]
    share = (step - steps[i]) / (steps[i + 1] - steps[i])
    return known[steps[i]] + share * (known[steps[i + 1]] - known[steps[i]])


def bound_of(step_ms: float, data_ms: float, busy_ms: float | None) -> str | None:
    """Whether a step waits for data, or the device for launches; None for neither. `busy_ms` is
    None without a GPU."""
    if data_ms > WAITING * step_ms:
        return "data-bound"
    return "launch-bound" if busy_ms is not None and busy_ms < BUSY * step_ms else None


def reason_of(bound: str, step_ms: float, data_ms: float, busy_ms: float | None) -> str:
    if bound == "data-bound":
        return f"{data_ms / step_ms:.0%} of the step goes by before a batch is there"
    return (
        f"the GPU works for {busy_ms:.2f} ms of a step of {step_ms:.2f} ms and waits for launches "
        "otherwise"
    )


def keys_for(bound: str, left: Collection[str], data: Mapping[str, Any]) -> list[str]:
    """What to try with this `data`; of runtime keys only those that are `left`: to be had here, and
    not on."""
    if bound == "data-bound":
        streamed = ["data=resident", "more data.num_workers"]
        return (
            ["a larger data.device_memory_gib", "data.storage=int8"]
            if "storage" in data
            else streamed
        )
    wanted = ("runtime.cuda_graph=true", "runtime.compile=true")
    return [*(word for word in wanted if word in left), "a larger batch_size"]


def told(seconds: Any) -> str:
    """The kinds with their shares, largest first, in one line; nothing of what is no account."""
    known = (
        {k: float(s) for k, s in seconds.items() if is_figure(s)}
        if isinstance(seconds, dict)
        else {}
    )
    whole = max(1e-9, sum(known.values()))
    shown = sorted(((s, kind) for kind, s in known.items() if s > 0.0005 * whole), reverse=True)
    return ", ".join(f"{s / whole:.1%} {kind}" for s, kind in shown)
