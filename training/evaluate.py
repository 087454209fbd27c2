"""Evaluates a model in training: held-out loss and sample grids, both with the averaged (EMA)
weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from common.clock import CLOCK
from common.distributed.ranks import Ranks
from common.output import Progress
from data.loader import Batch
from models.images import Autoencoder, to_uint8, write_grid
from training.assemble import Training
from training.drawing import SampleStream

Item = TypeVar("Item")
Result = TypeVar("Result")
PARTS = 64
"""Largest number of parts of the held-out split whose mean losses a checkpoint keeps."""
TIME_BUCKETS = 4
"""Number of equal intervals into which `evaluate` divides the range 0 to 1 of the flow's time t; it
returns a loss for each interval."""


def score(training: Training, distances: Callable[[], dict[str, float]] | None) -> dict[str, float]:
    """Returns the scores that are due after the last step, metric name -> value: of `evaluate`, and
    of `distances`, which compares samples with images (None: never)."""
    cfg = training.cfg
    state = training.state
    scores = evaluate(training) if state.is_due(cfg.eval_every) else {}
    return scores | (distances() if distances and state.is_due(cfg.fd_every) else {})


@CLOCK.count_as("evaluation")
@torch.no_grad()
def evaluate(training: Training) -> dict[str, float]:
    """Computes the loss of the averaged weights on the held-out split. Returns metric name -> loss:
    `eval_loss` over all t, and one value for each quarter of the range of t; empty if there are no
    held-out samples.

    Noise and t are the same at every call, so losses of different steps are comparable. t does not
    depend on the objective (see `compute_held_out_times`). Each rank evaluates a part of the
    batches.
    """
    batches = training.loader.held_out(training.micro_batch)
    count = -(-training.loader.held_out_count // training.micro_batch)

    def compute_losses(batch: Batch) -> Tensor:
        losses = training.step.compute_losses(batch, held_out=True)
        return torch.stack((losses.flow, losses.t), dim=1).double().cpu()

    with training.state.use_averages():
        rows = share_work(batches, count, "batches of evaluation", training.ranks, compute_losses)
    if not rows:
        return {}

    loss, t = torch.cat(rows).unbind(1)
    result = {"eval_loss": loss.mean().item()}
    training.state.parts = [part.mean().item() for part in loss.tensor_split(min(PARTS, len(loss)))]
    bucket = (t * TIME_BUCKETS).long().clamp(max=TIME_BUCKETS - 1)
    for i in range(TIME_BUCKETS):
        inside = loss[bucket == i]
        if len(inside):
            name = f"eval_loss_t{i / TIME_BUCKETS:.2f}_{(i + 1) / TIME_BUCKETS:.2f}"
            result[name] = inside.mean().item()
    return result


def share_work(
    items: Iterable[Item], count: int, unit: str, ranks: Ranks, work: Callable[[Item], Result]
) -> list[Result]:
    """Calls `work(item)` for each of the `count` items, each on one of the ranks; returns the
    results of all items, in order, on every rank. The first rank shows progress.

    All ranks of a sharded model must run the same number of forward passes. So if the last round
    has fewer items than ranks, a rank without an item also computes the last item, and this result
    is dropped.
    """
    iterator = iter(items)
    rank_results = []
    rounds = range(0, count, ranks.world_size)
    with closing(Progress(len(rounds), unit, silent=not ranks.first, lasting=False)) as progress:
        for _ in rounds:
            round_items = list(islice(iterator, ranks.world_size))
            rank_results.append(work(round_items[min(ranks.rank, len(round_items) - 1)]))
            progress.advance(1)
    rounds_of_results = zip(*ranks.gather_objects(rank_results), strict=True)
    return [result for results in rounds_of_results for result in results][:count]


@CLOCK.count_as("sampling")
def draw_sample_grid(training: Training, autoencoder: Autoencoder, file: Path) -> Path:
    """Writes an image to `file` with a row of samples, `sampling.per_class` of them, for each of
    ten classes or texts (`Training.grid_rows`), next to its name; returns `file`. Raises OSError
    if the file cannot be written.

    The noise depends only on the seed and the place in the grid, so the grids of a run show how the
    same samples change during training.
    """
    cfg = training.cfg
    spec = training.loader.spec
    ranks = training.ranks
    columns = cfg.sampling.per_class
    rows = training.grid_rows
    assert rows is not None
    samples = rows.repeat(columns)
    # Draw half a micro-batch at a time, because guidance doubles the batch of the model.
    size = max(1, training.micro_batch // 2)
    velocity = training.step.compute_velocity
    stream = SampleStream(velocity, spec, cfg.sampling, samples, cfg.seed, size)
    parts = torch.arange(len(samples.labels), device=training.device).split(size)

    def draw_images(place: Tensor) -> Tensor:
        _, latents = stream.draw(place)
        return torch.from_numpy(to_uint8(autoencoder.decode(latents)))

    with training.state.use_averages():
        images = share_work(parts, len(parts), "batches of the sample grid", ranks, draw_images)
    if ranks.first:
        names = [rows.names[number] for number in rows.list_numbers()]
        note = rows.note_rows(len(rows.labels), len(spec.names))
        write_grid(file, torch.cat(images).numpy(), columns, names=names, note=note)
    return file
