"""Makes the plan of a run, as figures and as text; searches for the fastest techniques, and writes
them to a runtime file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from jinja2 import Template

from common.config.compose import to_yaml
from common.config.schema import Positive, refuse_values
from common.config.words import CONF_FOLDER
from common.distributed.ranks import SINGLE
from common.environment import (
    Card,
    describe_environment,
    find_card,
    get_device_name,
    match_card,
    memory_of,
    pick_device,
)
from common.errors import UserError
from common.files import read_object, write_atomically
from common.memory import GIB
from common.text import format_table, is_figure
from scripts.plan.changes import (
    count_savings,
    find_cheapest_change,
    find_largest,
    format_overrides,
    list_savings,
    merge_values,
)
from scripts.plan.memory import ALLOCATOR_SLACK, CONTEXT_BYTES, Forecast, forecast
from scripts.plan.question import make_question
from training.preflight.tune import STEPS_KEY, tune_config
from training.weights.first_weights import compose_pretrained

HERE = "here"
MAX_SAMPLES = 2**20
"""Largest micro-batch that the search tries."""


@dataclass(frozen=True)
class PlanConfig:
    """Keys of the command that plans a run; any other argument is an override of the training
    configuration."""

    hardware: str | None = None
    """Name of a GPU model, or `here` for this machine; null: this machine's GPU, or h100 if it has
    none."""
    gpus: Positive = 1
    """Number of GPUs, all in one run."""
    price_per_hour: Annotated[float, Ge(0)] | None = None
    """Price of one GPU per hour, in any currency."""
    samples_per_s: Annotated[float, Gt(0)] | None = None
    """Samples per second of all GPUs together, if you know this number."""
    rate_of: str | None = None
    """The folder of a run that has ended, such as a fastrun; the plan assumes its samples per
    second."""
    mfu: Annotated[float, Gt(0), Le(1)] | None = None
    """Model FLOPs utilisation: the share of its peak FLOP/s that each GPU is assumed to reach."""
    json: bool = False
    """Print one object, as `--json` does."""


@dataclass(frozen=True)
class TuneConfig:
    """Keys of the command `tune`; any other argument is an override of the training
    configuration."""

    out: str | None = None
    """File to which the command writes the fastest runtime keys; null: conf/runtime/tuned.yaml,
    which runtime=tuned selects."""
    seconds: float = 120.0
    """Longest time, in seconds, that measuring may take."""


def choose_card(hardware: str | None) -> tuple[str, Card]:
    """Returns the name of the GPU model to plan for, and its memory and peak FLOP/s.
    For this machine (`here`) the memory is the number of bytes that the machine reports."""
    device = pick_device("auto")
    name = hardware or (HERE if device.type == "cuda" else "h100")
    if name != HERE:
        return name, find_card(name)
    driver = get_device_name(device)
    card = match_card(driver) or Card(driver, flops_16bit=0.0, memory=0.0)
    return HERE, card._replace(memory=memory_of(device))


def forecast_run(words: Sequence[str], cfg: PlanConfig, card: Card) -> Forecast:
    """Forecasts the memory of the run that these overrides describe."""
    train = compose_pretrained([*words]).cfg
    return forecast(make_question(train, card.memory, cfg.gpus, gpu=card.name != "cpu"))


def find_rate(cfg: PlanConfig, plan: Forecast, card: Card) -> float | None:
    """Returns the samples per second of all GPUs together, or None if no key states a rate.
    UserError if `mfu` is set and the GPU's peak FLOP/s are unknown, or if the run that `rate_of`
    names states no rate."""
    if cfg.mfu is not None:
        if not card.flops_16bit:
            raise UserError(
                f"mfu={cfg.mfu} is a share of a peak, and that of {card.name} is not known; give "
                "samples_per_s."
            )
        return cfg.gpus * cfg.mfu * card.flops_16bit / plan.network.count_train_flops()
    if cfg.rate_of is None:
        return cfg.samples_per_s

    file = Path(cfg.rate_of).expanduser() / "summary.json"
    measured = read_object(file).get("samples_per_s") if file.is_file() else None
    if not is_figure(measured) or not 0.0 < measured < inf:
        raise UserError(
            f"rate_of={cfg.rate_of}: {file} does not say samples_per_s; give the folder of a run "
            "that has ended."
        )
    return measured


def find_largest_micro_batch(plan: Forecast, memory: float) -> int:
    """Returns the number of samples of the largest micro-batch that fits `memory` bytes, by
    extrapolating the bytes of each phase linearly over the samples; 0 if none fits."""
    question = plan.question
    samples = question.samples
    other = max(1, samples // 2) if samples > 1 else 2
    batch = other * question.cfg.accumulation_steps * question.gpus
    at_other = forecast(replace(question, cfg=replace(question.cfg, batch_size=batch)))
    totals = [(plan.phases[name].total, at_other.phases[name].total) for name in plan.phases]

    def extrapolate(number: int) -> float:
        share = (number - samples) / (samples - other)
        return max(now + share * (now - then) for now, then in totals)

    return find_largest(extrapolate, memory, samples, 1, MAX_SAMPLES)


def plan_run(cfg: PlanConfig, words: list[str]) -> dict[str, Any]:
    """Plans a run. Returns the figures of the plan, ready for JSON: name of a figure -> its value,
    or None if the value is unknown."""
    refuse_values(cfg)
    rates = [key for key in ("samples_per_s", "rate_of", "mfu") if vars(cfg)[key] is not None]
    if len(rates) > 1:
        raise UserError(f"{' and '.join(rates)} each say how fast the run is; give one.")

    name, card = choose_card(cfg.hardware)
    plan = forecast_run(words, cfg, card)
    train = plan.question.cfg
    samples = plan.question.samples
    fits = plan.needs.total <= card.memory
    per_second = find_rate(cfg, plan, card)
    hours = per_second and train.total_samples / per_second / 3600
    price = cfg.price_per_hour

    # Find the cheapest changes that make the run fit, if there are any.
    taken, changed = find_cheapest_change(plan, card.memory, list_savings(plan.question))
    change = {
        "words": format_overrides(merge_values(taken)),
        "costs": "; ".join(saving.costs for saving in taken),
        "peak_gib": changed.needs.total / GIB,
    }
    return {
        "hardware": name,
        "gpus": cfg.gpus,
        "fits": fits,
        "peak_gib": plan.needs.total / GIB,
        "memory_gib": card.memory / GIB,
        "phase": plan.phase,
        "parts_gib": {part: size / GIB for part, size in plan.needs._asdict().items()},
        "phases_gib": {phase: needs.total / GIB for phase, needs in plan.phases.items()},
        "kept_mib_a_block_and_sample": plan.kept / (plan.network.model.depth * samples * 2**20),
        "on_host_gib": plan.lasting["on_host"] / GIB,
        "micro_batch": samples,
        "tokens": plan.network.tokens,
        "largest_micro_batch": find_largest_micro_batch(plan, card.memory),
        "samples": train.total_samples,
        "samples_per_s": per_second,
        "hours": hours,
        "cost": None if hours is None or price is None else cfg.gpus * price * hours,
        "change": change if taken and changed.needs.total <= card.memory else None,
        "savings": [] if fits else count_savings(plan),
    }


def plan(cfg: PlanConfig, words: list[str]) -> str:
    """Plans a run; returns its figures as JSON, or as text by plan.txt.jinja."""
    figures = plan_run(cfg, words)
    if cfg.json:
        return json.dumps(figures, indent=1)
    template = Template(Path(__file__).with_name("plan.txt.jinja").read_text(), trim_blocks=True)
    return template.render(
        figures, table=format_table, context_gib=CONTEXT_BYTES / GIB, slack=ALLOCATOR_SLACK
    )


def tune(cfg: TuneConfig, words: list[str]) -> str:
    """Tries techniques, writes the fastest combination to a runtime file, and returns a table of
    all combinations that it tried.

    UserError if nothing was measured, if the folder of `out` does not exist, or if `out` is the
    runtime file from which the search starts.
    """
    composed = compose_pretrained([*words, f"runtime.tune_seconds={cfg.seconds}"])
    file = Path(cfg.out).expanduser() if cfg.out else CONF_FOLDER / "runtime" / "tuned.yaml"
    if not file.parent.is_dir():
        raise UserError(
            f"out={file}: there is no folder {file.parent}; make it, or choose another file."
        )
    base = composed.choices["runtime"]
    if base == "auto":
        base = "fast"
    if base == file.stem:
        raise UserError(
            f"runtime={base} would be based on itself in {file}; start from another one, such as "
            "runtime=fast."
        )

    device = pick_device(composed.cfg.runtime.device)
    _, choice = tune_config(composed.cfg, device, SINGLE)
    tried = choice["tried"]
    if not any(row["step_ms"] for row in tried):
        refusals = "; ".join(f"{row['words']}: {row['note']}" for row in tried)
        raise UserError(
            f"seconds={cfg.seconds}: nothing was measured ({refusals}); give more seconds."
        )

    # In the new file, `defaults` names the runtime file from which the search started; the changes
    # that the search found follow it.
    runtime = dict(choice["changes"])
    steps = runtime.pop(STEPS_KEY, None)
    text = (
        f"# The fastest of {len(tried)} on {describe_environment(device)['hardware']}, for: "
        f"{' '.join(words)}\n"
    )
    if steps is not None:
        text += f"# It goes with accumulation_steps={steps}.\n"
    write_atomically(file, text + to_yaml({"defaults": [base, "_self_"]} | runtime))
    rows = [(r["words"], r["step_ms"], r["steps"] or None, r["note"]) for r in tried]
    listed = format_table([("candidate", "ms/step", "steps", ""), *rows])
    return f"{listed}\n\n{choice['words']}: written to {file}"
