"""The training step: what it decides, and that it decides on the device."""

from __future__ import annotations

import pytest
import torch

from accel.kernels.add_norm import add_norm
from accel.kernels.bidirectional_ssd import bidirectional_ssd
from accel.kernels.local_mix import local_mix
from accel.techniques.precision import LossScaler
from tests.harness.steps import (
    VARIANTS,
    allow_any_precision,
    assemble,
    explain_unavailable,
    key_of,
    ledger_of,
    name_variant,
    tiny_training,
)

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def any_precision(monkeypatch):
    allow_any_precision(monkeypatch)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(fused, bad):
    model, step, _, loader = assemble(fused_adamw=fused)
    step([next(loader)])
    moments = [t.clone() for s in step.optimizer.state.values() for t in s.values()]
    before = (
        [p.detach().clone() for p in model.parameters()]
        + [a.clone() for a in step.ema.averages]
        + moments
    )
    batch = next(loader)
    output = step([batch._replace(latents=batch.latents * bad)])
    after = [p.detach() for p in model.parameters()] + step.ema.averages
    after += [t for s in step.optimizer.state.values() for t in s.values()]
    assert output.skipped == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert step([next(loader)]).skipped == 0.0


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_equals_pytorchs(fused):
    model, step, _, loader = assemble("mamba", "max_grad_norm=0.05", fused_adamw=fused)
    reference, other, _, other_loader = assemble("mamba", "max_grad_norm=0")
    step([next(loader)])
    losses, _ = other.losses(next(other_loader))
    losses.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    assert norm > 0.05
    other.optimizer.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_finds_its_loss_scale_without_counting_it_as_failure(fused):
    model, step, _, loader = assemble(precision="fp16", fused_adamw=fused)
    step.scaler.scale.fill_(2.0**40)  # gradients overflow
    before = [p.detach().clone() for p in model.parameters()]
    output = step([next(loader)])
    assert (output.skipped, output.backed_off) == (0.0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert step.scaler.scale == 2.0**39
    batch = next(loader)
    output = step([batch._replace(latents=batch.latents * float("nan"))])
    # the loss itself is bad: no scale helps
    assert (output.skipped, output.backed_off) == (1.0, 0.0)
    step.scaler.scale.fill_(1024.0)
    output = step([next(loader)])
    assert (output.skipped, output.backed_off) == (0.0, 0.0)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_loss_scale_cancels():
    norms = []
    for scale in (1.0, 4096.0):
        _, step, _, loader = assemble(precision="fp16", fused_adamw=True)
        step.scaler.scale.fill_(scale)
        norms.append(step([next(loader)]).grad_norm)
    torch.testing.assert_close(norms[0], norms[1], rtol=2e-2, atol=0.0)


def test_the_loss_scale_grows_and_backs_off_like_gradscalers():
    ours = LossScaler(torch.device("cpu"), 8.0)
    theirs = torch.amp.GradScaler("cpu", 8.0, growth_interval=2000)
    good = torch.zeros(())
    bad = torch.ones(())
    for _ in range(2000):
        ours.update(good)
    assert ours.scale == 8.0 * theirs.get_growth_factor()
    ours.update(bad)
    assert ours.scale == 8.0 * theirs.get_growth_factor() * theirs.get_backoff_factor()


def test_a_spike_does_not_move_the_loss_scale():
    _, step, _, loader = assemble(
        "mamba", "guards.spike_sigmas=6", "guards.spike_window=8", precision="fp16"
    )
    step.spikes.norms.copy_(1e-6 * torch.arange(8))  # so that any step is a spike
    step.spikes.count.fill_(8)
    output = step([next(loader)])
    assert (output.skipped, output.backed_off) == (1.0, 0.0)
    assert step.scaler.scale == 1024.0


def test_the_loss_scale_is_part_of_the_state():
    training = tiny_training(precision="fp16")
    other = tiny_training(precision="fp16")
    training.step.scaler.scale.fill_(256.0)
    training.step.scaler.good_steps.fill_(7)
    other.state.load_state_dict(training.state.state_dict())
    assert (other.step.scaler.scale, other.step.scaler.good_steps) == (256.0, 7)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_first_step_that_is_skipped_leaves_nothing_behind(optimizer, monkeypatch):
    """Memory that PyTorch takes and nobody writes to is full of NaN here."""
    training = tiny_training("mamba", f"optim={optimizer}", fused_adamw=True)
    losses = training.step.losses
    torch.use_deterministic_algorithms(True)
    try:
        monkeypatch.setattr(
            training.step, "losses", lambda batch: (losses(batch)[0] * torch.nan, None)
        )
        assert training.take_step().skipped == 1.0
        monkeypatch.setattr(training.step, "losses", losses)
        outputs = [training.take_step() for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert [float(output.skipped) for output in outputs] == [0.0] * 3
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


OPTIMIZERS = {"AdamW": [], "Adam": [], "SGD": ["~optim.betas"]}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_restored_in_place_where_a_graph_may_hold_on_to_it(optimizer):
    """Also the state before the first step; and what follows is the same, bit for bit."""
    words = [f"optim._target_=torch.optim.{optimizer}", *OPTIMIZERS[optimizer]]
    training = tiny_training("mamba", *words)
    reference = tiny_training("mamba", *words)
    entries = training.step.optimizer.state
    with training.state.preserve():
        training.take_step()
        moments = [t for of_parameter in entries.values() for t in of_parameter.values()]
    training.take_step()
    if optimizer != "SGD":
        now = [t for of_parameter in entries.values() for t in of_parameter.values()]
        assert all(a is b for a, b in zip(moments, now, strict=True))
    reference.take_step()
    pairs = zip(training.model.parameters(), reference.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def ops_in(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, ...]]:
    """What each public op returns for activations in `dtype` and parameters in fp32, as autocast
    has it."""
    torch.manual_seed(0)
    B = 2
    L = 9
    D = 8
    K = 2
    P = 4
    N = 4
    x = torch.randn(B, L, D)
    gate, scale, shift = torch.randn(3, B, D)
    dt, dt_bias, A_log = torch.randn(B, L, 2, K), *torch.randn(2, 2, K)
    B_in, C_out = torch.randn(2, B, L, 2, N)
    with torch.amp.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        h, z = add_norm(
            x.to(dtype), gate.to(dtype), torch.randn(B, L, D), scale.to(dtype), shift.to(dtype)
        )
        heads = x.to(dtype).unflatten(-1, (K, P))
        groups = (B_in.to(dtype), C_out.to(dtype))
        y = bidirectional_ssd(
            heads, dt.to(dtype), dt_bias, A_log, *groups, torch.ones(K), heads, torch.ones(K, P)
        )
        mixed = local_mix(x.to(dtype), torch.randn(D, 1, 3, 3), torch.randn(D), (3, 3))
    return {"add_norm": (h, z), "bidirectional_ssd": (y,), "local_mix": (mixed,)}


@pytest.mark.parametrize("op", ["add_norm", "bidirectional_ssd", "local_mix"])
def test_ops_under_autocast_keep_the_dtype_they_are_given_and_the_residual_in_fp32(op):
    narrow = ops_in(torch.bfloat16)[op]
    wide = ops_in(torch.float32)[op]
    assert narrow[0].dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in narrow[1:])  # the residual
    for a, b in zip(narrow, wide, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=name_variant)
def test_on_a_gpu_every_technique_is_seen_to_be_on(variant):
    if reason := explain_unavailable(variant, CUDA):
        pytest.skip(reason)
    key = key_of(variant)
    half = {"precision": "bf16"} if key == "attention" else {}
    family = "dit" if key == "attention" else "mamba"
    active = ledger_of(family, device=CUDA, **half | variant)[key].active
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
        "deterministic=true",
        "runtime.device=cuda",
        "log_every=1",
        "eval_every=5",
    ]
    words += [f"accumulation_steps={accumulation}", "save_every=10"]
    losses = {}
    for graph in (False, True):
        own = [*words, f"runtime.cuda_graph={str(graph).lower()}"]
        run(*own, "total_samples=80", folder=f"graph-{graph}")
        summary = run(*own, "total_samples=160", folder=f"graph-{graph}")
        assert summary["ledger"]["cuda_graph"]["active"] is graph
        losses[graph] = (
            (tmp_path / f"graph-{graph}" / "metrics.jsonl").read_text().split('"loss": ')[1:]
        )
        losses[graph] = [line.split(",")[0] for line in losses[graph]]
    assert len(losses[True]) == 20
    assert losses[True] == losses[False]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [{}, *VARIANTS], ids=name_variant)
def test_on_a_gpu_the_step_never_waits_for_the_device(variant):
    if variant and (reason := explain_unavailable(variant, CUDA)):
        pytest.skip(reason)
    family = "dit" if "attention" in variant else "mamba"
    _, step, stack, loader = assemble(family, device=CUDA, **{"fused_adamw": True} | variant)
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
