"""Steps that go wrong: not finite, spikes, out of memory."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch

from common.config.compose import report_user_errors
from common.files import read_object
from common.trees import flatten
from tests.harness.outcomes import are_equal, list_checkpoints, read_columns, read_lines
from tests.harness.refusals import expect_refusal
from tests.harness.words import CPU
from training.assemble import Training
from training.optim.spikes import SpikeGuard
from training.step import TrainStep

TWENTY_STEPS = ["total_samples=160", "runtime=eager", "log_every=1", "save_every=5"]


def change_losses(monkeypatch, change):
    """Makes the losses of each step `change(step, losses)`."""
    compute = TrainStep.compute_losses

    def compute_changed(self, batch, held_out=False):
        losses = compute(self, batch, held_out)
        step = int(batch.position[0]) // 8 + 1
        return losses._replace(flow=change(step, losses.flow))

    monkeypatch.setattr(TrainStep, "compute_losses", compute_changed)


@pytest.fixture
def states(monkeypatch):
    """Weights, averages and moments after each step."""
    take_step = Training.take_step
    copies = []

    def step_and_copy(training):
        take_step(training)
        state = training.state.state_dict()
        pieces = {name: state[name] for name in ("model", "ema", "optimizer")}
        copies.append(
            [leaf.clone() for leaf in flatten(pieces).values() if isinstance(leaf, torch.Tensor)]
        )

    monkeypatch.setattr(Training, "take_step", step_and_copy)
    return copies


def assert_skipped(states, step):
    """This step must leave every bit as it was, and the next one must not."""
    before, after, later = states[step - 2 : step + 1]
    assert are_equal(before, after)
    assert not are_equal(after, later)


@pytest.mark.fault(
    "a NaN in one batch",
    "that step is skipped on the device: weights, averages, moments bit-identical",
)
@pytest.mark.parametrize(("bad", "fused"), [(torch.nan, True), (1e30, False)])
def test_one_bad_batch(bad, fused, run, states, poison_latents):
    """The norm of the gradient is NaN in one case, and infinite in the other."""
    poison_latents(7, 7, bad)
    summary = run(*TWENTY_STEPS, f"runtime.fused_adamw={fused}")
    assert (summary["steps"], summary["skipped_steps"]) == (20, 1)
    assert_skipped(states, 7)
    assert all(tensor.isfinite().all() for tensor in states[-1])


@pytest.mark.fault(
    "a spike of the gradient norm (guards.spike_sigmas)",
    "that step is skipped, the next one is not",
)
def test_a_spike_is_skipped(run, states, monkeypatch):
    change_losses(monkeypatch, lambda step, loss: loss * 1e4 if step == 15 else loss)
    summary = run(*TWENTY_STEPS, "guards.spike_sigmas=6", "guards.spike_window=8")
    assert summary["skipped_steps"] == 1
    assert_skipped(states, 15)


@pytest.mark.fault("NaN in a burst of batches", "stops at guards.max_skipped_in_row with a dump")
def test_a_burst_stops_the_run(run, run_dir, poison_latents):
    """It is noticed where nothing is logged."""
    poison_latents(7, 99)
    sentence = (
        r"step 10: the last 4 steps were skipped.*step-10\.json has the batch.*"
        r"continues from step-5; 40 samples after it are lost\."
    )
    with expect_refusal(sentence):
        run(*TWENTY_STEPS, "log_every=0", "guards.max_skipped_in_row=4")
    dump = read_object(run_dir / "dumps" / "step-10.json")
    assert [sample["position"] for sample in dump["samples"]] == list(range(72, 80))
    assert {sample["loss"] for sample in dump["samples"]} == {"nan"}
    assert dump["blocks"]["blocks.0"]["gradient_norm"] == "nan"
    assert list_checkpoints(run_dir)[-1] == "step-5"


def test_a_good_step_ends_the_row(run, poison_latents):
    poison_latents(7, 9)
    poison_latents(11, 13)
    assert run(*TWENTY_STEPS, "guards.max_skipped_in_row=4")["skipped_steps"] == 6


def test_a_skipped_step_enters_no_mean(run, tmp_path, poison_latents):
    """One NaN in a window of five leaves the mean of the other four; a window of skipped steps
    alone has no mean."""
    poison_latents(5, 5)
    run(*TWENTY_STEPS, "total_samples=40", folder="each")
    *losses, last = [loss for (loss,) in read_columns(tmp_path / "each", "loss")]
    assert last is None
    run(*TWENTY_STEPS, "total_samples=40", "log_every=5", folder="window")
    (line,) = read_lines(tmp_path / "window")
    assert line["loss"] == pytest.approx(sum(losses) / 4)
    assert (line["skipped"], line["grad_norm"], line["not_finite"]) == (1, None, 1)


def test_the_window_takes_finite_norms_only():
    """One NaN does not blind the guard, one spike does not either, and a lasting change of level is
    followed."""
    guard = SpikeGuard(4.0, 16, CPU)
    draw = torch.Generator().manual_seed(0)
    norms = [1.0 + 0.1 * torch.randn((), generator=draw) for _ in range(40)]
    assert all(bool(guard.admit(norm)) for norm in norms[:20])
    for bad in (float("nan"), float("inf"), 1e6):
        assert not guard.admit(torch.tensor(bad))
    assert guard.norms.max() < 2
    assert all(bool(guard.admit(norm)) for norm in norms[20:])
    assert not guard.admit(torch.tensor(3.0))
    assert any(bool(guard.admit(torch.tensor(3.0))) for _ in range(32))


def test_before_its_window_is_full_nothing_is_a_spike():
    guard = SpikeGuard(1.0, 8, CPU)
    assert all(bool(guard.admit(torch.tensor(10.0**i))) for i in range(8))
    # A checkpoint of a run without a guard has no window.
    guard.load_state_dict({})
    assert guard.count == 0


def exhaust(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail_in_forward(monkeypatch, fail=exhaust):
    change_losses(monkeypatch, lambda step, loss: fail() if step >= 12 else loss)


def fail_in_backward(monkeypatch):
    def change(step, loss):
        if step >= 12:
            loss.register_hook(exhaust)
        return loss

    change_losses(monkeypatch, change)


def fail_in_optimizer(monkeypatch):
    update = TrainStep.update_parameters

    def failing(self, *arguments):
        if self.position >= 88:
            exhaust()
        return update(self, *arguments)

    monkeypatch.setattr(TrainStep, "update_parameters", failing)


GPU_MEMORY = pytest.mark.fault(
    "out of memory in the forward pass, the backward pass, the optimizer",
    "one sentence: where, the measured peak, the keys that help; what is saved loads",
)
HOST_MEMORY = pytest.mark.fault(
    "host memory used up", "one sentence: where, the measured peak; what is saved loads"
)


@pytest.mark.parametrize(
    ("fail", "place"),
    [
        pytest.param(fail_in_forward, "the forward pass", marks=GPU_MEMORY),
        pytest.param(fail_in_backward, "the backward pass", marks=GPU_MEMORY),
        pytest.param(fail_in_optimizer, "the optimizer", marks=GPU_MEMORY),
        pytest.param(
            partial(fail_in_forward, fail=Mock(side_effect=MemoryError)), "", marks=HOST_MEMORY
        ),
    ],
)
def test_out_of_memory(fail, place, run, run_dir, monkeypatch, capsys):
    fail(monkeypatch)
    with pytest.raises(SystemExit), report_user_errors():
        run(*TWENTY_STEPS)
    message = capsys.readouterr().err
    assert f"out of memory in {place}" in message
    assert "GiB were taken at the peak" in message
    # Activations and moments are in host memory anyway here, so nothing offers to move them.
    advice = "runtime.gradient_checkpointing=true runtime.checkpoint_policy=blocks, runtime.weights"
    assert advice in message
    assert "offload" not in message
    assert "continues from step-10" in message
    assert list_checkpoints(run_dir)[-1] == "step-10"


@pytest.mark.fault("out of memory in warm-up", "the same sentence; no folder is left")
def test_out_of_memory_at_once(run, run_dir, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")

    monkeypatch.setattr(TrainStep, "compute_losses", failing)
    with expect_refusal(r"out of memory in .* at step 0: .*, a smaller model"):
        run(*TWENTY_STEPS)
    assert not run_dir.exists()
