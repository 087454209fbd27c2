"""Measures how many times faster than a baseline a configuration trains, for the leaderboard in
docs/speedrun.md.

A configuration is k times faster if a run of its own, which takes 1/k of the seconds of the
baseline's run and has its own schedule, is no worse: the median of a figure over the seeds is at
most the baseline's. The seconds are those of training steps alone: seconds of the process on a CPU,
which other processes on the machine hardly change, or seconds of a synchronised GPU. A run gets its
length from them as a number of samples: `find_cost` times steps of both configurations in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import isnan, nan
from typing import Any

from common.config.compose import compose
from common.errors import UserError
from common.text import replace_non_finite
from evaluation.evaluator import TrainingDistances
from scripts.bench import TABLES, Case, Figures, SpeedrunConfig, Words
from scripts.bench.measure import compare, device_of
from scripts.bench.rows import format_entries
from scripts.bench.step import Workload
from scripts.timing import measure_seconds, summarise
from training.evaluate import evaluate
from training.weights.pretrained import build_autoencoder

SHARED_OVERRIDES = ("data", "sampling.", "fd.", "runtime.device=")
"""Beginnings of the user's overrides that apply to all runs of a leaderboard, the baseline too."""
CLOCKS = {"cuda": time.perf_counter, "cpu": time.process_time}
"""Type of a device -> clock of its training steps: wall time, or the seconds for which all threads
of this process computed."""


def plan_rows(command: Any, cfg: SpeedrunConfig, words: Words, boards: Any) -> Iterator[Case]:
    """Plans a case for each row of the leaderboard, or, if the user gave overrides of a training
    run, one case with these overrides. The case's baseline is the row `cfg.baseline`."""
    rows = boards.get(cfg.setting, {})
    if cfg.baseline not in rows:
        raise UserError(
            f"setting={cfg.setting} has no row {cfg.baseline}; scripts/bench/cases.yaml lists the "
            "settings and rows."
        )
    if min(cfg.speedups, default=0.0) <= 0.0:
        raise UserError(f"speedups={cfg.speedups} must be numbers above 0.")

    # Keep all overrides of the setting, also those of a group that the user overrides, because all
    # rows have its patch size and width.
    common = TABLES["settings"][cfg.setting]["words"].split()
    shared = [word for word in words if word.startswith(SHARED_OVERRIDES) and word not in common]
    common += shared
    own = [word for word in words if word not in common]
    chosen = {" ".join(own): own} if own else {n: row.split() for n, row in rows.items()}

    baseline = [*common, *rows[cfg.baseline].split()]
    labels = {
        "board": (
            f"{' '.join([str(cfg.setting), *shared])}, {cfg.total_samples:,} samples, "
            f"{len(cfg.seeds)} seeds, {cfg.sets} sets, against {cfg.baseline}"
        )
    }
    for name, row in chosen.items():
        yield Case(name, command.measure, [*common, *row], baseline, labels=labels)


def find_cost(case: Case, cfg: SpeedrunConfig) -> Figures:
    """Times steps of the case and of its baseline in turn. Returns the figures of `compare`;
    `cost`, the seconds of a sample divided by those of the baseline, with its quartiles; and
    `flops_ratio`, the same for FLOPs."""
    figures = compare(case, cfg, CLOCKS[device_of(case.baseline).type])
    return {
        # A row of the leaderboard is not judged by the speed of its steps.
        **{name: value for name, value in figures.items() if not name.startswith("speed")},
        # Name only techniques that the case lost and its baseline did not: after a loss the next
        # case starts a new process, which has no finished runs of the baseline.
        "not_on": sorted({*figures["not_on"]} - {*figures["baseline_not_on"]}),
        "cost": 1.0 / figures["speed"],
        "cost_q1": 1.0 / figures["speed_q3"],
        "cost_q3": 1.0 / figures["speed_q1"],
        "flops_ratio": figures["flops_a_sample"] / figures["baseline_flops_a_sample"],
    }


def count_samples(samples: int, times_faster: float, cost: float, batch_size: int) -> int:
    """Returns the number of samples, in whole steps, for which a run may train that takes no more
    than 1/`times_faster` of the baseline's seconds. The baseline trains for `samples`; `cost` is
    the seconds of a sample divided by those of the baseline."""
    return int(samples / (times_faster * cost * batch_size)) * batch_size


@cache
def train_run(words: tuple[str, ...], samples: int, seed: int, sets: int) -> dict[str, float]:
    """Trains a run with the overrides `words` for `samples` samples. Returns the figures of its
    averaged weights, and the `seconds` of its steps.

    A distance is the mean over `sets` sets of generated samples, because the noise of one set is
    some percent; it is NaN if it cannot be computed. The function keeps its results, so that the
    cases of one command share the runs of their baseline.
    """
    workload = Workload([*words, f"total_samples={samples}", f"seed={seed}"])
    training = workload.training
    steps = samples // workload.cfg.batch_size
    device = workload.device
    seconds = measure_seconds(lambda: workload.run(steps), device, CLOCKS[device.type])

    spec = training.loader.spec
    distances = TrainingDistances(training, build_autoencoder(spec, device))
    drawn = []
    for number in range(sets):
        distances.stream = replace(distances.stream, seed=number)
        drawn.append(distances())
    means = {name: sum(one.get(name, nan) for one in drawn) / sets for name in list_figures(words)}
    return means | evaluate(training) | {"seconds": seconds}


def list_figures(words: Sequence[str]) -> Words:
    """Lists the names of the figures by which runs of the overrides `words` are compared: the
    Fréchet distance in each feature space, and last the held-out loss. Smaller is better."""
    return [*(f"fd_{space}" for space in compose(words).cfg.fd.spaces), "eval_loss"]


def train_seeds(words: Words, samples: int, cfg: SpeedrunConfig) -> Figures:
    """Trains a run from each seed. Returns the figures of the runs, and the median and the range of
    each figure, which are NaN if the figure of one seed is NaN."""
    runs = [train_run(tuple(words), samples, seed, cfg.sets) for seed in cfg.seeds]
    result: Figures = {"samples": samples, "runs": runs}
    for name in list_figures(words):
        result |= summarise(name, [run[name] for run in runs])
    return result


def climb(
    speedups: Iterable[float], baseline: Figures, train: Callable[[float], Figures]
) -> tuple[list[Figures], dict[str, float]]:
    """Tries the speed-ups in ascending order: `train(k)` trains runs that take 1/k of the
    baseline's seconds. Returns a list of what `train` returned, with `times_faster` (k); and a
    dict: name of a figure of `baseline` -> the largest speed-up such that, there and at all smaller
    ones, the figure was at most the baseline's; 0 if there is none.

    Stops at the speed-up at which the last figure is worse. A figure that was worse once is not
    compared again: a second attempt would be another chance to be lucky.
    """
    attempts = []
    left = [*baseline]
    best = dict.fromkeys(left, 0.0)
    for times_faster in sorted(speedups):
        attempt = train(times_faster)
        attempts.append({"times_faster": times_faster, **attempt})
        left = [name for name in left if attempt[name] <= baseline[name]]
        best |= dict.fromkeys(left, times_faster)
        if not left:
            break
    return attempts, best


def measure_speedup(case: Case, cfg: SpeedrunConfig) -> Figures:
    """Measures how many times faster than its baseline the case trains. Returns the largest
    speed-up at which it is no worse in both feature spaces (`k`) and in each figure (`k_<figure>`),
    and all attempts.

    `k_flops` is the ratio of the baseline's FLOPs to those of the case's runs at `k`. UserError if
    the baseline has no figures to compare with.
    """
    cost = find_cost(case, cfg)
    baseline = train_seeds(case.baseline, cfg.total_samples, cfg)
    names = list_figures(case.baseline)
    keys = ("data.path", "model.prediction")
    own, others = ({w for w in ws if w.startswith(keys)} for ws in (case.overrides, case.baseline))
    if own != others:
        names.remove("eval_loss")  # losses of other latents, or weighed otherwise, say nothing
    goals = {name: baseline[name] for name in names}
    for name, value in goals.items():
        if isnan(value):
            raise UserError(
                f"baseline={cfg.baseline} has no {name}: its samples are not finite, or fd.count "
                "is too small; choose another baseline, or raise fd.count."
            )

    def train(times_faster: float) -> Figures:
        samples = count_samples(cfg.total_samples, times_faster, cost["cost"], cost["batch_size"])
        return train_seeds(case.overrides, samples, cfg)

    attempts, best = climb(cfg.speedups, goals, train)
    k = min(value for name, value in best.items() if name != "eval_loss")
    rows = [{"times_faster": "baseline", **baseline}, *attempts]
    table, *_ = format_entries("attempts", [{"name": case.name, **row} for row in rows])
    return {
        **cost,
        "k": k,
        **{f"k_{name}": value for name, value in best.items()},
        "k_flops": k * cost["cost"] / cost["flops_ratio"],
        "baseline": baseline,
        "first": replace_non_finite(attempts[0]),
        "tried": [attempt["times_faster"] for attempt in attempts],
        "attempts": replace_non_finite(attempts),
        "text": table,
    }
