"""Long sums against fp64: each is right on a long and hostile series, and a plainer way of summing
is not."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from accel.sharding import total_norm
from data.resident import read_split
from encoding.job import ChannelSums, channel_statistics
from evaluation.distances import Moments, frechet, squared_mmd
from training.distributed.ranks import SINGLE
from training.evaluate import evaluate
from training.metrics import Meter
from training.step import EMA, SpikeGuard, StepOutput, TrainStep

CPU = torch.device("cpu")
BF16 = 2.0**-9
"""What rounding a weight to bf16 changes at most, relative to it."""


def error(found, exact) -> float:
    """The largest difference relative to the largest exact value."""
    found, exact = (torch.as_tensor(value, dtype=torch.float64) for value in (found, exact))
    return float((found - exact).abs().max() / exact.abs().max())


def normal(*shape, mean=0.0, std=1.0):
    """Always the same, in fp64."""
    return mean + std * torch.randn(
        *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def running_sum(values: torch.Tensor) -> torch.Tensor:
    """The plain way: one addition after the other, in the type of `values`."""
    return torch.from_numpy(np.cumsum(values.numpy(), 0))[-1]


def test_the_loss_of_a_long_window():
    """1e-14 over 5,000 steps whose losses scarcely differ, as late in a run; an fp32 sum is off by
    over 1e-6."""
    losses = normal(5_000, mean=0.5371, std=1e-5).float()
    meter = Meter(batch_size=1, tokens=1, flops_per_sample=1, peak_flops=None)
    zero = torch.zeros(())
    for loss in losses:
        meter.update(StepOutput(loss, zero, zero, zero))
    exact = math.fsum(losses.tolist()) / len(losses)
    assert error(running_sum(losses) / len(losses), exact) > 1e-6
    assert error(meter.report(lr=0.1)["loss"], exact) < 1e-14


def test_a_window_of_a_whole_run_needs_more_than_fp32():
    """`log_every=0`: of a million steps an fp32 sum keeps three digits, and fp64, which the meter
    has, twelve."""
    losses = normal(1_000_000, mean=0.53, std=0.005).float()
    exact = math.fsum(losses.tolist())
    assert error(running_sum(losses), exact) > 5e-4
    assert error(running_sum(losses.double()), exact) < 1e-12


def test_a_window_of_an_older_checkpoint_goes_on_in_fp64():
    meter = Meter(batch_size=1, tokens=1, flops_per_sample=1, peak_flops=None)
    zero = torch.zeros(())
    sums = {"loss": torch.tensor(2.0**24), "skipped": zero, "backed_off": zero, "in_row": zero}
    meter.load_state_dict(sums | {"steps": 2**24})
    meter.update(StepOutput(torch.ones(()), zero, zero, zero))
    assert meter.state_dict()["loss"].dtype == torch.float64
    assert meter.state_dict()["loss"] == 2**24 + 1  # in fp32 it would stand still
    assert {meter.state_dict()[name].dtype for name in ("skipped", "backed_off", "in_row")} == {
        torch.float32
    }


def test_gradients_and_loss_of_many_micro_batches():
    """fp32: 5e-6 over 512 micro-batches whose gradients scarcely differ; a bf16 sum loses over a
    tenth."""
    parameter = nn.Parameter(torch.ones(1000))
    slopes = normal(512, 1000, mean=1.0, std=0.01).float()
    step = SimpleNamespace(
        losses=lambda slope: ((parameter * slope).sum().reshape(1), None),
        ema_weight=torch.zeros(()),
        synchronised=lambda last: nullcontext(),
        mark=lambda phase: None,
        scaler=None,
    )
    total = TrainStep.accumulate(step, list(slopes))
    exact = slopes.double().mean(0)
    rough = torch.zeros(1000, dtype=torch.bfloat16)
    for slope in slopes:
        rough += (slope / len(slopes)).bfloat16()
    assert parameter.grad.dtype == torch.float32
    assert error(rough, exact) > 0.1
    assert error(parameter.grad, exact) < 5e-6
    assert error(total, math.fsum(exact.tolist())) < 5e-6


@pytest.mark.parametrize(("kind", "bound"), [("normal", 1e-5), ("equal", 1e-4)])
def test_the_gradient_norm_of_a_large_matrix(kind, bound):
    """fp32, of 11 million values, the modulation's of `mamba_s`; PyTorch's own norm is off tenfold
    on the CPU."""
    gradient = torch.full((384 * 74, 384), 1e-3)
    if kind == "normal":
        gradient.normal_(0.0, 1e-3, generator=torch.Generator().manual_seed(0))
    exact = gradient.double().square().sum().sqrt()
    assert error(torch.nn.utils.get_total_norm([gradient]), exact) > 10 * bound
    assert error(total_norm([gradient]), exact) < bound
    assert error(total_norm([gradient.T, torch.zeros(3)]), exact) < bound


def test_the_limit_for_spikes():
    """Deviation of 4,096 norms near 1000, in fp32, to 1e-3 of itself; squares minus squared mean
    give nonsense."""
    norms = normal(4096, mean=1000.0, std=0.1).float()
    guard = SpikeGuard(sigmas=6.0, window=len(norms), device=CPU)
    guard.norms.copy_(norms)
    guard.count.fill_(len(norms))
    std, mean = torch.std_mean(norms.double())
    naive = running_sum(norms.square()) / len(norms) - (running_sum(norms) / len(norms)).square()
    assert error(naive, std.square()) > 1.0
    below, above = (mean + (6.0 + margin) * std for margin in (-6e-3, 6e-3))
    assert not guard.passes(above.float())
    guard.norms.copy_(norms)
    assert guard.passes(below.float())


def averaged(weight: float, walk: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The average that EMA keeps, in `dtype`, of a parameter that takes the values `walk`."""
    model = nn.ParameterDict({"p": nn.Parameter(walk[0].clone())})
    ema = EMA(model, half_life_samples=1.0)
    factor = torch.tensor(weight)
    ema.averages[0].data = ema.averages[0].to(dtype)
    for values in walk[1:]:
        model["p"].data = values
        ema.update(factor)
    return ema.averages[0]


def exactly_averaged(weight: float, walk: torch.Tensor) -> torch.Tensor:
    """The same in fp64 and in closed form, so without a running average."""
    shares = weight * (1.0 - weight) ** torch.arange(len(walk) - 1, -1, -1, dtype=torch.float64)
    shares[0] /= weight
    return shares @ walk.double()


@pytest.mark.parametrize(("half_life", "bound"), [(1_774_000, 1e-4), (17_740_000, BF16 / 4)])
def test_averages_of_many_steps(half_life, bound):
    """fp32 stays far below bf16's rounding, and below 2^-24 / w, the most that it could lose.

    256 a step, as in `experiment=fullrun`, and a half-life ten times as long: w is 1e-4 and 1e-5.
    Weights near 1, the hardest, are moved as Adam moves them.
    """
    weight = float(torch.tensor(EMA(nn.Linear(1, 1), half_life).weight(10**12, 256)))
    rates = 1e-4 * (0.5 + 0.5 * torch.linspace(0.0, math.pi, 10_000).cos())
    moves = rates[:, None] * (0.3 * normal(10_000, 256) + 0.1)
    walk = (normal(256, mean=1.0, std=0.1) + moves.cumsum(0)).float()
    found = averaged(weight, walk)
    exact = exactly_averaged(weight, walk)
    assert error(found, exact) < min(bound, 2.0**-24 / weight)
    # beside what the average has moved
    assert error(found - walk[0], exact - walk[0].double()) < 0.05


@pytest.mark.parametrize(("dtype", "weight"), [(torch.bfloat16, 1e-4), (torch.float32, 1e-7)])
def test_where_averages_would_stand_still(dtype, weight):
    """In bf16 at the weight of `experiment=fullrun`; in fp32 at a half-life of 7 million steps,
    which nobody sets."""
    walk = torch.full((1000, 4), 1.3)
    walk[0] = 1.0
    assert torch.equal(averaged(weight, walk, dtype), walk[0].to(dtype))
    assert exactly_averaged(weight, walk).min() > 1.00002
    assert error(averaged(1e-5, walk), exactly_averaged(1e-5, walk)) < 1e-5


def test_the_last_of_the_way_to_weights_that_stand_still_is_lost():
    """A weight that is 5e-4 away from an average of 1 is not followed at w = 1e-4; 1e-3 away it
    is."""
    near = torch.full((1000, 4), 1.0005)
    far = torch.full((1000, 4), 1.001)
    near[0] = far[0] = 1.0
    assert torch.equal(averaged(1e-4, near), near[0])
    assert averaged(1e-4, far).min() > 1.00005


def test_the_mean_of_held_out_losses():
    """1e-14 over 50,000 samples whose losses scarcely differ; an fp32 sum is off by over 1e-6."""
    losses = normal(50_000, mean=0.53, std=1e-4).float()
    t = torch.linspace(0.0, 0.999, 50_000)
    loader = SimpleNamespace(
        held_out=lambda size: (
            SimpleNamespace(position=part) for part in torch.arange(50_000).split(size)
        ),
        held_out_count=50_000,
    )
    found = evaluate(
        SimpleNamespace(
            ranks=SINGLE,
            micro_batch=256,
            loader=loader,
            state=SimpleNamespace(averaged=nullcontext),
            step=SimpleNamespace(
                losses=lambda batch, held_out: (losses[batch.position], t[batch.position])
            ),
        )
    )
    exact = math.fsum(losses.tolist()) / len(losses)
    assert error(running_sum(losses) / len(losses), exact) > 1e-6
    assert error(found["eval_loss"], exact) < 1e-14
    last = losses[t >= 0.75].tolist()
    assert error(found["eval_loss_t0.75_1.00"], math.fsum(last) / len(last)) < 1e-14


def test_mean_and_std_of_latents():
    """1e-13 and 1e-8 over a million values with a mean of 100 and a deviation of 0.1; fp32 has no
    such deviation."""
    latents = normal(4096, 2, 16, 16, mean=100.0, std=0.1).float()
    sums = [ChannelSums(), ChannelSums()]
    for i, block in enumerate(latents.split(64)):
        sums[i % 2].add({"latents": block})
    mean, std = channel_statistics([s.as_dict() for s in sums])
    values = latents.double().transpose(0, 1).flatten(1)
    exact = [math.fsum(channel.tolist()) / len(channel) for channel in values]
    deviation = (values - values.mean(1, keepdim=True)).square().mean(1).sqrt()
    squares, total = (
        running_sum(v.float().flatten()) / v.numel() for v in (values[0].square(), values[0])
    )
    assert error(squares - total.square(), deviation[0].square()) > 1.0
    assert error(mean, exact) < 1e-13
    assert error(std, deviation) < 1e-8


def test_the_error_of_latents_in_8_bits():
    """1e-12 over 131,072 values a channel; an fp32 sum is off by over 1e-6."""
    latents = normal(512, 4, 16, 16, mean=3.0).half()
    reader = SimpleNamespace(
        shape=(4, 16, 16),
        count=512,
        places=[SimpleNamespace(first=8 * i, block=SimpleNamespace(samples=8)) for i in range(64)],
        read=lambda i: {
            "latents": latents[8 * i : 8 * i + 8],
            "ids": torch.arange(8 * i, 8 * i + 8),
            "labels": torch.zeros(8, dtype=torch.long),
        },
    )
    split, found = read_split(reader, CPU, "int8")
    off = (split.latents[:] - latents.float()).transpose(0, 1).flatten(1)
    exact = [
        math.sqrt(math.fsum(channel.tolist()) / len(channel)) for channel in off.double().square()
    ]
    assert error((running_sum(off.T.square()) / off.shape[1]).sqrt(), exact) > 1e-6
    assert error(found, exact) < 1e-12


def test_the_covariance_of_many_features():
    """1e-9 of 50,000 features with a mean of 1000 and a deviation of 0.01; products minus means
    lose all in fp32."""
    features = normal(50_000, 16, std=0.01) + 1000.0
    moments = Moments(16)
    for batch in features.split(64):
        moments.add(batch)
    centred = features - 1000.0  # exact: both are near each other
    exact = centred.T @ centred - torch.outer(centred.sum(0), centred.sum(0)) / len(centred)
    naive = features.float().T @ features.float() / len(features) - torch.outer(
        *2 * [features.float().mean(0)]
    )
    assert error(naive, exact / len(features)) > 10.0
    assert error(moments.covariance, exact / (len(features) - 1)) < 1e-9
    assert error(moments.mean, centred.mean(0) + 1000.0) < 1e-13


def test_the_frechet_distance_of_nearly_equal_sets():
    """1e-4 where variances differ by 1 in 10,000, so the distance is 2.5e-9 of the traces it is
    left over from."""
    variances = torch.logspace(-2, 2, 256, dtype=torch.float64)
    turned = torch.linalg.qr(normal(256, 256)).Q
    sides = []
    for values in (variances, variances * (1.0 + 1e-4)):
        side = Moments(256)
        side.count = 50_000
        side.scatter = 49_999 * (turned * values) @ turned.T
        sides.append(side)
    exact = math.fsum((math.sqrt(v * (1.0 + 1e-4)) - math.sqrt(v)) ** 2 for v in variances.tolist())
    first, second = (side.covariance.float().trace() for side in sides)
    overlap = (variances * (1.0 + 5e-5)).float().sum()
    assert error(first + second - 2.0 * overlap, exact) > 0.9  # nothing is left
    assert error(frechet(*sides), exact) < 1e-4


def test_the_kernel_distance_of_features_far_from_0():
    """1e-9 where kernel values of about a million leave a distance of about a thousand; fp32 is off
    by over 1e-6."""
    a, b = (
        mean + part for mean, part in zip((10.0, 10.1), normal(600, 16).split(300), strict=True)
    )
    every = torch.ones(1, 300, dtype=torch.float64)

    def total(x, y, same: bool) -> float:
        kernel = (x @ y.T / 16 + 1.0) ** 3
        values = kernel[~torch.eye(300, dtype=torch.bool)] if same else kernel.flatten()
        return math.fsum(values.tolist()) / len(values)

    exact = total(a, a, True) + total(b, b, True) - 2.0 * total(a, b, False)
    assert error(squared_mmd(a.float(), b.float(), every.float(), every.float()), exact) > 1e-6
    assert error(squared_mmd(a, b, every, every), exact) < 1e-9
