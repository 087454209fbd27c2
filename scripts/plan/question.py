"""Describes to a plan the run to forecast, and the GPUs that share its batches."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.schema import TrainConfig
from data.spec import LatentSpec
from training.inputs import foresee_latents


@dataclass(frozen=True)
class Question:
    """The run to forecast: its configuration, on `gpus` GPUs that share each batch.

    `spec` describes the latents; `resident` is the number of bytes of latents that lie on the
    device. With `gpu=False` the forecast is for this machine's CPU, without the techniques that it
    does not support.
    """

    cfg: TrainConfig
    spec: LatentSpec
    gpus: int = 1
    resident: float = 0.0
    gpu: bool = True

    @property
    def samples(self) -> int:
        """Number of samples in a micro-batch on one GPU."""
        return max(1, self.cfg.batch_size // self.cfg.accumulation_steps // self.gpus)

    @property
    def mode(self) -> str:
        """Parallelism of the GPUs: none, ddp, fsdp or hsdp."""
        if self.gpus == 1:
            return "none"
        mode = self.cfg.runtime.parallel.mode
        return "ddp" if mode in ("auto", "none") else mode

    @property
    def shards(self) -> int:
        """Number of GPUs over which the weights, gradients and optimizer state are sharded; 1: not
        sharded."""
        if self.mode == "hsdp":
            return min(self.cfg.runtime.parallel.shard_degree or 8, self.gpus)
        return self.gpus if self.mode == "fsdp" else 1


def make_question(cfg: TrainConfig, memory: float, gpus: int = 1, gpu: bool = True) -> Question:
    """Makes the `Question` of a forecast for a run on devices with `memory` bytes each. If the
    latents fit that memory, the forecast includes their bytes."""
    spec, resident = foresee_latents(cfg, memory)
    return Question(cfg, spec, gpus, resident, gpu)
