"""Held-out losses, the sample grid, and the share of each process in them."""

import dataclasses
from copy import deepcopy

import numpy as np
import pytest
import torch
from PIL import Image

from common.distributed.ranks import Ranks
from models.autoencoders import PixelAutoencoder
from models.images import LINE_HEIGHT
from tests.harness.outcomes import are_equal
from tests.harness.steps import tiny_training
from training.assemble import GRID_ROWS
from training.drawing import SampleStream
from training.evaluate import draw_sample_grid, evaluate, share_work


def test_evaluation_is_fixed_uses_the_averages_and_leaves_the_weights():
    training = tiny_training()
    before = evaluate(training)
    training.state.ema.averages[0].add_(0.1)
    weights = deepcopy(training.model.state_dict())
    losses = evaluate(training)
    assert evaluate(training) == losses != before
    # The mean is of fp64 sums: in fp32 a mean of many samples loses digits.
    assert torch.tensor(losses["eval_loss"]).item() != losses["eval_loss"]
    assert are_equal(training.model.state_dict(), weights)
    batch = next(training.loader.held_out(1000))
    with training.state.use_averages(), torch.no_grad():
        loss, t, _ = training.step.compute_losses(batch, held_out=True)
    for i, name in enumerate(("t0.00_0.25", "t0.25_0.50", "t0.50_0.75", "t0.75_1.00")):
        inside = loss[(t >= i / 4) & (t < (i + 1) / 4)]
        assert losses[f"eval_loss_{name}"] == pytest.approx(inside.mean().item(), rel=1e-5)


def test_a_grid_has_a_row_for_each_class_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    """Samples are the shade of their class."""

    def draw_shades(stream, position):
        labels = stream.conditions(position).labels
        return labels, (labels / 4.5 - 1).view(-1, 1, 1, 1).expand(-1, 1, 8, 6)

    monkeypatch.setattr(SampleStream, "draw", draw_shades)
    training = tiny_training("mamba", "sampling.per_class=3")
    names = [f"kind {i}" for i in range(9)] + ["an apple of a very long name", *"αβ"]
    spec = dataclasses.replace(training.loader.spec, class_names=names, num_classes=12)
    monkeypatch.setattr(training.loader, "spec", spec)
    training.grid_rows = training.choose_conditions("train", GRID_ROWS)
    with Image.open(draw_sample_grid(training, PixelAutoencoder(), tmp_path / "grid.png")) as grid:
        pixels = np.asarray(grid)[..., 0]
    # The names stand left of the last 96 pixels: 3 images of 6 pixels and a frame, times 4.
    images = pixels[:400, -96:]
    assert images[20::40, 16::32].tolist() == [[round(255 * i / 9)] * 3 for i in range(10)]
    assert len(pixels) == 400 + LINE_HEIGHT
    assert (pixels[400:] < 128).any(), "no line says that 10 of 12 classes are shown"
    margin = pixels[:400, :-96]
    assert (margin.reshape(10, -1) < 128).any(1).all(), "a row has no name"


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("world", [1, 3])
def test_items_are_shared_evenly(count, world):
    """The processes run one after the other here; the last one gathers the results of all."""
    hands = []

    class Hands(Ranks):
        def gather_objects(self, item, group=None):
            hands.append(item)
            return hands if len(hands) == world else [item] * world

    for rank in range(world):
        results = share_work(range(count), count, "items", Hands(rank, world), lambda item: item)
    assert len({len(hand) for hand in hands}) == 1
    assert results == list(range(count))
