"""Looks at a model in training: held-out loss and sample grids, both with the averaged weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from common.terminal import counted
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
    batches = enumerate(training.loader.held_out(training.micro_batch))
    count = -(-training.loader.held_out_count // training.micro_batch)
    found = []
    with training.state.averaged():
        for (number, batch), mine in dealt_and_shown(
            batches, count, "batches of evaluation", ranks
        ):
            losses = training.step.losses(batch, held_out=True)
            if mine:
                found.append((number, torch.stack(losses, dim=1).double().cpu()))
    rows = in_order(found, ranks)
    if not rows:
        return {}

    loss, t = torch.cat(rows).unbind(1)
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
    iterator = iter(items)
    while together := list(islice(iterator, ranks.world_size)):
        mine = ranks.rank < len(together)
        yield together[ranks.rank if mine else 0], mine


def dealt_and_shown(
    items: Iterable[Item], count: int, unit: str, ranks: Ranks
) -> Iterator[tuple[Item, bool]]:
    """Deals `count` items, and the first process shows how far it is."""
    return counted(dealt(items, ranks), -(-count // ranks.world_size), unit, not ranks.first)


def in_order(found: list[tuple[int, Item]], ranks: Ranks) -> list[Item]:
    """What all processes found of the items, in the order of the items' numbers: the same at any
    number of processes."""
    pairs = [pair for share in ranks.gathered_objects(found) for pair in share]
    return [item for _, item in sorted(pairs, key=lambda pair: pair[0])]


@CLOCK.spending("sampling")
def sample_grid(training: Training, autoencoder: Autoencoder, file: Path) -> Path:
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
    found = []
    with training.state.averaged():
        for (number, place), mine in dealt_and_shown(
            enumerate(parts), len(parts), "batches of the sample grid", ranks
        ):
            latents = draw_latents(
                training.step.forward, spec, labels[place], place, cfg.seed, cfg.sampling
            )
            if mine:
                found.append((number, torch.from_numpy(to_uint8(autoencoder.decode(latents)))))
    images = in_order(found, ranks)
    if ranks.first:
        note = f"{classes} of {len(spec.names)} classes" if len(spec.names) > classes else ""
        names = spec.names[:classes]
        write_grid(file, torch.cat(images).numpy(), columns, names=names, note=note)
    return file
