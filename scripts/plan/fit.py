"""Finds the cheapest changes that make a run fit its memory, by forecasts."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from accel.stack import TECHNIQUES
from accel.technique import Saving
from scripts.plan.memory import Forecast, Question, forecast
from training.config.schema import TrainConfig
from training.tune import STEPS

USEFUL = 0.99
"""Share of the peak below which a change must bring it."""
WORTH = 8
"""Samples of a micro-batch below which recomputing is tried first."""
SMALLER = 20
"""The rank of more micro-batches; with few samples in each `MUCH_SMALLER`."""
MUCH_SMALLER = 50
EIGHT_BIT = Saving({"optim": "adamw_8bit"}, "8-bit moments", 60)
Changes = Mapping[str, Any]
"""Runtime key, accumulation_steps or optim -> plain value."""


class Change(NamedTuple):
    """Changes, what each costs, and what the run then takes."""

    changes: Changes
    costs: list[str]
    forecast: Forecast


def words_of(changes: Changes) -> list[str]:
    """The overrides that changes amount to."""
    names = {key: key if key in (STEPS, "optim") else f"runtime.{key}" for key in changes}
    return [f"{names[key]}={str(value).lower()}" for key, value in changes.items()]


def savings(question: Question, exact: bool = False) -> list[tuple[Changes, str]]:
    """Changes that save memory, and what they cost, the cheapest first; `exact` ones leave what is
    computed as it is."""
    kinds = [kind for kind in TECHNIQUES if not exact or kind.loss_rtol == 0.0]
    found = [saving for kind in kinds for saving in kind.savings]
    if not exact:
        found.append(EIGHT_BIT)
    times = 2
    while question.samples % times == 0:
        rank = SMALLER if question.samples // times >= WORTH else MUCH_SMALLER
        steps = times * question.cfg.accumulation_steps
        found.append(Saving({STEPS: steps}, "smaller products", rank + times.bit_length()))
        times *= 2

    # What has one rank is tried together.
    together: dict[int, tuple[Changes, str]] = {}
    for saving in sorted(found, key=lambda saving: saving.rank):
        values = together.get(saving.rank, ({}, ""))[0]
        together[saving.rank] = ({**values, **saving.values}, saving.costs)
    return list(together.values())


def cheapest_change(
    now: Forecast,
    memory: float,
    proposed: list[tuple[Changes, str]],
    applied: Callable[[Changes], TrainConfig],
) -> Change:
    """The proposed changes, one on top of the other until the run fits, or all; those that save
    less than a hundredth are left out, and so are those that do not go with the rest, for which
    `applied` raises ValueError."""
    taken: list[tuple[Changes, str]] = []
    for new, costs in proposed:
        if now.needs.total <= memory:
            break
        others = [pair for pair in taken if not pair[0].keys() & new.keys()]
        tried = [*others, (new, costs)]
        try:
            cfg = applied(merged(tried))
            if cfg == now.question.cfg:
                continue
            found = forecast(replace(now.question, cfg=cfg))
        except (ValueError, ImportError):  # an optimizer's library may be missing
            continue
        if found.needs.total < USEFUL * now.needs.total:
            taken = tried
            now = found
    return Change(merged(taken), [costs for _, costs in taken], now)


def merged(pairs: list[tuple[Changes, str]]) -> dict[str, Any]:
    return dict(ChainMap(*(dict(changes) for changes, _ in reversed(pairs))))
