"""Predicts whether a run fits a GPU, how long it takes and what it costs, on any machine.

    python -m scripts.plan model=ssd_mlp_xl data=resident data.path=latents/photos
    runtime=production batch_size=256 \\
        hardware=h100 price_per_hour=2.5

`hardware` is a name from training/hardware.py, or `here` for this machine: its GPU at the rates
that `python -m scripts.doctor --measure` found, or its CPU, without times. Where the run does not
fit, the cheapest change that makes it fit is looked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from common.errors import UserError
from scripts.plan.network import exposed
from scripts.plan.scale import known_card
from scripts.tables import table
from training.components import latents_of
from training.config.schema import KERNELS, TrainConfig
from training.forecast import CONTEXT, SLACK, Forecast
from training.hardware import GIB, Card, this_card
from training.memory import memory_of
from training.roofline import KERNEL, LAUNCH, REACHED, REACHED_MEASURED, Time
from training.weights.adapter_base import settled

HERE = "here"
NO_TIMES = (
    "no time is predicted for a CPU, where nothing measured says how fast each kernel runs: "
    "`python -m scripts.bench step` measures a step"
)
USEFUL = 0.99
"""Share of the peak below which a change must bring it."""
CHANGES = (
    ([f"runtime.{key}=auto" for key in KERNELS], "nothing: kernels"),
    (["runtime.compile=true"], "a minute of warm-up"),
    (["accumulation_steps=*2"], "smaller products"),
    (["accumulation_steps=*4"], "smaller products"),
    (["accumulation_steps=*8"], "smaller products"),
    (
        ["runtime.gradient_checkpointing=true", "runtime.checkpoint_policy=selective"],
        "recomputes what is cheap",
    ),
    (
        ["runtime.gradient_checkpointing=true", "runtime.checkpoint_policy=blocks"],
        "one more forward pass",
    ),
    (["accumulation_steps=*16"], "much smaller products"),
    (["optim=adamw_8bit"], "8-bit moments"),
    (["runtime.weights=bf16"], "weights rounded at random"),
    (["runtime.offload_optimizer=true"], "the state crosses to the host and back in every step"),
)
"""Words, and what they cost; each is tried on top of those before it, the cheapest first."""


@dataclass(frozen=True)
class PlanConfig:
    """What to plan with; any other word is an override of the training configuration."""

    hardware: str | None = None
    """Null: this machine's GPU, and h100 without one."""
    gpus: int = 1
    price_per_hour: float | None = None
    """Of one GPU, in any currency."""
    json: bool = False


class Change(NamedTuple):
    """What makes a run fit."""

    words: list[str]
    costs: str
    forecast: Forecast


def chosen_card(hardware: str | None) -> tuple[str, Card]:
    """The card to plan for; ValueError if this machine's is not known."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if hardware == HERE and device.type == "cpu":
        # nobody asks for a rate of it
        return HERE, Card("CPU", 0, 0, 0, 0, memory_of(device), 0, 0, 0, 0, 0)
    if hardware == HERE or (hardware is None and device.type == "cuda"):
        card = this_card(device, memory_of(device))
        if card is None:
            raise UserError(
                "hardware=here: the rates of this machine are not known; run `python -m "
                "scripts.doctor --measure` once."
            )
        return HERE, card
    name = hardware or "h100"
    return name, known_card(name)


def forecast_of(words: Sequence[str], cfg: PlanConfig, card: Card) -> Forecast:
    train: TrainConfig = settled([*words]).cfg
    each = train.accumulation_steps * cfg.gpus
    if train.batch_size % each:
        raise UserError(
            f"batch_size={train.batch_size} is not a multiple of "
            f"accumulation_steps={train.accumulation_steps} × gpus={cfg.gpus}; change one of them."
        )
    spec, resident = latents_of(train.data, train.seed, card.memory)
    on_cpu = cfg.hardware == HERE and not torch.cuda.is_available()
    return Forecast(train, spec, gpus=cfg.gpus, resident=resident, gpu=not on_cpu)


def step_time(forecast: Forecast, card: Card) -> Time | None:
    """Seconds of a step, with the communication that computing does not hide; None on a CPU."""
    if not forecast.gpu:
        return None
    alone = forecast.time(card)
    parallel = forecast.cfg.runtime.parallel
    parameters = sum(p.numel() for p in forecast.model.parameters())
    narrow = 2 if parallel.reduce_dtype.value == "bf16" else 4
    steps = forecast.cfg.accumulation_steps

    def lost(compute: float, gradient_bytes: int) -> float:
        return exposed(
            forecast.mode,
            forecast.gpus,
            compute,
            parameters,
            gradient_bytes,
            card,
            forecast.depth + 1,
        )

    return Time(
        *(
            whole + (steps - 1) * lost(whole / steps, 0) + lost(whole / steps, narrow)
            for whole in alone
        )
    )


def largest_micro_batch(forecast: Forecast, card: Card) -> int:
    """The most samples of a micro-batch that fit; 0 if one does not. Bytes are a straight line over
    the samples."""
    here = forecast.samples
    other = max(1, here // 2) if here > 1 else 2
    sizes = {"batch_size": other * forecast.cfg.accumulation_steps * forecast.gpus}
    at_other = Forecast(
        replace(forecast.cfg, **sizes),
        forecast.spec,
        gpus=forecast.gpus,
        resident=forecast.resident,
        gpu=forecast.gpu,
    )
    most = float("inf")
    for phase, needs in forecast.phases.items():
        slope = (needs.total - at_other.phases[phase].total) / (here - other)
        if slope > 0:
            most = min(most, here + (card.memory - needs.total) / slope)
        elif needs.total > card.memory:
            most = 0
    return max(0, int(min(most, 2**20)))


def cheapest_change(words: list[str], cfg: PlanConfig, card: Card, now: Forecast) -> Change | None:
    """The changes, cheapest first, that make a run fit; those that save less than a hundredth are
    left out."""
    taken: list[tuple[dict[str, str], str]] = []
    for new, costs in CHANGES:
        told = dict(word.split("=") for word in new)
        if (times := told.get("accumulation_steps", "")).startswith("*"):
            told = {
                "accumulation_steps": str(settled(words).cfg.accumulation_steps * int(times[1:]))
            }
        others = [pair for pair in taken if not pair[0].keys() & told.keys()]
        tried = [
            f"{key}={value}" for pair in [*others, (told, costs)] for key, value in pair[0].items()
        ]
        try:
            if settled([*words, *tried]).cfg == now.cfg:
                continue
            found = forecast_of([*words, *tried], cfg, card)
        except (
            ValueError,
            ImportError,
        ):  # it does not go with the rest, or its library is not there
            continue
        if found.needs.total < USEFUL * now.needs.total:
            taken = [*others, (told, costs)]
            now = found
        if now.needs.total <= card.memory:
            return Change(tried, "; ".join(cost for _, cost in taken), now)
    return None


def planned(cfg: PlanConfig, words: list[str]) -> dict[str, Any]:
    """Everything that the plan says, ready for JSON; None for what is not known."""
    if cfg.gpus < 1 or (cfg.price_per_hour or 0.0) < 0.0:
        raise UserError(
            f"gpus={cfg.gpus} must be at least 1, price_per_hour={cfg.price_per_hour} at least 0."
        )
    name, card = chosen_card(cfg.hardware)
    cfg = replace(cfg, hardware=name)
    forecast = forecast_of(words, cfg, card)
    needs = forecast.needs
    time = step_time(forecast, card)
    train = forecast.cfg
    steps = -(-train.total_samples // train.batch_size)
    price = cfg.price_per_hour
    hours = None if time is None else [steps * seconds / 3600 for seconds in time]
    fits = needs.total <= card.memory
    change = None if fits else cheapest_change(words, cfg, card, forecast)
    return {
        "hardware": name,
        "gpus": cfg.gpus,
        "fits": fits,
        "peak_gib": needs.total / GIB,
        "memory_gib": card.memory / GIB,
        "phase": forecast.phase,
        "parts_gib": {part: size / GIB for part, size in needs._asdict().items()},
        "phases_gib": {phase: some.total / GIB for phase, some in forecast.phases.items()},
        "kept_mib_a_block_and_sample": forecast.kept / forecast.depth / forecast.samples / 2**20,
        "on_host_gib": forecast.lasting["on_host"] / GIB,
        "micro_batch": forecast.samples,
        "largest_micro_batch": largest_micro_batch(forecast, card),
        "step_ms": in_ms(time),
        "steps": steps,
        "hours": hours,
        "kwh": [cfg.gpus * card.watts * end / 1e3 for end in hours]
        if hours and card.watts
        else None,
        "cost": None
        if hours is None or price is None
        else [cfg.gpus * price * end for end in hours],
        "change": change
        and {"words": change.words, "costs": change.costs, **figures(change.forecast, card)},
        "not_counted": without_effect(train, forecast.gpu),
    }


def in_ms(time: Time | None) -> list[float] | None:
    return None if time is None else [1e3 * seconds for seconds in time]


def figures(forecast: Forecast, card: Card) -> dict[str, Any]:
    return {"peak_gib": forecast.needs.total / GIB, "step_ms": in_ms(step_time(forecast, card))}


def without_effect(cfg: TrainConfig, gpu: bool) -> dict[str, str]:
    """Keys that this plan does not reckon with, and why; those of a `gpu` alone only for one."""
    runtime = cfg.runtime
    found = {}
    if gpu and runtime.cudnn_benchmark:
        found["runtime.cudnn_benchmark"] = "tries convolutions once, in warm-up"
    if gpu and runtime.empty_cache_at_eval:
        found["runtime.empty_cache_at_eval"] = "acts between training and evaluation, not in a step"
    if runtime.attention.value not in ("auto", "math"):
        found["runtime.attention"] = (
            "all kernels but math keep the same tensors; their speed is not told apart"
        )
    if runtime.compile:
        found["runtime.compile_mode"] = (
            "changes kernels, not what is kept; the workspace of a compiled block is a bound"
        )
    if runtime.precision.value == "fp8":
        found["runtime.fp8_recipe"] = (
            "scales are small beside what they scale; their cost is not told apart"
        )
    if runtime.parallel.bucket_cap_mb != 25 or runtime.parallel.nccl:
        found["runtime.parallel"] = "buckets are reckoned as 25 MiB, and NCCL as it comes"
    if gpu and any(getattr(runtime, key) == "auto" for key in KERNELS):
        found["fused kernels"] = "auto is planned as on; the trial on the GPU decides"
    return found


def texts(found: dict[str, Any]) -> str:
    """The plan as tables and sentences."""
    verdict = "fits" if found["fits"] else "does not fit"
    gpu = found["step_ms"] is not None
    parts = {
        part: size
        for part, size in found["parts_gib"].items()
        if gpu or part not in ("context", "slack")
    }
    rows: list[tuple[object, ...]] = [
        ("part", "GiB"),
        *((part, f"{size:.2f}") for part, size in parts.items()),
    ]

    def between(*ranges: tuple[list[float] | None, str, int]) -> str:
        return ", ".join(
            f"{r[0]:.{digits}f} to {r[1]:.{digits}f} {unit}" for r, unit, digits in ranges if r
        )

    phases = ", ".join(f"{phase} {size:.2f}" for phase, size in found["phases_gib"].items())
    lines = [
        table(rows),
        "",
        f"{found['peak_gib']:.2f} GiB of {found['memory_gib']:.1f} on {found['gpus']} × "
        f"{found['hardware']}, in phase {found['phase']}: {verdict} (by phase: {phases})",
        f"micro-batch {found['micro_batch']}, largest that fits {found['largest_micro_batch']}; a "
        "block keeps "
        f"{found['kept_mib_a_block_and_sample']:.2f} MiB a sample" + host(found),
    ]
    hours = found["hours"], f"hours for {found['steps']} steps", 2
    times = between(
        (found["step_ms"], "ms a step", 1),
        hours,
        (found["kwh"], "kWh", 2),
        (found["cost"], "in all", 2),
    )
    lines.append(times or NO_TIMES)
    if change := found["change"]:
        words = " ".join(change["words"])
        time = between((change["step_ms"], "ms a step", 1))
        told = f"{change['peak_gib']:.2f} GiB{time and f', {time}'}; it costs {change['costs']}"
        lines.append(f"cheapest change that fits: {words} ({told})")
    elif not found["fits"]:
        lines.append(
            "no change that this plan knows makes it fit; use a smaller model, or several GPUs "
            "with fsdp."
        )
    lines += ["", *(f"not told apart: {key}: {why}" for key, why in found["not_counted"].items())]
    lines += [assumptions()] if gpu else []
    return "\n".join(lines)


def host(found: dict[str, Any]) -> str:
    return f"; {found['on_host_gib']:.2f} GiB lie in host memory" if found["on_host_gib"] else ""


def assumptions() -> str:
    return (
        f"assumed: {CONTEXT / GIB:.1f} GiB of context and {SLACK:.0%} lost by the allocator; "
        f"kernels reach {REACHED['worst']:.0%} to {REACHED['best']:.0%} of a data sheet's rates, "
        f"{REACHED_MEASURED['worst']:.0%} to {REACHED_MEASURED['best']:.0%} of measured ones; "
        f"{1e6 * KERNEL:.0f} µs for the smallest kernel, {1e6 * LAUNCH['best']:.0f} to "
        f"{1e6 * LAUNCH['worst']:.0f} µs for a launch. Evaluation, sampling and saving come on "
        "top. On a GPU: not measured yet."
    )


def report(cfg: PlanConfig, words: list[str]) -> str:
    found = planned(cfg, words)
    return json.dumps(found, indent=1) if cfg.json else texts(found)
