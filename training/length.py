"""Decides how long a run is: `total_samples`, `epochs`, or `budget_minutes`.

For a budget, a process of its own measures the seconds of a step, an evaluation and a sample grid
before training begins (scripts/plan/tune.py). The run's folder keeps these seconds, so that a
resumed run has the same length. Start, compilation and the distances of `fd_every` come on top.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from common.errors import UserError
from common.files import read_object
from data.loader import LatentLoader
from training.assemble import to_json_types
from training.components import find_text_level, foresee_latents
from training.config.schema import TrainConfig
from training.environment import memory_of
from training.tune import run_apart

LENGTH_FILE = "length.json"
"""Name of the file in a run folder that holds the measured seconds."""
PAUSES = {"eval_every": "evaluation_s", "sample_every": "grid_s"}
"""Interval of a task for which training pauses -> name of the task's seconds in `LENGTH_FILE`."""
PAUSED_SHARE = 0.1
"""Largest share of a budget that each of `PAUSES` takes, unless the command sets its interval."""
MAX_EPOCHS = 2000
"""A start warns of more epochs."""


def settle_length(
    cfg: TrainConfig, overrides: Collection[str], folder: Path, device: torch.device
) -> TrainConfig:
    """Returns the configuration with its length as `total_samples`, except if that is a budget and
    the run's `folder` has no measurements. `overrides` are the words of the command."""
    if cfg.epochs is not None:
        level = find_text_level(cfg.model)
        spec, _ = foresee_latents(cfg.data, cfg.seed, memory_of(device), level)
        return replace(cfg, total_samples=math.ceil(cfg.epochs * spec.count))
    if cfg.budget_minutes is None or not (folder / LENGTH_FILE).exists():
        return cfg
    given = {word.partition("=")[0].rpartition(".")[2] for word in overrides}
    return spend_budget(cfg, read_object(folder / LENGTH_FILE), given)


def spend_budget(
    cfg: TrainConfig, seconds: Mapping[str, float], given: Collection[str]
) -> TrainConfig:
    """Returns the configuration with as many samples as the budget allows. Warm-up, averages and
    intervals change with the length, except the keys that the command has `given`, by the last
    part of their names; lines of the log and checkpoints only get more frequent. Raises ValueError
    if the budget is too short."""
    budget = 60.0 * (cfg.budget_minutes or 0.0)
    step_seconds = seconds["step_s"]
    paused = 0.0
    counts = {}
    for key, task in PAUSES.items():
        every = getattr(cfg, key)
        if every and key in given:
            step_seconds += seconds[task] / every
        elif every:
            wanted = cfg.total_samples / cfg.batch_size / every
            counts[key] = max(1, round(min(wanted, PAUSED_SHARE * budget / seconds[task])))
            paused += counts[key] * seconds[task]
    steps = int((budget - paused) / step_seconds)
    if steps < 1:
        raise UserError(
            f"budget_minutes={cfg.budget_minutes:g} is too short: a step takes "
            f"{step_seconds:.3g} s, and evaluations and grids {paused:.3g} s; give more minutes."
        )

    def scale(node: object, *names: str, most: float = math.inf) -> dict[str, int]:
        """Returns the keys of `node` in proportion to the run's length."""
        factor = min(most, steps * cfg.batch_size / cfg.total_samples)
        values = {name: getattr(node, name) for name in names if name not in given}
        return {name: value and math.ceil(value * factor) for name, value in values.items()}

    schedule = replace(cfg.schedule, **scale(cfg.schedule, "warmup_samples"))
    ema = replace(cfg.ema, **scale(cfg.ema, "half_life_samples"))
    intervals = scale(cfg, "fd_every") | scale(cfg, "log_every", "save_every", most=1.0)
    intervals |= {key: math.ceil(steps / count) for key, count in counts.items()}
    length = steps * cfg.batch_size
    return replace(cfg, total_samples=length, schedule=schedule, ema=ema, **intervals)


def measure_seconds(cfg: TrainConfig, device: torch.device, processes: int) -> dict[str, float]:
    """Measures the seconds of a step, an evaluation and a grid. Raises ValueError if the process
    that measures them fails."""
    print("measuring a step, an evaluation and a grid …", file=sys.stderr, flush=True)
    job = {"cfg": to_json_types(asdict(cfg)), "device": str(device), "processes": processes}
    code, found = run_apart(job | {"measure": True})
    found = found or {"refusal": f"the process that measures them ended with code {code}."}
    if "refusal" in found:
        raise UserError(f"budget_minutes={cfg.budget_minutes:g}: {found['refusal']}")
    return found


def describe_length(cfg: TrainConfig, loader: LatentLoader) -> str:
    """Says how long the run is in epochs, and how many images are held out; warns of very many
    epochs."""
    images = loader.spec.count
    epochs = cfg.total_samples / max(1, images)
    held_out = loader.held_out_count or "none, so there is no eval_loss"
    text = (
        f"{cfg.total_samples:,} samples = {epochs:,.4g} epochs of {images:,} images, "
        f"in {-(-cfg.total_samples // cfg.batch_size):,} steps; held out: {held_out}"
    )
    if epochs > MAX_EPOCHS:
        text += (
            f"\nwarning: that is more than {MAX_EPOCHS:,} epochs; epochs=200 or budget_minutes=10 "
            "says how long to train on so few images"
        )
    return text
