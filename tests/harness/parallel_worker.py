"""A training process of the tests: `train.py`, with a quick compiler and, where it is asked for, a
fault.

FAULT is "<kind>:<rank>:<step>": nan (a gradient that is not finite), die (SIGKILL, once), hang.
With ANY_PRECISION a CPU may have any; with OFFLOADS it copies what is kept for the backward pass.
With KERNELS_ON_RANK fused kernels may be asked for, and can
run in that process alone, in Triton's interpreter.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from accel import saved_tensors
from accel.techniques.compilation import Compile
from accel.techniques.fused_kernels import FusedKernel
from accel.techniques.offload_activations import OffloadActivations
from tests.harness.words import TINY_RUN
from train import train
from training.config.compose import compose, report_user_errors
from training.distributed.exit import exit_cleanly
from training.step import TrainStep

Compile.backend = "aot_eager"


def faulty(kind: str, step: int) -> None:
    """Makes the step fail; warm-up has three of its own, which do not count."""
    losses = TrainStep.losses
    calls = iter(range(10**6))

    def failing(self: TrainStep, batch, held_out=False):
        loss, t = losses(self, batch, held_out)
        if self.optimizer.state_dict()["state"] and next(calls) == step:
            if kind == "nan":
                loss = loss * float("nan")
            elif kind == "hang":
                time.sleep(600)
            elif not (marker := Path(os.environ["FAULT_MARKER"])).exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return loss, t

    TrainStep.losses = failing  # pyright: ignore[reportAttributeAccessIssue]


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    if os.environ.get("ANY_PRECISION"):
        import pytest

        from tests.harness.steps import allow_any_precision

        allow_any_precision(pytest.MonkeyPatch())
    if os.environ.get("OFFLOADS"):
        OffloadActivations.unavailable = lambda self: None
        saved_tensors.LEAST_MOVED = 1024
    if rank := os.environ.get("KERNELS_ON_RANK"):
        FusedKernel.unavailable = lambda self: None
        if os.environ["RANK"] == rank:
            os.environ["TRITON_INTERPRET"] = "1"  # for the process that tries them
    if fault := os.environ.get("FAULT"):
        kind, rank, step = fault.split(":")
        if os.environ.get("RANK") == rank:
            faulty(kind, int(step))
    with exit_cleanly(), report_user_errors():
        train(compose([*TINY_RUN, *words]))


if __name__ == "__main__":
    main(sys.argv[1:])
