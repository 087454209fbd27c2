"""Measures how long the steps, evaluations and sample grids of a run take, for training/length.py
and scripts/plan/tune.py."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts import timing
from training.assemble import Parts, Training, assemble
from training.config.compose import apply_schema
from training.config.schema import ParallelConfig, TrainConfig
from training.environment import set_deterministic
from training.evaluate import draw_sample_grid, evaluate
from training.memory import refuse_large_step
from training.weights.pretrained import build_autoencoder

MAX_TIMED_STEPS = 16
"""Largest number of a candidate's steps that are timed."""
GPU_STEPS_AT_A_TIME = 4
"""Number of steps on a GPU between two readings of the clock. Within them the host launches kernels
ahead of the GPU, as it does in training."""


def assemble_share(cfg: TrainConfig, job: Mapping[str, Any], parts: Parts) -> Training:
    """Builds what one process of the run would train, without data parallelism."""
    set_deterministic(cfg.deterministic)
    torch.manual_seed(cfg.seed)
    runtime = replace(cfg.runtime, parallel=ParallelConfig())
    single = replace(cfg, batch_size=cfg.batch_size // job["processes"], runtime=runtime)
    return assemble(single, torch.device(job["device"]), parts=parts)


def measure_run(job: Mapping[str, Any]) -> dict[str, float]:
    """Measures the seconds of a step, an evaluation and a sample grid of a run on its own data, for
    training/length.py. The processes of the run share evaluations and grids."""
    cfg = apply_schema(TrainConfig, job["cfg"], [])
    training = assemble_share(cfg, job, Parts())
    device = training.device
    refuse_large_step(training)
    training.warm_up()
    training.take_step()
    seconds = {"step_s": statistics.mean(time_steps(training, math.inf))}
    if cfg.eval_every:
        seconds["evaluation_s"] = timing.measure_seconds(lambda: evaluate(training), device)
    if cfg.sample_every:
        autoencoder = build_autoencoder(training.loader.spec, device)
        file = Path(job["file"]).with_suffix(".png")
        seconds["grid_s"] = timing.measure_seconds(
            lambda: draw_sample_grid(training, autoencoder, file), device
        )
    shares = {name: 1 if name == "step_s" else job["processes"] for name in seconds}
    return {name: value / shares[name] for name, value in seconds.items()}


def time_steps(training: Training, until: float) -> list[float]:
    """Times steps at least once, and again until `until`, a time of time.monotonic(), or until
    `MAX_TIMED_STEPS` steps were timed. Returns the seconds per step of each measurement."""
    steps = GPU_STEPS_AT_A_TIME if training.device.type == "cuda" else 1
    seconds: list[float] = []

    def run() -> None:
        for _ in range(steps):
            training.take_step()

    while not seconds or (len(seconds) * steps < MAX_TIMED_STEPS and time.monotonic() < until):
        seconds.append(timing.measure_seconds(run, training.device) / steps)
    return seconds
