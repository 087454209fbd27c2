"""Counts how much memory each change of a run would save, and finds the cheapest changes that make
the run fit its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from accel.stack import TECHNIQUES
from accel.technique import Saving
from common.config.compose import compose
from common.config.schema import TrainConfig
from scripts.plan.memory import Forecast, Question, forecast
from training.preflight.tune import STEPS_KEY, apply_changes

USEFUL_SHARE = 0.99
"""`forecast_change` drops a change unless it lowers the peak memory to less than this share of the
run's present peak."""
FEW_SAMPLES = 8
"""The search tries micro-batches of at least this many samples before it tries gradient
checkpointing, and smaller ones only afterwards."""
SMALLER_ORDER = 20
"""Sort key (`rank` of a `Saving`) of a smaller micro-batch, to which `list_savings` adds more for
each halving; the search tries changes with a low rank first."""
MUCH_SMALLER_ORDER = 50
"""Sort key (`rank` of a `Saving`) of a micro-batch with fewer than `FEW_SAMPLES` samples. The
search tries it late, because such a small batch makes matrix products slow."""
OPTIM = "optim"
EIGHT_BIT = Saving({OPTIM: "adamw_8bit"}, "8-bit moments", 60)
Apply = Callable[[Mapping[str, Any]], TrainConfig]
"""Function that applies changes (key -> value) to a run's configuration and returns the new
configuration; UserError if the changes contradict other keys."""


def format_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Formats changes (key -> value) as overrides, such as runtime.compile=true. The keys are
    runtime keys, accumulation_steps or optim."""
    words = [f"{key}={str(value).lower()}" for key, value in changes.items()]
    return [word if word.startswith((STEPS_KEY, OPTIM)) else f"runtime.{word}" for word in words]


def make_apply(cfg: TrainConfig) -> Apply:
    """Returns a function that takes changes (key -> value) and returns `cfg` with these changes."""

    def apply(changes: Mapping[str, Any]) -> TrainConfig:
        run_changes = {key: value for key, value in changes.items() if key != OPTIM}
        if OPTIM not in changes:
            return apply_changes(cfg, run_changes)
        optim = compose([f"{OPTIM}={changes[OPTIM]}"]).cfg.optim
        return apply_changes(replace(cfg, optim=optim), run_changes)

    return apply


def list_savings(question: Question, exact: bool = False) -> list[Saving]:
    """Lists the changes that could save memory in a run, those with the least cost first. With
    `exact` it leaves out changes that alter the losses."""
    savings = [] if exact else [EIGHT_BIT]
    for kind in TECHNIQUES:
        if not exact or kind.loss_rtol == 0.0:
            savings += kind.planning.savings
    times = 2
    while question.samples % times == 0:
        smaller = SMALLER_ORDER if question.samples // times >= FEW_SAMPLES else MUCH_SMALLER_ORDER
        steps = times * question.cfg.accumulation_steps
        savings.append(Saving({STEPS_KEY: steps}, "smaller products", smaller + times.bit_length()))
        times *= 2

    # Merge savings with the same `rank` into one, because the search tries their changes together.
    rank = attrgetter("rank")
    groups = [list(group) for _, group in groupby(sorted(savings, key=rank), rank)]
    return [group[-1]._replace(values=merge_values(group)) for group in groups]


def forecast_change(now: Forecast, values: Mapping[str, Any], apply: Apply) -> Forecast | None:
    """Returns the forecast of the run with the changes `values`; None if these change nothing,
    contradict other keys, or save less than 1 % of the peak."""
    try:
        cfg = apply(values)
        if cfg == now.question.cfg:
            return None
        changed = forecast(replace(now.question, cfg=cfg))
    except (ValueError, ImportError):
        # An ImportError means that the library of an optimizer is missing: skip the change.
        return None
    return changed if changed.needs.total < USEFUL_SHARE * now.needs.total else None


def find_cheapest_change(
    now: Forecast, memory: float, apply: Apply, exact: bool = False
) -> tuple[list[Saving], Forecast]:
    """Adds changes that save memory, the cheapest first, until the run fits `memory` bytes. Returns
    the changes and the forecast of the run with these changes, even if this run still does not
    fit."""
    taken: list[Saving] = []
    for new in list_savings(now.question, exact):
        if now.needs.total <= memory:
            break
        # Drop an earlier change that sets one of the new change's keys, because the new value
        # replaces its value.
        tried = [old for old in taken if not old.values.keys() & new.values.keys()] + [new]
        changed = forecast_change(now, merge_values(tried), apply)
        if changed:
            taken = tried
            now = changed
    return taken, now


def count_savings(now: Forecast) -> list[dict[str, Any]]:
    """Counts how many bytes of a run's peak memory each change saves by itself. Returns a dict for
    each change: its overrides (`words`), the `bytes` by which it lowers the peak, and a phrase on
    what it `costs`. The change that saves most comes first.

    Among the smaller micro-batches, the function counts only half the present size.
    """
    cfg = now.question.cfg
    rows = []
    for saving in list_savings(now.question):
        if saving.values.get(STEPS_KEY, 0) > 2 * cfg.accumulation_steps:
            continue
        changed = forecast_change(now, saving.values, make_apply(cfg))
        if changed:
            row = {"words": format_overrides(saving.values), "costs": saving.costs}
            rows.append(row | {"bytes": now.needs.total - changed.needs.total})
    return sorted(rows, key=lambda row: -row["bytes"])


def merge_values(savings: list[Saving]) -> dict[str, Any]:
    """Merges the changes of several savings into one dict, key -> value; for a key that several
    savings set, the last value wins."""
    return {key: value for saving in savings for key, value in saving.values.items()}


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Formats a candidate's changes as overrides in one string; "as given" if there are no
    changes."""
    return " ".join(format_overrides(changes)) or "as given"


def list_micro_batches(cfg: TrainConfig) -> list[Any]:
    """Lists the changes of accumulation_steps to try: twice as many, which halves the micro-batch,
    and half as many, if the number is even, which doubles the micro-batch."""
    steps = cfg.accumulation_steps
    return [{STEPS_KEY: 2 * steps}, *([{STEPS_KEY: steps // 2}] if steps % 2 == 0 else [])]
