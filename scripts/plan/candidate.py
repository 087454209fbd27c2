"""One candidate of runtime=auto, in a process of its own: builds the step, warms it up, and times
it.

    python -m scripts.plan.candidate <job>      scripts/plan/tune.py writes the job
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel.ledger import UNUSED, Ledger
from accel.techniques.fused_kernels import FusedKernel
from common.files import read_object, write_atomically
from common.text import first_line
from common.workers import end_with
from data.builtin import SyntheticLatents
from data.loader import LatentSpec
from training.assemble import Parts, Training, assemble
from training.config import build
from training.config.compose import typed
from training.config.schema import ParallelConfig, TrainConfig
from training.environment import set_deterministic

PROBES = 3
"""Steps whose losses and gradient norms are compared with those of the first candidate."""
STEPS = 16
"""That are timed, at most."""
AT_A_TIME = 4
"""Steps of a GPU that are timed as one, so that launches run ahead as they do in training."""
LEAST = 1e-3
"""Relative difference that is always allowed: sums in another order, seen through a few updates."""


def built(cfg: TrainConfig, spec: LatentSpec, device: torch.device, processes: int) -> Training:
    """The step of one of `processes` processes, on normal latents, with weights at which every part
    matters."""

    def loader(
        _node: Mapping[str, Any], seed: int, micro_batch: int, on: torch.device, *_: Any
    ) -> SyntheticLatents:
        made = SyntheticLatents(
            channels=spec.channels,
            height=spec.height,
            width=spec.width,
            num_classes=max(1, spec.num_classes),
            count=max(64, micro_batch * cfg.accumulation_steps),
            batch_size=micro_batch,
            seed=seed,
            device=on,
        )
        made.spec = spec
        return made

    torch.manual_seed(cfg.seed)
    runtime = replace(cfg.runtime, parallel=ParallelConfig())
    alone = replace(cfg, batch_size=cfg.batch_size // processes, runtime=runtime)
    training = assemble(alone, device, parts=Parts(loader=loader))

    # A new model returns zero whatever its blocks do.
    generator = torch.Generator().manual_seed(1)
    ema = training.state.ema
    with torch.no_grad():
        for parameter, average in zip(ema.parameters, ema.averages, strict=True):
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
            average.copy_(parameter)
    return training


def probed(training: Training, asked: list[str]) -> dict[str, Any]:
    """Warms up; returns the losses and norms of a few steps, how far they may be off, which
    techniques the model has no use for, and why not to take it."""
    ledger = training.warm_up()
    outputs = [training.take_step() for _ in range(PROBES)]
    techniques = training.stack.techniques
    allowed = [t.loss_rtol for t in techniques if t.enabled and t.key in asked]
    return {
        "losses": [float(output.loss) for output in outputs],
        "norms": [float(output.grad_norm) for output in outputs],
        "tolerance": max(LEAST, *allowed) if allowed else LEAST,
        "unused": [row.key for row in ledger if row.active == UNUSED],
        "refusal": missing(training, ledger, asked),
    }


def missing(training: Training, ledger: Ledger, asked: list[str]) -> str | None:
    """What of the techniques that make this candidate is not on; a run goes on without a kernel."""
    kernels = {t.key for t in training.stack.techniques if isinstance(t, FusedKernel)}
    wrong = [row for row in ledger if row.missing and row.key in asked and row.key not in kernels]
    return "; ".join(f"{row.key} is not on: {row.evidence}" for row in wrong) or None


def seconds_of(training: Training, until: float) -> list[float]:
    """Seconds of each step, as many as are timed before `until` (of time.monotonic); one at
    least."""
    cuda = training.device.type == "cuda"
    steps = AT_A_TIME if cuda else 1
    taken: list[float] = []
    while not taken or (len(taken) * steps < STEPS and time.monotonic() < until):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            training.take_step()
        if cuda:
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / steps)
    return taken


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    """What is to be known of the candidate."""
    cfg = typed(TrainConfig, job["cfg"], [])
    build.admit([f"{build.EXTENSIONS}=[{','.join(cfg.extensions)}]"])
    set_deterministic(cfg.deterministic)
    device = torch.device(job["device"])
    try:
        # In the place of what the run holds besides.
        held = job["held"] if device.type == "cuda" else 0
        room = torch.empty(held, dtype=torch.uint8, device=device)
        training = built(cfg, LatentSpec(**job["spec"]), device, job["processes"])
        found = probed(training, job["asked"])
        if found["refusal"] is None:
            found["seconds"] = seconds_of(training, job["until"])
        del room
    except torch.OutOfMemoryError:
        return {"refusal": "memory ran out"}
    except Exception as error:
        return {"refusal": first_line(error)}
    return found


def main(file: Path) -> None:
    job = read_object(file)
    end_with(job["parent"])
    write_atomically(file.with_suffix(".found"), json.dumps(outcome(job)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
