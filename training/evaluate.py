"""Looks at a model in training: held-out loss and sample grids, both with the averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from common.terminal import show_progress
from data.loader import Batch
from models.images import Autoencoder, to_uint8, write_grid
from models.sampler import draw_latents
from training.assemble import Training
from training.distributed.ranks import Ranks
from training.goodput import CLOCK

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_CLASSES = 10
"""Classes in a grid made during training."""
TIME_BUCKETS = 4


@CLOCK.count_as("evaluation")
@torch.no_grad()
def evaluate(training: Training) -> dict[str, float]:
    """`eval_loss` of the averages over the held-out split, with fixed noise and t, and the same by
    quarters of t.

    Of several processes each takes its share of the batches. Empty if nothing is held out.
    """
    batches = training.loader.held_out(training.micro_batch)
    count = -(-training.loader.held_out_count // training.micro_batch)

    def losses(batch: Batch) -> Tensor:
        return torch.stack(training.step.losses(batch, held_out=True), dim=1).double().cpu()

    with training.state.use_averages():
        rows = share_work(batches, count, "batches of evaluation", training.ranks, losses)
    if not rows:
        return {}

    loss, t = torch.cat(rows).unbind(1)
    result = {"eval_loss": loss.mean().item()}
    for i in range(TIME_BUCKETS):
        inside = loss[(t * TIME_BUCKETS).long().clamp(max=TIME_BUCKETS - 1) == i]
        if len(inside):
            result[f"eval_loss_t{i / TIME_BUCKETS:.2f}_{(i + 1) / TIME_BUCKETS:.2f}"] = (
                inside.mean().item()
            )
    return result


def share_work(
    items: Iterable[Item], count: int, unit: str, ranks: Ranks, work: Callable[[Item], Result]
) -> list[Result]:
    """The results of `work` on `count` items, in their order, in all processes, of which each does
    its share; the first one shows how far it is.

    In a short last round a process with no item works on another's, and nobody wants the result:
    all step equally often, as sharded models must.
    """
    iterator = iter(items)
    own = []
    rounds = range(0, count, ranks.world_size)
    for _ in show_progress(rounds, len(rounds), unit, not ranks.first):
        together = list(islice(iterator, ranks.world_size))
        own.append(work(together[min(ranks.rank, len(together) - 1)]))
    turns = zip(*ranks.gather_objects(own), strict=True)
    return [result for turn in turns for result in turn][:count]


@CLOCK.count_as("sampling")
def draw_sample_grid(training: Training, autoencoder: Autoencoder, file: Path) -> Path:
    """Writes a grid with one row a class (the first ten, with their names) and `sampling.per_class`
    columns; returns `file`.

    The noise depends on the seed and the place in the grid only, so grids of one run show the same
    samples maturing.
    """
    cfg = training.cfg
    spec = training.loader.spec
    ranks = training.ranks
    columns = cfg.sampling.per_class
    classes = min(len(spec.labels), MAX_CLASSES)
    labels = torch.arange(classes, device=training.device).repeat_interleave(columns)
    places = torch.arange(len(labels), device=training.device)
    parts = places.split(max(1, training.micro_batch // 2))  # guidance doubles it

    def images_at(place: Tensor) -> Tensor:
        latents = draw_latents(
            training.step.forward, spec, labels[place], place, cfg.seed, cfg.sampling
        )
        return torch.from_numpy(to_uint8(autoencoder.decode(latents)))

    with training.state.use_averages():
        images = share_work(parts, len(parts), "batches of the sample grid", ranks, images_at)
    if ranks.first:
        note = f"{classes} of {len(spec.names)} classes" if len(spec.names) > classes else ""
        names = spec.names[:classes]
        write_grid(file, torch.cat(images).numpy(), columns, names=names, note=note)
    return file
