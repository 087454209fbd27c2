"""One candidate of runtime=auto, in a process of its own: builds the step, warms it up, and takes
steps when told to.

python -m training.tuning_candidate <job> <descriptor>      training/contest.py starts it and talks
to it

It is told how many steps to take by lines on standard input, and answers by lines of JSON on the
descriptor.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accel.techniques.fused_kernels import FusedKernel
from common.text import first_line
from data.loader import LatentSpec
from data.synthetic import SyntheticLatents
from training.assemble import Parts, Training, assemble
from training.config import build
from training.config.compose import typed
from training.config.schema import ParallelConfig, ParallelMode, TrainConfig
from training.contest import NO_MEMORY
from training.environment import set_deterministic

PROBES = 3
"""Steps whose losses and gradient norms are compared with those of the first candidate."""
LEAST = 1e-3
"""Relative difference that is always allowed: sums in another order, seen through a few updates."""


def built(cfg: TrainConfig, spec: LatentSpec, device: torch.device, processes: int) -> Training:
    """The step of one of `processes` processes, on normal latents, with weights at which every part
    matters."""

    def loader(
        _node: Mapping[str, Any], seed: int, micro_batch: int, on: torch.device, *_: Any
    ) -> SyntheticLatents:
        sizes = {name: getattr(spec, name) for name in ("channels", "height", "width")}
        count = max(64, micro_batch * cfg.accumulation_steps)
        classes = max(1, spec.num_classes)
        made = SyntheticLatents(
            **sizes, num_classes=classes, count=count, batch_size=micro_batch, seed=seed, device=on
        )
        made.spec = spec
        return made

    torch.manual_seed(cfg.seed)
    runtime = replace(cfg.runtime, parallel=ParallelConfig(mode=ParallelMode.none))
    alone = replace(cfg, batch_size=cfg.batch_size // processes, runtime=runtime)
    training = assemble(alone, device, parts=Parts(loader=loader))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter, average in zip(
            training.state.ema.parameters, training.state.ema.averages, strict=True
        ):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter += 0.02 * noise  # a new model returns zero whatever its blocks do
            average.copy_(parameter)
    return training


def probed(training: Training, asked: list[str]) -> dict[str, Any]:
    """Warms up; returns the losses and norms of a few steps, how far they may be off, and why not
    to take it."""
    ledger = training.warm_up()
    # a run goes on without one
    kernels = {t.key for t in training.stack.techniques if isinstance(t, FusedKernel)}
    wrong = [row for row in ledger if row.key in asked and row.missing and row.key not in kernels]
    outputs = [training.take_step() for _ in range(PROBES)]
    losses, norms = (
        [float(x) for x in xs] for xs in zip(*((o.loss, o.grad_norm) for o in outputs), strict=True)
    )
    tolerance = max(
        [LEAST, *(t.loss_rtol for t in training.stack.techniques if t.enabled and t.key in asked)]
    )
    told = {"losses": losses, "norms": norms, "tolerance": tolerance}
    return told | {
        "refusal": "; ".join(f"{row.key} is not on: {row.evidence}" for row in wrong) or None
    }


def seconds_of(training: Training, steps: int) -> list[float]:
    """Seconds a step; on a GPU the mean of four at a time, so that launches run ahead as they do in
    training."""
    cuda = training.device.type == "cuda"
    taken = []
    at_a_time = min(4, steps) if cuda else 1
    for _ in range(0, steps, at_a_time):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(at_a_time):
            training.take_step()
        if cuda:
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / at_a_time)
    return taken


def end_with(parent: int) -> None:
    """Ends this process, and those that it started, within a second after `parent`, however that
    ends."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


def main() -> int:
    answers = os.fdopen(int(sys.argv[2]), "w")

    def say(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    job = json.loads(Path(sys.argv[1]).read_text())
    end_with(job["parent"])
    cfg = typed(TrainConfig, job["cfg"], [])
    spec = LatentSpec(**job["spec"])
    build.admit([f"{build.EXTENSIONS}=[{','.join(cfg.extensions)}]"])
    set_deterministic(cfg.deterministic)
    device = torch.device(job["device"])
    held: list[torch.Tensor] = []  # in the place of what the run holds besides
    try:
        if device.type == "cuda":
            held.append(torch.empty(job["held"], dtype=torch.uint8, device=device))
        training = built(cfg, spec, device, job["processes"])
        say(probed(training, job["asked"]))
        for line in sys.stdin:
            say({"seconds": seconds_of(training, int(line))})
    except torch.OutOfMemoryError:
        say({"refusal": NO_MEMORY})
    except Exception as error:
        say({"refusal": first_line(error)})
        raise
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
