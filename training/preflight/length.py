"""Decides how long a run is: `total_samples`, `epochs`, or `budget_minutes`.

For a budget, a process of its own measures the seconds of a step, an evaluation and a sample grid
before training begins (scripts/plan/tune.py). The run's folder keeps these seconds, so that a
resumed run has the same length. Start, compilation and the distances of `fd_every` come on top.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from common.config.schema import TrainConfig
from common.environment import memory_of
from common.errors import UserError
from common.files import read_object
from data.loader import LatentLoader
from training.assemble import Training
from training.evaluate import draw_sample_grid, evaluate
from training.inputs import find_text_level, foresee_latents
from training.preflight.tune import measure_apart
from training.weights.pretrained import build_autoencoder

LENGTH_FILE = "length.json"
"""Name of the file in a run folder that holds the measured seconds."""
PAUSES = {"eval_every": "evaluation_s", "sample_every": "grid_s"}
"""Interval of a task for which training pauses -> name of the task's seconds in `LENGTH_FILE`."""
PAUSED_SHARE = 0.1
"""Largest share of a budget that each of `PAUSES` takes."""


def settle_length(cfg: TrainConfig, folder: Path, device: torch.device) -> TrainConfig:
    """Returns the configuration with its length as `total_samples`; with a budget, as it is if the
    run's `folder` has no measurements yet."""
    if cfg.epochs is not None:
        spec, _ = foresee_latents(cfg, memory_of(device))
        return replace(cfg, total_samples=math.ceil(cfg.epochs * spec.count))
    file = folder / LENGTH_FILE
    return spend_budget(cfg, read_object(file)) if cfg.budget_minutes and file.exists() else cfg


def spend_budget(cfg: TrainConfig, seconds: Mapping[str, float]) -> TrainConfig:
    """Returns the configuration with as many samples as the budget allows; warm-up, averages and
    the intervals of `PAUSES` change in the same proportion. Raises UserError if the budget is too
    short."""
    budget = 60.0 * (cfg.budget_minutes or 0.0)
    paused = 0.0
    counts = {}
    for key, task in PAUSES.items():
        every = vars(cfg)[key]
        if every:
            cost = seconds.get(task, 1e-9)  # not measured if the first start had none
            wanted = cfg.total_samples / cfg.batch_size / every
            counts[key] = max(1, round(min(wanted, PAUSED_SHARE * budget / cost)))
            paused += counts[key] * cost
    steps = int((budget - paused) / seconds["step_s"])
    if steps < 1:
        raise UserError(
            f"budget_minutes={cfg.budget_minutes:g} is too short: a step takes "
            f"{seconds['step_s']:.3g} s, evaluations and grids {paused:.3g} s; give more minutes."
        )

    samples = steps * cfg.batch_size
    factor = samples / cfg.total_samples
    intervals = {key: math.ceil(steps / count) for key, count in counts.items()}
    schedule = replace(cfg.schedule, warmup_samples=round(factor * cfg.schedule.warmup_samples))
    ema = replace(cfg.ema, half_life_samples=factor * cfg.ema.half_life_samples)
    return replace(cfg, total_samples=samples, schedule=schedule, ema=ema, **intervals)


def measure_seconds(cfg: TrainConfig, device: torch.device, processes: int) -> dict[str, float]:
    """Measures the seconds of a step, an evaluation and a grid in another process."""
    print("measuring a step, an evaluation and a grid …", flush=True)
    return measure_apart(
        {"cfg": asdict(cfg), "device": str(device), "processes": processes, "measure": True}
    )


def measure_pauses(training: Training, file: Path, processes: int) -> dict[str, float]:
    """Measures the seconds of an evaluation and a sample grid, which is written to `file`, in a run
    of several processes, which share them."""
    seconds = {}
    # Both end with a result on the host.
    if training.cfg.eval_every:
        began = time.perf_counter()
        evaluate(training)
        seconds["evaluation_s"] = (time.perf_counter() - began) / processes
    if training.cfg.sample_every:
        autoencoder = build_autoencoder(training.loader.spec, training.device)
        began = time.perf_counter()
        draw_sample_grid(training, autoencoder, file)
        seconds["grid_s"] = (time.perf_counter() - began) / processes
    return seconds


def describe_length(cfg: TrainConfig, loader: LatentLoader) -> str:
    """Says how long the run is in epochs, and how many images are held out; warns of very many
    epochs."""
    epochs = cfg.total_samples / max(1, loader.spec.count)
    text = (
        f"{cfg.total_samples:,} samples = {epochs:,.4g} epochs of {loader.spec.count:,} images; "
        f"held out: {loader.held_out_count or 'none, so there is no eval_loss'}"
    )
    if loader.spec.text and find_text_level(cfg.model) == "none":
        text += (
            "\nnote: the data has captions, and model.conditioning=class leaves them out; text "
            "reads them in place of the classes, class_and_text reads both"
        )
    if epochs > 2000:
        text += "\nwarning: few sets need so many epochs; try epochs=200 or budget_minutes=10"
    return text
