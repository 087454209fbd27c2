"""The training step: what it decides, and that it decides on the device."""

from copy import deepcopy

import pytest
import torch
from torch.testing import assert_close

from accel.techniques.precision import LossScaler
from tests.harness.outcomes import are_equal, read_columns
from tests.harness.steps import (
    VARIANTS,
    assemble,
    explain_unavailable,
    key_of,
    ledger_of,
    name_variant,
    tiny_training,
)
from tests.harness.words import CPU, CUDA
from training.state import load_weights

pytestmark = pytest.mark.usefixtures("any_precision")
EITHER_WAY = pytest.mark.parametrize("fused", [False, True])


@EITHER_WAY
def test_clipping_equals_pytorchs(fused):
    training = tiny_training("mamba", "max_grad_norm=0.05", fused_adamw=fused)
    training.take_step()
    reference = tiny_training("mamba", "max_grad_norm=0")
    reference.step.compute_losses(next(reference.loader)).flow.mean().backward()
    parameters = list(reference.model.parameters())
    assert torch.nn.utils.clip_grad_norm_(parameters, 0.05) > 0.05
    reference.step.optimizer.step()
    assert_close(list(training.model.parameters()), parameters, rtol=1e-5, atol=1e-7)


@EITHER_WAY
def test_an_internal_head_changes_nothing_but_itself(fused):
    """The head changes neither other gradients, nor their clipping, nor what is a spike."""
    words = ["max_grad_norm=0.05", "guards.spike_sigmas=6", "guards.spike_window=8"]
    plain = tiny_training("hybrid", *words, fused_adamw=fused)
    training = tiny_training("hybrid", *words, "model.internal_block=1", fused_adamw=fused)
    load_weights(training.model, plain.model.state_dict() | select_internal(training.model))
    before = select_internal(training.model)
    for _ in range(3):
        outputs = [run.take_step() for run in (plain, training)]
        assert outputs[0].grad_norm == outputs[1].grad_norm
    state = training.model.state_dict()
    assert are_equal(
        {name: state[name] for name in plain.model.state_dict()}, plain.model.state_dict()
    )
    assert torch.equal(plain.step.spikes.norms, training.step.spikes.norms)
    after = select_internal(training.model)
    assert not any(torch.equal(after[name], before[name]) for name in after)

    # A gradient of the head that is not finite skips the step.
    training.model.internal.head.bias.register_hook(lambda grad: grad * torch.nan)
    weights = deepcopy(training.model.state_dict())
    assert training.take_step().skipped == 1.0
    assert are_equal(weights, training.model.state_dict())


def select_internal(model):
    tensors = model.state_dict()
    return {name: tensors[name].clone() for name in tensors if name.startswith("internal.")}


@EITHER_WAY
def test_fp16_finds_its_loss_scale_without_counting_it_as_failure(fused):
    words = ["guards.spike_sigmas=6", "guards.spike_window=8"]
    model, step, _, loader = assemble("mamba", *words, precision="fp16", fused_adamw=fused)
    before = deepcopy(model.state_dict())

    def count(batch):
        output = step([batch])
        return output.skipped, output.backed_off

    # Gradients overflow at this scale.
    step.scaler.scale.fill_(2.0**40)
    assert count(next(loader)) == (0.0, 1.0)
    assert are_equal(before, model.state_dict())
    assert step.scaler.scale == 2.0**39

    # No scale helps where the loss itself is NaN.
    batch = next(loader)
    assert count(batch._replace(latents=batch.latents * float("nan"))) == (1.0, 0.0)

    step.scaler.scale.fill_(1024.0)
    assert count(next(loader)) == (0.0, 0.0)

    # Any step is a spike after a window of such norms; it does not move the scale.
    step.spikes.norms.copy_(1e-6 * torch.arange(8))
    step.spikes.count.fill_(8)
    assert count(next(loader)) == (1.0, 0.0)
    assert step.scaler.scale == 1024.0


def test_the_loss_scale_grows_and_backs_off_like_gradscalers():
    scaler = LossScaler(CPU)
    reference = torch.amp.GradScaler("cpu", growth_interval=2000)
    for _ in range(2000):
        scaler.update(torch.zeros(()))
    grown = reference.get_growth_factor() * 2.0**16
    assert scaler.scale == grown
    scaler.update(torch.ones(()))
    assert scaler.scale == grown * reference.get_backoff_factor()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_first_step_that_is_skipped_leaves_nothing_behind(optimizer):
    """Deterministic PyTorch fills memory with NaN that it allocates and does not write."""
    training = tiny_training("mamba", f"optim={optimizer}", fused_adamw=True)
    torch.use_deterministic_algorithms(True)
    batch = next(training.loader)
    assert training.step([batch._replace(latents=batch.latents * torch.nan)]).skipped == 1.0
    assert [float(training.take_step().skipped) for _ in range(3)] == [0.0] * 3
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


def test_a_step_has_the_rates_of_the_samples_it_ends_at():
    """A step has 8 samples, the warm-up 160, and at 160 samples the half-life is 0.05 · 160, later
    100."""
    step = tiny_training("mamba", "schedule.warmup_samples=160").step
    step.schedule(72)
    assert step.lr == pytest.approx(0.5e-3)
    step.schedule(152)
    assert step.lr == pytest.approx(1e-3)
    ema, weight = step.averages[0]
    assert weight.item() == pytest.approx(0.5)
    assert (1 - ema.compute_weight(10**6, 10)) ** 10 == pytest.approx(0.5)


def choose_run(variant):
    """Family and runtime in which a technique has something to do: attention, its rotation and the
    SwiGLU are in `dit`, and two backends of attention take 16-bit inputs only."""
    keys = variant.keys() & {"attention", "fused_rope", "fused_swiglu"}
    half = {"precision": "bf16"} if "attention" in keys else {}
    return "dit" if keys else "mamba", half | variant


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=name_variant)
def test_on_a_gpu_every_technique_is_seen_to_be_on(variant):
    if reason := explain_unavailable(variant, CUDA):
        pytest.skip(reason)
    key = key_of(variant)
    family, settings = choose_run(variant)
    active = ledger_of(family, device=CUDA, **settings)[key].active
    # PyTorch runs an fp32 depthwise convolution by a kernel of its own, so the autotuner may have
    # nothing to tune.
    assert active in ((True, "unused") if key == "cudnn_benchmark" else (variant[key],))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["mamba_xs", "ssd_mlp_xs", "dit_xs"])
def test_on_a_gpu_deterministic_runs_are_equal(model, run):
    words = ["deterministic=true", "runtime.device=cuda", f"model={model}", "total_samples=64"]
    assert run(*words)["loss"] == run(*words, folder="again")["loss"]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("runtime", ["fast", "production"])
def test_on_a_gpu_a_captured_step_loses_as_an_uncaptured_one(runtime, accumulation, run, tmp_path):
    """Ten steps with evaluation and a checkpoint in the middle, then ten more after a resume."""
    words = [
        f"runtime={runtime}",
        f"accumulation_steps={accumulation}",
        "deterministic=true",
        "runtime.device=cuda",
        "log_every=1",
        "eval_every=5",
        "save_every=10",
    ]
    losses = []
    for graph in (False, True):
        chosen = [*words, f"runtime.cuda_graph={str(graph).lower()}"]
        folder = f"graph-{graph}"
        run(*chosen, "total_samples=80", folder=folder)
        summary = run(*chosen, "total_samples=160", folder=folder)
        assert summary["ledger"]["cuda_graph"]["active"] is graph
        losses.append(read_columns(tmp_path / folder, "loss"))
    assert len(losses[0]) == 20
    assert losses[0] == losses[1]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [{}, *VARIANTS], ids=name_variant)
def test_on_a_gpu_the_step_never_waits_for_the_device(variant):
    if variant and (reason := explain_unavailable(variant, CUDA)):
        pytest.skip(reason)
    family, settings = choose_run(variant)
    _, step, stack, loader = assemble(family, device=CUDA, **{"fused_adamw": True} | settings)
    for _ in range(2):
        step([next(loader)])
    for technique in stack.techniques:
        technique.on_warm()
    for _ in range(3):
        step([next(loader)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.schedule(8)
        step([next(loader)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
