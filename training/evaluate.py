"""Looking at a model in training: held-out loss and sample grids, both with the averaged weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from accel.kernels.counter_noise import Purpose, counter_normal
from data.loader import LatentSpec
from models.autoencoders import Autoencoder
from models.images import to_uint8, write_grid
from models.sampler import guided_velocity, sample
from training.config.schema import SamplingConfig
from training.process.ranks import Ranks
from training.state import TrainState
from training.step import TrainStep

Item = TypeVar("Item")
MAX_CLASSES = 10
"""Classes in a grid made during training."""
BUCKETS = 4


@torch.no_grad()
def evaluate(step: TrainStep, state: TrainState, batch_size: int) -> dict[str, float]:
    """`eval_loss` of the averages over the held-out split, with fixed noise and t, and the same by quarters of t.

    Of several processes each takes its share of the batches. Empty if nothing is held out.
    """
    ranks = state.meter.ranks
    found = []
    with state.averaged():
        for batch, mine in dealt(state.loader.held_out(batch_size), ranks):
            loss, t = step.losses(batch, held_out=True)
            if mine:
                found.append(torch.stack((batch.position.double(), loss.double(), t.double())).T)
    rows = torch.cat(ranks.gathered(torch.cat(found) if found else torch.zeros(0, 3)))
    if not len(rows):
        return {}
    loss, t = rows[rows[:, 0].argsort()][:, 1:].unbind(1)  # in the order of the split, at any number of processes
    result = {"eval_loss": loss.mean().item()}
    for i in range(BUCKETS):
        inside = loss[(t * BUCKETS).long().clamp(max=BUCKETS - 1) == i]
        if len(inside):
            result[f"eval_loss_t{i / BUCKETS:.2f}_{(i + 1) / BUCKETS:.2f}"] = inside.mean().item()
    return result


def dealt(items: Iterable[Item], ranks: Ranks) -> Iterator[tuple[Item, bool]]:
    """Of each round of items this process's own, and True; in a last round that is short, another's and False.

    So all processes have equally many: sharded models compute together.
    """
    for together in batched(items, ranks.world_size):
        mine = ranks.rank < len(together)
        yield together[ranks.rank if mine else 0], mine


def batched(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Lists of `count` items; the last may be shorter."""
    iterator = iter(items)
    while together := list(islice(iterator, count)):
        yield together


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
    ranks, images, places = state.meter.ranks, [], []
    with state.averaged():
        parts = torch.arange(len(labels), device=device).split(max(1, batch_size // 2))  # guidance doubles it
        for position, mine in dealt(parts, ranks):
            noise = counter_normal(step.seed, Purpose.SAMPLE, position, (spec.channels, spec.height, spec.width))
            velocity = guided_velocity(step.forward, labels[position], spec.num_classes, sampling.guidance, (low, high))
            latents = sample(velocity, noise, sampling.steps, sampling.solver.value, sampling.shift)
            if mine:
                images.append(torch.from_numpy(to_uint8(autoencoder.decode(spec.denormalise(latents)))))
                places.append(position.cpu())
    none = torch.zeros(0, dtype=torch.long)
    order = torch.cat(ranks.gathered(torch.cat(places) if places else none)).argsort()
    shape = (0, *images[0].shape[1:]) if images else (0, 1, 1, 3)
    found = [part for part in ranks.gathered(torch.cat(images) if images else torch.zeros(shape)) if len(part)]
    if ranks.first:
        write_grid(file, torch.cat(found)[order].numpy(), columns=sampling.per_class)
    return file
