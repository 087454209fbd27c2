"""Plans a run before it costs anything: whether it fits a GPU, how long it takes, what it costs.

    python -m scripts.plan model=ssd_mlp_xl data=resident data.path=latents/photos \\
        runtime=production batch_size=256 hardware=h100
    python -m scripts.plan <the same> rate_of=runs/my-fastrun price_per_hour=2.5

`hardware` is a name from training/hardware.py, or `here` for this machine's GPU, or its CPU. Where
the run does not fit, the cheapest change that makes it fit is looked for. Hours and cost come from
a rate: that of a run of yours (`rate_of`), one that you give (`samples_per_s`), or a share of the
card's peak (`mfu`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from accel.stack import TECHNIQUES
from common.errors import UserError
from common.files import read_object
from models.adapters import passes
from scripts.plan.fit import Changes, cheapest_change, savings, words_of
from scripts.plan.memory import CONTEXT, SLACK, Forecast, Question, forecast
from training.assemble import latents_of
from training.config.schema import TrainConfig
from training.hardware import CARDS, GIB, Card, card_called, device_name, memory_of
from training.weights.adapter_base import settled

HERE = "here"
RATES = ("samples_per_s", "rate_of", "mfu")


@dataclass(frozen=True)
class PlanConfig:
    """What to plan with; any other word is an override of the training configuration."""

    hardware: str | None = None
    """Null: this machine's GPU, and h100 without one."""
    gpus: int = 1
    price_per_hour: float | None = None
    """Of one GPU, in any currency."""
    samples_per_s: float | None = None
    """Of all GPUs together, as you know it."""
    rate_of: str | None = None
    """The folder of a run that has ended, such as a fastrun: its samples a second count."""
    mfu: float | None = None
    """Model FLOPs utilisation: the share of the peak that each GPU reaches."""
    json: bool = False

    def check(self) -> None:
        """ValueError for a value that no plan can have."""
        if self.gpus < 1 or (self.price_per_hour or 0.0) < 0.0:
            raise UserError(
                f"gpus={self.gpus} must be at least 1, price_per_hour={self.price_per_hour} at "
                "least 0."
            )
        given = [key for key in RATES if getattr(self, key) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} each say how fast the run is; give one.")
        if self.samples_per_s is not None and self.samples_per_s <= 0.0:
            raise UserError(f"samples_per_s={self.samples_per_s} must be above 0.")
        check_mfu(self.mfu)


def check_mfu(mfu: float | None) -> None:
    """ValueError for a share of the peak that is none."""
    if mfu is not None and not 0.0 < mfu <= 1.0:
        raise UserError(f"mfu={mfu} must be above 0 and at most 1.")


def known_card(hardware: str) -> Card:
    """The card of a name; ValueError for one that is not in the table."""
    if hardware not in CARDS:
        raise UserError(f"hardware={hardware} is not known; choose one of {', '.join(CARDS)}.")
    return CARDS[hardware]


def chosen_card(hardware: str | None) -> tuple[str, Card]:
    """The card to plan for, and what the user calls it; of this machine's its own memory counts."""
    on_gpu = torch.cuda.is_available()
    if hardware != HERE and not (hardware is None and on_gpu):
        name = hardware or "h100"
        return name, known_card(name)
    device = torch.device("cuda" if on_gpu else "cpu")
    name = device_name(device)
    card = card_called(name) or Card(name, half=0.0, memory=0.0, intra=0.0, inter=0.0)
    return HERE, card._replace(memory=memory_of(device))


def forecast_of(words: Sequence[str], cfg: PlanConfig, card: Card) -> Forecast:
    """The forecast of a run that these words describe."""
    train = settled([*words]).cfg
    spec, resident = latents_of(train.data, train.seed, card.memory)
    on_cpu = cfg.hardware == HERE and not torch.cuda.is_available()
    return forecast(Question(train, spec, cfg.gpus, resident, gpu=not on_cpu))


def rate(cfg: PlanConfig, found: Forecast, card: Card) -> float | None:
    """Samples a second of all GPUs; None where nothing says it."""
    if cfg.rate_of is not None:
        return rate_of_run(cfg.rate_of)
    if cfg.mfu is None:
        return cfg.samples_per_s
    if not card.half:
        raise UserError(
            f"mfu={cfg.mfu} is a share of a peak, and that of {card.name} is not known; give "
            "samples_per_s."
        )
    model = found.counted.model
    return cfg.gpus * cfg.mfu * card.half / (passes(model) * model.flops_per_sample())


def rate_of_run(folder: str) -> float:
    """Samples a second in the summary of a run; ValueError where there is none."""
    file = Path(folder).expanduser() / "summary.json"
    try:
        found = float(read_object(file)["samples_per_s"])
        if not 0.0 < found < float("inf"):
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"rate_of={folder}: {file} does not say samples_per_s; give the folder of a run that "
            "has ended."
        ) from error
    return found


def largest_micro_batch(found: Forecast, memory: float) -> int:
    """The most samples of a micro-batch that fit; 0 if one does not. Bytes are a straight line over
    the samples."""
    question = found.question
    here = question.samples
    other = max(1, here // 2) if here > 1 else 2
    batch = other * question.cfg.accumulation_steps * question.gpus
    at_other = forecast(replace(question, cfg=replace(question.cfg, batch_size=batch)))
    most = float("inf")
    for phase, needs in found.phases.items():
        slope = (needs.total - at_other.phases[phase].total) / (here - other)
        if slope > 0:
            most = min(most, here + (memory - needs.total) / slope)
        elif needs.total > memory:
            most = 0
    return max(0, int(min(most, 2**20)))


def planned(cfg: PlanConfig, words: list[str]) -> dict[str, Any]:
    """Everything that the plan says, ready for JSON; None for what is not known."""
    cfg.check()
    name, card = chosen_card(cfg.hardware)
    cfg = replace(cfg, hardware=name)
    found = forecast_of(words, cfg, card)
    needs = found.needs
    train = found.question.cfg
    samples = found.question.samples
    fits = needs.total <= card.memory
    per_second = rate(cfg, found, card)
    change = None if fits else change_that_fits(words, found, card.memory)
    hours = None if per_second is None else train.total_samples / per_second / 3600
    price = cfg.price_per_hour
    return {
        "hardware": name,
        "gpus": cfg.gpus,
        "fits": fits,
        "peak_gib": needs.total / GIB,
        "memory_gib": card.memory / GIB,
        "phase": found.phase,
        "parts_gib": {part: size / GIB for part, size in needs._asdict().items()},
        "phases_gib": {phase: some.total / GIB for phase, some in found.phases.items()},
        "kept_mib_a_block_and_sample": found.counted.kept
        / (found.counted.model.depth * samples * 2**20),
        "on_host_gib": found.lasting["on_host"] / GIB,
        "micro_batch": samples,
        "largest_micro_batch": largest_micro_batch(found, card.memory),
        "samples": train.total_samples,
        "samples_per_s": per_second,
        "hours": hours,
        "cost": None if hours is None or price is None else cfg.gpus * price * hours,
        "change": change,
        "not_counted": not_counted(train, found.question.gpu),
    }


def change_that_fits(words: list[str], now: Forecast, memory: float) -> dict[str, Any] | None:
    """The cheapest changes that make a run fit, ready for JSON; None if none do."""

    def applied(changes: Changes) -> TrainConfig:
        return settled([*words, *words_of(changes)]).cfg

    change = cheapest_change(now, memory, savings(now.question), applied)
    peak = change.forecast.needs.total
    if peak > memory:
        return None
    told = words_of(change.changes)
    return {"words": told, "costs": "; ".join(change.costs), "peak_gib": peak / GIB}


def not_counted(train: TrainConfig, gpu: bool) -> dict[str, list[str]]:
    """What the plan does not tell, and the keys of whose techniques; those of a `gpu` only for
    one."""
    values = train.runtime.values()
    found: dict[str, list[str]] = {}
    for kind in TECHNIQUES:
        options = {name: values[name] for name in kind.options}
        technique = kind(values[kind.key], torch.device("cpu"), **options)
        if technique.plan_note and technique.enabled and (gpu or not technique.unavailable()):
            found.setdefault(technique.plan_note, []).append(f"runtime.{kind.key}")
    return found


def texts(found: dict[str, Any]) -> str:
    """The plan as a table and sentences."""
    verdict = "fits" if found["fits"] else "does not fit"
    parts = found["parts_gib"]
    gpu = parts["context"] > 0.0
    lines = [f"{'part':<10} {'GiB':>6}"]
    for part, size in parts.items():
        if gpu or part not in ("context", "slack"):
            lines.append(f"{part:<10} {size:>6.2f}")
    phases = ", ".join(f"{phase} {size:.2f}" for phase, size in found["phases_gib"].items())
    on_host = found["on_host_gib"]
    lines += [
        "",
        f"{found['peak_gib']:.2f} GiB of {found['memory_gib']:.1f} on {found['gpus']} × "
        f"{found['hardware']}, in phase {found['phase']}: {verdict} (by phase: {phases})",
        f"micro-batch {found['micro_batch']}, largest that fits {found['largest_micro_batch']}; a "
        f"block keeps {found['kept_mib_a_block_and_sample']:.2f} MiB a sample"
        + (f"; {on_host:.2f} GiB lie in host memory" if on_host else ""),
        time_and_cost(found),
    ]
    if change := found["change"]:
        lines.append(
            f"cheapest change that fits: {' '.join(change['words'])} "
            f"({change['peak_gib']:.2f} GiB; it costs {change['costs']})"
        )
    elif not found["fits"]:
        lines.append(
            "no change that this plan knows makes it fit; use a smaller model, or several GPUs "
            "with fsdp."
        )
    lines.append("")
    for why, keys in found["not_counted"].items():
        lines.append(f"not told apart: {', '.join(keys)}: {why}")
    if gpu:
        lines.append(
            f"assumed: {CONTEXT / GIB:.1f} GiB of context and {SLACK:.0%} lost by the allocator. "
            "On a GPU: not measured yet."
        )
    return "\n".join(lines).rstrip()


def time_and_cost(found: dict[str, Any]) -> str:
    """The line that says how long the run takes, and what it costs where a price is given."""
    if found["hours"] is None:
        return (
            "no hours and no cost without a rate: give rate_of=<the folder of a fastrun>, "
            "samples_per_s= or mfu="
        )
    cost = f", {found['cost']:.2f} in all" if found["cost"] is not None else ""
    return (
        f"{found['hours']:.2f} hours for {found['samples']} samples at "
        f"{found['samples_per_s']:.1f} a second{cost}; evaluation, sampling and saving come on top"
    )


def report(cfg: PlanConfig, words: list[str]) -> str:
    found = planned(cfg, words)
    return json.dumps(found, indent=1) if cfg.json else texts(found)
