"""Measures one candidate of a search (tune.py), in a process of its own."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel.ledger import UNUSED
from common.config.compose import apply_schema
from common.config.schema import ParallelConfig, TrainConfig
from common.environment import seed
from common.text import shorten_error
from data.spec import LatentSpec
from data.synthetic import imitate_set
from scripts import timing
from training.assemble import Training, assemble
from training.inputs import find_text_level
from training.preflight.length import measure_pauses
from training.preflight.memory import refuse_large_step

PROBE_STEPS = 3
"""Number of steps of each candidate whose losses and gradient norms are compared with those of the
first candidate."""
MAX_TIMED_STEPS = 16
"""Largest number of a candidate's steps that are timed."""
GPU_STEPS_AT_A_TIME = 4
"""Number of steps on a GPU between two readings of the clock. Within them the host launches kernels
ahead of the GPU, as it does in training."""
LEAST_TOLERANCE = 1e-3
"""Relative difference from the first candidate's losses and gradient norms that every candidate may
have: adding the same numbers in another order causes as much after a few updates."""


def prepare_candidate(job: Mapping[str, Any]) -> Training:
    """Builds what one process of the run would train with this candidate's configuration: its share
    of the batch, without data parallelism, on normally distributed random latents or, to `measure`
    a budget, its own data. Adds noise to the initial weights, so that every part of the model
    affects the loss."""
    cfg = apply_schema(TrainConfig, job["cfg"], [])
    runtime = replace(cfg.runtime, parallel=ParallelConfig())
    cfg = replace(cfg, batch_size=cfg.batch_size // job["processes"], runtime=runtime)
    device = torch.device(job["device"])
    seed(cfg)
    loader = None
    if "measure" not in job:
        loader = imitate_set(
            LatentSpec.from_dict(job["spec"]),
            count=max(64, cfg.batch_size),
            batch_size=cfg.batch_size // cfg.accumulation_steps,
            seed=cfg.seed,
            device=device,
            text=find_text_level(cfg.model),
        )
    training = assemble(cfg, device, loader=loader)

    # Add noise to the initial weights: a new model returns zero, so its losses would hide every
    # error in a block.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in training.state.ema.parameters:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return training


def probe_candidate(training: Training, asked: list[str]) -> dict[str, Any]:
    """Warms up and takes `PROBE_STEPS` steps. Returns a dict. `losses` and `norms` (of the
    gradients) have a value per step. `tolerance` is the relative difference that these may have
    from the first candidate's. `unused` lists the keys of techniques that the model does not use.

    `refusal` says which technique of the keys `asked` is not on, or is None.
    """
    ledger = training.warm_up()
    outputs = [training.take_step() for _ in range(PROBE_STEPS)]
    techniques = [t for t in training.stack.techniques if t.key in asked]
    inactive = [row for row in ledger if row.missing and row.key in asked]
    return {
        "losses": [float(output.loss) for output in outputs],
        "norms": [float(output.grad_norm) for output in outputs],
        "tolerance": max([LEAST_TOLERANCE, *(t.loss_rtol for t in techniques if t.enabled)]),
        "unused": [row.key for row in ledger if row.active == UNUSED],
        "refusal": "; ".join(f"{row.key} is not on: {row.evidence}" for row in inactive) or None,
    }


def time_steps(training: Training, until: float) -> list[float]:
    """Times steps at least once, and again until `until`, a time of time.monotonic(), or until
    `MAX_TIMED_STEPS` steps were timed. Returns the seconds per step of each measurement."""
    steps = GPU_STEPS_AT_A_TIME if training.device.type == "cuda" else 1
    seconds = []

    def run() -> None:
        for _ in range(steps):
            training.take_step()

    while not seconds or (len(seconds) * steps < MAX_TIMED_STEPS and time.monotonic() < until):
        seconds.append(timing.measure_seconds(run, training.device) / steps)
    return seconds


def measure_run(job: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Measures the seconds of a run's step and pauses, for training/preflight/length.py."""
    training = prepare_candidate(job)
    refuse_large_step(training)
    training.warm_up()
    training.take_step()
    step = statistics.mean(time_steps(training, math.inf))
    return {"step_s": step, **measure_pauses(training, file, job["processes"])}


def try_out(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the candidate that `job` describes. Returns the dict of `probe_candidate`, with the
    `seconds` per step of each measurement; or, if the candidate fails, a dict with only the
    `refusal`, the reason."""
    try:
        # Allocate the bytes that the run will need besides this step, so that a candidate that fits
        # here also fits in the run. Nothing reads this tensor.
        size = 0 if job["device"] == "cpu" else int(job["held"])
        reserved = torch.empty(size, dtype=torch.uint8, device=job["device"])
        training = prepare_candidate(job)
        result = probe_candidate(training, job["asked"])
        if result["refusal"] is None:
            result["seconds"] = time_steps(training, job["until"])
        del reserved
    except torch.OutOfMemoryError:
        return {"refusal": "memory ran out"}
    except Exception as error:
        return {"refusal": shorten_error(error)}
    return result
