"""Long sums beside fp64: the error of each, and that fp64 is used where fp32 would not do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from encoding.statistics import ChannelSums, channel_statistics
from evaluation.distances import Moments
from training.ema import EMA
from training.metrics import Meter
from training.process.ranks import SINGLE
from training.step import StepOutput


def test_the_loss_of_a_long_window():
    """100,000 steps in fp32, a window a thousand times as long as usual: nothing that a log would show."""
    drawn = 0.8 + 0.05 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    meter = Meter(8, 4, 1, None, SINGLE)
    zero = torch.zeros(())
    meter.loss = zero
    for loss in drawn:
        meter.update(StepOutput(loss, zero, zero, zero))
    exact = math.fsum(drawn.tolist()) / len(drawn)
    assert meter.report(0.0)["loss"] == pytest.approx(exact, rel=1e-4)


def averaged(parameters: torch.Tensor, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The average of parameters (steps, n) that EMA holds, and the same in fp64."""
    model = nn.Linear(parameters.shape[1], 1, bias=False)
    model.weight.data.copy_(parameters[0])
    ema = EMA(model, half_life_samples=1.0)
    exact, scalar = parameters[0].double(), torch.tensor(weight)
    for now in parameters:
        model.weight.data.copy_(now)
        ema.update(scalar)
        exact += float(scalar) * (now.double() - exact)
    return ema.averages[0][0].double(), exact


def test_an_average_of_weights_that_move_as_training_moves_them():
    """A decay of 0.9999, weights that jitter by 1e-3: the error is 200 times below the rounding of bf16 products."""
    generator = torch.Generator().manual_seed(0)
    drift = torch.linspace(1.0, 1.2, 20_000).unsqueeze(1)
    found, exact = averaged(drift + 1e-3 * torch.randn(20_000, 64, generator=generator), 1e-4)
    error = ((found - exact) / exact).abs().max()
    assert error < 2.0**-9 / 200
    # Of weights that stand still the last 6e-4 of the way are lost: steps of 1e-4 of it round away.
    still, exact = averaged(torch.cat((torch.ones(1, 8), torch.full((40_000, 8), 1.001))), 1e-4)
    assert 1e-4 < (still - exact).abs().max() < 6.5e-4


def test_the_statistics_of_latents():
    """Mean 100, deviations of 0.01: in fp32 the squares would hold nothing of them."""
    values = 100.0 + 0.01 * torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    parts = [ChannelSums(), ChannelSums()]
    for i, batch in enumerate(values.split(8)):
        parts[i % 2].add({"latents": batch})
    mean, std = channel_statistics([part.as_dict() for part in parts])
    exact = values.double().transpose(0, 1).flatten(1)
    assert mean == pytest.approx(exact.mean(1).tolist(), rel=1e-12)
    assert std == pytest.approx(exact.std(1, correction=0).tolist(), rel=1e-5)
    narrow = values.transpose(0, 1).flatten(1)
    naive = (narrow.square().mean(1) - narrow.mean(1).square()).clamp(min=0.0).sqrt()
    assert not torch.allclose(naive.double(), exact.std(1, correction=0), rtol=0.1)


def test_the_covariance_of_features():
    """Mean 1,000, deviations of 0.01, in uneven batches: merged by deviations, not by squares."""
    features = 1e3 + 0.01 * torch.randn(3_000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moments = Moments(8)
    for batch in features.split(7):
        moments.add(batch)
    exact = np.cov((features - 1e3).numpy().T)
    np.testing.assert_allclose(moments.covariance.numpy(), exact, rtol=0.0, atol=1e-8 * exact.max())
    squares = (features.T @ features) / len(features) - torch.outer(features.mean(0), features.mean(0))
    assert (squares - torch.from_numpy(exact)).abs().max() > 1e-6 * exact.max()
