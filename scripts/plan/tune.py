"""Measures which techniques make a run's step fastest on this machine. Before training with
`runtime=auto`, training/preflight/tune.py starts this file with a job file that describes the run.
For a run with `budget_minutes`, this file measures the seconds of its steps and pauses instead.

A candidate is a combination of runtime keys. The search goes through the techniques and tries each
technique's values on top of the best candidate so far. Kernels with `auto` are on in all
candidates: the run chooses among them by itself (accel/trial/kernels.py). Each candidate builds and
warms up the whole step in its own process (this file again), so a candidate that crashes, hangs or
exhausts the memory does not end the search. A candidate may change how a step is computed, but not
its result: its losses must match those of the first candidate, within the tolerances that the
techniques state.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from accel.ledger import AUTO
from accel.stack import AccelerationStack
from accel.techniques.fused_kernels import FusedKernel
from common.config import build
from common.config.compose import apply_schema
from common.config.schema import TrainConfig
from common.environment import memory_of
from common.errors import UserError
from common.files import read_object, write_atomically
from common.memory import GIB
from common.workers import ask_child, end_with_parent
from data.spec import LatentSpec
from scripts.plan.candidate import measure_run, try_out
from scripts.plan.changes import find_cheapest_change, format_overrides, list_savings, merge_values
from scripts.plan.memory import forecast
from scripts.plan.question import Question
from training.preflight.tune import STEPS_KEY, TUNER_PROGRAM, apply_changes, is_available

NEEDED_SHARE = 0.98
"""A candidate replaces the best one so far only if its step takes less than this share of the best
one's time; a smaller gain may be noise."""
CANDIDATE_SHARE = 0.75
"""Share of the remaining time that each candidate after the first may take, so that a candidate
that hangs leaves time for other candidates."""
USABLE_MEMORY = 0.95
"""Largest share of the device's memory that a step may need, according to the forecast."""
TOO_LATE = "the budget was over before it was measured"
Changes = dict[str, Any]
"""Changes to a run: name of a runtime key, or accumulation_steps -> new value, of a type that JSON
has."""


def describe_changes(changes: Changes) -> str:
    """Formats a candidate's changes as overrides in one string; "as given" if there are no
    changes."""
    return " ".join(format_overrides(changes)) or "as given"


def list_micro_batches(cfg: TrainConfig) -> list[Changes]:
    """Lists the changes of accumulation_steps to try: twice as many, which halves the micro-batch,
    and half as many, if the number is even, which doubles the micro-batch."""
    steps = cfg.accumulation_steps
    return [{STEPS_KEY: 2 * steps}, *([{STEPS_KEY: steps // 2}] if steps % 2 == 0 else [])]


class Search:
    """Finds the fastest settings for the run that `job`, written by training/preflight/tune.py,
    describes. The run has `processes` devices of the same kind; the search uses one of them, until
    `deadline`, a time of time.monotonic() in seconds."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job = job
        self.device = torch.device(job["device"])
        self.processes: int = job["processes"]

        # Kernels with `auto` are on in all candidates, and off where they fail.
        cfg = apply_schema(TrainConfig, job["cfg"], [])
        self.techniques = AccelerationStack(
            cfg.runtime.values(), self.device, deterministic=cfg.deterministic
        ).techniques
        kernels = [t.key for t in self.techniques if isinstance(t, FusedKernel) and t.value == AUTO]
        self.cfg = apply_changes(cfg, dict.fromkeys(kernels, True) | {"on_unavailable": "degrade"})

        self.reserved: float = job["resident"]
        """Bytes on the device that the run will need but the step of a candidate does not allocate,
        such as resident latents."""
        self.tried: list[dict[str, Any]] = []
        self.tried_configs: list[TrainConfig] = []
        """Configurations of all candidates so far; `time_candidate` does not run the same
        configuration twice."""
        self.reference: dict[str, Any] = {}
        """Result of the first candidate that ran; the losses and gradient norms of all later
        candidates must match it. Empty until a candidate has run."""
        self.longest = 0.0
        """Seconds that the slowest candidate so far took, from its start to its end."""

    def run(self) -> dict[str, Any]:
        """Searches for the fastest candidate. Returns a dict: `words`, the overrides of the fastest
        candidate; `changes`, the same as key -> value; `tried`, a list with the result of every
        candidate."""
        best = self.find_fitting()
        fastest = self.time_candidate(best)

        def choose(alternatives: Iterable[Changes]) -> None:
            nonlocal best, fastest
            for values in alternatives:
                candidate = best | values
                if is_available(self.cfg, candidate, self.device, self.processes):
                    step_time = self.time_candidate(candidate, fastest)
                    if step_time < NEEDED_SHARE * fastest:
                        best = candidate
                        fastest = step_time
                else:
                    self.note(candidate, "not tried: this machine or configuration excludes it")

        for values in self.list_ways():
            choose(values)
        choose(list_micro_batches(apply_changes(self.cfg, best)))
        return {"words": describe_changes(best), "changes": best, "tried": self.tried}

    @property
    def seconds_left(self) -> float:
        return self.job["deadline"] - time.monotonic()

    def find_fitting(self) -> Changes:
        """Returns changes that lower the memory of a step until it fits the device, and that keep
        the step's result; {} if the step fits without changes, or if no forecast is possible. The
        forecast includes the run's latents and ddp's copies of the gradients, although the step of
        a candidate has neither. UserError if no changes make the step fit."""
        spec = LatentSpec.from_dict(self.job["spec"])
        gpu = self.device.type == "cuda"
        question = Question(apply_changes(self.cfg, {}), spec, self.processes, self.reserved, gpu)
        try:
            now = forecast(question)
        except ValueError as error:
            self.note({}, f"whether the step fits the memory is not known: {error}")
            return {}

        memory = memory_of(self.device)
        savings = [
            saving
            for saving in list_savings(question, exact=True)
            if is_available(self.cfg, saving.values, self.device, self.processes)
        ]
        taken, plan = find_cheapest_change(now, USABLE_MEMORY * memory, savings)
        needed = plan.needs.total
        if needed > USABLE_MEMORY * memory:
            raise UserError(
                f"runtime.tune=true: a step needs {needed / GIB:.3g} GiB at least, of "
                f"{memory / GIB:.3g}; use a smaller model or batch_size, or ask `python -m "
                "scripts.plan` for what makes it fit."
            )
        self.reserved += plan.buckets
        return merge_values(taken)

    def list_ways(self) -> list[list[Changes]]:
        """Returns a list for each technique that the search tries: the technique's candidates, each
        as key -> value. The lists of techniques that launch fewer kernels come first. Techniques
        that the model does not use have no list."""
        unused = self.reference.get("unused", ())
        ways = [
            t.planning.list_candidates(t) for t in reversed(self.techniques) if t.key not in unused
        ]
        return [[dict(values) for values in way] for way in ways if way]

    def note(self, changes: Changes, note: str, seconds: list[float] | None = None) -> None:
        """Adds a candidate to `tried`."""
        ms = round(1e3 * statistics.median(seconds), 4) if seconds else None
        self.tried.append(
            {
                "words": describe_changes(changes),
                "step_ms": ms,
                "steps": len(seconds or ()),
                "note": note,
            }
        )

    def time_candidate(self, changes: Changes, fastest: float = math.inf) -> float:
        """Runs the configuration with `changes` and returns the median seconds per step; infinity
        if the candidate failed, no time was left for it, its losses differ from the first
        candidate's, or the same configuration was tried before. `fastest`: seconds of the best
        candidate so far."""
        cfg = apply_changes(self.cfg, changes)
        if cfg in self.tried_configs:
            return math.inf
        self.tried_configs.append(cfg)

        # Start the candidate only if more time is left than the slowest candidate so far took.
        result: dict[str, Any] = {"refusal": TOO_LATE}
        if self.longest < self.seconds_left:
            began = time.monotonic()
            result = self.run_candidate(cfg, [key for key in changes if key != STEPS_KEY])
            self.longest = max(self.longest, time.monotonic() - began)

        refusal = result["refusal"] or self.find_difference(result)
        if refusal:
            self.note(changes, refusal)
            return math.inf
        median = statistics.median(result["seconds"])
        gain = f", {fastest / median:.3g} × as fast as the best before" * (fastest < math.inf)
        self.note(changes, f"{1e3 * median:.4g} ms{gain}", result["seconds"])
        return median

    def run_candidate(self, cfg: TrainConfig, asked: list[str]) -> dict[str, Any]:
        """Runs `try_out` with the configuration `cfg` in its own process and returns its result;
        or, if the process ends without a result, the reason as `refusal`. `asked` are the keys
        whose techniques must be on."""
        limit = self.seconds_left * (CANDIDATE_SHARE if self.reference else 1.0)
        candidate = {
            "cfg": asdict(cfg),
            "asked": asked,
            "held": self.reserved,
            "until": time.monotonic() + 0.95 * limit,
        }
        result, end = ask_child(TUNER_PROGRAM, {**self.job, **candidate}, limit)
        return result or {"refusal": f"its process {end}"}

    def find_difference(self, result: dict[str, Any]) -> str | None:
        """Compares a candidate's losses and gradient norms with those of the first candidate.
        Returns a sentence on the first difference above the tolerance, or None if there is none."""
        self.reference = self.reference or result
        tolerance = max(result["tolerance"], self.reference["tolerance"])
        for name in ("losses", "norms"):
            for value, wanted in zip(result[name], self.reference[name], strict=True):
                if not abs(value - wanted) <= tolerance * abs(wanted):
                    return (
                        f"its {name} are {value:.6g} instead of {wanted:.6g}, more than "
                        f"{tolerance:.0e} apart"
                    )
        return None


def main(folder: Path) -> None:
    """Runs the job in `folder` (a whole search, or one candidate of it) and writes its result, or
    the reason why the job was refused, to found.json (see `ask_child`)."""
    job = read_object(folder / "job.json")
    end_with_parent(job["parent"])
    build.admit_extensions([f"{build.EXTENSIONS_KEY}=[{','.join(job['cfg']['extensions'])}]"])
    try:
        if "measure" in job:
            result = measure_run(job, folder / "grid.png")
        else:
            result = try_out(job) if "asked" in job else Search(job).run()
    except ValueError as error:
        result = {"refusal": str(error)}
    write_atomically(folder / "found.json", json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
