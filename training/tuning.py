"""runtime=auto: measures which techniques make this run's step fastest on this machine, before training begins.

Every candidate is a process of its own (training/tuning_candidate.py) that has built and warmed up the whole step: one
that crashes, hangs or exhausts the memory costs itself. They step in turn; the slower half is out after each round, and
the rest take twice as many steps (successive halving, Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943). A
candidate may change how a step is computed, never what: its losses must be those of the settings as given, within the
tolerances that the techniques state. What was chosen is kept in a cache and in the run folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import select
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accel.ledger import AUTO, LedgerRow
from accel.proof import cache_folder
from accel.stack import TECHNIQUES
from accel.text import as_json
from data.loader import LatentSpec
from data.manifest import write_atomically
from training.cards import device_name
from training.components import latents_of, runtime_values
from training.config.compose import ROOT
from training.config.schema import AttentionName, CheckpointPolicyName, CompileScope, TrainConfig
from training.forecast import Forecast
from training.memory import memory_of
from training.process.ranks import Ranks

FILE = "tuning.json"
"""Of a run folder."""
GAIN = 0.98
"""Share of the step time of the settings as given that a candidate must stay below."""
USABLE = 0.95
"""Share of the device's memory that a forecast may take."""
FIRST_STEPS = 4
"""In the first round; twice as many in each that follows."""
ENOUGH = 64
NO_MEMORY = "memory ran out"
LATE = "the budget was over before it was measured"
KINDS = {"attention": AttentionName, "checkpoint_policy": CheckpointPolicyName, "compile_scope": CompileScope}
KERNELS = ("fused_add_norm", "fused_scan", "fused_conv")
Changes = dict[str, Any]
"""Runtime key, or accumulation_steps -> plain value."""


def words_of(changes: Changes) -> str:
    """The overrides that a candidate amounts to."""
    names = {key: key if key == "accumulation_steps" else f"runtime.{key}" for key in changes}
    return " ".join(f"{names[key]}={str(value).lower()}" for key, value in changes.items()) or "as given"


@dataclass
class Candidate:
    """One way to take the step, and what was found about it."""

    changes: Changes
    seconds: list[float] = field(default_factory=list)
    """Of steps."""
    refusal: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("inf")

    def as_dict(self) -> dict[str, Any]:
        ms = round(1e3 * self.median, 4) if self.seconds else None
        return {"words": words_of(self.changes), "step_ms": ms, "steps": len(self.seconds), "refusal": self.refusal}


def changed(cfg: TrainConfig, changes: Changes) -> TrainConfig:
    """The configuration with a candidate's changes, tuning done; ValueError where they do not go together."""
    runtime = {k: KINDS[k](v) if k in KINDS else v for k, v in changes.items() if k != "accumulation_steps"}
    steps = changes.get("accumulation_steps", cfg.accumulation_steps)
    found = replace(cfg, accumulation_steps=steps, runtime=replace(cfg.runtime, tune=False, **runtime))
    found.check()
    return found


def technique_changes(cfg: TrainConfig, device: torch.device) -> list[Changes]:
    """Kernels, compile and CUDA graph in every way; with kernels and nothing else first."""
    kernels = [key for key in KERNELS if getattr(cfg.runtime, key) == "auto" and device.type == "cuda"]
    scopes: list[Changes] = [{}, {"compile": True}, {"compile": True, "compile_scope": "model"}]
    graphs: list[Changes] = [{}, {"cuda_graph": True}]
    uses: list[Changes] = [dict.fromkeys(kernels, on) for on in (True, False)] if kernels else [{}]
    return [use | scope | graph for use in uses for graph in graphs for scope in scopes]


def attention_changes(cfg: TrainConfig, device: torch.device) -> list[Changes]:
    names = ("cudnn", "flash", "efficient")
    uses = "attention" in str(cfg.model.get("mixer", "")).lower() and cfg.runtime.attention is AttentionName.auto
    return [{}, *({"attention": name} for name in names)] if uses and device.type == "cuda" else [{}]


def batch_changes(cfg: TrainConfig, _device: torch.device) -> list[Changes]:
    """Micro-batches of half the size, and of twice it."""
    steps = cfg.accumulation_steps
    return [{}, {"accumulation_steps": 2 * steps}, *([{"accumulation_steps": steps // 2}] if steps % 2 == 0 else [])]


def can_be_had(cfg: TrainConfig, changes: Changes, device: torch.device, processes: int) -> bool:
    """Whether a candidate is one on this machine: its techniques are to be had, and its keys go together."""
    try:
        values = runtime_values(changed(cfg, changes).runtime)
    except ValueError:
        return False
    asked = {kind: kind(values[kind.key], device, **{n: values[n] for n in kind.options}) for kind in TECHNIQUES}
    new = {kind.key for kind in asked} & changes.keys()
    steps = changes.get("accumulation_steps", 1) * processes
    if any(t.key in new and t.enabled and (t.unavailable() or (cfg.deterministic and t.nondeterministic)) for t in asked.values()):
        return False
    return cfg.batch_size % steps == 0 and not (changes.get("cuda_graph") and processes > 1)


def fitting(cfg: TrainConfig, device: torch.device, processes: int) -> tuple[Changes, LatentSpec]:
    """What the memory demands, and the latents: more micro-batches, then checkpointing.

    ValueError if nothing makes the step fit.
    """
    memory = memory_of(device)
    spec, resident = latents_of(cfg.data, cfg.seed, memory)
    policies = ("selective", "blocks")
    recompute: list[Changes] = [{}, *({"gradient_checkpointing": True, "checkpoint_policy": p} for p in policies)]
    most = cfg.batch_size // processes
    steps = [n for n in (cfg.accumulation_steps << k for k in range(20)) if n <= most and most % n == 0]
    tried: list[float] = []
    for changes in ({**some, "accumulation_steps": n} for some in recompute for n in steps[:: 1 if not some else 2]):
        needs = Forecast(changed(cfg, changes), spec, gpus=processes, resident=resident, gpu=device.type == "cuda").needs
        tried.append(needs.total)
        if needs.total <= USABLE * memory:
            given = {"accumulation_steps": cfg.accumulation_steps}
            return {k: v for k, v in changes.items() if given.get(k) != v}, spec
    raise ValueError(
        f"runtime.tune=true: the step needs a predicted {min(tried) / 2**30:.3g} GiB at least, of {memory / 2**30:.3g}; "
        f"use a smaller model or batch_size, or see `python -m scripts.plan` for what makes it fit."
    )


class Contestant:
    """A candidate's process: it says when it is warm, then steps when it is told to."""

    def __init__(self, candidate: Candidate, job: dict[str, Any], folder: Path, deadline: float) -> None:
        self.candidate, self.deadline = candidate, deadline
        file = Path(tempfile.mkstemp(dir=folder, suffix=".job")[1])
        file.write_bytes(pickle.dumps(job))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)  # it steps alone
        with file.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "training.tuning_candidate", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self.log = file.with_suffix(".log")

    def answer(self) -> dict[str, Any] | None:
        """The next line that it says; None where it has ended, which is a refusal, or where time is up."""
        assert self.process.stdout is not None
        said = b""
        while not said.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(0.0, self.deadline - time.monotonic()))[0]:
                self.end()
                return None
            part = os.read(self.process.stdout.fileno(), 65536)
            if not part:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                self.refuse("its process ended" + (f" ({lines[-1][:200]})" if lines else ""))
                return None
            said += part
        return json.loads(said)

    def refuse(self, why: str) -> None:
        self.candidate.refusal = self.candidate.refusal or why
        self.end()

    def step(self, steps: int) -> None:
        """Has it take so many steps, and adds their seconds to the candidate's."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(f"{steps}\n".encode())
            self.process.stdin.flush()
        if said := self.answer():
            self.candidate.seconds += said.get("seconds", [])
            if said.get("refusal"):
                self.refuse(said["refusal"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()


class Contest:
    """Finds the fastest way to take a step, stage by stage, until the budget is over."""

    def __init__(
        self, cfg: TrainConfig, spec: LatentSpec, device: torch.device, processes: int, deadline: float
    ) -> None:
        self.cfg, self.spec, self.device, self.processes = cfg, spec, device, processes
        self.deadline = deadline
        self.tried: list[Candidate] = []
        self.alive: list[Contestant] = []
        self.reference: dict[str, Any] | None = None
        self.longest = 0.0
        """Seconds in which a candidate got warm."""

    def run(self, changes: Changes) -> Changes:
        """The changes of the fastest candidate, beginning with those that the memory demands."""
        champion: Contestant | None = None
        first = Candidate(changes | technique_changes(self.cfg, self.device)[0])
        self.tried.append(first)
        with tempfile.TemporaryDirectory(prefix="fastlatent-tuning-") as folder, ExitStack() as running:
            champion = self.started(first, Path(folder), running)
            best = first
            for stage in (technique_changes, attention_changes, batch_changes):
                new = [Candidate(best.changes | some) for some in stage(changed(self.cfg, best.changes), self.device)]
                known = {words_of(c.changes) for c in self.tried}
                new = [c for c in new if words_of(c.changes) not in known]
                new = [c for c in new if can_be_had(self.cfg, c.changes, self.device, self.processes)]
                if new and time.monotonic() + self.longest < self.deadline:
                    champion = self.fastest(champion, new, Path(folder), running)
                    best = champion.candidate if champion else best
        for candidate in self.tried:
            candidate.refusal = candidate.refusal or (None if candidate.seconds else LATE)
        return best.changes

    def fastest(
        self, champion: Contestant | None, new: Sequence[Candidate], folder: Path, running: ExitStack
    ) -> Contestant | None:
        """The fastest of the champion, who stays unless another is clearly faster, and new candidates."""
        self.tried += new
        self.alive = [champion] if champion else []
        everyone = [*self.alive]
        for candidate in new:
            if time.monotonic() + self.longest > self.deadline:
                candidate.refusal = LATE
            elif contestant := self.started(candidate, folder, running):
                everyone.append(contestant)
                self.alive.append(contestant)
        steps = FIRST_STEPS
        while self.alive and steps <= ENOUGH and time.monotonic() < self.deadline:
            for contestant in self.alive:
                contestant.step(steps)
            self.alive.sort(key=lambda c: c.candidate.median)
            kept = max(2, -(-len(self.alive) // 2))
            for slower in self.alive[kept:]:
                slower.end()
            self.alive, steps = [c for c in self.alive[:kept] if not c.candidate.refusal], 2 * steps
        fit = [c for c in everyone if c.candidate.seconds and not c.candidate.refusal]
        best = min(fit, key=lambda c: c.candidate.median, default=champion)
        if champion in fit and best is not None and best.candidate.median > GAIN * champion.candidate.median:
            best = champion
        for other in everyone:
            if other is not best:
                other.end()
        return best

    def started(self, candidate: Candidate, folder: Path, running: ExitStack) -> Contestant | None:
        """A candidate's process, warm; None if it is refused. One that needs all the memory is alone with it."""
        cfg = changed(self.cfg, candidate.changes)
        job = {"cfg": cfg, "spec": self.spec, "device": str(self.device), "processes": self.processes}
        job["asked"] = [key for key in candidate.changes if key != "accumulation_steps"]
        began, said, contestant = time.monotonic(), None, None
        for attempt in range(2):
            contestant = Contestant(candidate, job, folder, self.deadline)
            running.callback(contestant.end)
            said = contestant.answer()
            if said is None or said["refusal"] != NO_MEMORY or attempt or not self.alive:
                break
            contestant.end()
            for other in self.alive:  # what they show now is what counts of them
                other.step(FIRST_STEPS)
                other.end()
            self.alive = []
        if said is None or contestant is None:
            return None
        self.longest = max(self.longest, time.monotonic() - began)
        if why := said["refusal"] or self.difference(said):
            contestant.refuse(why)
            return None
        return contestant

    def difference(self, said: dict[str, Any]) -> str | None:
        """Why its losses are not those of the first candidate; None where they are, within what it may differ."""
        if self.reference is None:
            self.reference = said
            return None
        tolerance = max(said["tolerance"], self.reference["tolerance"])
        for name in ("losses", "norms"):
            for own, wanted in zip(said[name], self.reference[name], strict=True):
                if not abs(own - wanted) <= tolerance * abs(wanted):
                    return f"its {name} are {own:.6g} instead of {wanted:.6g}, more than {tolerance:.0e} apart"
        return None


def facts_of(cfg: TrainConfig, spec: LatentSpec, device: torch.device, processes: int) -> str:
    """All that a choice depends on, as a hash."""
    sources = sorted(file for part in ("accel", "models", "training") for file in (ROOT / part).rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    sizes = (spec.channels, spec.height, spec.width, spec.num_classes, cfg.batch_size, cfg.accumulation_steps, processes)
    parts = (device_name(device), version("torch"), code, cfg.model, cfg.optim, cfg.runtime, cfg.deterministic, sizes)
    return hashlib.sha256(repr((*parts, memory_of(device))).encode()).hexdigest()[:32]


def tuned(
    cfg: TrainConfig, device: torch.device, ranks: Ranks, folder: Path | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration with the fastest techniques, and what was tried; the run's `folder` or the cache may know it.

    The first process measures, alone on its device; all take its choice. ValueError if the step does not fit.
    """
    found = ranks.agreed(lambda: choice_of(cfg, device, ranks.world_size, folder))
    return changed(cfg, found["changes"]), found


def choice_of(cfg: TrainConfig, device: torch.device, processes: int, folder: Path | None) -> dict[str, Any]:
    """`words`, `changes` and `tried` of what was chosen before, or is measured now."""
    deadline = time.monotonic() + cfg.runtime.tune_seconds
    if folder is not None and (found := read(folder / FILE, cfg)):
        return found
    needed, spec = fitting(cfg, device, processes)
    file = cache_folder("tuning") / f"{facts_of(cfg, spec, device, processes)}.json"
    if found := read(file, cfg):
        return found
    print(f"Trying techniques for at most {cfg.runtime.tune_seconds:.0f} s …", file=sys.stderr, flush=True)
    contest = Contest(cfg, spec, device, processes, deadline)
    chosen = contest.run(needed)
    found = {"words": words_of(chosen), "changes": chosen, "tried": [c.as_dict() for c in contest.tried]}
    if any(row["step_ms"] for row in found["tried"]):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, as_json(found, indent=1) + "\n")
        except OSError as error:
            warnings.warn(f"{file} cannot be written ({error.strerror}), so the next run tries again.", stacklevel=2)
    return found


def read(file: Path, cfg: TrainConfig) -> dict[str, Any] | None:
    """A choice that was written down; None where there is none, or it is damaged, or does not go with `cfg`."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        found = json.loads(file.read_text())
        changed(cfg, found["changes"])
        ledger_row(found)
        return found
    return None


def ledger_row(found: dict[str, Any]) -> LedgerRow:
    """The row that says what was chosen, and what else was tried."""

    def told(row: dict[str, Any]) -> str:
        return f"{row['words']}: " + (row["refusal"] or f"{row['step_ms']:.4g} ms")

    tried = "; ".join(map(told, found["tried"])) or "nothing else can be had here"
    return LedgerRow("tune", AUTO, str(found["words"]), tried)
