"""Counts what each change of a run would save of its memory, and finds the cheapest changes that
make it fit.

Where memory ran out, training/failures.py starts this file with the run in a job file: it counts on
the CPU, for the device is full, and no change is named whose bytes were not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import groupby
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

from accel.stack import TECHNIQUES
from accel.technique import Saving
from common import workers
from common.files import read_object, write_atomically
from data.loader import LatentSpec
from scripts.plan.memory import Forecast, Question, forecast
from training.config import build
from training.config.compose import apply_schema, compose
from training.config.schema import TrainConfig
from training.tune import STEPS_KEY, apply_changes

USEFUL_SHARE = 0.99
"""Share of the peak below which a change must bring it."""
FEW_SAMPLES = 8
"""Samples of a micro-batch below which recomputing is tried first."""
SMALLER_RANK = 20
"""The rank of more micro-batches; with few samples in each `MUCH_SMALLER`."""
MUCH_SMALLER_RANK = 50
OPTIM = "optim"
EIGHT_BIT = Saving({OPTIM: "adamw_8bit"}, "8-bit moments", 60)
Apply = Callable[[Mapping[str, Any]], TrainConfig]
"""Makes the configuration that has some changes; ValueError where they do not go with the rest."""


def format_overrides(changes: Mapping[str, Any]) -> list[str]:
    """The overrides that changes amount to, of runtime keys, accumulation_steps or optim."""
    words = [f"{key}={str(value).lower()}" for key, value in changes.items()]
    return [word if word.startswith((STEPS_KEY, OPTIM)) else f"runtime.{word}" for word in words]


def make_apply(cfg: TrainConfig) -> Apply:
    """Returns the function that applies changes to this configuration."""

    def applied(changes: Mapping[str, Any]) -> TrainConfig:
        of_run = {key: value for key, value in changes.items() if key != OPTIM}
        if OPTIM not in changes:
            return apply_changes(cfg, of_run)
        optim = compose([f"{OPTIM}={changes[OPTIM]}"]).cfg.optim
        return apply_changes(replace(cfg, optim=optim), of_run)

    return applied


def list_savings(question: Question, exact: bool = False) -> list[Saving]:
    """Changes that save memory, the cheapest first; `exact` ones leave what is computed as it
    is."""
    found = [] if exact else [EIGHT_BIT]
    for kind in TECHNIQUES:
        if not exact or kind.loss_rtol == 0.0:
            found += kind.savings
    times = 2
    while question.samples % times == 0:
        smaller = SMALLER_RANK if question.samples // times >= FEW_SAMPLES else MUCH_SMALLER_RANK
        steps = times * question.cfg.accumulation_steps
        found.append(Saving({STEPS_KEY: steps}, "smaller products", smaller + times.bit_length()))
        times *= 2

    # What has one rank is tried together.
    rank = attrgetter("rank")
    together = [list(some) for _, some in groupby(sorted(found, key=rank), rank)]
    return [some[-1]._replace(values=merge_values(some)) for some in together]


def forecast_change(now: Forecast, values: Mapping[str, Any], applied: Apply) -> Forecast | None:
    """The forecast of a run with changes; None where they change nothing, do not go with the rest,
    or save less than a hundredth."""
    try:
        cfg = applied(values)
        if cfg == now.question.cfg:
            return None
        found = forecast(replace(now.question, cfg=cfg))
    except (ValueError, ImportError):  # an optimizer's library may be missing
        return None
    return found if found.needs.total < USEFUL_SHARE * now.needs.total else None


def find_cheapest_change(
    now: Forecast, memory: float, applied: Apply, exact: bool = False
) -> tuple[list[Saving], Forecast]:
    """The changes that save memory, one on top of the other until the run fits, or all, and what
    the run then takes."""
    taken: list[Saving] = []
    for new in list_savings(now.question, exact):
        if now.needs.total <= memory:
            break
        tried = [old for old in taken if not old.values.keys() & new.values.keys()] + [new]
        if found := forecast_change(now, merge_values(tried), applied):
            taken = tried
            now = found
    return taken, now


def count_savings(
    now: Forecast, barred: Collection[str] = (), until: float = inf
) -> list[dict[str, Any]]:
    """What each change saves of a run's peak by itself, most bytes first: its `words`, `bytes` and
    what it `costs`.

    Of more micro-batches only twice as many are counted; none of the overrides that are `barred`;
    and nothing after `until` (of time.monotonic).
    """
    cfg = now.question.cfg
    found = []

    # The cheapest are counted first, for the time may be over before the last.
    for saving in list_savings(now.question):
        values = {key: value for key, value in saving.values.items() if key not in barred}
        if values.get(STEPS_KEY, 0) > 2 * cfg.accumulation_steps or time.monotonic() > until:
            continue
        if other := forecast_change(now, values, make_apply(cfg)):
            row = {"words": format_overrides(values), "costs": saving.costs}
            found.append(row | {"bytes": now.needs.total - other.needs.total})
    return sorted(found, key=lambda row: -row["bytes"])


def merge_values(some: list[Saving]) -> dict[str, Any]:
    """All that they change, by key."""
    return {key: value for saving in some for key, value in saving.values.items()}


def main(file: Path) -> None:
    """Counts for the run in a job file, and writes beside it what helps: `savings`, as
    `saved_bytes` has them."""
    told = read_object(file)
    workers.end_with_parent(told["parent"])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    build.admit_extensions([f"{build.EXTENSIONS_KEY}=[{','.join(told['cfg']['extensions'])}]"])
    cfg = apply_schema(TrainConfig, told["cfg"], [])
    spec = LatentSpec(**told["spec"])
    now = forecast(Question(cfg, spec, told["processes"], gpu=told["gpu"]))
    found = count_savings(now, told["barred"], told["until"])
    write_atomically(file.with_suffix(".found"), json.dumps({"savings": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
