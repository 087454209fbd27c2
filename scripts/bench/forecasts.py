"""Measures for `bench counted`: scripts.plan counts memory and sizes of models on an H100 that need
not be here."""

from __future__ import annotations

from scripts.bench import BenchConfig, Case, Figures
from scripts.plan.largest import LargestConfig, forecast_largest
from scripts.plan.memory import forecast, make_question
from training.config.compose import compose
from training.environment import CARDS

CARD = CARDS["h100"]


def count_savings(case: Case, cfg: BenchConfig) -> Figures:
    """Counts by scripts.plan what a configuration and its baseline take of an H100, without one:
    bytes at the peak, of which `activations` are kept for the backward pass."""
    found: Figures = {}
    for which, words in (("baseline_", case.baseline), ("", case.overrides)):
        plan = forecast(make_question(compose(words).cfg, CARD.memory))
        found[f"{which}peak_bytes"] = plan.needs.total
        found[f"{which}activations_bytes"] = plan.kept
    for what in ("peak", "activations"):
        found[f"{what}_change"] = found[f"{what}_bytes"] / found[f"baseline_{what}_bytes"] - 1.0
    return found


def count_largest(case: Case, cfg: BenchConfig) -> Figures:
    """Counts by scripts.plan how deep a model fits H100s, and how many times the parameters of the
    deepest one of the baseline that has."""
    found: Figures = {}
    for which, words in (("baseline_", case.baseline), ("", case.overrides)):
        depth, plan = forecast_largest(LargestConfig(), words, "", CARD)
        found |= {f"{which}depth": depth, f"{which}parameters": plan.parameters}
        found["gpus"] = plan.question.gpus
    return found | {"times": found["parameters"] / found["baseline_parameters"]}
