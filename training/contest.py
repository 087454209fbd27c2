"""Runs the candidates of runtime=auto, each in a process of its own, and lets them step in turn."""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import processes
from training.assemble import plain
from training.config.schema import TrainConfig

GAIN = 0.98
"""Share of the champion's step time that a candidate must stay below."""
STEPS = 4
"""That a candidate takes before it is the next one's turn."""
TURNS = 4
"""In the first round; twice as many in each that follows. Those that cannot be in memory together
have one round."""
MOST_TURNS = 16
PATIENCE = 0.75
"""Share of the time that is left in which a candidate must get warm."""
NO_MEMORY = "memory ran out"
LATE = "the budget was over before it was measured"
PROGRAM = ["-m", "training.tuning_candidate"]
Changes = dict[str, Any]
"""Runtime key, or accumulation_steps -> plain value."""


def words_of(changes: Changes) -> str:
    """The overrides that a candidate amounts to."""
    names = {key: key if key == "accumulation_steps" else f"runtime.{key}" for key in changes}
    return (
        " ".join(f"{names[key]}={str(value).lower()}" for key, value in changes.items())
        or "as given"
    )


@dataclass
class Candidate:
    """One way to take the step, and what was found about it."""

    changes: Changes
    seconds: list[float] = field(default_factory=list)
    """Of steps."""
    turns: list[float] = field(default_factory=list)
    """Median seconds a step, of each turn of this stage."""
    refusal: str | None = None

    def shares(self, champion: Candidate) -> list[float]:
        """Its step time as shares of the champion's in the same turns, sorted: a machine's drift
        meets both alike."""
        # without pairs nothing is known, which is slow
        pairs = zip(self.turns, champion.turns, strict=False)
        return sorted(own / its for own, its in pairs) or [math.inf]

    def beats(self, champion: Candidate) -> bool:
        """Whether it is clearly faster: by the median of its turns, and in three of four turns."""
        shares = self.shares(champion)
        return statistics.median(shares) < GAIN and shares[math.ceil(0.75 * len(shares)) - 1] < 1

    def as_dict(self) -> dict[str, Any]:
        ms = round(1e3 * statistics.median(self.seconds), 4) if self.seconds else None
        return {
            "words": words_of(self.changes),
            "step_ms": ms,
            "steps": len(self.seconds),
            "refusal": self.refusal,
        }


class Contestant:
    """A candidate's process: it says when it is warm, then steps when it is told to."""

    def __init__(
        self, candidate: Candidate, job: dict[str, Any], folder: Path, deadline: float
    ) -> None:
        self.candidate = candidate
        self.deadline = deadline
        self.ended = False
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".job")
        file = Path(name)
        with open(descriptor, "w") as opened:
            json.dump(job | {"parent": os.getpid()}, opened)
        environment = processes.environment()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)  # it steps alone
        self.answers, theirs = os.pipe()  # anything may print to standard output
        self.log = file.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(file), str(theirs)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                env=environment,
                start_new_session=True,  # with what it starts, so that all of it can be ended
            )
        os.close(theirs)

    def answer(self, deadline: float | None = None) -> dict[str, Any] | None:
        """The next line that it says; None where it has ended, which is a refusal, or where time is
        up."""
        said = b""
        while not said.endswith(b"\n"):
            left = (deadline or self.deadline) - time.monotonic()
            if not select.select([self.answers], [], [], max(0.0, left))[0]:
                self.end()
                return None
            part = os.read(self.answers, 65536)
            if not part:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                self.refuse("its process ended" + (f" ({lines[-1][:200]})" if lines else ""))
                return None
            said += part
        return json.loads(said)

    def refuse(self, why: str) -> None:
        self.candidate.refusal = self.candidate.refusal or why
        self.end()

    def step(self, turns: int = 1) -> None:
        """Has it take its turns, and adds their seconds to the candidate's."""
        assert self.process.stdin is not None
        for _ in range(turns):
            if self.ended:
                return
            with suppress(OSError):
                self.process.stdin.write(f"{STEPS}\n".encode())
                self.process.stdin.flush()
            if (said := self.answer()) and said.get("refusal"):
                self.refuse(said["refusal"])
            elif said:
                self.candidate.seconds += said["seconds"]
                self.candidate.turns.append(statistics.median(said["seconds"]))

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        processes.end(self.process)
        os.close(self.answers)


class Contest:
    """Finds the fastest way to take a step, stage by stage, until `deadline` (of time.monotonic).

    `config_of` gives the configuration of a candidate, `job` what else its process has to know.
    """

    def __init__(
        self, config_of: Callable[[Changes], TrainConfig], job: dict[str, Any], deadline: float
    ) -> None:
        self.config_of = config_of
        self.job = job
        self.deadline = deadline
        self.tried: list[Candidate] = []
        self.alive: list[Contestant] = []
        self.reference: dict[str, Any] | None = None
        """What the first candidate said of its losses."""
        self.longest = 0.0
        """Seconds in which a candidate got warm."""

    def run(self, first: Changes, stages: Sequence[Callable[[Changes], list[Changes]]]) -> Changes:
        """The changes of the fastest candidate. A stage says what to try beside the best one so
        far."""
        best = Candidate(first)
        self.tried.append(best)
        with (
            tempfile.TemporaryDirectory(prefix="fastlatent-tuning-") as folder,
            ExitStack() as running,
        ):
            champion = self.started(best, Path(folder), running)
            if champion:
                champion.step()  # whatever becomes of the others, its time is known
            for stage in stages:
                known = [self.config_of(c.changes) for c in self.tried]
                new = [
                    Candidate(some)
                    for some in stage(best.changes)
                    if self.config_of(some) not in known
                ]
                if new and time.monotonic() + self.longest < self.deadline:
                    champion = self.fastest(champion, new, Path(folder), running)
                    best = champion.candidate if champion else best
        for candidate in self.tried:
            candidate.refusal = candidate.refusal or (None if candidate.seconds else LATE)
        return best.changes

    def fastest(
        self,
        champion: Contestant | None,
        new: Sequence[Candidate],
        folder: Path,
        running: ExitStack,
    ) -> Contestant | None:
        """The champion, or the fastest of the new candidates if that is clearly faster."""
        self.tried += new
        everyone = [champion] if champion else []
        self.alive = [c for c in everyone if not c.ended]
        for contestant in self.alive:
            contestant.candidate.turns.clear()  # only turns of the same minutes are compared
        for candidate in new:
            if time.monotonic() + self.longest > self.deadline:
                candidate.refusal = LATE
            elif contestant := self.started(candidate, folder, running):
                everyone.append(contestant)
                self.alive.append(contestant)
        if not everyone:
            return None
        best = self.raced(everyone)
        for other in everyone:
            if other is not best:
                other.end()
        return best

    def raced(self, everyone: list[Contestant]) -> Contestant:
        """Lets those that are alive step in turn, round by round; the slower half is out after
        each."""
        turns = TURNS
        pace = everyone[0]

        def share(contestant: Contestant) -> float:
            return statistics.median(contestant.candidate.shares(pace.candidate))

        while (
            (len(self.alive) > 1 or turns == TURNS)
            and turns <= MOST_TURNS
            and time.monotonic() < self.deadline
        ):
            for _ in range(turns):
                for contestant in self.alive:
                    contestant.step()
            others = sorted((c for c in self.alive if c is not pace), key=share)
            for slower in others[max(1, -(-len(others) // 2)) :]:
                slower.end()
                everyone.remove(slower)
            self.alive = [c for c in self.alive if not c.ended]
            turns = 2 * turns
            if pace.candidate.refusal and self.alive:
                pace = self.alive[0]
        best = min(
            (c for c in everyone if c.candidate.turns and not c.candidate.refusal),
            key=share,
            default=pace,
        )
        return best if pace.candidate.refusal or best.candidate.beats(pace.candidate) else pace

    def started(self, candidate: Candidate, folder: Path, running: ExitStack) -> Contestant | None:
        """A candidate's process, warm; None if it is refused. One that needs all the memory is
        alone with it.

        After the first each has `PATIENCE` of the time that is left, so that one that hangs leaves
        time for the others.
        """
        asked = [key for key in candidate.changes if key != "accumulation_steps"]
        job = self.job | {"cfg": plain(asdict(self.config_of(candidate.changes))), "asked": asked}
        began = time.monotonic()
        said = None
        contestant = None
        for attempt in range(2):
            contestant = Contestant(candidate, job, folder, self.deadline)
            running.callback(contestant.end)
            now = time.monotonic()
            said = contestant.answer(
                None if self.reference is None else now + PATIENCE * (self.deadline - now)
            )
            if said is None or said["refusal"] != NO_MEMORY or attempt or not self.alive:
                break
            contestant.end()
            for other in self.alive:  # what they show now is what counts of them
                other.step(TURNS)
                other.end()
            self.alive = []
        if said is None or contestant is None:
            candidate.refusal = (
                candidate.refusal or f"it was not warm after {time.monotonic() - began:.0f} s"
            )
            return None
        self.longest = max(self.longest, time.monotonic() - began)
        if why := said["refusal"] or self.difference(said):
            contestant.refuse(why)
            return None
        return contestant

    def difference(self, said: dict[str, Any]) -> str | None:
        """Why its losses are not those of the first candidate; None where they are, within what it
        may differ."""
        if self.reference is None:
            self.reference = said
            return None
        tolerance = max(said["tolerance"], self.reference["tolerance"])
        for name in ("losses", "norms"):
            for own, wanted in zip(said[name], self.reference[name], strict=True):
                if not abs(own - wanted) <= tolerance * abs(wanted):
                    return (
                        f"its {name} are {own:.6g} instead of {wanted:.6g}, more than "
                        f"{tolerance:.0e} apart"
                    )
        return None
