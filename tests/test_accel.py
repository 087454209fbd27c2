"""Every technique keeps the contract; tests enrol by walking the stack's own tuple."""

from __future__ import annotations

import pytest
import torch

from accel.compile_blocks import CompileBlocks
from accel.evidence import Evidence, observe_step
from accel.fused_adamw import FusedAdamW
from accel.gradient_checkpointing import CheckpointBlocks
from accel.ledger import UNUSED, Ledger, LedgerRow
from accel.precision import Precision
from accel.residual_in_fp32 import ResidualInFp32
from accel.stack import TECHNIQUES, AccelerationStack
from accel.technique import Observation, Technique
from accel.tf32 import Tf32
from data.digits import DigitLatents
from tests.test_models import FAMILIES, tiny, woken
from training.ema import EMA
from training.objective import FlowMatching
from training.optim import parameter_groups
from training.schedule import Schedule
from training.schema import RuntimeConfig
from training.setup import spine
from training.step import TrainStep

CPU = torch.device("cpu")
EAGER = spine(RuntimeConfig())
ON = {technique.key: "bf16" if technique is Precision else True for technique in TECHNIQUES}
CUDA_ONLY = {"tf32", "cudnn_benchmark"}


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    monkeypatch.setattr(CompileBlocks, "backend", "aot_eager")


def assemble(family="mamba", max_grad_norm=1.0, optimizer=torch.optim.AdamW, techniques=None, **values):
    """Model, step, stack and loader of one tiny run under eager plus `values`."""
    loader = DigitLatents(batch_size=8, seed=0, device=CPU)
    model = woken(tiny(family, channels=1, num_classes=10))
    stack = AccelerationStack(EAGER | values, CPU)
    if techniques:
        stack.techniques += techniques
    stack.on_process()
    model = stack.on_model(model)
    made = optimizer(parameter_groups(model, 0.01), lr=1e-3, **stack.optimizer_kwargs())
    step = stack.on_step(
        TrainStep(
            model,
            FlowMatching(),
            made,
            Schedule("constant", 1000),
            EMA(model, 100.0),
            seed=0,
            batch_size=8,
            max_grad_norm=max_grad_norm,
        )
    )
    step.schedule(0)
    return model, step, stack, loader


def one_step(family="mamba", **values):
    """Loss, gradient norm and parameters after one step."""
    model, step, _, loader = assemble(family, **values)
    output = step([next(loader)])
    return output.loss, output.grad_norm, [p.detach().clone() for p in model.parameters()]


def available(key: str) -> bool:
    technique = next(t for t in TECHNIQUES if t.key == key)
    return technique(ON[key], CPU).unavailable() is None


@pytest.mark.parametrize("key", ON)
@pytest.mark.parametrize("family", FAMILIES)
def test_switching_a_technique_on_moves_the_loss_within_its_tolerance(key, family):
    if not available(key):
        pytest.skip(f"{key} cannot be had on this CPU")
    rtol = next(t for t in TECHNIQUES if t.key == key).loss_rtol
    other = key != "residual_in_fp32"  # that one is on in eager: compare with off
    plain, fast = one_step(family), one_step(family, **{key: ON[key] if other else False})
    assert_within(plain, fast, rtol)


def assert_within(plain, fast, rtol):
    if rtol == 0.0:
        assert torch.equal(plain[0], fast[0])
        assert torch.equal(plain[1], fast[1])
        assert all(torch.equal(a, b) for a, b in zip(plain[2], fast[2], strict=True))
    else:
        torch.testing.assert_close(fast[0], plain[0], rtol=rtol, atol=0.0)
        torch.testing.assert_close(fast[1], plain[1], rtol=20 * rtol, atol=0.0)


class ScaledLoss(Technique):
    """A planted fault: the velocity is off by one part in ten thousand."""

    key = "scaled"
    loss_rtol = 0.0

    def on_step(self, step):
        forward = step.forward
        step.forward = lambda *a: forward(*a) * 1.0001
        return step

    def observe(self, evidence):
        return Observation(True, "")


def test_a_planted_fault_is_caught():
    with pytest.raises(AssertionError):
        assert_within(one_step(), one_step(techniques=[ScaledLoss(True, CPU)]), ScaledLoss.loss_rtol)
    with pytest.raises(AssertionError):
        assert_within(one_step(), one_step(techniques=[ScaledLoss(True, CPU)]), 1e-5)


@pytest.mark.parametrize("key", ON)
def test_state_dict_keys_do_not_change(key):
    plain, _, _, _ = assemble()
    fast, _, _, _ = assemble(**{key: ON[key]})
    assert list(fast.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("key", sorted(CUDA_ONLY))
def test_what_needs_a_gpu_says_so_in_a_sentence(key):
    sentence = next(t for t in TECHNIQUES if t.key == key)(True, CPU).unavailable()
    assert "cpu" in sentence
    assert sentence.endswith(".")


def test_bf16_is_refused_on_a_cpu_without_native_bf16(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert "AVX512-BF16" in Precision("bf16", CPU).unavailable()


def test_degrade_names_what_is_missing_and_error_refuses_with_all_of_it():
    values = EAGER | dict.fromkeys(CUDA_ONLY, True)
    stack = AccelerationStack(values, CPU, on_unavailable="degrade")
    assert set(stack.reasons) == CUDA_ONLY
    with pytest.raises(ValueError, match=r"(?s)runtime.tf32=True.*runtime.cudnn_benchmark=True.*degrade"):
        AccelerationStack(values, CPU, on_unavailable="error")


def test_deterministic_switches_off_what_is_not(monkeypatch):
    technique = next(t for t in TECHNIQUES if t.nondeterministic)
    monkeypatch.setattr(technique, "unavailable", lambda self: None)
    stack = AccelerationStack(EAGER | {technique.key: True}, CPU, on_unavailable="error", deterministic=True)
    assert stack.reasons == {technique.key: "switched off by deterministic=true"}


def ledger_of(family="mamba", **values):
    model, step, stack, loader = assemble(family, **values)
    ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    return {row.key: row for row in ledger}


@pytest.mark.parametrize("key", sorted(set(ON) - CUDA_ONLY))
def test_the_ledger_confirms_what_is_on_and_what_is_off(key):
    if not available(key):
        pytest.skip(f"{key} cannot be had on this CPU")
    off = False if key != "precision" else "fp32"
    assert ledger_of(**{key: ON[key]})[key].active == ON[key]
    # A residual that may be 16 bits wide is still fp32 where everything is.
    expected = True if key == "residual_in_fp32" else off
    assert ledger_of(**{key: off})[key].active == expected


def test_the_residual_is_seen_in_16_bits_where_it_is():
    if not available("precision"):
        pytest.skip("bf16 cannot be had on this CPU")
    assert ledger_of(precision="bf16", residual_in_fp32=False)["residual_in_fp32"].active is False
    assert ledger_of(precision="bf16", residual_in_fp32=True)["residual_in_fp32"].active is True


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_is_seen_in_the_bytes_that_a_block_keeps(family, compiled):
    rows = ledger_of(family, gradient_checkpointing=True, compile=compiled)
    assert rows["gradient_checkpointing"].active is True
    assert rows["compile"].active is compiled
    assert ledger_of(family, compile=compiled)["gradient_checkpointing"].active is False


SABOTAGE = {
    "gradient_checkpointing": (CheckpointBlocks, "on_model", lambda self, model: model),
    "compile": (CompileBlocks, "on_model", lambda self, model: model),
    "fused_adamw": (FusedAdamW, "optimizer_kwargs", lambda self: {}),
    "precision": (Precision, "on_step", lambda self, step: step),
    "residual_in_fp32": (
        ResidualInFp32,
        "on_model",
        lambda self, m: [setattr(b, self.key, False) for b in m.blocks] and m,
    ),
}


@pytest.mark.parametrize("key", SABOTAGE)
def test_the_ledger_tells_when_a_technique_does_nothing(key, monkeypatch):
    if not available("precision"):
        pytest.skip("bf16 cannot be had on this CPU")
    kind, method, nothing = SABOTAGE[key]
    monkeypatch.setattr(kind, method, nothing)
    row = ledger_of(**{"precision": "bf16", key: ON[key]})[key]
    assert row.active != ON[key]
    assert row.missing


def test_error_stops_where_a_step_shows_a_technique_to_be_off(monkeypatch):
    monkeypatch.setattr(FusedAdamW, "optimizer_kwargs", lambda self: {})
    model, step, _, loader = assemble()
    stack = AccelerationStack(EAGER | {"fused_adamw": True}, CPU, on_unavailable="error")
    with pytest.raises(ValueError, match=r"runtime\.fused_adamw"):
        stack.warm_up(lambda: step([next(loader)]), model.blocks)


def broken_backend(graph, inputs):
    raise RuntimeError("this compiler is broken\nand says so at length")


def test_a_compiler_failure_falls_back_loudly_or_stops(monkeypatch):
    monkeypatch.setattr(CompileBlocks, "backend", staticmethod(broken_backend))
    model, step, stack, loader = assemble(compile=True)
    with pytest.warns(UserWarning, match="blocks run uncompiled"):
        ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "compile")
    assert (row.requested, row.active) == (True, False)
    assert "broken" in row.evidence
    assert torch.equal(step([next(loader)]).loss.isfinite(), torch.tensor(True))

    model, step, stack, loader = assemble(compile=True)
    stack.strict = True
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        stack.warm_up(lambda: step([next(loader)]), model.blocks)


def test_a_mistake_of_the_user_is_no_compiler_failure():
    model, step, stack, loader = assemble(compile=True)
    model.blocks[0].layers[0].in_proj = torch.nn.Linear(63, 5)
    with pytest.raises(RuntimeError, match=r"shape|size|dimension"):  # a fallback would warn, an error here
        stack.warm_up(lambda: step([next(loader)]), model.blocks)


def test_inductor_compiles_a_block_into_one_graph_with_equal_results():
    """The one case with the real compiler; the others use aot_eager."""
    torch._dynamo.reset()
    CompileBlocks.backend = "inductor"
    plain, fast = one_step(), one_step(compile=True)
    torch.testing.assert_close(fast[0], plain[0], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(fast[1], plain[1], rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(fused, bad):
    model, step, _, loader = assemble(fused_adamw=fused)
    step([next(loader)])
    moments = [t.clone() for s in step.optimizer.state.values() for t in s.values()]
    before = [p.detach().clone() for p in model.parameters()] + [a.clone() for a in step.ema.averages] + moments
    batch = next(loader)
    output = step([batch._replace(latents=batch.latents * bad)])
    after = [p.detach() for p in model.parameters()] + step.ema.averages
    after += [t for s in step.optimizer.state.values() for t in s.values()]
    assert output.skipped == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert step([next(loader)]).skipped == 0.0


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_equals_pytorchs(fused):
    model, step, _, loader = assemble(fused_adamw=fused, max_grad_norm=0.05)
    reference, other, _, other_loader = assemble(max_grad_norm=0.0)
    step([next(loader)])
    losses, _ = other.losses(next(other_loader))
    losses.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    assert norm > 0.05
    other.optimizer.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_probe_leaves_the_model_as_it_was():
    model, step, _, loader = assemble()
    blocks = list(model.blocks)
    evidence = observe_step(lambda: step([next(loader)]), model.blocks)
    assert [a is b for a, b in zip(blocks, model.blocks, strict=True)] == [True] * 2
    assert evidence.residual_dtype == torch.float32
    assert evidence.block_saved_bytes > evidence.block_input_bytes
    with pytest.raises(RuntimeError, match="boom"):
        observe_step(lambda: (_ for _ in ()).throw(RuntimeError("boom")), model.blocks)
    assert model.blocks[-1] is blocks[-1]


def test_a_flag_that_nothing_used_is_not_called_on():
    assert Tf32(True, torch.device("cuda")).observe(Evidence()).active in (False, UNUSED)
    row = LedgerRow("tf32", True, UNUSED, "allowed; 0 products in fp32")
    assert not row.missing  # nothing is lost, so on_unavailable=error does not stop


def test_unfused_means_pytorchs_default():
    assert FusedAdamW(False, CPU).optimizer_kwargs() == {}  # fused=False would switch foreach off too


def test_the_ledgers_table_marks_what_is_missing():
    ledger = Ledger([LedgerRow("tf32", True, False, "no GPU"), LedgerRow("precision", "bf16", "bf16", "seen")])
    lines = ledger.table().splitlines()
    assert lines[1].startswith("! tf32")
    assert lines[2].startswith("  precision")
    assert ledger.as_dict()["tf32"] == {"requested": True, "active": False, "evidence": "no GPU"}


def test_evidence_of_nothing_is_no_evidence():
    for kind in TECHNIQUES:
        if kind.key in ("residual_in_fp32", "gradient_checkpointing", "compile", "fused_adamw", "precision"):
            assert kind(ON[kind.key], CPU).observe(Evidence()).active is False


@pytest.mark.gpu
@pytest.mark.parametrize("key", ON)
def test_on_a_gpu_every_technique_is_seen_to_be_on(key, run):
    ledger = run(f"runtime.{key}={str(ON[key]).lower()}", "runtime.device=cuda", "runtime=eager")["ledger"]
    # PyTorch runs an fp32 depthwise convolution by a kernel of its own, so the autotuner may have nothing to tune.
    assert ledger[key]["active"] in ((True, UNUSED) if key == "cudnn_benchmark" else (ON[key],))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["mamba_xs", "ssd_mlp_xs", "dit_xs"])
def test_on_a_gpu_deterministic_runs_are_equal(model, run):
    words = ["deterministic=true", "runtime.device=cuda", f"model={model}", "total_samples=64"]
    assert run(*words)["loss"] == run(*words, folder="again")["loss"]


@pytest.mark.gpu
def test_on_a_gpu_the_step_never_waits_for_the_device():
    device = torch.device("cuda")
    loader = DigitLatents(batch_size=8, seed=0, device=device)
    model = woken(tiny("mamba", channels=1, num_classes=10)).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), fused=True)
    rates = dict(seed=0, batch_size=8, max_grad_norm=1.0)
    step = TrainStep(model, FlowMatching(), optimizer, Schedule("constant", 100), EMA(model, 100.0), **rates)
    step.schedule(0)
    step([next(loader)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.schedule(8)
        step([next(loader)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
