"""Flow matching: target, times, labels that are dropped, and draws by position; extra terms of an
objective, and the times of held-out samples."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from accel.kernels.counter_noise.draws import Purpose, counter_normal
from common.condition import Condition
from data.loader import Batch
from models.sampler import shift_times
from sampling.load import load_run
from tests.harness.batches import select
from tests.harness.outcomes import are_equal
from tests.harness.planted_objectives import EXTRA_TERM
from tests.harness.refusals import expect_refusal
from tests.harness.steps import assemble_run, compose_words, tiny_training
from tests.harness.words import CPU
from training.evaluate import evaluate
from training.objective import FlowMatching, LatentHead, compute_held_out_times


def make_batch(size):
    position = torch.arange(size)
    latents = counter_normal(9, Purpose.SYNTHETIC, position, (1, 4, 4))
    return Batch(latents, Condition(position % 3), position, position)


def answer_x(x, *_):
    return x, {}


def compute_times(**options):
    objective = FlowMatching(logit_mean=0.5, logit_std=0.7, **options)
    return objective.compute_losses(answer_x, make_batch(4000), seed=0, null_label=3).t


def test_time_is_logit_normal_and_shifted():
    t = compute_times()
    assert ((t > 0) & (t < 1)).all()
    logit = torch.logit(t)
    assert abs(logit.mean() - 0.5) < 0.05
    assert abs(logit.std() - 0.7) < 0.05
    shifted = compute_times(timestep_shift=3.0)
    torch.testing.assert_close(shifted, shift_times(t, 3.0))
    assert (shifted > t).all()
    assert torch.equal(compute_times(timestep_shift="auto"), t)  # of 16 values


@pytest.mark.parametrize("held_out", [False, True])
def test_the_loss_of_clean_latents_is_that_of_velocities_above_the_floor(held_out):
    """An estimate ẑ is the velocity (x - ẑ)/t, and its loss |ẑ - z|²/max(t, 0.05)²."""
    batch = make_batch(400)
    z = batch.latents

    def measure(model, error):
        def answer(x, t, _):
            velocity = (x - (z + error)) / t.view(-1, 1, 1, 1)
            return velocity, {"internal": velocity}

        objective = FlowMatching(logit_mean=-2.0)
        objective.attach_heads(SimpleNamespace(model=model))
        options = {"seed": 0, "null_label": 3, "held_out": held_out}
        return objective.compute_losses(answer, batch, **options)

    error = counter_normal(5, Purpose.SYNTHETIC, batch.position, z.shape[1:])
    plain = measure(SimpleNamespace(), error)
    clean = measure(SimpleNamespace(prediction="clean"), error)
    expected = error.square().mean((1, 2, 3)) / clean.t.clamp(min=0.05) ** 2
    torch.testing.assert_close(clean.flow, expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(clean.extra["internal"], clean.flow, rtol=0.0, atol=0.0)
    above = clean.t >= 0.05
    assert 0 < above.sum() < len(above)
    assert torch.equal(clean.flow[above], plain.flow[above])
    assert (clean.flow[~above] < plain.flow[~above]).all()
    assert measure(SimpleNamespace(prediction="clean"), 0.0).flow.max() < 1e-9


def test_held_out_noise_is_not_that_of_training():
    """A model that answers 0 has the square of noise - latents as its loss."""
    model = lambda x, *_: (0 * x, {})  # noqa: E731
    compute = partial(FlowMatching().compute_losses, model, make_batch(8), seed=0, null_label=3)
    assert (compute().flow != compute(held_out=True).flow).all()


def test_labels_become_the_null_label_at_their_rate_in_training_only():
    """Digits have the classes 0 … 9."""
    training = tiny_training("mamba", "objective.label_dropout=0.3")
    labels = []
    training.step.forward = lambda x, t, y: labels.append(y) or (x, {})
    batch = make_batch(4000)
    for held_out in (False, True):
        training.step.compute_losses(batch, held_out)
    assert abs((labels[0] == 10).float().mean() - 0.3) < 0.03
    assert torch.equal(labels[1], batch.condition.labels)


def measure_unevenness(u):
    """The largest difference between the share of numbers below a limit, and the limit."""
    u = u.double().sort().values
    ranks = torch.arange(len(u), dtype=torch.float64)
    return float(torch.maximum(u - ranks / len(u), (ranks + 1) / len(u) - u).max())


@pytest.mark.parametrize("count", [180, 1000])
def test_held_out_times_are_quantiles(count):
    """Their shares are those of the standard logit-normal distribution within 2.5 / n; those of
    random numbers are off by more than 6 / n."""
    t = compute_held_out_times(torch.arange(count))
    assert measure_unevenness(torch.special.ndtr(torch.logit(t.double()))) < 2.5 / count
    random = torch.rand(count, generator=torch.Generator().manual_seed(0))
    assert measure_unevenness(random) > 6.0 / count
    far = compute_held_out_times(torch.arange(2**40, 2**40 + 1000))
    assert ((far > 0.0) & (far < 1.0)).all()


def test_held_out_losses_of_two_objectives_are_comparable():
    """One model has one held-out loss: under another draw of t, extra terms or other batches."""
    losses = evaluate(tiny_training())
    draws = ["objective.logit_mean=1", "objective.logit_std=0.5", "objective.timestep_shift=3"]
    for words in (draws, EXTRA_TERM, ["batch_size=5"]):
        assert evaluate(tiny_training("mamba", *words)) == pytest.approx(losses, rel=1e-6)


def test_training_minimises_the_loss_and_the_extra_term():
    """Draws follow the position, so micro-batches have those of the batch."""
    training = tiny_training("mamba", *EXTRA_TERM)
    batch = next(training.loader)
    flow, _, extra = training.step.compute_losses(batch)
    parameters = list(training.model.parameters())
    expected = torch.autograd.grad(flow.mean() + extra["size"].mean(), parameters)

    means = training.step.accumulate([select(batch, half) for half in (slice(4), slice(4, None))])
    torch.testing.assert_close([p.grad for p in parameters], [*expected], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(means, {"loss": flow.mean(), "loss_size": extra["size"].mean()})


LOOKING = "model._target_=tests.harness.planted_tuning.Looking"
ALIGN = ["objective.align_weight=0.5", "objective.align_block=1"]


def test_the_latent_is_estimated_from_an_early_block_and_the_velocity_by_an_internal_head():
    """The flow is x = z + t·v. The first term is the smooth L1 distance to the clean latents, and
    trains its head and the blocks before it; the second trains its head only. In evaluation both
    are absent."""
    training = tiny_training("hybrid", *ALIGN, "model.internal_block=2")
    calls = []
    forward = training.step.forward
    training.step.forward = lambda *inputs: calls.append((inputs, forward(*inputs))) or calls[-1][1]
    batch = next(training.loader)
    flow, _, terms = training.step.compute_losses(batch)
    (x, t, _), (velocity, outputs) = calls[0]
    target = (x - batch.latents) / t.view(-1, 1, 1, 1)
    for loss, guess in ((flow, velocity), (terms["internal"], outputs["internal"])):
        torch.testing.assert_close(loss, (guess - target).square().mean(dim=(1, 2, 3)))
    difference = (outputs["latent"] - batch.latents).abs()
    distance = torch.where(difference < 0.05, 10 * difference.square(), difference - 0.025)
    torch.testing.assert_close(terms["latent"], 0.5 * distance.mean(dim=(1, 2, 3)))

    def train_term(name):
        terms[name].mean().backward()
        return {n for n, p in training.state.network.named_parameters() if p.grad is not None}

    internal = train_term("internal")
    assert internal == {
        f"model.internal.{name}" for name, _ in training.model.internal.named_parameters()
    }
    reached = train_term("latent") - internal
    assert {name for name in reached if name.startswith("aux_heads.")} == {
        f"aux_heads.latent.{name}" for name, _ in LatentHead(64, 4).named_parameters()
    }
    assert any(name.startswith("model.blocks.0.") for name in reached)
    assert not any(name.startswith(("model.blocks.1.", "model.head.")) for name in reached)
    held_out = evaluate(training)
    training.state.network.taps.clear()
    assert evaluate(training) == held_out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([LOOKING, *ALIGN], "align_weight=0.5 needs the forward pass .*Looking has its own; set"),
        ([LOOKING, "model.internal_block=1"], "internal_block needs the forward pass"),
        (
            [*ALIGN, "model.prediction=clean"],
            "align_weight=0.5: the model estimates the clean latents itself, by model.prediction=c",
        ),
        (["objective._target_=training.objective.LatentHead"], "is no Objective, which objective"),
    ],
)
def test_heads_past_another_forward_and_what_is_no_objective_are_refused(words, sentence):
    with expect_refusal(sentence):
        tiny_training("conv", "extensions=[tests]", *words)


def test_a_model_starts_the_same_with_and_without_the_head():
    def start(*words):
        torch.manual_seed(0)
        return assemble_run(compose_words(*words), CPU)

    plain = start()
    aligned = start(*ALIGN[:1])
    assert not plain.state.network.aux_heads
    assert "aux_heads.latent.fc1.bias" in aligned.state.network.no_weight_decay()
    weights = aligned.model.state_dict()
    torch.testing.assert_close(weights, plain.model.state_dict(), rtol=0.0, atol=0.0)
    assert aligned.take_step().loss == plain.take_step().loss
    assert aligned.state.network.taps == {"latent": 1}
    assert start("model=mamba_s", *ALIGN[:1]).state.network.taps == {"latent": 8}


def test_files_of_weights_leave_the_head_out(run, tmp_path):
    """Any run samples from them and starts from the averages, with or without an internal head."""
    first = last = tmp_path / "run"
    run("save_every=2", "ema.snapshots=1", *ALIGN)
    files = [*first.glob("checkpoints/*/[em]*.safetensors"), *first.glob("averages/*.safetensors")]
    assert len(files) == 4
    assert not any("aux_heads" in name for file in files for name in load_file(file))
    assert load_run(first, device="cpu").sample([3], steps=1).shape == (1, 8, 8, 3)
    for name, objective in {"a": [], "b": ALIGN, "c": ["model.internal_block=1"], "d": []}.items():
        run("save_every=2", *objective, f"init_from={last}", "optim.lr=0", folder=name)
        last = tmp_path / name
    weights, averages = (
        load_file(folder / f"checkpoints/step-2/{name}.safetensors")
        for folder, name in ((last, "model"), (first, "ema"))
    )
    assert are_equal(weights, averages)


def test_the_estimate_ends_by_a_weight_of_zero():
    """The head still gets gradients, of zeros: ddp waits for all gradients."""
    training = tiny_training("mamba", *ALIGN, "objective.align_until_samples=11")
    for samples in (0, 8):
        losses = training.step.compute_losses(next(training.loader))
        assert (losses.extra["latent"] > 0).tolist() == [samples + i < 11 for i in range(8)]
    training.step.accumulate([next(training.loader)])
    grads = [p.grad for p in training.state.network.aux_heads.parameters()]
    assert all(grad is not None and not grad.any() for grad in grads)


def test_an_objective_may_return_a_plain_tuple():
    words = ["extensions=[tests]", "objective._target_=tests.harness.planted_objectives.PlainTuple"]
    losses = tiny_training("mamba", *words).take_step().losses
    assert losses == tiny_training().take_step().losses
