"""`python -m scripts.plan tune`: measures which techniques make a run's step fastest on this
machine, and writes them.

    python -m scripts.plan tune model=ssd_mlp_s data=synthetic batch_size=256 seconds=300
    python train.py runtime=tuned model=ssd_mlp_s data=synthetic batch_size=256

It is what `runtime=auto` does before training (training/tune.py starts this file with a job); the
result can be read, changed and kept.

Candidates are tried one after the other, each in a process of its own (scripts/plan/candidate.py)
that builds and warms up the whole step: one that crashes, hangs or exhausts the memory costs
itself. Each technique's values are tried on top of the best so far. A candidate may change how a
step is computed, never what: its losses must be those of the settings as given, within the
tolerances that the techniques state.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import ChainMap
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from accel.stack import AccelerationStack
from common import workers
from common.errors import UserError
from common.files import read_object, write_atomically
from data.loader import LatentSpec
from scripts.plan.fit import cheapest_change, savings, words_of
from scripts.plan.memory import Question, buckets, forecast
from scripts.plan.scale import pretended_processes
from scripts.tables import table
from training.assemble import plain
from training.config import build
from training.config.compose import as_yaml, typed
from training.config.schema import TrainConfig
from training.config.words import CONF
from training.distributed.ranks import SINGLE
from training.environment import GIB, describe_environment, memory_of, pick_device
from training.tune import STEPS, can_be_had, changed, tuned
from training.weights.adapter_base import settled

GAIN = 0.98
"""Share of the best step time so far that a candidate must stay below."""
PATIENCE = 0.75
"""Share of the time that is left which a candidate may take, so that one that hangs leaves some."""
USABLE = 0.95
"""Share of the device's memory that a forecast may take."""
LATE = "the budget was over before it was measured"
CANDIDATE = ["-m", "scripts.plan.candidate"]
Changes = dict[str, Any]
"""Runtime key, or accumulation_steps -> plain value."""


@dataclass(frozen=True)
class TuneConfig:
    """Where the choice goes; any other word is an override of the training configuration."""

    out: str | None = None
    """Null: conf/runtime/tuned.yaml, so that runtime=tuned asks for it."""
    seconds: float = 120.0


@dataclass
class Job:
    """What is tuned: the run, on one of `processes` like devices, until `deadline` (of
    time.monotonic); `resident` are bytes of its latents on the device."""

    cfg: TrainConfig
    spec: LatentSpec
    device: torch.device
    processes: int
    resident: float
    deadline: float

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


class Search:
    """Tries candidates; `held` are bytes that each of them lacks beside its own."""

    def __init__(self, job: Job, held: float) -> None:
        self.job = job
        self.held = held
        self.tried: list[dict[str, Any]] = []
        self.known: list[TrainConfig] = []
        self.reference: dict[str, Any] = {}
        """What the first candidate said of its losses."""
        self.longest = 0.0
        """Seconds that a candidate took."""

    def step_time(self, changes: Changes) -> float:
        """Tries a candidate: its median milliseconds a step, infinite if it is refused or was
        tried before."""
        cfg = changed(self.job.cfg, changes)
        if cfg in self.known:
            return math.inf
        self.known.append(cfg)
        said: dict[str, Any] = {"refusal": LATE}
        if self.longest < self.job.left:
            began = time.monotonic()
            said = self.outcome(cfg, [key for key in changes if key != STEPS])
            self.longest = max(self.longest, time.monotonic() - began)
        refusal = said["refusal"] or self.difference(said)
        seconds = said.get("seconds") or []
        ms = round(1e3 * statistics.median(seconds), 4) if seconds and not refusal else None
        row = {"words": named(changes), "step_ms": ms, "steps": len(seconds), "refusal": refusal}
        self.tried.append(row)
        return ms or math.inf

    def outcome(self, cfg: TrainConfig, asked: list[str]) -> dict[str, Any]:
        """What the process of a candidate says in the end; `asked` are the keys that must be on."""
        limit = self.job.left * (PATIENCE if self.reference else 1.0)
        told = {
            "cfg": plain(asdict(cfg)),
            "asked": asked,
            "spec": self.job.spec.as_dict(),
            "device": str(self.job.device),
            "processes": self.job.processes,
            "held": int(self.held),
            "until": time.monotonic() + 0.95 * limit,
            "parent": os.getpid(),
        }
        with tempfile.TemporaryDirectory(prefix="fastlatent-candidate-") as folder:
            file = Path(folder) / "job.json"
            file.write_text(json.dumps(told))
            log = Path(folder) / "log"
            with log.open("wb") as output:
                command = [sys.executable, *CANDIDATE, str(file)]
                code = workers.attended(command, limit, output)
            if (found := file.with_suffix(".found")).exists():
                return read_object(found)
            if code is None:
                return {"refusal": f"it was not measured after {limit:.0f} s"}
            lines = log.read_text(errors="replace").strip().splitlines()
            why = f" ({lines[-1][:200]})" if lines else ""
            return {"refusal": f"its process ended{why}"}

    def difference(self, said: dict[str, Any]) -> str | None:
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


def named(changes: Changes) -> str:
    """A candidate, as the overrides that it amounts to."""
    return " ".join(words_of(changes)) or "as given"


def ways(job: Job, unused: Collection[str] = ()) -> list[list[Changes]]:
    """The values of each technique among which time decides, those to begin with first; a
    technique that the model has no use for has none. What launches less comes first."""
    cfg = job.cfg
    stack = AccelerationStack(cfg.runtime.values(), job.device, deterministic=cfg.deterministic)
    together: dict[str, list[Any]] = {}
    for technique in reversed(stack.techniques):
        values = technique.tried()
        if values and technique.key not in unused:
            together.setdefault(technique.tried_with or technique.key, []).append(values)
    return [
        [dict(ChainMap(*values)) for values in zip(*alternatives, strict=True)]
        for alternatives in together.values()
    ]


def batches(cfg: TrainConfig) -> list[Changes]:
    """Micro-batches of half the size, and of twice it."""
    steps = cfg.accumulation_steps
    return [{STEPS: 2 * steps}, *([{STEPS: steps // 2}] if steps % 2 == 0 else [])]


def fitting(job: Job) -> tuple[Changes, float]:
    """What the memory demands, of changes that leave the result as it is; and the bytes that
    candidates lack, which are the run's latents and copies that ddp sends. ValueError if nothing
    makes the step fit."""
    memory = memory_of(job.device)
    gpu = job.device.type == "cuda"

    def applied(changes: Mapping[str, Any]) -> TrainConfig:
        if not can_be_had(job.cfg, changes, job.device, job.processes):
            raise UserError(f"{changes} cannot be had here.")
        return changed(job.cfg, changes)

    question = Question(changed(job.cfg, {}), job.spec, job.processes, job.resident, gpu)
    try:
        now = forecast(question)
    except ValueError as error:
        warnings.warn(f"whether the step fits the memory is not known: {error}", stacklevel=2)
        return {}, job.resident
    change = cheapest_change(now, USABLE * memory, savings(question, exact=True), applied)
    found = change.forecast
    if found.needs.total > USABLE * memory:
        raise UserError(
            f"runtime.tune=true: a step needs {found.needs.total / GIB:.3g} GiB at least, of "
            f"{memory / GIB:.3g}; use a smaller model or batch_size, or ask `python -m "
            "scripts.plan` for what makes it fit."
        )
    return dict(change.changes), job.resident + buckets(found.question, found.lasting)


def search(job: Job) -> dict[str, Any]:
    """`words`, `changes` and `tried`: the fastest candidate, and all of them."""
    needed, held = fitting(job)
    searching = Search(job, held)
    best = dict(ChainMap(needed, *(values[0] for values in ways(job))))
    fastest = searching.step_time(best)

    def choose(some: list[Changes]) -> None:
        nonlocal best, fastest
        for values in some:
            candidate = best | values
            if can_be_had(job.cfg, candidate, job.device, job.processes):
                taken = searching.step_time(candidate)
                if taken < GAIN * fastest:
                    best, fastest = candidate, taken

    for values in ways(job, searching.reference.get("unused", ())):
        choose(values[1:])
    choose(batches(changed(job.cfg, best)))
    return {"words": named(best), "changes": best, "tried": searching.tried}


def read_job(told: Mapping[str, Any]) -> Job:
    """The job that training/tune.py describes."""
    cfg = typed(TrainConfig, told["cfg"], [])
    spec = LatentSpec(**told["spec"])
    device = torch.device(told["device"])
    return Job(cfg, spec, device, told["processes"], told["resident"], told["deadline"])


def main(file: Path) -> None:
    """Does the job in a file, and writes beside it what was found, or what stands against the
    run."""
    told = read_object(file)
    workers.end_with(told["parent"])
    build.admit([f"{build.EXTENSIONS}=[{','.join(told['cfg']['extensions'])}]"])
    job = read_job(told)

    # Techniques that do not go with several processes see that there are some.
    several = pretended_processes(job.processes) if job.processes > 1 else nullcontext()
    try:
        with several:
            found = search(job)
    except ValueError as error:
        found = {"refusal": str(error)}
    write_atomically(file.with_suffix(".found"), json.dumps(found))


def tune(cfg: TuneConfig, words: list[str]) -> str:
    """Tries techniques, writes the fastest as a runtime file, and returns the table of all.

    ValueError if nothing was measured, or the file cannot be where it was asked for.
    """
    composed = settled([*words, f"runtime.tune_seconds={cfg.seconds}"])
    file = Path(cfg.out).expanduser() if cfg.out else CONF / "runtime" / "tuned.yaml"
    if not file.parent.is_dir():
        raise UserError(
            f"out={file}: there is no folder {file.parent}; make it, or choose another file."
        )
    base = {"auto": "fast"}.get(composed.choices["runtime"], composed.choices["runtime"])
    if base == file.stem:
        raise UserError(
            f"runtime={base} would be based on itself in {file}; start from another one, as "
            "runtime=fast."
        )
    device = pick_device(composed.cfg.runtime.device.value)
    _, found = tuned(composed.cfg, device, SINGLE)
    if not any(row["step_ms"] for row in found["tried"]):
        told = "; ".join(f"{row['words']}: {row['refusal']}" for row in found["tried"])
        raise UserError(f"seconds={cfg.seconds}: nothing was measured ({told}); give more seconds.")
    file.write_text(runtime_file(found, base, device, words))
    rows: list[tuple[object, ...]] = [("candidate", "ms/step", "steps", "")]
    rows += [
        (row["words"], row["step_ms"], row["steps"] or None, row["refusal"] or "")
        for row in found["tried"]
    ]
    return f"{table(rows)}\n\n{found['words']}: written to {file}"


def runtime_file(found: dict[str, Any], base: str, device: torch.device, words: list[str]) -> str:
    """The choice as a file of conf/runtime."""
    hardware = describe_environment(device)["hardware"]
    text = f"# The fastest of {len(found['tried'])} on {hardware}, for: {' '.join(words)}\n"
    runtime = {key: value for key, value in found["changes"].items() if key != STEPS}
    if STEPS in found["changes"]:
        text += f"# It goes with accumulation_steps={found['changes'][STEPS]}.\n"
    return text + as_yaml({"defaults": [base, "_self_"]} | runtime)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
