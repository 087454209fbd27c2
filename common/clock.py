"""Assigns every second of a run, over all its restarts, to a kind of time, and suggests
configuration keys to change if the device waits in a step.

Kinds of time: `start` is imports, building and loading; `warm_up` is trials, tuning, compiling and
the steps of warm-up; `steps` is training, the one productive kind; in `data_wait` the device waits
for a batch; in `evaluation`, `sampling`, `saving` and `logging` training pauses for that task;
`redone` is the time of steps after the last checkpoint of a killed process, which the run repeats;
in `idle` no process runs. If a process is killed, `idle` also includes the seconds between the last
write of `TIME_FILE` and the kill.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from common.files import go_on_without, write_atomically
from common.text import is_figure, to_json

TIME_FILE = "time.json"
"""Name of the file in a run folder that holds the seconds of each of `KINDS`."""
MAINTENANCE_KINDS = ("evaluation", "sampling", "saving", "logging")
KINDS = ("start", "warm_up", "steps", "data_wait", *MAINTENANCE_KINDS, "redone", "idle")
WRITE_INTERVAL_SECONDS = 5.0
"""Seconds between two writes of `TIME_FILE`."""
MAX_SAVED_STEPS = 512
"""`TIME_FILE` stores the seconds of training up to a checkpoint for at most this number of
checkpoints, the latest ones."""
DATA_BOUND_SHARE = 0.1
"""A step is data-bound if it waits for data for more than this share of its time."""
LAUNCH_BOUND_SHARE = 0.8
"""A step is launch-bound if the GPU works for less than this share of its time."""


Seconds = Annotated[float, Field(ge=0.0, le=1e12)]
Moment = Annotated[float, Field(ge=1.5e9, le=1e12)]
"""Unix time in seconds; the lower bound, in 2017, refuses values that cannot be the time of a
run."""


class Record(BaseModel, allow_inf_nan=False):
    """Content of `TIME_FILE`: how many seconds the run spent in each kind of time."""

    first: Moment
    """Unix time, in seconds, at which the run's first process began."""
    last: Moment
    """Unix time, in seconds, of the last write of `TIME_FILE`."""
    seconds: dict[str, Seconds]
    """Kind of time -> its seconds, over all processes of the run."""
    reached: dict[int, Seconds]
    """Step of a checkpoint -> seconds of training, over all processes, up to that step."""


class Clock:
    """Counts the seconds of a run by kind, over all its processes.

    The time between two calls of `switch` has exactly one kind, so the seconds of all kinds add up
    to the elapsed time.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, since: float | None = None) -> None:
        """Clears the clock and counts time as `start`, from the moment at which
        time.perf_counter() returned `since`, or from now on if that is None."""
        now = time.perf_counter()
        self.since = now if since is None else since
        self.began = time.time() - (now - self.since)
        self.first = self.began
        self.kind = "start"
        self.seconds: dict[str, float] = defaultdict(float)
        """Kind of time -> its seconds in this process."""
        self.earlier: dict[str, float] = defaultdict(float)
        """Kind of time -> its seconds in earlier processes of the run."""
        self.reached: dict[int, float] = {}
        """Step of a checkpoint -> seconds of training, over all processes, up to that step."""
        self.written = self.since

    def switch(self, kind: str) -> str:
        """Counts time from now on as `kind`; returns the kind that the clock counted before."""
        now = time.perf_counter()
        before = self.kind
        self.seconds[before] += now - self.since
        self.kind = kind
        self.since = now
        return before

    def count_seconds(self, *kinds: str) -> float:
        """Returns the seconds that this process has spent so far in the given kinds of time,
        together."""
        self.switch(self.kind)
        return sum(self.seconds[kind] for kind in kinds)

    @contextmanager
    def count_as(self, kind: str) -> Iterator[None]:
        """Counts the time of the `with` block as `kind`, except time that a nested call counts as
        another kind. Also works as a decorator."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves `seconds` from the kind `source` to the kind `target`, but at most those that
        `source` has. The caller measures these seconds by other means, such as CUDA events."""
        seconds = min(seconds, self.count_seconds(source))
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def resume(self, file: Path, step: int) -> None:
        """Adds the time of the run's earlier processes, which they wrote to `file`; the run resumes
        at `step`.

        If the file is damaged, warns, and counts this process alone.
        """
        if not file.exists():
            return
        try:
            record = Record.model_validate_json(file.read_bytes())
        except (OSError, ValueError) as error:
            warnings.warn(
                f"{file} cannot be read ({type(error).__name__}); the account of the run's time "
                "starts again from zero.",
                stacklevel=3,
            )
            return
        self.first = min(record.first, self.began)
        self.reached = {at: seconds for at, seconds in record.reached.items() if at <= step}
        self.earlier.update(record.seconds)

        # Move the training time after the checkpoint to `redone`, because the run repeats these
        # steps, and add the time since the last write of `file` to `idle`.
        redone = max(0.0, self.earlier["steps"] - max(self.reached.values(), default=0.0))
        self.earlier["steps"] -= redone
        self.earlier["redone"] += redone
        self.earlier["idle"] += max(0.0, self.began - record.last)

    @property
    def account(self) -> dict[str, float]:
        """Dict from kind of time to its seconds until now, over all processes of the run."""
        self.switch(self.kind)
        return {kind: self.earlier[kind] + self.seconds[kind] for kind in KINDS}

    def write(self, file: Path, saved_step: int | None = None, now: bool = True) -> None:
        """Writes the run's seconds by kind to `file`. `saved_step` is the step of the checkpoint
        that the run has just saved, or None. If `now` is false, writes at most every
        `WRITE_INTERVAL_SECONDS`. An error of the disk causes a warning."""
        if not now and time.perf_counter() - self.written < WRITE_INTERVAL_SECONDS:
            return
        seconds = self.account
        self.written = time.perf_counter()
        if saved_step is not None:
            self.reached[saved_step] = seconds["steps"]
            self.reached = dict(list(self.reached.items())[-MAX_SAVED_STEPS:])
        record = {
            "first": self.first,
            "last": time.time(),
            "seconds": seconds,
            "reached": self.reached,
        }
        with go_on_without(file):
            write_atomically(file, to_json(record) + "\n")


CLOCK = Clock()
"""Clock of the current run; `train` in train.py begins it."""


def explain_bound(
    step_ms: float,
    data_ms: float,
    busy_ms: float | None,
    launch_savers: Collection[str],
    data: Mapping[str, Any],
) -> tuple[str, str, list[str]] | None:
    """Finds out whether waiting for data or launching kernels limits the speed of a step; returns
    the name of this limit, the reason, and configuration keys to try, or None if neither limits it.

    Times are in milliseconds: `data_ms` is the wait for data in a step, `busy_ms` the time in which
    the GPU works, None without a GPU. `launch_savers` are overrides, such as runtime.compile=true,
    for techniques that launch fewer kernels, are available on this machine and are off; `data` is
    the loader's configuration node.
    """
    if data_ms > DATA_BOUND_SHARE * step_ms:
        keys = ["data=resident", "more data.num_workers"]
        if "storage" in data:
            keys = ["a larger data.device_memory_gib", "data.storage=int8"]
        reason = f"the device waits for a batch for {data_ms / step_ms:.0%} of the step"
        return "data-bound", reason, keys
    if busy_ms is None or busy_ms >= LAUNCH_BOUND_SHARE * step_ms:
        return None
    reason = (
        f"the GPU works for {busy_ms:.2f} ms of a step of {step_ms:.2f} ms and waits for launches "
        "otherwise"
    )
    return "launch-bound", reason, [*launch_savers, "a larger batch_size"]


def format_shares(seconds: Any) -> str:
    """Formats `seconds` (kind of time -> its seconds) as one line of shares of the total, largest
    first; ignores values that are no numbers, and leaves out shares that round to 0.0 %."""
    entries = seconds.items() if isinstance(seconds, dict) else ()
    known = {kind: float(s) for kind, s in entries if is_figure(s)}
    total = max(1e-9, sum(known.values()))
    largest_first = sorted(known, key=known.__getitem__, reverse=True)
    return ", ".join(
        f"{known[kind] / total:.1%} {kind}"
        for kind in largest_first
        if known[kind] > 0.0005 * total
    )
