"""Every technique keeps the contract; tests enrol by walking the stack's own tuple."""

from __future__ import annotations

import warnings

import pytest
import torch

from accel.stack import SAME_BYTES, TECHNIQUES, AccelerationStack
from accel.technique import Observation, Technique
from accel.techniques.attention_backend import AttentionBackend
from accel.techniques.compilation import Compile
from accel.techniques.fused_adamw import FusedAdamW
from accel.techniques.precision import Precision
from tests.harness.sets import pairwise
from tests.harness.steps import (
    EAGER,
    VARIANTS,
    allow_any_precision,
    assemble,
    explain_unavailable,
    key_of,
    ledger_of,
    name_variant,
    explain_no_fp8,
    take_one_step,
    find_technique,
)
from tests.harness.words import CPU

CUDA_ONLY = {"tf32", "cudnn_benchmark", "empty_cache_at_eval", "cuda_graph"}
EVERY = pytest.mark.parametrize("variant", VARIANTS, ids=name_variant)


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")


@pytest.fixture
def any_precision(monkeypatch):
    """16 bits on any CPU: slow there, and right."""
    allow_any_precision(monkeypatch)


def test_every_technique_is_enrolled():
    assert {key_of(variant) for variant in VARIANTS} == {kind.key for kind in TECHNIQUES}
    assert {kind.key for kind in TECHNIQUES} | {
        option for kind in TECHNIQUES for option in kind.options
    } == set(
        EAGER
        # the last: processes'
    ) - {"device", "on_unavailable", "tune", "tune_seconds", "mode", "timeout_minutes", "nccl"}


@pytest.mark.parametrize(
    "family",
    [
        "mamba",
        "dit",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("ssd_mlp", "zigzag", "mamba1")
        ),
    ],
)
@EVERY
def test_switching_a_technique_on_moves_the_loss_within_its_tolerance(
    variant, family, any_precision
):
    if reason := explain_unavailable(variant):
        pytest.skip(reason)
    rtol = find_technique(key_of(variant)).loss_rtol
    if variant == {"residual_in_fp32": True}:  # that one is on in eager: compare with off
        variant = {"residual_in_fp32": False}
    plain = take_one_step(family)
    fast = take_one_step(family, **variant)
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
        assert_within(take_one_step(), take_one_step(planted=ScaledLoss(True, CPU)), ScaledLoss.loss_rtol)
    with pytest.raises(AssertionError):
        assert_within(take_one_step(), take_one_step(planted=ScaledLoss(True, CPU)), 1e-5)


@EVERY
def test_state_dict_keys_do_not_change(variant):
    plain, _, _, _ = assemble()
    fast, _, _, _ = assemble(**variant)
    assert list(fast.state_dict()) == list(plain.state_dict())


@EVERY
def test_what_cannot_be_had_here_says_so_in_a_sentence(variant):
    reason = explain_unavailable(variant)
    if key_of(variant) in CUDA_ONLY or variant.get("attention") in (
        "cudnn",
        "efficient",
        "flex",
        "flash3",
        "flash4",
    ):
        assert "cpu" in reason
    if reason is not None:
        assert reason.endswith(".")
        assert "\n" not in reason


@pytest.mark.parametrize(("name", "word"), [("bf16", "AVX512-BF16"), ("fp16", "AMX-FP16")])
def test_16_bits_are_refused_on_a_cpu_without_native_instructions(name, word, monkeypatch):
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False)
    assert word in Precision(name, CPU).unavailable()
    stack = AccelerationStack(
        EAGER | {"precision": name, "tf32": True}, CPU, on_unavailable="emulate"
    )
    assert (stack.precision, stack.values["tf32"]) == (name, False)
    assert stack.reasons["precision"].startswith("emulated: This CPU has no native")


def test_compiling_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "inductor")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "C++ compiler" in Compile(True, CPU).unavailable()


def test_degrade_names_what_is_missing_and_error_refuses_with_all_of_it():
    values = EAGER | dict.fromkeys(CUDA_ONLY, True)
    stack = AccelerationStack(values, CPU, on_unavailable="degrade")
    assert set(stack.reasons) == CUDA_ONLY
    with pytest.raises(
        ValueError, match=r"(?s)runtime.tf32=True.*runtime.cuda_graph=True.*degrade"
    ):
        AccelerationStack(values, CPU, on_unavailable="error")


def test_deterministic_switches_off_what_is_not(monkeypatch):
    technique = next(t for t in TECHNIQUES if t.nondeterministic)
    monkeypatch.setattr(technique, "unavailable", lambda self: None)
    stack = AccelerationStack(
        EAGER | {technique.key: True}, CPU, on_unavailable="error", deterministic=True
    )
    assert stack.reasons == {technique.key: "switched off by deterministic=true"}


def test_work_that_must_end_with_the_same_bytes_leaves_cudnn_no_choice(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    stack = AccelerationStack(
        EAGER | {"cudnn_benchmark": True}, CPU, on_unavailable="error", same_bytes=SAME_BYTES
    )
    stack.on_process()
    assert "must end with the same bytes" in stack.reasons["cudnn_benchmark"]
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, True)


ROWS = pairwise(
    ["fp32", "bf16", "fp16", "fp8"],  # precision
    [True, False],  # residual_in_fp32
    ["auto", "flash", "math"],  # attention
    [None, "blocks", "every_2", "selective"],  # checkpointing and its policy
    [None, "blocks", "model"],  # compile and its scope
    [True, False],  # fused_adamw
    [True, False],  # all that needs a GPU, which is refused here
)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.slow) if i % 4 != 1 else row
        for i, row in enumerate(ROWS)
    ],
    ids=lambda row: "-".join(map(str, row)),
)
def test_pairs_of_techniques_take_two_steps(row, any_precision):
    precision, residual, attention, policy, scope, fused, refused = row
    if precision == "fp8" and (reason := explain_no_fp8()):
        pytest.skip(reason)
    values = {
        "precision": precision,
        "residual_in_fp32": residual,
        "attention": attention,
        "fused_adamw": fused,
    }
    values |= {
        "gradient_checkpointing": policy is not None,
        "checkpoint_policy": policy or "blocks",
    }
    values |= {"compile": scope is not None, "compile_scope": scope or "blocks"} | dict.fromkeys(
        CUDA_ONLY, refused
    )
    _, plain, _, other = assemble("dit")
    model, step, stack, loader = assemble("dit", **values)
    for _ in range(2):
        expected = plain([next(other)])
        output = step([next(loader)])
        torch.testing.assert_close(output.loss, expected.loss, rtol=3e-2, atol=0.0)
    rows = {found.key: found for found in stack.warm_up(lambda: step([next(loader)]), model.blocks)}
    assert [key for key, found in rows.items() if found.missing] == sorted(
        CUDA_ONLY, key=list(rows).index
    ) * refused


def test_attention_that_no_kernel_can_do_falls_back_loudly_or_stops(monkeypatch):
    monkeypatch.setattr(AttentionBackend, "unavailable", lambda self: None)
    model, step, stack, loader = assemble("dit", attention="efficient")
    with pytest.warns(UserWarning, match="efficient attention does not take"):
        ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "attention")
    assert (row.requested, row.active, row.missing) == ("efficient", "flash", True)
    model, step, stack, loader = assemble("dit", attention="efficient")
    stack.strict = True
    with pytest.raises(RuntimeError, match="No viable backend"):
        stack.warm_up(lambda: step([next(loader)]), model.blocks)


def broken_backend(graph, inputs):
    raise RuntimeError("this compiler is broken\nand says so at length")


def test_a_compiler_failure_falls_back_loudly_or_stops(monkeypatch):
    monkeypatch.setattr(Compile, "backend", staticmethod(broken_backend))
    model, step, stack, loader = assemble(compile=True)
    with pytest.warns(UserWarning, match="nothing runs compiled"):
        ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "compile")
    assert (row.requested, row.active) == (True, False)
    assert "broken" in row.evidence
    assert torch.equal(step([next(loader)]).loss.isfinite(), torch.tensor(True))

    model, step, stack, loader = assemble(compile=True)
    stack.strict = True
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        stack.warm_up(lambda: step([next(loader)]), model.blocks)


@pytest.fixture
def any_mode(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "inductor")
    torch._dynamo.reset()


def failed_assertion(*_):
    assert not _, ""


# Inductor imports torch.utils.mkldnn
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_a_failed_assertion_of_the_autotuner_falls_back_loudly(any_mode, monkeypatch):
    """As Inductor has with mamba in `max-autotune-no-cudagraphs` on a CPU."""
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.run", failed_assertion)
    model, step, stack, loader = assemble(compile=True, compile_mode="max-autotune-no-cudagraphs")
    with pytest.warns(
        UserWarning, match=r"AssertionError.*\(in test_accel.py, failed_assertion\).*max-autotune"
    ):
        ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "compile")
    assert (row.missing, "nothing runs compiled" in row.evidence) == (True, True)


@pytest.mark.slow
def test_max_autotune_is_on_or_falls_back_loudly(any_mode):
    model, step, stack, loader = assemble(
        depth=1, compile=True, compile_mode="max-autotune-no-cudagraphs"
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "compile")
    assert row.missing == any("nothing runs compiled" in str(warning.message) for warning in said)
    assert "max-autotune-no-cudagraphs" in row.evidence


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_reduce_overhead_trains_as_eager_does(any_mode, device):
    """On a CPU Inductor leaves its CUDA graphs away; on a GPU the steps are replays."""
    _, plain, _, other = assemble("dit", depth=1, device=torch.device(device))
    how = {"compile": True, "compile_scope": "model", "compile_mode": "reduce-overhead"}
    model, step, stack, loader = assemble("dit", depth=1, device=torch.device(device), **how)
    for _ in range(4):
        expected = plain([next(other)])
        found = step([next(loader)])
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=0.0)
    ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "compile")
    assert row.active is True
    assert "mode reduce-overhead" in row.evidence


def test_a_mistake_of_the_user_is_no_compiler_failure():
    model, step, stack, loader = assemble(compile=True)
    model.blocks[0].layers[0].in_proj = torch.nn.Linear(63, 5)
    # a fallback would warn, an error here
    with pytest.raises(RuntimeError, match=r"shape|size|dimension"):
        stack.warm_up(lambda: step([next(loader)]), model.blocks)


def test_inductor_compiles_a_block_into_one_graph_with_equal_results():
    """The one case with the real compiler; the others use aot_eager."""
    torch._dynamo.reset()
    Compile.backend = "inductor"
    plain = take_one_step()
    fast = take_one_step(compile=True)
    assert "2 of 2 blocks compiled" in ledger_of(compile=True)["compile"].evidence
    torch.testing.assert_close(fast[0], plain[0], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(fast[1], plain[1], rtol=1e-4, atol=0.0)


def test_unfused_means_pytorchs_default():
    # fused=False would switch foreach off too
    assert FusedAdamW(False, CPU).optimizer_kwargs() == {}
