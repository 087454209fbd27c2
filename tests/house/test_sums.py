"""Long sums keep their digits on long and hostile series: those of means far from 0 and small
differences."""

import math

import pytest
import torch
from torch import nn

from encoding.shards import ChannelSums, compute_channel_statistics
from evaluation.distances import Moments, frechet_distance
from training.optim.ema import EMA
from training.records.metrics import Meter, StepOutput

BF16 = 2.0**-9
"""The largest relative error of rounding to bf16."""


def relative_error(value, exact):
    """The largest difference relative to the largest exact value."""
    value, exact = (torch.as_tensor(x, dtype=torch.float64) for x in (value, exact))
    return float((value - exact).abs().max() / exact.abs().max())


def draw_normal(*shape, mean=0.0, std=1.0):
    """Draws normal values in fp64, always the same."""
    generator = torch.Generator().manual_seed(0)
    return mean + std * torch.randn(*shape, generator=generator, dtype=torch.float64)


def exact_mean(values):
    return math.fsum(values.tolist()) / len(values)


def test_the_loss_of_a_long_window():
    """1e-14 over 5,000 steps whose losses scarcely differ, as late in a run."""
    losses = draw_normal(5_000, mean=0.5371, std=1e-5).float()
    meter = Meter(batch_size=1, tokens=1, train_flops=3, peak_flops=None)
    zero = torch.zeros(())
    for loss in losses:
        meter.update(StepOutput({"loss": loss}, zero, zero, zero))
    assert relative_error(meter.report(lr=0.1)["loss"], exact_mean(losses)) < 1e-14


@pytest.mark.parametrize(("half_life", "bound"), [(1_774_000, 1e-4), (17_740_000, BF16 / 4)])
def test_averages_of_many_steps(half_life, bound):
    """fp32 stays far below bf16's rounding, and below 2^-24 / w, the most that it could lose.

    With 256 samples a step, the half-life of `experiment=fullrun` and one ten times as long have a
    weight w of 1e-4 and 1e-5. Weights near 1, the hardest, move as Adam moves them.
    """
    factor = torch.tensor(EMA(nn.Linear(1, 1), half_life).compute_weight(10**12, 256))
    rates = 1e-4 * (0.5 + 0.5 * torch.linspace(0.0, math.pi, 10_000).cos())
    moves = rates[:, None] * (0.3 * draw_normal(10_000, 256) + 0.1)
    walk = (draw_normal(256, mean=1.0, std=0.1) + moves.cumsum(0)).float()
    model = nn.ParameterDict({"p": nn.Parameter(walk[0].clone())})
    ema = EMA(model, half_life_samples=1.0)
    for values in walk[1:]:
        model["p"].data = values
        ema.update(factor)

    # The same in fp64 and in closed form, not kept from step to step.
    weight = float(factor)
    shares = weight * (1.0 - weight) ** torch.arange(len(walk) - 1, -1, -1, dtype=torch.float64)
    shares[0] /= weight
    error = relative_error(ema.averages[0], shares @ walk.double())
    assert error < min(bound, 2.0**-24 / weight)


def test_mean_and_std_of_latents():
    """1e-13 and 1e-8 over a million values with a mean of 100 and a deviation of 0.1."""
    latents = draw_normal(4096, 2, 16, 16, mean=100.0, std=0.1).float()
    sums = [ChannelSums(), ChannelSums()]
    for i, block in enumerate(latents.split(64)):
        sums[i % 2].add({"latents": block})
    mean, std = compute_channel_statistics([s.as_dict() for s in sums])
    values = latents.double().transpose(0, 1).flatten(1)
    exact = [exact_mean(channel) for channel in values]
    deviation = (values - values.mean(1, keepdim=True)).square().mean(1).sqrt()
    assert relative_error(mean, exact) < 1e-13
    assert relative_error(std, deviation) < 1e-8


def test_the_covariance_of_many_features():
    """1e-9 of 50,000 features with a mean of 1000 and a deviation of 0.01."""
    features = draw_normal(50_000, 16, std=0.01) + 1000.0
    moments = Moments(16)
    for batch in features.split(64):
        moments.add(batch)
    # The difference is exact, as both are near each other.
    centred = features - 1000.0
    exact = centred.T @ centred - torch.outer(centred.sum(0), centred.sum(0)) / len(centred)
    assert relative_error(moments.covariance, exact / (len(features) - 1)) < 1e-9
    assert relative_error(moments.mean, centred.mean(0) + 1000.0) < 1e-13


def test_the_frechet_distance_of_nearly_equal_sets():
    """1e-4 where variances differ by 1 in 10,000: the distance is 2.5e-9 of the traces whose
    difference it is."""
    variances = torch.logspace(-2, 2, 256, dtype=torch.float64)
    turned = torch.linalg.qr(draw_normal(256, 256)).Q
    sides = []
    for values in (variances, variances * (1.0 + 1e-4)):
        side = Moments(256)
        side.count = 50_000
        side.scatter = 49_999 * (turned * values) @ turned.T
        sides.append(side)
    exact = math.fsum((math.sqrt(v * (1.0 + 1e-4)) - math.sqrt(v)) ** 2 for v in variances.tolist())
    assert relative_error(frechet_distance(*sides), exact) < 1e-4
