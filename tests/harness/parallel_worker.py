"""A training process of the tests: `train.py` with a quick compiler, changed by its environment.

FAULT is "<kind>:<rank>:<step>": nan (a gradient that is not finite), die (SIGKILL, once), lose (the
same with the launcher), hang; the rank may be any.
ANY_PRECISION allows 8 and 16 bits on a CPU, OFFLOADS the copies of saved tensors to the host.
KERNELS_ON_RANK allows fused kernels, and only that process can run them, in Triton's interpreter.
LIMITED is the processor time in seconds that the process may take, with 1 GiB of memory.
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
from common.config.compose import compose, report_user_errors
from common.distributed.exit import exit_cleanly
from tests.harness.limits import set_limits
from tests.harness.words import TINY_RUN
from train import train
from training.step import TrainStep

Compile.backend = "aot_eager"


def plant_fault(kind: str, step: int) -> None:
    """Makes a training step fail; steps of the warm-up do not count."""
    losses = TrainStep.compute_losses
    calls = iter(range(10**6))

    def failing(self: TrainStep, batch, held_out=False):
        computed = losses(self, batch, held_out)
        if self.optimizer.state_dict()["state"] and next(calls) == step:
            if kind == "nan":
                return computed._replace(flow=computed.flow * float("nan"))
            if kind == "hang":
                time.sleep(600)
            elif not (marker := Path(os.environ["FAULT_MARKER"])).exists():
                marker.touch()
                if kind == "lose":
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        return computed

    TrainStep.compute_losses = failing  # pyright: ignore[reportAttributeAccessIssue]


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    if seconds := os.environ.get("LIMITED"):
        set_limits(int(seconds))
    if os.environ.get("ANY_PRECISION"):
        import pytest

        from tests.harness.steps import allow_any_precision

        allow_any_precision(pytest.MonkeyPatch())
    if os.environ.get("OFFLOADS"):
        OffloadActivations.find_obstacle = lambda self: None
        saved_tensors.MIN_MOVED_BYTES = 1024
    if rank := os.environ.get("KERNELS_ON_RANK"):
        FusedKernel.find_obstacle = lambda self: None
        if os.environ["RANK"] == rank:
            os.environ["TRITON_INTERPRET"] = "1"  # for the process that tries them
    if fault := os.environ.get("FAULT"):
        kind, rank, step = fault.split(":")
        if rank in ("any", os.environ.get("RANK")):
            plant_fault(kind, int(step))
    with exit_cleanly(), report_user_errors():
        train(compose([*TINY_RUN, *words]))


if __name__ == "__main__":
    main(sys.argv[1:])
