"""Looks at a model in training: held-out loss and sample grids, both with the averaged weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from common.progress import counted
from models.autoencoders import Autoencoder
from models.images import to_uint8, write_grid
from models.sampler import draw_latents
from training.assemble import Training
from training.distributed.ranks import Ranks
from training.goodput import CLOCK

Item = TypeVar("Item")
MAX_CLASSES = 10
"""Classes in a grid made during training."""
BUCKETS = 4


@CLOCK.spending("evaluation")
@torch.no_grad()
def evaluate(training: Training) -> dict[str, float]:
    """`eval_loss` of the averages over the held-out split, with fixed noise and t, and the same by
    quarters of t.

    Of several processes each takes its share of the batches. Empty if nothing is held out.
    """
    ranks = training.ranks
    found = []
    with training.state.averaged():
        batches = training.loader.held_out(training.micro_batch)
        count = -(-training.loader.held_out_count // training.micro_batch)
        for batch, mine in dealt_and_shown(batches, count, "batches of evaluation", ranks):
            loss, t = training.step.losses(batch, held_out=True)
            if mine:
                found.append(torch.stack((batch.position.double(), loss.double(), t.double())).T)
    rows = torch.cat(ranks.gathered(torch.cat(found) if found else torch.zeros(0, 3)))
    if not len(rows):
        return {}
    # in the order of the split, at any number of processes
    loss, t = rows[rows[:, 0].argsort()][:, 1:].unbind(1)
    result = {"eval_loss": loss.mean().item()}
    for i in range(BUCKETS):
        inside = loss[(t * BUCKETS).long().clamp(max=BUCKETS - 1) == i]
        if len(inside):
            result[f"eval_loss_t{i / BUCKETS:.2f}_{(i + 1) / BUCKETS:.2f}"] = inside.mean().item()
    return result


def dealt(items: Iterable[Item], ranks: Ranks) -> Iterator[tuple[Item, bool]]:
    """Yields this process's share of the items as (item, is_real).

    A short last round is padded with another process's item, so that all ranks step equally often,
    as sharded models must.
    """
    for together in batched(items, ranks.world_size):
        mine = ranks.rank < len(together)
        yield together[ranks.rank if mine else 0], mine


def dealt_and_shown(
    items: Iterable[Item], count: int, unit: str, ranks: Ranks
) -> Iterator[tuple[Item, bool]]:
    """Deals `count` items, and the first process shows how far it is."""
    return counted(dealt(items, ranks), -(-count // ranks.world_size), unit, not ranks.first)


def batched(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Lists of `count` items; the last may be shorter."""
    iterator = iter(items)
    while together := list(islice(iterator, count)):
        yield together


@CLOCK.spending("sampling")
def sample_grid(training: Training, autoencoder: Autoencoder, file: Path) -> Path:
    """Writes a grid with one row a class (the first ten, with their names) and `sampling.per_class`
    columns.

    Returns `file`.

    The noise depends on the seed and the place in the grid only, so grids of one run show the same
    samples maturing.
    """
    cfg = training.cfg
    step = training.step
    spec = training.loader.spec
    ranks = training.ranks
    classes = min(len(spec.labels), MAX_CLASSES)
    labels = torch.arange(classes, device=training.device).repeat_interleave(cfg.sampling.per_class)
    places = torch.arange(len(labels), device=training.device)
    found: list[tuple[Tensor, Tensor]] = []
    with training.state.averaged():
        parts = places.split(max(1, training.micro_batch // 2))  # guidance doubles it
        for position, mine in dealt_and_shown(
            parts, len(parts), "batches of the sample grid", ranks
        ):
            latents = draw_latents(
                step.forward, spec, labels[position], position, cfg.seed, cfg.sampling
            )
            if mine:
                found.append(
                    (position.cpu(), torch.from_numpy(to_uint8(autoencoder.decode(latents))))
                )
    order = torch.cat(
        ranks.gathered(
            torch.cat([torch.zeros(0, dtype=torch.long), *(place for place, _ in found)])
        )
    )
    images = ranks.gathered(torch.cat([image for _, image in found]) if found else torch.zeros(0))
    if ranks.first:
        drawn = torch.cat([part for part in images if len(part)])[order.argsort()]
        note = f"{classes} of {len(spec.names)} classes" if len(spec.names) > classes else ""
        write_grid(
            file, drawn.numpy(), cfg.sampling.per_class, names=spec.names[:classes], note=note
        )
    return file
