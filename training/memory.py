"""The bytes of a run, counted from its tensors."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from accel.composite_optimizer import kept_by
from accel.saved_tensors import keeping
from accel.sharding import local
from accel.techniques.offload_optimizer import OffloadOptimizer
from data.loader import Batch
from training.assemble import Training


class Bytes(NamedTuple):
    """What a run holds from one step to the next, in bytes of this process."""

    weights: int
    gradients: int
    """From the first micro-batch of a step to its update."""
    averages: int
    optimizer: int
    on_host: int
    """Of the optimizer's state, in host memory."""

    @property
    def on_device(self) -> int:
        return self.weights + self.gradients + self.averages + self.optimizer


def lasting_bytes(training: Training) -> Bytes:
    """Counts the tensors of a run that has stepped, or was warmed up."""
    step = training.step
    sizes = [(local(p.detach()).nbytes, p.requires_grad) for p in step.parameters]
    weights = sum(size for size, _ in sizes)
    gradients = sum(size for size, trains in sizes if trains)
    averages = sum(local(average).nbytes for average in training.state.ema.averages)
    kept = [
        t
        for p in step.parameters
        for t in kept_by(step.optimizer, p).values()
        if isinstance(t, Tensor)
    ]
    on_host = training.stack.technique(OffloadOptimizer).on_host()
    return Bytes(
        weights, gradients, averages, sum(local(t).nbytes for t in kept) - on_host, on_host
    )


def kept_at(training: Training, samples: int) -> int:
    """Bytes that stay on the device for the backward pass, of the loss on `samples` samples of
    zeros.

    Nothing runs compiled.
    """
    spec = training.loader.spec
    device = training.device
    latents = torch.zeros(samples, spec.channels, spec.height, spec.width, device=device)
    numbers = torch.arange(samples, device=device)
    batch = Batch(latents, torch.zeros_like(numbers), numbers, numbers)
    with torch.compiler.set_stance("force_eager"), keeping(training.model) as kept:
        losses, _ = training.step.losses(batch)
    del losses
    return sum(kept.left.values())


def memory_of(device: torch.device) -> int:
    """Bytes of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
