"""Forecasts for the command `counted`, by scripts.plan: the memory of runs on an H100, and the
largest models that fit. This needs no H100."""

from __future__ import annotations

from scripts.bench import BenchConfig, Case, Figures
from scripts.plan.largest import LargestConfig, forecast_largest
from scripts.plan.memory import forecast, make_question
from training.config.compose import compose
from training.environment import CARDS

CARD = CARDS["h100"]


def count_savings(case: Case, cfg: BenchConfig) -> Figures:
    """Forecasts memory on an H100 for the case's overrides and for its baseline: the peak bytes of
    a step, and the bytes of activations kept for the backward pass. Returns these four figures, and
    the two relative changes from the baseline to the case."""
    figures: Figures = {}
    for prefix, words in (("baseline_", case.baseline), ("", case.overrides)):
        plan = forecast(make_question(compose(words).cfg, CARD.memory))
        figures[f"{prefix}peak_bytes"] = plan.needs.total
        figures[f"{prefix}activations_bytes"] = plan.kept
    for name in ("peak", "activations"):
        ratio = figures[f"{name}_bytes"] / figures[f"baseline_{name}_bytes"]
        figures[f"{name}_change"] = ratio - 1.0
    return figures


def count_largest(case: Case, cfg: BenchConfig) -> Figures:
    """Finds the largest depth whose model fits the memory of an H100 (of each of 8 H100s if the
    overrides shard the model), for the case's overrides and for its baseline. Also returns the
    parameters of both models and the ratio of these two numbers."""
    figures: Figures = {}
    for prefix, words in (("baseline_", case.baseline), ("", case.overrides)):
        depth, plan = forecast_largest(LargestConfig(), words, "", CARD)
        figures |= {f"{prefix}depth": depth, f"{prefix}parameters": plan.parameters}
        figures["gpus"] = plan.question.gpus
    return figures | {"times": figures["parameters"] / figures["baseline_parameters"]}
