"""Chooses the techniques for runtime=auto: those that make the run's step fastest on this machine.

The run first looks for an earlier choice of techniques: in its folder, then in a cache for the same
model, batch, runtime, machine and code (accel/trial/contest.py). Without one, a separate process
tries candidates before training begins (scripts/plan/tune.py). The choice may change the way in
which a step is computed, but not the result of the step, except for rounding.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from accel.stack import AccelerationStack
from accel.techniques.cuda_graph import CudaGraph
from accel.trial.contest import Facts, describe_machine, make_ledger_row, settle
from common.config.compose import apply_schema
from common.config.schema import RuntimeConfig, TrainConfig
from common.distributed.ranks import Ranks
from common.environment import memory_of
from common.errors import READ_ERRORS, UserError
from common.files import ROOT
from common.workers import ask_child, read_found
from training.inputs import foresee_latents

TUNING_FILE = "tuning.json"
"""Name of the file in a run folder that holds the choice of techniques."""
STEPS_KEY = "accumulation_steps"
TUNER_PROGRAM = ["-m", "scripts.plan.tune"]
"""Arguments of `python` for the tuner, the program that tries candidates, each in its own process
(see `ask_child`)."""
HASHED_FOLDERS = ("accel", "common", "models", "training", "scripts/plan")
"""Folders whose code a cached choice depends on: if a file there changes, the tuner runs again."""
FACTS_OF_RUN = (
    "model",
    "objective",
    "optim",
    "max_grad_norm",
    "runtime",
    "deterministic",
    "batch_size",
    "accumulation_steps",
)
"""Keys of the configuration on which a choice depends."""
Changes = Mapping[str, Any]
"""Configuration key (a runtime key, or accumulation_steps) -> its new value, of a JSON type."""


def tune_config(
    cfg: TrainConfig, device: torch.device, ranks: Ranks, folder: Path | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the configuration with the fastest techniques, and the choice: a dict with the key
    `changes`, runtime key -> chosen value, and with `words` and `tried` (see
    `contest.make_ledger_row`). Uses an earlier choice if the run's `folder` or the cache has one.

    Only the first rank measures, on its device; all ranks use the choice of the first rank. Raises
    UserError if no candidate's step fits into memory.
    """

    def prepare() -> tuple[Facts, dict[str, Any]]:
        deadline = time.monotonic() + cfg.runtime.tune_seconds
        spec, resident = foresee_latents(cfg, memory_of(device))
        job = {
            "cfg": asdict(cfg),
            "spec": spec.as_dict(),
            "resident": resident,
            "device": str(device),
            "processes": ranks.world_size,
            "deadline": deadline,
        }
        return collect_facts(job, device), job

    def choose(known: dict[str, Any]) -> dict[str, Any]:
        found = known.get("runtime")
        fits = found and is_available(cfg, found["changes"], device, ranks.world_size)
        return {"runtime": found if fits else search(job)}

    choice = ranks.broadcast_result(lambda: read_choice(folder, cfg, device, ranks.world_size))
    if choice is None:
        facts, job = ranks.broadcast_result(prepare)
        choice = settle(
            "tuning",
            {"runtime": facts},
            lambda known: ranks.broadcast_result(lambda: choose(known)),
            lambda findings: findings[0],
            {},
        )["runtime"]
    new = apply_changes(cfg, choice["changes"])
    ranks.check_batch(new.batch_size, new.accumulation_steps)
    return new, choice


def search(job: Mapping[str, Any]) -> dict[str, Any]:
    """Lets the tuner try candidates, and returns its choice (see `tune_config`)."""
    print(
        f"Trying techniques for at most {job['deadline'] - time.monotonic():.0f} s …",
        file=sys.stderr,
        flush=True,
    )
    choice = measure_apart(job)
    return choice | {"passing": not any(row["step_ms"] for row in choice["tried"])}


def measure_apart(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the tuner and returns what it has found: a choice, or seconds of a run. Raises UserError
    if the tuner fails or refuses the run."""
    found, end = ask_child(TUNER_PROGRAM, job, math.inf)
    if not found:
        raise UserError(
            f"the process that measures steps {end}; use neither runtime.tune nor budget_minutes."
        )
    if found.get("refusal"):
        raise UserError(found["refusal"])
    return found


def read_choice(
    folder: Path | None, cfg: TrainConfig, device: torch.device, processes: int
) -> dict[str, Any] | None:
    """Reads the techniques that the run in `folder` has chosen; returns None if there are none, if
    the file is damaged, or if this run cannot use them."""
    choice = read_found(folder / TUNING_FILE) if folder else {}
    with suppress(*READ_ERRORS):
        make_ledger_row([choice])  # raises an error if something is absent
        return choice if is_available(cfg, choice["changes"], device, processes) else None
    return None


def apply_changes(cfg: TrainConfig, changes: Changes) -> TrainConfig:
    """Returns the configuration with `changes` (keys of `runtime`, such as "parallel.mode", or
    accumulation_steps -> value) and with tuning off. Raises UserError if the new values contradict
    each other."""
    runtime: dict[str, Any] = asdict(cfg.runtime) | {"tune": False}
    for key, value in changes.items():
        *outer, last = key.split(".")
        place = runtime
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value

    steps = runtime.pop(STEPS_KEY, cfg.accumulation_steps)
    new = replace(cfg, accumulation_steps=steps, runtime=apply_schema(RuntimeConfig, runtime, []))
    new.check()
    return new


def is_available(cfg: TrainConfig, changes: Changes, device: torch.device, processes: int) -> bool:
    """Says whether this machine supports all techniques in `changes`, and whether their values can
    be combined with the configuration."""
    mode = {"parallel.mode": "ddp"} if processes > 1 and CudaGraph.key in changes else {}
    try:
        new = apply_changes(cfg, {**mode, **changes})
    except ValueError:
        return False
    stack = AccelerationStack(new.runtime.values(), device, deterministic=cfg.deterministic)
    divisible = cfg.batch_size % (new.accumulation_steps * processes) == 0
    return divisible and not stack.reasons.keys() & changes.keys()


def collect_facts(job: Mapping[str, Any], device: torch.device) -> Facts:
    """Collects everything that a choice of techniques depends on: code, machine, latents,
    configuration and batch size."""
    cfg = job["cfg"]
    folders = [ROOT / part for part in HASHED_FOLDERS]
    for name in cfg["extensions"]:
        spec = find_spec(name)
        folders += map(Path, (spec.submodule_search_locations if spec else None) or [])
    text = job["spec"]["text"]
    return {
        **describe_machine(device, folders),
        **{key: cfg[key] for key in FACTS_OF_RUN},
        **{key: job["spec"][key] for key in ("channels", "height", "width", "num_classes")},
        "text": text and [text["width"], text["max_tokens"]],
        "resident": job["resident"],
        "processes": job["processes"],
    }
