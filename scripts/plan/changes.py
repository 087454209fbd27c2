"""Tries changes of a run on its forecast: what each saves, the cheapest ones that make the run fit,
and the largest batch or depth that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from accel.stack import TECHNIQUES
from accel.technique import Saving
from common.config.compose import compose
from scripts.plan.memory import Forecast, forecast
from scripts.plan.question import Question
from training.preflight.tune import STEPS_KEY, apply_changes

USEFUL_SHARE = 0.99
"""`try_savings` drops a change unless it lowers the peak memory to less than this share of the peak
without it."""
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


def format_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Formats changes (key -> value) as overrides, such as runtime.compile=true. The keys are
    runtime keys, accumulation_steps or optim."""
    words = [f"{key}={str(value).lower()}" for key, value in changes.items()]
    return [word if word.startswith((STEPS_KEY, OPTIM)) else f"runtime.{word}" for word in words]


def merge_values(savings: Iterable[Saving]) -> dict[str, Any]:
    """Merges the changes of several savings into one dict, key -> value; for a key that several
    savings set, the last value wins."""
    return {key: value for saving in savings for key, value in saving.values.items()}


def list_savings(question: Question, exact: bool = False) -> list[Saving]:
    """Lists the changes that could save memory in a run, those with the least cost first. With
    `exact` it leaves out changes that alter the losses."""
    savings = [] if exact else [Saving({OPTIM: "adamw_8bit"}, "8-bit moments", 60)]
    for kind in TECHNIQUES:
        if not exact or kind.loss_rtol == 0.0:
            savings += kind.planning.savings
    times = 2
    while question.samples % times == 0:
        first = SMALLER_ORDER if question.samples // times >= FEW_SAMPLES else MUCH_SMALLER_ORDER
        steps = times * question.cfg.accumulation_steps
        savings.append(Saving({STEPS_KEY: steps}, "smaller products", first + times.bit_length()))
        times *= 2

    # Merge savings with the same `rank` into one, because the search tries their changes together.
    rank = attrgetter("rank")
    groups = [list(group) for _, group in groupby(sorted(savings, key=rank), rank)]
    return [group[-1]._replace(values=merge_values(group)) for group in groups]


def change_run(now: Forecast, values: Mapping[str, Any]) -> Forecast | None:
    """Returns the forecast of the run with the changes `values`; None if these change nothing,
    contradict other keys, or need a library that is missing."""
    cfg = now.question.cfg
    runtime = {key: value for key, value in values.items() if key != OPTIM}
    try:
        changed = apply_changes(cfg, runtime)
        if OPTIM in values:
            changed = replace(changed, optim=compose([f"{OPTIM}={values[OPTIM]}"]).cfg.optim)
        return None if changed == cfg else forecast(replace(now.question, cfg=changed))
    except (ValueError, ImportError):
        return None


def try_savings(
    now: Forecast, savings: Iterable[Saving], together: bool = False
) -> Iterator[tuple[list[Saving], Forecast]]:
    """Yields each change that saves at least 1 % of the peak, and the forecast of the run with it:
    by itself or, if `together`, with the changes that were yielded before."""
    taken: list[Saving] = []
    peak = now.needs.total
    for new in savings:
        # Drop an earlier change that sets one of the new change's keys, because the new value
        # replaces its value.
        tried = [old for old in taken if not old.values.keys() & new.values.keys()] + [new]
        changed = change_run(now, merge_values(tried))
        if changed and changed.needs.total < USEFUL_SHARE * peak:
            yield tried, changed
            if together:
                taken = tried
                peak = changed.needs.total


def find_cheapest_change(
    now: Forecast, memory: float, savings: Iterable[Saving]
) -> tuple[list[Saving], Forecast]:
    """Adds changes that save memory, the cheapest first, until the run fits `memory` bytes. Returns
    the changes and the forecast of the run with these changes, even if this run still does not
    fit."""
    found: tuple[list[Saving], Forecast] = ([], now)
    tries = try_savings(now, savings, together=True)
    while found[1].needs.total > memory and (better := next(tries, None)):
        found = better
    return found


def count_savings(now: Forecast) -> list[dict[str, Any]]:
    """Counts how many bytes of a run's peak memory each change saves by itself. Returns a dict for
    each change: its overrides (`words`), the `bytes` by which it lowers the peak, and a phrase on
    what it `costs`. The change that saves most comes first.

    Among the smaller micro-batches, the function counts only half the present size.
    """
    most = 2 * now.question.cfg.accumulation_steps
    savings = [s for s in list_savings(now.question) if s.values.get(STEPS_KEY, 0) <= most]
    rows = [
        {
            "words": format_overrides(saving.values),
            "costs": saving.costs,
            "bytes": now.needs.total - changed.needs.total,
        }
        for (saving,), changed in try_savings(now, savings)
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def find_largest(
    count_bytes: Callable[[int], float], memory: float, start: int, least: int, most: int
) -> int:
    """Finds the largest number, of blocks or samples, from `least` to `most`, for which a step
    needs at most `memory` bytes by `count_bytes(number)`; `least` - 1 if there is none. `start` is
    the first number to try.

    Bytes are nearly linear in the number. The next number to try is the one at which a line through
    the latest two points reaches `memory` bytes, so the search needs few counts.
    """
    sizes: list[tuple[int, float]] = []
    number = start
    while True:
        sizes.append((number, count_bytes(number)))
        fits = max((n for n, size in sizes if size <= memory), default=least - 1)
        too_large = min((n for n, size in sizes if size > memory), default=most + 1)
        if too_large - fits == 1:
            return fits

        number = start // 2
        if len(sizes) > 1:
            (n_before, size_before), (n, size) = sizes[-2:]
            slope = (size - size_before) / (n - n_before)
            number = int(n + (memory - size) / slope) if slope > 0 else most
        number = min(max(number, fits + 1), too_large - 1)
