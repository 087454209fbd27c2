"""Chooses the techniques for runtime=auto: those that make the run's step fastest on this machine.

The run first looks for an earlier choice of techniques: in its folder, then in a cache for the same
model, batch, runtime, machine and code. Without one, a separate process tries candidates before
training begins (scripts/plan/tune.py) and writes its choice to a file, which this module reads. The
choice may change the way in which a step is computed, but not the result of the step, except for
rounding.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch

from accel.ledger import AUTO, LedgerRow
from accel.stack import AccelerationStack
from common import workers
from common.config.compose import apply_schema
from common.config.schema import RuntimeConfig, TrainConfig
from common.distributed.ranks import Ranks
from common.environment import get_device_name, memory_of
from common.errors import READ_ERRORS, UserError
from common.files import ROOT, find_cache_folder, read_object, write_to_cache
from common.text import replace_non_finite
from training.inputs import foresee_latents

TUNING_FILE = "tuning.json"
"""Name of the file in a run folder that holds the choice of techniques."""
STEPS_KEY = "accumulation_steps"
TUNER_PROGRAM = ["-m", "scripts.plan.tune"]
"""Arguments of `python` for the tuner, the program that tries candidates, each in its own process.
The tuner reads the run's configuration and machine from a file, and writes its result beside this
file."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
"""Environment variables of launchers such as torchrun. The tuner must not see them, because a
candidate runs as a single process."""
HASHED_FOLDERS = ("accel", "common", "models", "training", "scripts/plan")
"""Folders whose code a cached choice depends on: if a file there changes, the tuner runs again."""
Changes = Mapping[str, Any]
"""Configuration key (a runtime key, or accumulation_steps) -> its new value, of a JSON type."""


def tune_config(
    cfg: TrainConfig, device: torch.device, ranks: Ranks, folder: Path | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the configuration with the fastest techniques, and the choice as a dict (see
    `find_choice`). Uses an earlier choice if the run's `folder` or the cache has one.

    Only the first rank measures, on its device; all ranks use the choice of the first rank. Raises
    UserError if no candidate's step fits into memory.
    """
    choice = ranks.broadcast_result(lambda: find_choice(cfg, device, ranks.world_size, folder))
    new = apply_changes(cfg, choice["changes"])
    ranks.check_batch(new.batch_size, new.accumulation_steps)
    return new, choice


def find_choice(
    cfg: TrainConfig, device: torch.device, processes: int, folder: Path | None
) -> dict[str, Any]:
    """Returns an earlier choice of techniques, or measures a new one.

    A choice is a dict. Its key `words` holds the chosen values as command-line overrides, in one
    string. Its key `changes` maps a runtime key to the chosen value. Its key `tried` has a row for
    each candidate that was tried.
    """
    deadline = time.monotonic() + cfg.runtime.tune_seconds
    if folder is not None:
        choice = read_choice(folder / TUNING_FILE, cfg, device, processes)
        if choice:
            return choice
    spec, resident = foresee_latents(cfg, memory_of(device))
    text = spec.text and (spec.text.width, spec.text.max_tokens)
    latents = (*spec.shape, spec.num_classes, resident, text)
    file = find_cache_folder("tuning") / f"{hash_facts(cfg, device, processes, *latents)}.json"
    choice = read_choice(file, cfg, device, processes)
    if choice:
        return choice

    print(
        f"Trying techniques for at most {cfg.runtime.tune_seconds:.0f} s …",
        file=sys.stderr,
        flush=True,
    )
    choice = measure_choice(
        {
            "cfg": asdict(cfg),
            "spec": spec.as_dict(),
            "resident": resident,
            "device": str(device),
            "processes": processes,
            "deadline": deadline,
        }
    )
    if any(row["step_ms"] for row in choice["tried"]):
        write_to_cache(file, replace_non_finite(choice))
    return choice


def measure_choice(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the tuner and returns its choice (see `find_choice`), or the seconds that it has
    measured. Raises UserError if the tuner fails or refuses the run."""
    code, choice = run_apart(job)
    if choice is None:
        raise UserError(
            f"the process that measures steps ended with code {code}; see its output above, or use "
            "neither runtime.tune nor budget_minutes."
        )
    refusal = choice.get("refusal")
    if refusal:
        raise UserError(refusal)
    return choice


def run_apart(
    job: Mapping[str, Any], seconds: float | None = None, log: IO[bytes] | None = None
) -> tuple[int | None, dict[str, Any] | None]:
    """Runs the tuner in a separate process and passes it `job` as a JSON file. Returns the
    process's exit code (None if it was killed after `seconds`) and the JSON object that it wrote
    (None if it wrote none)."""
    with tempfile.TemporaryDirectory(prefix="fastlatent-plan-") as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps({**job, "parent": os.getpid()}))
        command = [sys.executable, *TUNER_PROGRAM, str(file)]
        code = workers.run_to_end(command, seconds, log, without=RANK_VARIABLES)
        result = file.with_suffix(".found")
        return code, read_object(result) if result.exists() else None


def read_choice(
    file: Path, cfg: TrainConfig, device: torch.device, processes: int
) -> dict[str, Any] | None:
    """Reads the techniques that an earlier tuning chose; returns None if the file is absent or
    damaged, or if this run cannot use them."""
    with suppress(*READ_ERRORS):
        choice = read_object(file)
        # Make a ledger row only to check the choice: `make_ledger_row` raises an error if a value
        # is absent or has another type.
        make_ledger_row(choice)
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
    try:
        new = apply_changes(cfg, changes)
    except ValueError:
        return False
    stack = AccelerationStack(new.runtime.values(), device, deterministic=cfg.deterministic)
    divisible = cfg.batch_size % (new.accumulation_steps * processes) == 0
    return divisible and not stack.reasons.keys() & changes.keys()


def hash_facts(cfg: TrainConfig, device: torch.device, processes: int, *latents: Any) -> str:
    """Returns a hash (hexadecimal) of everything that a choice of techniques depends on: code,
    machine, latents, configuration and batch size."""
    folders = [ROOT / part for part in HASHED_FOLDERS]
    for name in cfg.extensions:
        spec = find_spec(name)
        folders += map(Path, (spec.submodule_search_locations if spec else None) or [])
    machine = (get_device_name(device), memory_of(device), version("torch"))
    run = (cfg.model, cfg.objective, cfg.optim, cfg.max_grad_norm, cfg.runtime, cfg.deterministic)
    batch = (cfg.batch_size, cfg.accumulation_steps, processes)
    digest = hashlib.sha256(repr((machine, latents, run, batch)).encode())
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def make_ledger_row(choice: Mapping[str, Any]) -> LedgerRow:
    """Makes the ledger's row about a choice: the chosen techniques, and the candidates that were
    tried with their milliseconds per step."""
    candidates = "; ".join(
        f"{row['words']}: " + (row["refusal"] or f"{row['step_ms']:.4g} ms")
        for row in choice["tried"]
    )
    return LedgerRow(
        "tune", AUTO, str(choice["words"]), candidates or "no other technique is available here"
    )
