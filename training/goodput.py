"""Accounts for every second of a run, from its first start on and over all restarts, and says what
to do about waiting.

start: imports, building, loading. warm_up: trials, tuning, compiling, the steps of warm-up. steps:
training; the one productive kind. data_wait: nothing to train on. evaluation, sampling, saving,
logging: training waits for them. redone: steps that a process took which was killed before it saved
them. idle: no process, as far as anyone knows; what a killed process did since it wrote its account
last, seconds before, counts here too.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from common.files import write_atomically
from common.require_python import PROCESS_START
from common.text import is_figure, to_json

READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a file of ours ends with where it is not there, or has values of another type."""
TIME_FILE = "time.json"
"""The account's name in a run folder."""
MAINTENANCE_KINDS = ("evaluation", "sampling", "saving", "logging")
KINDS = ("start", "warm_up", "steps", "data_wait", *MAINTENANCE_KINDS, "redone", "idle")
WRITE_INTERVAL_SECONDS = 5.0
"""Seconds after which the account is written again."""
MAX_SAVED_STEPS = 512
"""Saved steps of which the account keeps when they were reached."""
DATA_BOUND_SHARE = 0.1
"""Share of a step above which waiting for data counts as what bounds it."""
LAUNCH_BOUND_SHARE = 0.8
"""Share of a step below which the device's work counts as bounded by launches."""


Seconds = Annotated[float, Field(ge=0.0, le=1e12)]
Moment = Annotated[float, Field(ge=1.5e9, le=1e12)]
"""Unix time; no run began before the first of these."""


class Record(BaseModel, allow_inf_nan=False):
    """The content of an account's file."""

    first: Moment
    last: Moment
    seconds: dict[str, Seconds]
    reached: dict[int, Seconds]


class Clock:
    """Seconds of a run by kind, and the account of them over all its processes. The time between
    two switches goes to one kind, so the sum is the clock's."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, seconds_ago: float = 0.0) -> None:
        """Forgets everything and starts now, or a while ago."""
        self.since = time.perf_counter() - seconds_ago
        self.began = time.time() - seconds_ago
        self.first = self.began
        self.kind = "start"
        self.seconds: dict[str, float] = defaultdict(float)
        """Of this process."""
        self.earlier: dict[str, float] = defaultdict(float)
        """Of the processes before."""
        self.reached: dict[int, float] = {}
        """Saved step -> productive seconds up to it."""
        self.written = self.since

    def switch(self, kind: str) -> str:
        """Has time from now on be of this kind; returns the one before."""
        now = time.perf_counter()
        before = self.kind
        self.seconds[before] += now - self.since
        self.kind = kind
        self.since = now
        return before

    def count_seconds(self, *kinds: str) -> float:
        """Seconds of these kinds until now."""
        self.switch(self.kind)
        return sum(self.seconds[kind] for kind in kinds)

    @contextmanager
    def count_as(self, kind: str) -> Iterator[None]:
        """Has time inside be of this kind, but what another one inside takes for itself. Also a
        decorator."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Takes seconds that were measured otherwise from one kind to another."""
        seconds = min(seconds, self.count_seconds(source))
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def resume(self, file: Path, step: int) -> None:
        """Takes over the account that earlier processes of a run left, which goes on at `step`.

        A damaged one is lost, with a warning: the account then begins with this process.
        """
        if not file.exists():
            return
        try:
            found = Record.model_validate_json(file.read_bytes())
        except (OSError, ValueError) as error:
            warnings.warn(
                f"{file} cannot be read ({type(error).__name__}); the account of the run's time "
                "begins anew.",
                stacklevel=3,
            )
            return
        self.first = min(found.first, self.began)
        self.reached = {at: seconds for at, seconds in found.reached.items() if at <= step}
        self.earlier.update(found.seconds)

        # Steps after the one that was saved are done again; since `last` nobody worked.
        redone = max(0.0, self.earlier["steps"] - max(self.reached.values(), default=0.0))
        self.earlier["steps"] -= redone
        self.earlier["redone"] += redone
        self.earlier["idle"] += max(0.0, self.began - found.last)

    @property
    def account(self) -> dict[str, float]:
        """Seconds by kind, of all processes."""
        self.switch(self.kind)
        return {kind: self.earlier[kind] + self.seconds[kind] for kind in KINDS}

    def write(self, file: Path, saved_step: int | None = None, now: bool = True) -> None:
        """Writes the account, of a run that has just saved a step or not; if not `now`, every few
        seconds. A disk that refuses it costs the account."""
        if not now and time.perf_counter() - self.written < WRITE_INTERVAL_SECONDS:
            return
        seconds = self.account
        self.written = time.perf_counter()
        if saved_step is not None:
            self.reached[saved_step] = seconds["steps"]
            self.reached = dict(list(self.reached.items())[-MAX_SAVED_STEPS:])
        found = {
            "first": self.first,
            "last": time.time(),
            "seconds": seconds,
            "reached": self.reached,
        }
        with suppress(OSError):
            write_atomically(file, to_json(found) + "\n")


CLOCK = Clock()
"""The clock of the run that this process is at; of its first one, if that is all it is for, since
the process began."""
CLOCK.begin(time.perf_counter() - PROCESS_START)


def explain_bound(
    step_ms: float,
    data_ms: float,
    busy_ms: float | None,
    left: Collection[str],
    data: Mapping[str, Any],
) -> tuple[str, str, list[str]] | None:
    """What bounds a step that waits for data, or whose device waits for launches: its name, why
    and what to try with this `data`; None for neither.

    `busy_ms` is None without a GPU. Of switches only those are proposed that are `left`: to be had
    here, and not on.
    """
    if data_ms > DATA_BOUND_SHARE * step_ms:
        keys = ["data=resident", "more data.num_workers"]
        if "storage" in data:
            keys = ["a larger data.device_memory_gib", "data.storage=int8"]
        reason = f"{data_ms / step_ms:.0%} of the step goes by before a batch is there"
        return "data-bound", reason, keys
    if busy_ms is None or busy_ms >= LAUNCH_BOUND_SHARE * step_ms:
        return None
    reason = (
        f"the GPU works for {busy_ms:.2f} ms of a step of {step_ms:.2f} ms and waits for launches "
        "otherwise"
    )
    return "launch-bound", reason, [*left, "a larger batch_size"]


def format_shares(seconds: Any) -> str:
    """The kinds with their shares, largest first, in one line; nothing of what is no account."""
    found = seconds.items() if isinstance(seconds, dict) else ()
    known = {kind: float(s) for kind, s in found if is_figure(s)}
    whole = max(1e-9, sum(known.values()))
    largest_first = sorted(known, key=known.__getitem__, reverse=True)
    shown = [kind for kind in largest_first if known[kind] > 0.0005 * whole]
    return ", ".join(f"{known[kind] / whole:.1%} {kind}" for kind in shown)
