"""Loads checkpoints: the newest one that verifies, or the one that is named."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from common.errors import UserError
from common.files import rename
from common.text import first_line
from training.checkpoint.find import complete, damage, description
from training.checkpoint.parts import assembled, flat
from training.checkpoint.save import Savable
from training.config.schema import RuntimeConfig
from training.distributed.ranks import SINGLE, Ranks

MALFORMED = (
    *(SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RuntimeError),
)
"""What reading values of another type or shape ends with."""


def identity(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a run cannot change, of its configuration; of the data, whose content is not looked at
    here, the seed."""
    return {
        "model": config.get("model") or {},
        "data": {"seed": config.get("seed")},
        "objective": config.get("objective") or {},
        "optimizer": {"class": (config.get("optim") or {}).get("_target_")},
        "adapter": config.get("adapter") or {},
    }


MUST_MATCH = tuple(identity({}))
HASH = 64
"""Hexadecimal digits with which the fingerprint of a latent set begins; its order and statistics
follow."""


def newest_verified(folder: Path) -> Path | None:
    """The newest checkpoint that verifies, None where there is no checkpoint.

    One that does not verify is renamed to `step-N.corrupt`, with a warning, and the one before is
    tried. ValueError if there were some and none verifies: starting over is for the user to decide.
    Clears half-done saves and removals away: the caller holds the lock.
    """
    for half in (*folder.glob("step-*.tmp"), *folder.glob("step-*.removed")):
        shutil.rmtree(half, ignore_errors=True)

    for found in reversed(complete(folder)):
        problem = damage(found)
        if not problem:
            return found
        quarantine = found.with_name(found.name + ".corrupt")
        try:
            shutil.rmtree(quarantine, ignore_errors=True)
            rename(found, quarantine)
        except OSError as error:
            raise UserError(
                f"{found}: {problem}, and it cannot be set aside ({error.strerror})."
            ) from error
        warnings.warn(
            f"{found}: {problem}; moved to {quarantine.name}, trying the one before.", stacklevel=3
        )

    if any(folder.glob("step-*.corrupt")):
        raise UserError(f"{folder} holds no checkpoint that verifies; start over in a new run_dir.")
    return None


def load(folder: Path, state: Savable, run: dict[str, Any], ranks: Ranks = SINGLE) -> str:
    """Loads a checkpoint that was verified, and returns the settings changed since; ValueError if
    it belongs to another run, or to no version of ours."""
    try:
        described = {"adapter": {}} | description(folder)  # earlier versions had none
        other = other_than(described, run)
        content = {} if other else assembled(folder, described, state.kept, ranks)
        # What an earlier version did not know was as it is by default.
        settings = described["settings"]
        if "runtime" in settings:
            settings = settings | {"runtime": asdict(RuntimeConfig()) | settings["runtime"]}
        changed = difference(settings, run["settings"])
    except torch.OutOfMemoryError:
        raise
    except MALFORMED as error:
        raise UserError(
            f"{folder} is no checkpoint of this version of ours ({first_line(error)}); use "
            "another step."
        ) from error

    if other:
        instead = f", or init_from={folder} to start from its weights"
        raise UserError(
            f"{folder} was made with another {other}. Use a new run_dir"
            f"{'' if described['adapter'] else instead}."
        )
    try:
        state.load_state_dict(content)
    except torch.OutOfMemoryError:
        raise
    except MALFORMED as error:
        told = str(error) if isinstance(error, ValueError) else first_line(error)
        raise UserError(f"{folder} does not fit this run: {told}") from error
    return changed


def other_than(described: dict[str, Any], run: dict[str, Any]) -> str | None:
    """The first part in which a checkpoint is of another run, with the difference."""
    now = json.loads(json.dumps({name: run[name] for name in MUST_MATCH}))
    for name in MUST_MATCH:
        then = described[name]
        if then == now[name] or (name == "data" and same_set(described, run)):
            continue
        told = difference(then, now[name])
        if name == "data":
            told += other_order(str(then.get("fingerprint")), str(now[name].get("fingerprint")))
        return f"{name}: {told}"
    return None


def other_order(then: str, now: str) -> str:
    """For two fingerprints of the same latents in another order or storage, a sentence on that."""
    same = then[:HASH] == now[:HASH] and re.fullmatch("[0-9a-f]+", then[:HASH])
    if then == now or not same:
        return ""
    return (
        ". The latents are the same: their order, normalisation or storage was "
        f"{then[HASH + 1 :]} and is {now[HASH + 1 :]}, as data=, data.window, "
        "data.normalisation and data.storage choose it"
    )


def same_set(described: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether a checkpoint of an earlier version has the run's data: its fingerprint left out mean
    and std."""
    then = described["spec"]
    now = run["spec"]
    earlier = {"fingerprint": now["earlier_fingerprint"], "seed": run["data"]["seed"]}
    return described["data"] == earlier and (then["mean"], then["std"]) == (now["mean"], now["std"])


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The keys in which two descriptions differ, with both values."""
    was = dict(flat(old))
    now = dict(flat(new))
    keys = sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
    return ", ".join(f"{k} was {was.get(k)}, is {now.get(k)}" for k in keys)
