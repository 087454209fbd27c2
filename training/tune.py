"""runtime=auto: the run takes the techniques that make its step fastest on this machine.

What was chosen before is in the run folder, or in a cache for equal model, batch, runtime, machine
and code. Otherwise a process of its own tries candidates before training begins
(scripts/plan/tune.py), and this file reads what it wrote. A choice may change how a step is
computed, never what.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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
from common.errors import UserError
from common.files import ROOT, find_cache_folder, read_object, write_to_cache
from common.text import replace_non_finite
from training.assemble import to_json_types
from training.components import foresee_latents
from training.config.compose import apply_schema
from training.config.schema import RuntimeConfig, TrainConfig
from training.distributed.ranks import Ranks
from training.environment import get_device_name, memory_of
from training.goodput import READ_ERRORS

TUNING_FILE = "tuning.json"
"""Of a run folder."""
STEPS_KEY = "accumulation_steps"
TUNER_PROGRAM = ["-m", "scripts.plan.tune"]
"""The program that tries candidates, or is one of them: it is told a job in a file, and writes what
it found beside it."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables of one process among several; a candidate steps alone."""
HASHED_FOLDERS = ("accel", "common", "models", "training", "scripts/plan")
Changes = Mapping[str, Any]
"""Runtime key, or accumulation_steps -> plain value."""


def tune_config(
    cfg: TrainConfig, device: torch.device, ranks: Ranks, folder: Path | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration with the fastest techniques, and what was tried; the run's `folder` or the
    cache may know it.

    The first process measures, alone on its device; all take its choice. ValueError if the step
    does not fit.
    """
    found = ranks.broadcast_result(lambda: find_choice(cfg, device, ranks.world_size, folder))
    new = apply_changes(cfg, found["changes"])
    ranks.check_batch(new.batch_size, new.accumulation_steps)
    return new, found


def find_choice(
    cfg: TrainConfig, device: torch.device, processes: int, folder: Path | None
) -> dict[str, Any]:
    """`words`, `changes` and `tried` of what was chosen before, or is measured now."""
    deadline = time.monotonic() + cfg.runtime.tune_seconds
    if folder is not None and (found := read_choice(folder / TUNING_FILE, cfg, device, processes)):
        return found
    spec, resident = foresee_latents(cfg.data, cfg.seed, memory_of(device))
    latents = (spec.channels, spec.height, spec.width, spec.num_classes, resident)
    file = find_cache_folder("tuning") / f"{hash_facts(cfg, device, processes, *latents)}.json"
    if found := read_choice(file, cfg, device, processes):
        return found

    print(
        f"Trying techniques for at most {cfg.runtime.tune_seconds:.0f} s …",
        file=sys.stderr,
        flush=True,
    )
    found = measure_choice(
        {
            "cfg": to_json_types(asdict(cfg)),
            "spec": spec.as_dict(),
            "resident": resident,
            "device": str(device),
            "processes": processes,
            "deadline": deadline,
        }
    )
    if any(row["step_ms"] for row in found["tried"]):
        write_to_cache(file, replace_non_finite(found))
    return found


def measure_choice(job: Mapping[str, Any]) -> dict[str, Any]:
    """What a process of its own finds; ValueError with what it has against the run."""
    code, found = run_apart(job)
    if found is None:
        raise UserError(
            f"runtime.tune=true: the process that tries techniques ended with code {code}; "
            "what it said stands above. runtime=fast needs none."
        )
    if refusal := found.get("refusal"):
        raise UserError(refusal)
    return found


def run_apart(
    job: Mapping[str, Any],
    seconds: float | None = None,
    log: IO[bytes] | None = None,
    program: Sequence[str] | None = None,
) -> tuple[int | None, dict[str, Any] | None]:
    """The exit code of a process of its own that does a job, None if it took longer than `seconds`;
    and what it found, None if nothing. `program` follows `python`; None: the tuner."""
    with tempfile.TemporaryDirectory(prefix="fastlatent-plan-") as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps({**job, "parent": os.getpid()}))
        command = [sys.executable, *(program or TUNER_PROGRAM), str(file)]
        code = workers.run_to_end(command, seconds, log, without=RANK_VARIABLES)
        found = file.with_suffix(".found")
        return code, read_object(found) if found.exists() else None


def read_choice(
    file: Path, cfg: TrainConfig, device: torch.device, processes: int
) -> dict[str, Any] | None:
    """A choice that was written down; None where there is none, or it is damaged, or cannot be had
    in this run."""
    with suppress(*READ_ERRORS):
        found = read_object(file)
        make_ledger_row(found)
        return found if is_available(cfg, found["changes"], device, processes) else None
    return None


def apply_changes(cfg: TrainConfig, changes: Changes) -> TrainConfig:
    """The configuration with changes of runtime keys, dotted where they are nested, and of
    accumulation_steps, tuning done; ValueError where they do not go together."""
    runtime = to_json_types(asdict(cfg.runtime)) | {"tune": False}
    for key, value in changes.items():
        *outer, last = key.split(".")
        place = runtime
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value

    steps = runtime.pop(STEPS_KEY, cfg.accumulation_steps)
    found = replace(cfg, accumulation_steps=steps, runtime=apply_schema(RuntimeConfig, runtime, []))
    found.check()
    return found


def is_available(cfg: TrainConfig, changes: Changes, device: torch.device, processes: int) -> bool:
    """Whether a choice is one on this machine: its techniques are to be had, and its keys go
    together."""
    try:
        new = apply_changes(cfg, changes)
    except ValueError:
        return False
    values = new.runtime.values()
    stack = AccelerationStack(values, device, deterministic=cfg.deterministic)
    whole = cfg.batch_size % (new.accumulation_steps * processes) == 0
    return whole and not stack.reasons.keys() & changes.keys()


def hash_facts(cfg: TrainConfig, device: torch.device, processes: int, *latents: Any) -> str:
    """All that a choice depends on, as a hash; `latents` describe those of the run."""
    folders = [ROOT / part for part in HASHED_FOLDERS]
    for name in cfg.extensions:
        spec = find_spec(name)
        folders += map(Path, (spec.submodule_search_locations if spec else None) or [])
    sources = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    machine = (get_device_name(device), memory_of(device), version("torch"))
    run = (cfg.model, cfg.objective, cfg.optim, cfg.max_grad_norm, cfg.runtime, cfg.deterministic)
    batch = (cfg.batch_size, cfg.accumulation_steps, processes)
    digest = hashlib.sha256(repr((machine, latents, run, batch)).encode())
    for file in sources:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def make_ledger_row(found: Mapping[str, Any]) -> LedgerRow:
    """The row that says what was chosen, and what else was tried."""

    def told(row: Mapping[str, Any]) -> str:
        return f"{row['words']}: " + (row["refusal"] or f"{row['step_ms']:.4g} ms")

    tried = "; ".join(map(told, found["tried"])) or "nothing else can be had here"
    return LedgerRow("tune", AUTO, str(found["words"]), tried)
