"""runtime=auto: measures which techniques make this run's step fastest on this machine, before
training begins.

Every candidate is a process of its own (training/tuning_candidate.py) that has built and warmed up
the whole step: one that crashes, hangs or exhausts the memory costs itself. They step in turn; the
slower half is out after each round, and the rest have twice as many turns (successive halving,
Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943). A candidate may change how a step is
computed, never what: its losses must be those of the settings as given, within the tolerances that
the techniques state. What was chosen is kept in a cache and in the run folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from accel.ledger import AUTO, LedgerRow
from accel.stack import TECHNIQUES
from common.errors import UserError
from common.files import ROOT, cache_folder, write_atomically
from common.text import as_json
from data.loader import LatentSpec
from training.components import latents_of
from training.config.schema import (
    KERNELS,
    AttentionName,
    CheckpointPolicyName,
    CompileScope,
    TrainConfig,
)
from training.contest import Changes, Contest, words_of
from training.distributed.ranks import Ranks
from training.forecast import Forecast
from training.goodput import UNREADABLE
from training.hardware import device_name
from training.memory import memory_of

FILE = "tuning.json"
"""Of a run folder."""
USABLE = 0.95
"""Share of the device's memory that a forecast may take."""
WORTH = 8
"""Samples of a micro-batch below which recomputing is tried first."""
KINDS = {
    "attention": AttentionName,
    "checkpoint_policy": CheckpointPolicyName,
    "compile_scope": CompileScope,
}


def changed(cfg: TrainConfig, changes: Changes) -> TrainConfig:
    """The configuration with a candidate's changes, tuning done; ValueError where they do not go
    together."""
    for key, value in changes.items():
        if type(value) is not (
            int if key == "accumulation_steps" else str if key in KINDS else bool
        ):
            raise UserError(f"{key}={value} is of another type than that key.")
    runtime = {
        k: KINDS[k](v) if k in KINDS else v for k, v in changes.items() if k != "accumulation_steps"
    }
    steps = changes.get("accumulation_steps", cfg.accumulation_steps)
    found = replace(
        cfg, accumulation_steps=steps, runtime=replace(cfg.runtime, tune=False, **runtime)
    )
    found.check()
    return found


def technique_changes(cfg: TrainConfig, device: torch.device) -> list[Changes]:
    """Kernels, compile and CUDA graph in every way; with kernels and nothing else first."""
    kernels = [
        key for key in KERNELS if getattr(cfg.runtime, key) == "auto" and device.type == "cuda"
    ]
    scopes: list[Changes] = [{}, {"compile": True}, {"compile": True, "compile_scope": "model"}]
    graphs: list[Changes] = [{}, {"cuda_graph": True}]
    uses: list[Changes] = [dict.fromkeys(kernels, on) for on in (True, False)] if kernels else [{}]
    return [use | scope | graph for use in uses for graph in graphs for scope in scopes]


def attention_changes(cfg: TrainConfig, device: torch.device) -> list[Changes]:
    names = ("cudnn", "flash", "efficient")
    uses = (
        "attention" in str(cfg.model.get("mixer", "")).lower()
        and cfg.runtime.attention is AttentionName.auto
    )
    return [{"attention": name} for name in names] if uses and device.type == "cuda" else []


def batch_changes(cfg: TrainConfig) -> list[Changes]:
    """Micro-batches of half the size, and of twice it."""
    steps = cfg.accumulation_steps
    return [
        {"accumulation_steps": 2 * steps},
        *([{"accumulation_steps": steps // 2}] if steps % 2 == 0 else []),
    ]


def stages_of(
    cfg: TrainConfig, device: torch.device, processes: int
) -> list[Callable[[Changes], list[Changes]]]:
    """What to try beside the best so far: techniques, then attention, then micro-batches."""
    ways: list[Callable[[Changes], list[Changes]]] = [
        lambda best: technique_changes(cfg, device),
        lambda best: attention_changes(cfg, device),
        lambda best: batch_changes(changed(cfg, best)),
    ]

    def possible(way: Callable[[Changes], list[Changes]], best: Changes) -> list[Changes]:
        return [
            best | some for some in way(best) if can_be_had(cfg, best | some, device, processes)
        ]

    return [partial(possible, way) for way in ways]


def can_be_had(cfg: TrainConfig, changes: Changes, device: torch.device, processes: int) -> bool:
    """Whether a candidate is one on this machine: its techniques are to be had, and its keys go
    together."""
    try:
        values = changed(cfg, changes).runtime.values()
    except ValueError:
        return False
    asked = {
        k.key: k(values[k.key], device, **{n: values[n] for n in k.options}) for k in TECHNIQUES
    }
    new = asked.keys() & changes.keys()
    steps = changes.get("accumulation_steps", 1) * processes
    new_ones = [technique for key, technique in asked.items() if key in new and technique.enabled]
    if any(t.unavailable() or (cfg.deterministic and t.nondeterministic) for t in new_ones):
        return False
    return cfg.batch_size % steps == 0 and not (changes.get("cuda_graph") and processes > 1)


def fitting(
    cfg: TrainConfig, device: torch.device, processes: int, spec: LatentSpec, resident: float
) -> tuple[Changes, float]:
    """What the memory demands: more micro-batches, then checkpointing; and the bytes that
    candidates lack.

    These are the run's latents, `resident` on the device, and copies that ddp sends. ValueError if
    nothing makes the step fit.
    """
    memory = memory_of(device)
    policies = () if cfg.runtime.gradient_checkpointing else ("selective", "blocks")
    recompute: list[Changes] = [
        {},
        *({"gradient_checkpointing": True, "checkpoint_policy": p} for p in policies),
    ]
    most = cfg.batch_size // processes
    steps = [
        n for n in (cfg.accumulation_steps << k for k in range(20)) if n <= most and most % n == 0
    ]
    how = {"gpus": processes, "resident": resident, "gpu": device.type == "cuda"}
    tried: list[float] = []
    for some, n in ((some, n) for some in recompute for n in steps):
        if some is not recompute[-1] and most // n < min(WORTH, most // cfg.accumulation_steps):
            continue
        changes = some | ({"accumulation_steps": n} if n != cfg.accumulation_steps else {})
        try:
            forecast = Forecast(changed(cfg, changes), spec, **how)
            tried.append(forecast.needs.total)
        except ValueError as error:
            warnings.warn(f"whether the step fits the memory is not known: {error}", stacklevel=2)
            return {}, resident
        if tried[-1] <= USABLE * memory:
            return changes, resident + forecast.buckets
    raise UserError(
        f"runtime.tune=true: a step needs {min(tried) / 2**30:.3g} GiB at least, of "
        f"{memory / 2**30:.3g}; use a smaller model or batch_size, or ask `python -m "
        "scripts.plan` for what makes it fit."
    )


def facts_of(cfg: TrainConfig, device: torch.device, processes: int, *latents: Any) -> str:
    """All that a choice depends on, as a hash; `latents` describe those of the run."""
    own = [
        spec.submodule_search_locations or []
        for name in cfg.extensions
        if (spec := find_spec(name))
    ]
    folders = [
        *(ROOT / part for part in ("accel", "models", "training")),
        *map(Path, chain.from_iterable(own)),
    ]
    sources = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    of_run = (
        cfg.model,
        cfg.objective,
        cfg.optim,
        cfg.max_grad_norm,
        cfg.runtime,
        cfg.deterministic,
    )
    batch = (cfg.batch_size, cfg.accumulation_steps, processes)
    machine = (device_name(device), memory_of(device), version("torch"), code)
    return hashlib.sha256(repr((machine, latents, of_run, batch)).encode()).hexdigest()[:32]


def tuned(
    cfg: TrainConfig, device: torch.device, ranks: Ranks, folder: Path | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration with the fastest techniques, and what was tried; the run's `folder` or the
    cache may know it.

    The first process measures, alone on its device; all take its choice. ValueError if the step
    does not fit.
    """
    found = ranks.agreed(lambda: choice_of(cfg, device, ranks.world_size, folder))
    new = changed(cfg, found["changes"])
    ranks.check_batch(new.batch_size, new.accumulation_steps)
    return new, found


def choice_of(
    cfg: TrainConfig, device: torch.device, processes: int, folder: Path | None
) -> dict[str, Any]:
    """`words`, `changes` and `tried` of what was chosen before, or is measured now."""
    deadline = time.monotonic() + cfg.runtime.tune_seconds
    if folder is not None and (found := read(folder / FILE, cfg, device, processes)):
        return found
    spec, resident = latents_of(cfg.data, cfg.seed, memory_of(device))
    latents = (spec.channels, spec.height, spec.width, spec.num_classes, resident)
    file = cache_folder("tuning") / f"{facts_of(cfg, device, processes, *latents)}.json"
    if found := read(file, cfg, device, processes):
        return found
    needed, held = fitting(cfg, device, processes, spec, resident)
    print(
        f"Trying techniques for at most {cfg.runtime.tune_seconds:.0f} s …",
        file=sys.stderr,
        flush=True,
    )
    job = {"spec": spec.as_dict(), "device": str(device), "processes": processes, "held": int(held)}
    contest = Contest(partial(changed, cfg), job, deadline)
    chosen = contest.run(
        needed | technique_changes(cfg, device)[0], stages_of(cfg, device, processes)
    )
    found = {
        "words": words_of(chosen),
        "changes": chosen,
        "tried": [c.as_dict() for c in contest.tried],
    }
    if any(row["step_ms"] for row in found["tried"]):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, as_json(found, indent=1) + "\n")
        except OSError as error:
            warnings.warn(
                f"{file} cannot be written ({error.strerror}), so the next run tries again.",
                stacklevel=2,
            )
    return found


def read(
    file: Path, cfg: TrainConfig, device: torch.device, processes: int
) -> dict[str, Any] | None:
    """A choice that was written down; None where there is none, or it is damaged, or cannot be had
    in this run."""
    with suppress(*UNREADABLE):
        found = json.loads(file.read_text())
        changed(cfg, found["changes"])
        ledger_row(found)
        return found if can_be_had(cfg, found["changes"], device, processes) else None
    return None


def ledger_row(found: dict[str, Any]) -> LedgerRow:
    """The row that says what was chosen, and what else was tried."""

    def told(row: dict[str, Any]) -> str:
        return f"{row['words']}: " + (row["refusal"] or f"{row['step_ms']:.4g} ms")

    tried = "; ".join(map(told, found["tried"])) or "nothing else can be had here"
    return LedgerRow("tune", AUTO, str(found["words"]), tried)
