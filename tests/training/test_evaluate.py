"""Held-out losses, the sample grid, and the share of each process in them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from models.autoencoders import PixelAutoencoder
from models.images import LINE_HEIGHT
from tests.harness.steps import tiny_training
from training.distributed.ranks import Ranks
from training.evaluate import draw_sample_grid, evaluate, share_work


def test_evaluation_is_fixed_and_uses_the_averages():
    training = tiny_training()
    losses = evaluate(training)
    assert evaluate(training) == losses
    batch = next(training.loader.held_out(1000))
    with training.state.use_averages(), torch.no_grad():
        assert not training.model.training
        loss, t = training.step.compute_losses(batch, held_out=True)
    assert training.model.training
    for i, name in enumerate(("t0.00_0.25", "t0.25_0.50", "t0.50_0.75", "t0.75_1.00")):
        inside = loss[(t >= i / 4) & (t < (i + 1) / 4)]
        assert len(inside) > 5
        assert losses[f"eval_loss_{name}"] == pytest.approx(inside.mean().item(), rel=1e-5)
    training.step.ema.averages[0].add_(0.1)
    assert evaluate(training) != losses


@pytest.fixture
def shades(monkeypatch):
    """Samples that are the shade of their class."""

    def draw_shades(model, spec, labels, *_):
        return (labels / 4.5 - 1).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)

    monkeypatch.setattr("training.evaluate.draw_latents", draw_shades)


@pytest.mark.usefixtures("shades")
def test_a_grid_has_a_row_for_each_class(tmp_path):
    training = tiny_training("mamba", "sampling.per_class=3")
    file = draw_sample_grid(training, PixelAutoencoder(), tmp_path / "grid.png")
    with Image.open(file) as grid:
        # The names stand left of the last 120 pixels: 3 images of 8 pixels and a frame, times 4.
        pixels = np.asarray(grid)[:, -120:, 0]
    assert pixels[20::40, 20::40].tolist() == [[round(255 * i / 9)] * 3 for i in range(10)]


@pytest.mark.usefixtures("shades")
def test_a_grid_of_many_classes_names_its_rows_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    training = tiny_training("mamba", "sampling.per_class=3")
    names = [f"kind {i}" for i in range(9)] + ["an apple of a very long name", *"αβ"]
    spec = dataclasses.replace(training.loader.spec, class_names=names, num_classes=12)
    monkeypatch.setattr(training.loader, "spec", spec)
    with Image.open(draw_sample_grid(training, PixelAutoencoder(), tmp_path / "grid.png")) as grid:
        pixels = np.asarray(grid)
    assert len(pixels) == 400 + LINE_HEIGHT
    assert (pixels[400:] < 128).any(), "no line says that 10 of 12 classes are shown"
    margin = pixels[:, :-120, 0]
    assert 80 < margin.shape[1] < 200
    for row in range(10):
        assert (margin[40 * row : 40 * row + 40] < 128).any(), f"row {row} has no name"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_items_are_shared_evenly(count, world):
    """The processes run one after the other here; the last one gathers the results of all."""
    hands: list[list[int]] = []

    class SequentialRanks(Ranks):
        def gather_objects(self, item, group=None):
            hands.append(item)
            return hands if len(hands) == self.world_size else [item] * self.world_size

    results: list[int] = []
    for rank in range(world):
        ranks = SequentialRanks(rank, world, rank)
        results = share_work(range(count), count, "items", ranks, lambda item: item)
    assert len({len(hand) for hand in hands}) == 1
    assert results == list(range(count))
