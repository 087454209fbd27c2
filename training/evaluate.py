"""Looking at a model in training: held-out loss and sample grids, both with the averaged weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from accel.kernels.counter_noise import Purpose, counter_normal
from data.loader import LatentSpec
from models.autoencoders import Autoencoder
from models.images import to_uint8, write_grid
from models.sampler import guided_velocity, sample
from training.schema import SamplingConfig
from training.state import TrainState
from training.step import TrainStep

MAX_CLASSES = 10
"""Classes in a grid made during training."""
BUCKETS = 4


@torch.no_grad()
def evaluate(step: TrainStep, state: TrainState, batch_size: int) -> dict[str, float]:
    """`eval_loss` of the averages over the held-out split, with fixed noise and t, and the same by quarters of t.

    Empty if nothing is held out.
    """
    losses, times = [], []
    with state.averaged():
        for batch in state.loader.held_out(batch_size):
            loss, t = step.losses(batch, held_out=True)
            losses.append(loss.double())
            times.append(t)
    if not losses:
        return {}
    loss, t = torch.cat(losses), torch.cat(times)
    result = {"eval_loss": loss.mean().item()}
    for i in range(BUCKETS):
        inside = loss[(t * BUCKETS).long().clamp(max=BUCKETS - 1) == i]
        if len(inside):
            result[f"eval_loss_t{i / BUCKETS:.2f}_{(i + 1) / BUCKETS:.2f}"] = inside.mean().item()
    return result


def sample_grid(
    step: TrainStep,
    state: TrainState,
    spec: LatentSpec,
    autoencoder: Autoencoder,
    sampling: SamplingConfig,
    file: Path,
    batch_size: int,
) -> Path:
    """Writes a grid with one row a class (the first ten) and `sampling.per_class` columns; returns `file`.

    The noise depends on the seed and the place in the grid only, so grids of one run show the same samples maturing.
    """
    device = step.ema_weight.device
    classes = min(spec.num_classes, MAX_CLASSES)
    labels = torch.arange(classes, device=device).repeat_interleave(sampling.per_class)
    low, high = sampling.guidance_interval
    images = []
    with state.averaged():
        for position in torch.arange(len(labels), device=device).split(max(1, batch_size // 2)):  # guidance doubles it
            noise = counter_normal(step.seed, Purpose.SAMPLE, position, (spec.channels, spec.height, spec.width))
            velocity = guided_velocity(step.forward, labels[position], spec.num_classes, sampling.guidance, (low, high))
            latents = sample(velocity, noise, sampling.steps, sampling.solver.value, sampling.shift)
            images.append(to_uint8(autoencoder.decode(spec.denormalise(latents))))
    write_grid(file, np.concatenate(images), columns=sampling.per_class)
    return file
