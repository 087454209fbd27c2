"""Measures which techniques make a run's step fastest on this machine: what `runtime=auto` does
before training, for which training/tune.py starts this file with a job.

Candidates are tried one after the other, each in a process of its own (this file again) that builds
and warms up the whole step: one that crashes, hangs or exhausts the memory costs itself. Each
technique's values are tried on top of the best so far. A candidate may change how a step is
computed, never what: its losses must be those of the settings as given, within the tolerances that
the techniques state.
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
"""Share of the best step time so far that a candidate must stay below."""
CANDIDATE_SHARE = 0.75
"""Share of the time that is left which a candidate may take, so that one that hangs leaves some."""
USABLE_MEMORY = 0.95
"""Share of the device's memory that a forecast may take."""
TOO_LATE = "the budget was over before it was measured"
PROBE_STEPS = 3
"""Steps whose losses and gradient norms are compared with those of the first candidate."""
MAX_TIMED_STEPS = 16
"""Steps that are timed, at most."""
GPU_STEPS_AT_A_TIME = 4
"""Steps of a GPU that are timed as one, so that launches run ahead as they do in training."""
LEAST_TOLERANCE = 1e-3
"""Relative difference that is always allowed: sums in another order, seen through a few updates."""
Changes = dict[str, Any]
"""Runtime key, or accumulation_steps -> plain value."""


class Search:
    """Tries candidates for a job, which training/tune.py tells: a run on one of `processes` like
    devices, until a `deadline` (of time.monotonic)."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.job = told
        self.cfg = apply_schema(TrainConfig, told["cfg"], [])
        self.device = torch.device(told["device"])
        self.processes: int = told["processes"]
        self.held: float = told["resident"]
        """Bytes that each candidate lacks beside its own."""
        self.tried: list[dict[str, Any]] = []
        self.known: list[TrainConfig] = []
        self.reference: dict[str, Any] = {}
        """What the first candidate said of its losses."""
        self.longest = 0.0
        """Seconds that a candidate took."""

    def run(self) -> dict[str, Any]:
        """`words`, `changes` and `tried`: the fastest candidate, and all of them."""
        best = dict(ChainMap(self.find_fitting(), *(values[0] for values in self.list_ways())))
        fastest = self.time_candidate(best)

        def choose(some: list[Changes]) -> None:
            nonlocal best, fastest
            for values in some:
                candidate = best | values
                if self.can_have(candidate):
                    taken = self.time_candidate(candidate)
                    if taken < NEEDED_SHARE * fastest:
                        best, fastest = candidate, taken

        for values in self.list_ways():
            choose(values[1:])
        choose(list_micro_batches(apply_changes(self.cfg, best)))
        return {"words": describe_changes(best), "changes": best, "tried": self.tried}

    @property
    def seconds_left(self) -> float:
        return self.job["deadline"] - time.monotonic()

    def can_have(self, changes: Mapping[str, Any]) -> bool:
        return is_available(self.cfg, changes, self.device, self.processes)

    def find_fitting(self) -> Changes:
        """What the memory demands, of changes that leave the result as it is. Candidates lack the
        run's latents, and copies that ddp sends. ValueError if nothing makes the step fit."""
        memory = memory_of(self.device)

        def applied(changes: Mapping[str, Any]) -> TrainConfig:
            if not self.can_have(changes):
                raise UserError(f"{changes} cannot be had here.")
            return apply_changes(self.cfg, changes)

        spec = LatentSpec(**self.job["spec"])
        gpu = self.device.type == "cuda"
        question = Question(apply_changes(self.cfg, {}), spec, self.processes, self.held, gpu)
        try:
            now = forecast(question)
        except ValueError as error:
            warnings.warn(f"whether the step fits the memory is not known: {error}", stacklevel=2)
            return {}
        taken, found = find_cheapest_change(now, USABLE_MEMORY * memory, applied, exact=True)
        needed = found.needs.total
        if needed > USABLE_MEMORY * memory:
            raise UserError(
                f"runtime.tune=true: a step needs {needed / GIB:.3g} GiB at least, of "
                f"{memory / GIB:.3g}; use a smaller model or batch_size, or ask `python -m "
                "scripts.plan` for what makes it fit."
            )
        self.held += found.buckets
        return merge_values(taken)

    def list_ways(self) -> list[list[Changes]]:
        """The values of each technique among which time decides, those to begin with first; a
        technique that the model has no use for has none. What launches less comes first."""
        values = self.cfg.runtime.values()
        stack = AccelerationStack(values, self.device, deterministic=self.cfg.deterministic)
        unused = self.reference.get("unused", ())
        together: dict[str, list[Any]] = {}
        for technique in reversed(stack.techniques):
            tried = technique.list_candidates()
            if tried and technique.key not in unused:
                together.setdefault(technique.tried_with or technique.key, []).append(tried)
        return [
            [dict(ChainMap(*some)) for some in zip(*alternatives, strict=True)]
            for alternatives in together.values()
        ]

    def time_candidate(self, changes: Changes) -> float:
        """Tries a candidate: its median milliseconds a step, infinite if it is refused or was
        tried before."""
        cfg = apply_changes(self.cfg, changes)
        if cfg in self.known:
            return math.inf
        self.known.append(cfg)
        said: dict[str, Any] = {"refusal": TOO_LATE}
        if self.longest < self.seconds_left:
            began = time.monotonic()
            said = self.run_candidate(cfg, [key for key in changes if key != STEPS_KEY])
            self.longest = max(self.longest, time.monotonic() - began)
        refusal = said["refusal"] or self.find_difference(said)
        seconds = said.get("seconds") or []
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
        """What the process of a candidate says in the end; `asked` are the keys that must be on."""
        limit = self.seconds_left * (CANDIDATE_SHARE if self.reference else 1.0)
        until = time.monotonic() + 0.95 * limit
        candidate = {
            "cfg": to_json_types(asdict(cfg)),
            "asked": asked,
            "held": self.held,
            "until": until,
        }
        with tempfile.TemporaryFile() as log:
            code, found = run_apart({**self.job, **candidate}, limit, log)
            if found is not None:
                return found
            if code is None:
                return {"refusal": f"it was not measured after {limit:.0f} s"}
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
        why = f" ({lines[-1][:200]})" if lines else ""
        return {"refusal": f"its process ended{why}"}

    def find_difference(self, said: dict[str, Any]) -> str | None:
        """Why its losses are not those of the first candidate; None where they are, within what it
        may differ."""
        self.reference = self.reference or said
        tolerance = max(said["tolerance"], self.reference["tolerance"])
        for name in ("losses", "norms"):
            for own, wanted in zip(said[name], self.reference[name], strict=True):
                if not abs(own - wanted) <= tolerance * abs(wanted):
                    return (
                        f"its {name} are {own:.6g} instead of {wanted:.6g}, more than "
                        f"{tolerance:.0e} apart"
                    )
        return None


def describe_changes(changes: Changes) -> str:
    """A candidate, as the overrides that it amounts to."""
    return " ".join(format_overrides(changes)) or "as given"


def list_micro_batches(cfg: TrainConfig) -> list[Changes]:
    """Micro-batches of half the size, and of twice it."""
    steps = cfg.accumulation_steps
    return [{STEPS_KEY: 2 * steps}, *([{STEPS_KEY: steps // 2}] if steps % 2 == 0 else [])]


def prepare_candidate(told: Mapping[str, Any]) -> Training:
    """A candidate's step, of one of the processes, on normal latents and with weights at which
    every part matters."""
    cfg = apply_schema(TrainConfig, told["cfg"], [])
    spec = LatentSpec(**told["spec"])

    def loader(_: Any, seed: int, micro_batch: int, device: torch.device, *_more: Any) -> Any:
        made = SyntheticLatents(
            channels=spec.channels,
            height=spec.height,
            width=spec.width,
            num_classes=max(1, spec.num_classes),
            count=max(64, micro_batch * cfg.accumulation_steps),
            batch_size=micro_batch,
            seed=seed,
            device=device,
        )
        made.spec = spec
        return made

    set_deterministic(cfg.deterministic)
    torch.manual_seed(cfg.seed)
    runtime = replace(cfg.runtime, parallel=ParallelConfig())
    alone = replace(cfg, batch_size=cfg.batch_size // told["processes"], runtime=runtime)
    training = assemble(alone, torch.device(told["device"]), parts=Parts(loader=loader))

    # A new model returns zero whatever its blocks do.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in training.state.ema.parameters:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return training


def probe_candidate(training: Training, asked: list[str]) -> dict[str, Any]:
    """Warms up; returns the losses and norms of a few steps, how far they may be off, which
    techniques the model has no use for, and why not to take it: a technique that makes this
    candidate is not on, other than a kernel, without which a run goes on."""
    ledger = training.warm_up()
    outputs = [training.take_step() for _ in range(PROBE_STEPS)]
    techniques = [t for t in training.stack.techniques if t.key in asked]
    needed = {t.key for t in techniques if not isinstance(t, FusedKernel)}
    wrong = [row for row in ledger if row.missing and row.key in needed]
    return {
        "losses": [float(output.loss) for output in outputs],
        "norms": [float(output.grad_norm) for output in outputs],
        "tolerance": max([LEAST_TOLERANCE, *(t.loss_rtol for t in techniques if t.enabled)]),
        "unused": [row.key for row in ledger if row.active == UNUSED],
        "refusal": "; ".join(f"{row.key} is not on: {row.evidence}" for row in wrong) or None,
    }


def time_steps(training: Training, until: float) -> list[float]:
    """Seconds of each step, as many as are timed before `until` (of time.monotonic); one at
    least."""
    steps = GPU_STEPS_AT_A_TIME if training.device.type == "cuda" else 1
    taken: list[float] = []

    def run() -> None:
        for _ in range(steps):
            training.take_step()

    while not taken or (len(taken) * steps < MAX_TIMED_STEPS and time.monotonic() < until):
        taken.append(timing.measure_seconds(run, training.device) / steps)
    return taken


def try_out(told: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be known of a candidate."""
    try:
        # In the place of what the run holds besides.
        held = 0 if told["device"] == "cpu" else int(told["held"])
        room = torch.empty(held, dtype=torch.uint8, device=told["device"])
        training = prepare_candidate(told)
        found = probe_candidate(training, told["asked"])
        if found["refusal"] is None:
            found["seconds"] = time_steps(training, told["until"])
        del room
    except torch.OutOfMemoryError:
        return {"refusal": "memory ran out"}
    except Exception as error:
        return {"refusal": shorten_error(error)}
    return found


def main(file: Path) -> None:
    """Does the job in a file, a search or one candidate of it, and writes beside it what was found,
    or what stands against the run."""
    told = read_object(file)
    workers.end_with_parent(told["parent"])
    build.admit_extensions([f"{build.EXTENSIONS_KEY}=[{','.join(told['cfg']['extensions'])}]"])
    # Techniques that do not go with several processes see in a search that there are some.
    if "asked" not in told and told["processes"] > 1:
        dist.init_process_group("fake", rank=0, world_size=told["processes"], store=FakeStore())
    try:
        found = try_out(told) if "asked" in told else Search(told).run()
    except ValueError as error:
        found = {"refusal": str(error)}
    write_atomically(file.with_suffix(".found"), json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
