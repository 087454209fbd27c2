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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import isfinite, nan
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from common.text import replace_non_finite
from evaluation.evaluator import TrainingDistances
from scripts.bench import Case, Figures, SpeedrunConfig, Words
from scripts.bench.step import Workload, time_steps
from scripts.commands import format_table
from scripts.timing import compute_ratios, measure_seconds, summarise
from training.evaluate import evaluate
from training.weights.pretrained import build_autoencoder

SPACES = ("fd_encoder", "fd_random")
FIGURES = (*SPACES, "eval_loss")
"""Names of the figures by which runs are compared; smaller is better."""


def choose_clock(device: torch.device) -> Callable[[], float]:
    """Returns the clock for training steps: of wall time on a GPU, else of the seconds for which
    all threads of this process computed."""
    return time.perf_counter if device.type == "cuda" else time.process_time


def find_cost(case: Case, cfg: SpeedrunConfig) -> Figures:
    """Times steps of the case and of its baseline in turn. Returns the figures of the case's steps;
    `cost`, the seconds of a sample divided by those of the baseline; and `flops_ratio`, the same
    for FLOPs."""
    base = Workload(case.baseline)
    loops = {"base": base}
    if case.overrides != case.baseline:
        loops["case"] = Workload(case.overrides)
    times = time_steps(loops, cfg.steps, cfg.repeats, choose_clock(base.device))

    loop = loops.get("case", base)
    step_ms = times.get("case", times["base"])
    figures = loop.describe_steps(step_ms)
    batch_ratio = base.cfg.batch_size / loop.cfg.batch_size
    ratios = [batch_ratio * ratio for ratio in compute_ratios(step_ms, times["base"])]
    base_flops = base.training.state.meter.train_flops
    return {
        **figures,
        **summarise("cost", ratios),
        "flops_ratio": figures["flops_a_sample"] / base_flops,
        # Name only techniques that the case lost and its baseline did not.
        "not_on": sorted({*figures["not_on"]} - {*base.list_missing()}),
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
    some percent. A figure that cannot be computed is NaN. The function keeps its results, so that
    the cases of one command share the runs of their baseline.
    """
    workload = Workload([*words, f"total_samples={samples}", f"seed={seed}"])
    training = workload.training
    run = partial(workload.run, samples // workload.cfg.batch_size)
    seconds = measure_seconds(run, workload.device, choose_clock(workload.device))

    spec = training.loader.spec
    distances = TrainingDistances(training, build_autoencoder(spec, workload.device))
    drawn = []
    for number in range(sets):
        distances.stream = replace(distances.stream, seed=number)
        drawn.append(distances())
    means = {name: sum(one.get(name, nan) for one in drawn) / sets for name in SPACES}
    return means | {"eval_loss": evaluate(training).get("eval_loss", nan), "seconds": seconds}


def train_seeds(words: Words, samples: int, cfg: SpeedrunConfig) -> Figures:
    """Trains a run from each seed; returns the figures of each run, and their medians, which are
    NaN if the figure of one seed is NaN."""
    runs = [train_run(tuple(words), samples, seed, cfg.sets) for seed in cfg.seeds]
    medians = {name: float(np.median([run[name] for run in runs])) for name in FIGURES}
    return {"samples": samples, "medians": medians, "runs": runs}


def climb(
    speedups: Iterable[float], baseline: Figures, train: Callable[[float], Figures]
) -> list[Figures]:
    """Tries the speed-ups in ascending order: `train(k)` trains runs that take 1/k of the
    baseline's seconds. Returns what `train` returned for each, with `times_faster` (k) and
    `no_worse`, the names of the figures that are at most the baseline's for this k and for all
    smaller ones.

    Stops after the first speed-up at which no figure is left. A figure that was worse once is not
    compared again, so chance gets no second attempt.
    """
    attempts = []
    left = list(FIGURES)
    for times_faster in sorted(speedups):
        attempt = train(times_faster)
        medians = attempt["medians"]
        left = [name for name in left if medians[name] <= baseline["medians"][name]]
        attempts.append({"times_faster": times_faster, **attempt, "no_worse": left})
        if not left:
            break
    return attempts


def find_largest(attempts: Sequence[Figures], names: Iterable[str]) -> float:
    """Returns the largest speed-up at which none of the figures `names` is worse than the
    baseline's; 0 if there is none."""
    passed = [one["times_faster"] for one in attempts if {*names} <= {*one["no_worse"]}]
    return max(passed, default=0.0)


def format_attempts(name: str, baseline: Figures, attempts: Sequence[Figures]) -> str:
    """Formats a table of the baseline and all attempts: for each figure the median, the smallest
    and the largest value over the seeds."""
    rows: list[Sequence[object]] = [(name, "samples", *FIGURES, "no worse in")]
    base: Figures = {"times_faster": "baseline", "no_worse": []}
    for attempt in (baseline | base, *attempts):
        cells = []
        for figure in FIGURES:
            values = [run[figure] for run in attempt["runs"]]
            median = attempt["medians"][figure]
            cells.append(f"{median:.4g} ({min(values):.4g}–{max(values):.4g})")
        no_worse = ", ".join(attempt["no_worse"])
        rows.append((attempt["times_faster"], attempt["samples"], *cells, no_worse))
    return format_table(rows)


def measure_speedup(case: Case, cfg: SpeedrunConfig) -> Figures:
    """Measures how many times faster than its baseline the case trains. Returns the largest
    speed-up at which it is no worse in both feature spaces (`k`) and in each figure (`k_<figure>`),
    and all attempts.

    `k_flops` is the ratio of the baseline's FLOPs to those of the case's runs at `k`. UserError if
    the baseline has no figures to compare with.
    """
    figures = find_cost(case, cfg)
    baseline = train_seeds(case.baseline, cfg.samples, cfg)
    missing = [name for name, value in baseline["medians"].items() if not isfinite(value)]
    if missing:
        raise UserError(
            f"the baseline has no {', '.join(missing)}: its samples are not finite, or fd.count is "
            "too small; correct the baseline, or raise fd.count."
        )

    def train(times_faster: float) -> Figures:
        cost = figures["cost"]
        samples = count_samples(cfg.samples, times_faster, cost, figures["batch_size"])
        return train_seeds(case.overrides, samples, cfg)

    attempts = climb(cfg.speedups, baseline, train)
    k = find_largest(attempts, SPACES)
    result: dict[str, Any] = {
        **figures,
        "k": k,
        **{f"k_{name}": find_largest(attempts, [name]) for name in FIGURES},
        "k_flops": k * figures["cost"] / figures["flops_ratio"],
        "seeds": len(cfg.seeds),
        "baseline": baseline,
        "attempts": attempts,
        "text": format_attempts(case.name, baseline, attempts),
    }
    return replace_non_finite(result)
