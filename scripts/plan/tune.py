"""Measures which techniques make a run's step fastest on this machine. Before training with
`runtime=auto`, training/tune.py starts this file with a job file that describes the run.

The search tries one candidate after the other, and each technique's values on top of the best
candidate so far. Each candidate builds and warms up the whole step in its own process (this file
again), so that one that crashes, hangs or exhausts the memory ends only itself. A candidate may
change how a step is computed, but not its result: its losses must match those of the given
settings, within the tolerances that the techniques state.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel.ledger import UNUSED
from accel.stack import AccelerationStack
from accel.techniques.fused_kernels import FusedKernel
from common import workers
from common.errors import UserError
from common.files import read_object, write_atomically
from common.text import shorten_error
from data.loader import LatentSpec
from data.synthetic import SyntheticLatents
from scripts import timing
from scripts.plan.memory import Question, forecast
from scripts.plan.savings import find_cheapest_change, format_overrides, merge_values
from training.assemble import Parts, Training, assemble, to_json_types
from training.config import build
from training.config.compose import apply_schema
from training.config.schema import ParallelConfig, TrainConfig
from training.environment import GIB, memory_of, set_deterministic
from training.tune import STEPS_KEY, apply_changes, is_available, run_apart

NEEDED_SHARE = 0.98
"""A candidate replaces the best one so far only if its step time is below this share of the
best."""
CANDIDATE_SHARE = 0.75
"""Share of the remaining time that one candidate may take, so that a candidate that hangs leaves
time for other candidates."""
USABLE_MEMORY = 0.95
"""Largest share of the device's memory that a step may need, according to the forecast."""
TOO_LATE = "the budget was over before it was measured"
PROBE_STEPS = 3
"""Number of steps whose losses and gradient norms are compared with those of the first
candidate."""
MAX_TIMED_STEPS = 16
"""Largest number of a candidate's steps that are timed."""
GPU_STEPS_AT_A_TIME = 4
"""Number of steps on a GPU that are timed together, so that launches run ahead as they do in
training."""
LEAST_TOLERANCE = 1e-3
"""Relative difference of losses and gradient norms that is allowed for every candidate: another
order of sums causes as much after a few updates."""
Changes = dict[str, Any]
"""Changes to a run: runtime key or accumulation_steps -> new value, in types of JSON."""


class Search:
    """Finds the fastest settings for a job of training/tune.py. The job describes a run on
    `processes` devices of the same kind; this process uses one of them, until `deadline`, a time of
    time.monotonic()."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job = job
        self.cfg = apply_schema(TrainConfig, job["cfg"], [])
        self.device = torch.device(job["device"])
        self.processes: int = job["processes"]
        self.reserved: float = job["resident"]
        """Bytes on the device that the run will need and that a candidate's step does not have,
        such as resident latents."""
        self.tried: list[dict[str, Any]] = []
        self.tried_configs: list[TrainConfig] = []
        """Configurations of all candidates so far; `time_candidate` tries none of them twice."""
        self.reference: dict[str, Any] = {}
        """Result of the first candidate that ran, whose losses all others must match; empty
        before."""
        self.longest = 0.0
        """Seconds that the slowest candidate so far took, from its start to its end."""

    def run(self) -> dict[str, Any]:
        """Searches, and returns the fastest candidate, as `words` (overrides) and as `changes` (key
        -> value), and the list `tried` with the result of every candidate."""
        best = dict(ChainMap(self.find_fitting(), *(values[0] for values in self.list_ways())))
        fastest = self.time_candidate(best)

        def choose(alternatives: list[Changes]) -> None:
            nonlocal best, fastest
            for values in alternatives:
                candidate = best | values
                if self.is_supported(candidate):
                    step_time = self.time_candidate(candidate)
                    if step_time < NEEDED_SHARE * fastest:
                        best = candidate
                        fastest = step_time

        for values in self.list_ways():
            choose(values[1:])
        choose(list_micro_batches(apply_changes(self.cfg, best)))
        return {"words": describe_changes(best), "changes": best, "tried": self.tried}

    @property
    def seconds_left(self) -> float:
        return self.job["deadline"] - time.monotonic()

    def is_supported(self, changes: Mapping[str, Any]) -> bool:
        """Tells whether this machine supports the changes."""
        return is_available(self.cfg, changes, self.device, self.processes)

    def find_fitting(self) -> Changes:
        """Returns changes that make the step fit the memory and keep its result; {} if the step
        fits, or if no forecast is possible. The forecast includes the run's latents and ddp's
        copies of the gradients, although candidates hold neither. ValueError if no changes make the
        step fit."""
        memory = memory_of(self.device)

        def apply(changes: Mapping[str, Any]) -> TrainConfig:
            if not self.is_supported(changes):
                raise UserError(f"{changes} is not available on this machine.")
            return apply_changes(self.cfg, changes)

        spec = LatentSpec(**self.job["spec"])
        gpu = self.device.type == "cuda"
        question = Question(apply_changes(self.cfg, {}), spec, self.processes, self.reserved, gpu)
        try:
            now = forecast(question)
        except ValueError as error:
            warnings.warn(f"whether the step fits the memory is not known: {error}", stacklevel=2)
            return {}
        taken, plan = find_cheapest_change(now, USABLE_MEMORY * memory, apply, exact=True)
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
        """Returns for each technique that the search tries a list of candidates, each the changes
        of the technique's keys, the present values first. Techniques that launch fewer kernels come
        first. Techniques that the model does not use are left out."""
        values = self.cfg.runtime.values()
        stack = AccelerationStack(values, self.device, deterministic=self.cfg.deterministic)
        unused = self.reference.get("unused", ())

        # Group techniques with the same `tried_with`: the search changes their values together.
        groups: dict[str, list[Any]] = {}
        for technique in reversed(stack.techniques):
            candidates = technique.list_candidates()
            if candidates and technique.key not in unused:
                groups.setdefault(technique.tried_with or technique.key, []).append(candidates)
        return [
            [dict(ChainMap(*changes)) for changes in zip(*group, strict=True)]
            for group in groups.values()
        ]

    def time_candidate(self, changes: Changes) -> float:
        """Runs the configuration with `changes` and returns the median milliseconds per step;
        infinity if the candidate failed, no time was left for it, its losses differ from the first
        candidate's, or the same configuration was tried before."""
        cfg = apply_changes(self.cfg, changes)
        if cfg in self.tried_configs:
            return math.inf
        self.tried_configs.append(cfg)

        # Start the candidate only if the time left suffices for one as slow as the slowest so far.
        result: dict[str, Any] = {"refusal": TOO_LATE}
        if self.longest < self.seconds_left:
            began = time.monotonic()
            result = self.run_candidate(cfg, [key for key in changes if key != STEPS_KEY])
            self.longest = max(self.longest, time.monotonic() - began)

        refusal = result["refusal"] or self.find_difference(result)
        seconds = result.get("seconds") or []
        ms = round(1e3 * statistics.median(seconds), 4) if seconds and not refusal else None
        row = {
            "words": describe_changes(changes),
            "step_ms": ms,
            "steps": len(seconds),
            "refusal": refusal,
        }
        self.tried.append(row)
        return ms or math.inf

    def run_candidate(self, cfg: TrainConfig, asked: list[str]) -> dict[str, Any]:
        """Runs the configuration `cfg` in its own process and returns the result of `try_out`, or a
        refusal if the process ends without one; `asked` are the keys whose techniques must be
        on."""
        limit = self.seconds_left * (CANDIDATE_SHARE if self.reference else 1.0)
        until = time.monotonic() + 0.95 * limit
        candidate = {
            "cfg": to_json_types(asdict(cfg)),
            "asked": asked,
            "held": self.reserved,
            "until": until,
        }
        with tempfile.TemporaryFile() as log:
            code, result = run_apart({**self.job, **candidate}, limit, log)
            if result is not None:
                return result
            if code is None:
                return {"refusal": f"it was not measured after {limit:.0f} s"}
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
        why = f" ({lines[-1][:200]})" if lines else ""
        return {"refusal": f"its process ended{why}"}

    def find_difference(self, result: dict[str, Any]) -> str | None:
        """Returns a sentence on how a candidate's losses or gradient norms differ from those of the
        first candidate; None if they match within the tolerance."""
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


def describe_changes(changes: Changes) -> str:
    """Formats a candidate's changes as overrides."""
    return " ".join(format_overrides(changes)) or "as given"


def list_micro_batches(cfg: TrainConfig) -> list[Changes]:
    """Lists the changes that halve the micro-batch or, if accumulation_steps is even, double it."""
    steps = cfg.accumulation_steps
    return [{STEPS_KEY: 2 * steps}, *([{STEPS_KEY: steps // 2}] if steps % 2 == 0 else [])]


def prepare_candidate(job: Mapping[str, Any]) -> Training:
    """Assembles for a candidate the training step of one of the run's processes. The latents are
    normally distributed random numbers; the weights are such that every part of the model affects
    the loss."""
    cfg = apply_schema(TrainConfig, job["cfg"], [])
    spec = LatentSpec(**job["spec"])

    def make_loader(_: Any, seed: int, micro_batch: int, device: torch.device, *_more: Any) -> Any:
        latents = SyntheticLatents(
            channels=spec.channels,
            height=spec.height,
            width=spec.width,
            num_classes=max(1, spec.num_classes),
            count=max(64, micro_batch * cfg.accumulation_steps),
            batch_size=micro_batch,
            seed=seed,
            device=device,
        )
        latents.spec = spec
        return latents

    set_deterministic(cfg.deterministic)
    torch.manual_seed(cfg.seed)
    runtime = replace(cfg.runtime, parallel=ParallelConfig())
    single = replace(cfg, batch_size=cfg.batch_size // job["processes"], runtime=runtime)
    training = assemble(single, torch.device(job["device"]), parts=Parts(loader=make_loader))

    # Add noise to the initial weights: a new model returns zero, so its losses hide every error in
    # a block.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in training.state.ema.parameters:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return training


def probe_candidate(training: Training, asked: list[str]) -> dict[str, Any]:
    """Warms up and takes a few steps. Returns a dict with their losses and gradient norms, the
    tolerance, the techniques that the model does not use, and a refusal (None if there is none) if
    a technique of this candidate is not on. A fused kernel may be off, because a run continues
    without the kernel."""
    ledger = training.warm_up()
    outputs = [training.take_step() for _ in range(PROBE_STEPS)]
    techniques = [t for t in training.stack.techniques if t.key in asked]
    needed = {t.key for t in techniques if not isinstance(t, FusedKernel)}
    inactive = [row for row in ledger if row.missing and row.key in needed]
    return {
        "losses": [float(output.loss) for output in outputs],
        "norms": [float(output.grad_norm) for output in outputs],
        "tolerance": max([LEAST_TOLERANCE, *(t.loss_rtol for t in techniques if t.enabled)]),
        "unused": [row.key for row in ledger if row.active == UNUSED],
        "refusal": "; ".join(f"{row.key} is not on: {row.evidence}" for row in inactive) or None,
    }


def time_steps(training: Training, until: float) -> list[float]:
    """Measures the seconds per step at least once, and again until `until`, a time of
    time.monotonic(), or until `MAX_TIMED_STEPS` steps were timed."""
    steps = GPU_STEPS_AT_A_TIME if training.device.type == "cuda" else 1
    seconds: list[float] = []

    def run() -> None:
        for _ in range(steps):
            training.take_step()

    while not seconds or (len(seconds) * steps < MAX_TIMED_STEPS and time.monotonic() < until):
        seconds.append(timing.measure_seconds(run, training.device) / steps)
    return seconds


def try_out(job: Mapping[str, Any]) -> dict[str, Any]:
    """Tries one candidate. Returns what `probe_candidate` returns, with the `seconds` per step of
    each measurement; or only a `refusal`, the reason why the search cannot use the candidate."""
    try:
        # Allocate the memory that the run will need besides this step, as a tensor that nobody
        # reads.
        size = 0 if job["device"] == "cpu" else int(job["held"])
        reserved = torch.empty(size, dtype=torch.uint8, device=job["device"])
        training = prepare_candidate(job)
        result = probe_candidate(training, job["asked"])
        if result["refusal"] is None:
            result["seconds"] = time_steps(training, job["until"])
        del reserved
    except torch.OutOfMemoryError:
        return {"refusal": "memory ran out"}
    except Exception as error:
        return {"refusal": shorten_error(error)}
    return result


def main(file: Path) -> None:
    """Runs the job that the file describes, a search or one of its candidates, and writes the
    result or a refusal beside the file."""
    job = read_object(file)
    workers.end_with_parent(job["parent"])
    build.admit_extensions([f"{build.EXTENSIONS_KEY}=[{','.join(job['cfg']['extensions'])}]"])
    # Pretend that the run's processes exist, so that a search leaves out techniques that need a run
    # on one process.
    if "asked" not in job and job["processes"] > 1:
        dist.init_process_group("fake", rank=0, world_size=job["processes"], store=FakeStore())
    try:
        result = try_out(job) if "asked" in job else Search(job).run()
    except ValueError as error:
        result = {"refusal": str(error)}
    write_atomically(file.with_suffix(".found"), json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
