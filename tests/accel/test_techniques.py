"""Every technique keeps the contract; tests enrol by walking the stack's own tuple."""

import functools

import pytest
import torch

from accel.stack import SAME_BYTES, TECHNIQUES, AccelerationStack
from accel.techniques.attention_backend import AttentionBackend
from accel.techniques.compilation import Compile
from accel.techniques.fused_adamw import FusedAdamW
from accel.techniques.precision import Precision
from common.config.compose import compose
from common.config.schema import RuntimeConfig
from common.files import ROOT
from tests.harness.refusals import expect_refusal
from tests.harness.sets import cover_pairs
from tests.harness.steps import (
    EAGER,
    VARIANTS,
    checkpoint_values,
    compile_values,
    explain_no_fp8,
    explain_unavailable,
    find_technique,
    key_of,
    ledger_of,
    name_variant,
    read_ledger,
    take_one_step,
    tiny_training,
)
from tests.harness.words import CPU, slow

pytestmark = pytest.mark.usefixtures("quick_compiler")
CUDA_ONLY = {"tf32", "cudnn_benchmark", "empty_cache_at_eval", "cuda_graph"}
GPU_ONLY = CUDA_ONLY | {"offload_optimizer", "offload_activations"}
CUDA_BACKENDS = {"cudnn", "efficient", "flex", "flash3", "flash4"}
EVERY = pytest.mark.parametrize("variant", VARIANTS, ids=name_variant)
take_plain_step = functools.cache(take_one_step)


def test_every_technique_is_enrolled():
    assert {key_of(variant) for variant in VARIANTS} == {kind.key for kind in TECHNIQUES}
    keys = {key for kind in TECHNIQUES for key in (kind.key, *kind.options)}
    others = {"device", "on_unavailable", "tune", "tune_seconds", "mode", "timeout_minutes", "nccl"}
    assert keys == EAGER.keys() - others


@pytest.mark.parametrize(
    "family", ["hybrid", *(slow(name) for name in ("mamba", "dit", "zigzag", "mamba1"))]
)
@EVERY
def test_switching_a_technique_on_moves_the_loss_within_its_tolerance(
    variant, family, any_precision
):
    """The ledger confirms that it is on."""
    if reason := explain_unavailable(variant):
        pytest.skip(reason)
    key = key_of(variant)
    value = variant[key]
    # This one is on in eager, so it is switched off for the comparison.
    if variant == {"residual_in_fp32": True}:
        variant = {"residual_in_fp32": False}
    training, fast = take_one_step(family, **variant)
    assert_within(take_plain_step(family)[1], fast, find_technique(key).loss_rtol)
    if family == "hybrid":
        assert read_ledger(training)[key].active == value


def test_the_example_of_contributing_is_a_technique(monkeypatch):
    extension = {}
    exec((ROOT / "CONTRIBUTING.md").read_text().split("```")[3].removeprefix("python"), extension)
    kind = extension["PauseGarbageCollector"]
    monkeypatch.setattr("accel.stack.TECHNIQUES", (*TECHNIQUES, kind))
    read = RuntimeConfig.values
    for on in (True, False):
        values = {kind.key: on}
        monkeypatch.setattr(RuntimeConfig, "values", lambda cfg, new=values: read(cfg) | new)
        training, step = take_one_step()
        assert_within(take_plain_step("mamba")[1], step, kind.loss_rtol)
        assert read_ledger(training)[kind.key].active is on


def test_options_without_their_switch_are_told():
    told = {"compile_mode": "reduce-overhead", "checkpoint_policy": "selective"}
    told |= {"fp8_recipe": "rowwise", "parallel.bucket_cap_mb": 9}
    words = [f"runtime.{key}={value}" for key, value in told.items()]
    values = compose(["runtime.parallel.mode=none", *words, "runtime=eager"]).cfg.runtime.values()
    with pytest.warns(UserWarning, match="has no effect with runtime") as warned:
        AccelerationStack(values, CPU)
    assert sorted(str(w.message).partition(" ")[0] for w in warned) == sorted(words)
    AccelerationStack(values, CPU, only=("compile",))


def assert_within(plain, fast, rtol):
    """Compares the results of take_one_step: bit for bit at a tolerance of 0."""
    assert list(fast) == list(plain)
    if rtol == 0.0:
        assert [name for name in plain if not torch.equal(fast[name], plain[name])] == []
    else:
        torch.testing.assert_close(fast["loss"], plain["loss"], rtol=rtol, atol=0.0)
        torch.testing.assert_close(fast["grad_norm"], plain["grad_norm"], rtol=20 * rtol, atol=0.0)


@EVERY
def test_what_cannot_be_had_here_says_so_in_a_sentence(variant):
    reason = explain_unavailable(variant)
    if key_of(variant) in GPU_ONLY or variant.get("attention") in CUDA_BACKENDS:
        assert "cpu" in reason
    if reason is not None:
        assert reason.endswith(".")
        assert "\n" not in reason


@pytest.mark.parametrize(("name", "word"), [("bf16", "AVX512-BF16"), ("fp16", "AMX-FP16")])
def test_16_bits_are_refused_on_a_cpu_without_native_instructions(name, word, monkeypatch):
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False)
    assert word in Precision(name, CPU).find_obstacle()


def test_compiling_without_a_compiler_is_refused(inductor, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "C++ compiler" in Compile(True, CPU).find_obstacle()


def test_degrade_names_what_is_missing_and_error_refuses_with_all_of_it():
    values = EAGER | dict.fromkeys(CUDA_ONLY, True)
    assert set(AccelerationStack(values, CPU, on_unavailable="degrade").reasons) == CUDA_ONLY
    with expect_refusal(r"(?s)runtime.tf32=True.*runtime.cuda_graph=True.*degrade"):
        AccelerationStack(values, CPU, on_unavailable="error")


def test_error_stops_where_a_step_shows_a_technique_to_be_off(monkeypatch):
    monkeypatch.setattr(FusedAdamW, "make_optimizer_kwargs", lambda self: {})
    with expect_refusal(r"runtime\.fused_adamw"):
        ledger_of("mamba", "runtime.on_unavailable=error", fused_adamw=True)


def test_deterministic_switches_off_what_is_not(monkeypatch):
    kind = next(kind for kind in TECHNIQUES if kind.nondeterministic)
    monkeypatch.setattr(kind, "find_obstacle", lambda self: None)
    values = EAGER | {kind.key: True}
    stack = AccelerationStack(values, CPU, on_unavailable="error", deterministic=True)
    assert stack.reasons == {kind.key: "switched off by deterministic=true"}


def test_work_that_must_end_with_the_same_bytes_leaves_cudnn_no_choice(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    stack = AccelerationStack(EAGER | {"cudnn_benchmark": True}, CPU, same_bytes=SAME_BYTES)
    stack.on_process()
    assert "must end with the same bytes" in stack.reasons["cudnn_benchmark"]
    assert torch.backends.cudnn.benchmark is False
    assert torch.backends.cudnn.deterministic is True


PAIRS = cover_pairs(
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
    [slow(row) if i % 8 != 1 else row for i, row in enumerate(PAIRS)],
    ids=lambda row: "-".join(map(str, row)),
)
def test_pairs_of_techniques_take_two_steps(row, any_precision):
    precision, residual, attention, policy, scope, fused, refused = row
    if precision == "fp8" and (reason := explain_no_fp8()):
        pytest.skip(reason)
    training = tiny_training(
        "dit",
        precision=precision,
        residual_in_fp32=residual,
        attention=attention,
        fused_adamw=fused,
        **checkpoint_values(policy),
        **compile_values(scope),
        **dict.fromkeys(CUDA_ONLY, refused),
    )
    assert_near_eager(training, steps=2, rtol=3e-2)
    missing = {key for key, row in read_ledger(training).items() if row.missing}
    assert missing == (CUDA_ONLY if refused else set())


def assert_near_eager(training, steps, rtol, **how):
    plain = tiny_training("dit", **how)
    for _ in range(steps):
        expected = plain.take_step().loss
        torch.testing.assert_close(training.take_step().loss, expected, rtol=rtol, atol=0.0)


# What falls back in warm-up.


def broken_backend(graph, inputs):
    raise RuntimeError("this compiler is broken\nand says so at length")


@pytest.mark.parametrize(
    ("key", "value", "warning", "active", "error"),
    [
        (
            "attention",
            "efficient",
            "efficient attention does not take",
            "flash",
            "No viable backend",
        ),
        ("compile", True, "nothing runs compiled.*broken", False, "broken"),
    ],
)
def test_what_fails_in_warm_up_falls_back_loudly_or_stops(
    key, value, warning, active, error, monkeypatch
):
    monkeypatch.setattr(AttentionBackend, "find_obstacle", lambda self: None)
    monkeypatch.setattr(Compile, "backend", staticmethod(broken_backend))
    training = tiny_training("dit", **{key: value})
    with pytest.warns(UserWarning, match=warning):
        assert read_ledger(training)[key].active == active
    assert training.take_step().loss.isfinite()
    with pytest.raises(RuntimeError, match=error):
        ledger_of("dit", "runtime.on_unavailable=error", **{key: value})


def test_a_mistake_of_the_user_is_no_compiler_failure():
    """A fallback would warn, which is an error in tests."""
    training = tiny_training(compile=True)
    training.model.blocks[0].layers[0].in_proj = torch.nn.Linear(63, 5)
    with pytest.raises(RuntimeError, match=r"shape|size|dimension"):
        training.warm_up()


# The real compiler.


def fail_assertion(*arguments):
    assert not arguments, ""


# Inductor imports torch.utils.mkldnn.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_a_failed_assertion_of_the_autotuner_falls_back_loudly(inductor, monkeypatch):
    """Inductor fails so with mamba in `max-autotune-no-cudagraphs` on a CPU."""
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.run", fail_assertion)
    place = r"\(in test_techniques.py, fail_assertion\)"
    with pytest.warns(UserWarning, match=rf"AssertionError.*{place}.*max-autotune"):
        row = ledger_of(compile=True, compile_mode="max-autotune-no-cudagraphs")["compile"]
    assert "nothing runs compiled" in row.evidence


@pytest.mark.parametrize("device", [slow("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_reduce_overhead_trains_as_eager_does(inductor, device):
    """On a CPU Inductor leaves its CUDA graphs away; on a GPU the steps are replays."""
    how = {"depth": 1, "device": torch.device(device)}
    values = compile_values("model") | {"compile_mode": "reduce-overhead"}
    training = tiny_training("dit", **how, **values)
    assert_near_eager(training, steps=4, rtol=1e-4, **how)
    assert read_ledger(training)["compile"].active is True


def test_inductor_compiles_a_block_into_one_graph_with_equal_results(inductor):
    training, fast = take_one_step(compile=True)
    assert_within(take_plain_step()[1], fast, 1e-5)
    assert read_ledger(training)["compile"].active is True
