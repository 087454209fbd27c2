"""Flow matching: target, times, labels that are dropped, and draws by position."""

import torch

from accel.kernels.counter_noise import Purpose, counter_normal
from data.loader import Batch
from models.sampler import shift_times
from tests.harness.denoisers import fill_zero_layers, make_denoiser
from tests.harness.steps import tiny_training
from training.objective import FlowMatching


def make_batch(size):
    position = torch.arange(size)
    latents = counter_normal(9, Purpose.SYNTHETIC, position, (1, 4, 4))
    return Batch(latents, position % 3, position, position)


def compute_losses(objective, model=lambda x, *_: x, batch=None, **options):
    batch = batch or make_batch(4000)
    return objective.compute_losses(model, batch, seed=0, null_label=3, **options)


def test_a_perfect_model_has_no_loss():
    """Where z is 0, the target v = ε - z is x / t."""
    batch = make_batch(64)
    batch = batch._replace(latents=torch.zeros_like(batch.latents))
    losses, t = compute_losses(FlowMatching(), lambda x, t, y: x / t.view(-1, 1, 1, 1), batch)
    assert losses.max() < 1e-10
    assert ((t > 0) & (t < 1)).all()


def test_time_is_logit_normal_and_shifted():
    _, t = compute_losses(FlowMatching(logit_mean=0.5, logit_std=0.7))
    logit = torch.logit(t)
    assert abs(logit.mean() - 0.5) < 0.05
    assert abs(logit.std() - 0.7) < 0.05
    _, shifted = compute_losses(FlowMatching(logit_mean=0.5, logit_std=0.7, timestep_shift=3.0))
    torch.testing.assert_close(shifted, shift_times(t, 3.0))
    assert (shifted > t).all()


def test_labels_are_dropped_at_their_rate_in_training_only():
    labels = []

    def model(x, t, y):
        labels.append(y)
        return x

    objective = FlowMatching(label_dropout=0.3)
    compute_losses(objective, model)
    compute_losses(objective, model, held_out=True)
    assert abs((labels[0] == 3).float().mean() - 0.3) < 0.03
    assert torch.equal(labels[1], make_batch(4000).labels)


def test_a_dropped_label_becomes_the_one_that_no_class_has():
    """Digits have the classes 0 … 9."""
    training = tiny_training("mamba", "objective.label_dropout=1.0")
    labels = []
    training.step.forward = lambda x, t, y: labels.append(y) or x
    training.step.compute_losses(next(training.loader))
    assert labels[0].unique().tolist() == [10]


def test_draws_follow_the_position_not_the_batch():
    batch = make_batch(8)
    model = fill_zero_layers(make_denoiser("mamba", channels=1, height=4, width=4))
    whole, _ = compute_losses(FlowMatching(), model, batch)
    part, _ = compute_losses(FlowMatching(), model, Batch(*(t[3:5] for t in batch)))
    torch.testing.assert_close(part, whole[3:5])
