"""The ledger says what one real step shows, and notices when a technique does nothing."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from accel.counted_rows import AdapterGradients, OptimizerState
from accel.evidence import BlockEvidence, BlockProbe, Evidence, observe_ops, observe_step
from accel.kernels.attend import attend
from accel.ledger import UNUSED, Ledger, LedgerRow
from accel.stack import TECHNIQUES, AccelerationStack
from accel.techniques.compilation import Compile
from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.cudnn_benchmark import CudnnBenchmark
from accel.techniques.empty_cache_at_eval import EmptyCacheAtEval
from accel.techniques.fused_adamw import FusedAdamW
from accel.techniques.fused_kernels import FusedAddNorm, FusedKernel
from accel.techniques.gradient_checkpointing import CheckpointBlocks
from accel.techniques.parallel import DataParallel
from accel.techniques.precision import Precision
from accel.techniques.residual_in_fp32 import ResidualInFp32
from accel.techniques.tf32 import Tf32, rounds_to_tf32
from common.files import ROOT
from data.loader import Batch
from tests.harness.steps import (
    EAGER,
    VARIANTS,
    allow_any_precision,
    assemble,
    explain_unavailable,
    find_technique,
    key_of,
    ledger_of,
    name_variant,
    tiny_training,
)
from tests.harness.words import CPU
from training.goodput import CLOCK
from training.metrics import Meter
from training.step import StepOutput


@pytest.fixture(autouse=True)
def quick_compiler_and_any_precision(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    allow_any_precision(monkeypatch)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_variant)
def test_the_ledger_confirms_what_is_on(variant):
    if reason := explain_unavailable(variant):
        pytest.skip(reason)
    key = key_of(variant)
    assert ledger_of("dit", **variant)[key].active == variant[key]


def test_the_ledger_confirms_what_is_off():
    rows = ledger_of("dit")
    on = {"residual_in_fp32": True, "precision": "fp32", "attention": "flash", "parallel": "none"}
    on |= {"weights": "fp32", "optim": "fp32"}
    assert {key: row.active for key, row in rows.items()} == dict.fromkeys(rows, False) | on
    # A residual that may be 16 bits wide is still fp32 where everything is.
    assert ledger_of(residual_in_fp32=False)["residual_in_fp32"].active is True


def test_a_model_without_attention_has_no_use_for_its_backend():
    row = ledger_of("mamba", attention="math")["attention"]
    assert row.active == UNUSED
    assert not row.missing


def test_the_residual_is_seen_in_16_bits_where_it_is():
    assert (
        ledger_of("dit", precision="bf16", residual_in_fp32=False)["residual_in_fp32"].active
        is False
    )
    assert (
        ledger_of("dit", precision="bf16", residual_in_fp32=True)["residual_in_fp32"].active is True
    )


@pytest.mark.parametrize("family", [pytest.param("mamba", marks=pytest.mark.slow), "dit"])
@pytest.mark.parametrize("scope", [None, "blocks", pytest.param("model", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["blocks", "every_2", "selective"])
def test_checkpointing_is_seen_in_what_the_blocks_keep(family, scope, policy):
    compiled = {"compile": scope is not None, "compile_scope": scope or "blocks"}
    rows = ledger_of(family, gradient_checkpointing=True, checkpoint_policy=policy, **compiled)
    assert rows["gradient_checkpointing"].active is True
    assert rows["compile"].active is (scope is not None)
    if policy == "blocks":
        assert ledger_of(family, **compiled)["gradient_checkpointing"].active is False


def test_of_n_blocks_one_is_recomputed_and_anything_else_is_told(monkeypatch):
    values = {"gradient_checkpointing": True, "checkpoint_policy": "every_3", "depth": 5}
    row = ledger_of("dit", **values)["gradient_checkpointing"]
    assert row.active is True
    assert "5 of 5 blocks do as asked (one in 3 recomputes)" in row.evidence
    on_model = CheckpointBlocks.on_model

    def every_other_block(self, model):
        self.checkpoint_policy = "every_2"
        model = on_model(self, model)
        self.checkpoint_policy = "every_3"
        return model

    monkeypatch.setattr(CheckpointBlocks, "on_model", every_other_block)
    row = ledger_of("dit", **values)["gradient_checkpointing"]
    assert row.missing
    assert "2 of 5 blocks do as asked" in row.evidence


RECOMPUTED = {"gradient_checkpointing": True}
SABOTAGE = {
    "gradient_checkpointing": (CheckpointBlocks, "on_model", lambda self, model: model),
    "compile": (Compile, "on_model", lambda self, model: model),
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
    kind, method, nothing = SABOTAGE[key]
    monkeypatch.setattr(kind, method, nothing)
    values = {"precision": "bf16"} | next(v for v in VARIANTS if key_of(v) == key)
    row = ledger_of("dit", **values)[key]
    assert row.active != values[key]
    assert row.missing


@pytest.mark.parametrize("policy", ["every_2", "selective"])
def test_the_ledger_tells_when_a_policy_does_nothing(policy, monkeypatch):
    def without_policy(self, model):
        self.checkpoint_policy, policy_meant = "blocks", self.checkpoint_policy
        CheckpointBlocks.unpatched(self, model)
        self.checkpoint_policy = policy_meant
        return model

    monkeypatch.setattr(CheckpointBlocks, "unpatched", CheckpointBlocks.on_model, raising=False)
    monkeypatch.setattr(CheckpointBlocks, "on_model", without_policy)
    assert ledger_of(gradient_checkpointing=True, checkpoint_policy=policy)[
        "gradient_checkpointing"
    ].missing


@pytest.mark.parametrize("kept", ["mul", "no operation"])
@pytest.mark.parametrize("words", [{}, {"compile": True}], ids=["eager", "compiled"])
def test_a_selective_policy_that_keeps_other_results_is_not_on(words, kept, monkeypatch):
    def decide(context, op, *arguments, **kwargs):
        wanted = op.name().startswith(f"aten::{kept}")
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    monkeypatch.setattr("accel.techniques.gradient_checkpointing.decide", decide)
    row = ledger_of("dit", **RECOMPUTED, checkpoint_policy="selective", **words)[
        "gradient_checkpointing"
    ]
    assert row.missing
    assert "0 of 2 blocks recompute" in row.evidence


def test_a_compiler_that_goes_its_own_way_is_seen_in_what_is_kept():
    """The uncompiled step is as it should be, and the compiled blocks keep twice as much."""
    technique = CheckpointBlocks(True, CPU, checkpoint_policy="selective")
    call = BlockEvidence(
        10, 100, torch.float32, torch.float32, (True, True), frozenset({"aten::mm"})
    )
    technique.uncompiled = [[call]]
    for saved, on in ((93, True), (200, False), (10, False)):
        assert technique.observe(Evidence(blocks=[[replace(call, saved_bytes=saved)]])).active is on


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_that_is_multiplied_in_fp32_by_another_operation_is_named(compiled):
    """einsum makes a bmm of it, and a bmm in fp32 may be of two activations, which may be meant
    so."""

    def with_einsum(x):
        with torch.amp.autocast("cpu", enabled=False):
            return torch.einsum("bld,od->blo", x.float(), layer.weight)

    model, step, stack, loader = assemble("dit", depth=2, precision="bf16", compile=compiled)
    layer = model.blocks[1].layers[0].out_proj
    layer.forward = with_einsum
    row = {row.key: row for row in stack.warm_up(lambda: step([next(loader)]), model.blocks)}[
        "precision"
    ]
    assert row.active == "mixed"
    assert row.evidence.endswith(
        "in fp32 are products of weights: blocks.1.layers.0.out_proj.weight"
    )


@pytest.mark.parametrize(
    ("called", "launches", "active"),
    [(2, 2, True), (2, 0, False), (1, 1, False), (0, 2, False)],
    ids=str,
)
def test_a_fused_kernel_is_believed_only_when_every_block_launched_it(called, launches, active):
    """An operator that runs its definition is called too."""
    technique = FusedAddNorm(True, CPU)
    technique.switches = [nn.Identity()] * 2
    ops = [Counter({"fastlatent::add_norm": 1} if i < called else {}) for i in range(2)]
    calls = [
        [BlockEvidence(1, 1, torch.float32, torch.float32, (True, True), frozenset(), one)]
        for one in ops
    ]
    assert (
        technique.observe(Evidence(blocks=calls, ops=Counter({"add_norm_kernel": launches}))).active
        is active
    )


@pytest.mark.parametrize(
    ("mode", "sums"), [("ddp", "c10d::allreduce_"), ("fsdp", "c10d::_reduce_scatter_base_")]
)
def test_gradients_are_summed_only_where_a_collective_ran(mode, sums):
    technique = DataParallel(mode, CPU)
    assert technique.observe(Evidence(ops=Counter({"c10d::_allgather_base_": 3}))).active is False
    assert technique.observe(Evidence(ops=Counter({sums: 1}))).active == mode


def test_a_cache_that_is_not_emptied_is_seen(monkeypatch):
    technique = EmptyCacheAtEval(True, torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000 - 100 * len(emptied))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    emptied: list[int] = []
    assert technique.observe(Evidence()).active is True
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert technique.observe(Evidence()).active is False


ELSEWHERE = {
    "tf32": "test_ledger.py::test_tf32_is_what_a_product_shows",
    "cudnn_benchmark": "test_ledger.py::test_the_autotuner_is_on_where_it_changes_the_kernels",
    "parallel": "test_ledger.py::test_gradients_are_summed_only_where_a_collective_ran",
    "empty_cache_at_eval": "test_ledger.py::test_a_cache_that_is_not_emptied_is_seen",
    "cuda_graph": "test_ledger.py::test_a_graph_is_believed_only_when_it_was_launched",
    "weights": "test_memory.py::test_weights_that_are_not_rounded_at_random",
    "offload_optimizer": "test_memory.py::test_a_state_that_stays_on_the_device",
    "offload_activations": "test_memory.py::test_activations_that_other_hooks_keep",
    "optim": "test_memory.py::test_states_kept_in_fp32",
    "adapter": "../models/test_adapters.py::test_an_adapter_that_trains_nothing_is_noticed",
}
"""Rows whose sabotage is no entry of the tables here -> the test that has it."""


def test_every_row_says_what_would_fool_it_and_is_sabotaged():
    rows = [*TECHNIQUES, OptimizerState, AdapterGradients]
    for kind in rows:
        source = Path(inspect.getfile(kind)).read_text()
        assert 'What would still say "on" if this did nothing?' in source, kind
        if not (kind.key in SABOTAGE or issubclass(kind, FusedKernel) or kind.key == "attention"):
            file, test = ELSEWHERE[kind.key].split("::")
            assert f"def {test}(" in (ROOT / "tests" / "accel" / file).read_text(), test


def in_fp32(block):
    forward = block.forward
    block.forward = torch.amp.autocast("cpu", enabled=False)(
        lambda *inputs: forward(*(t.float() for t in inputs))
    )


def unwrapped(block):
    """Without the forward that recomputes."""
    del block.forward


def narrow(block):
    block.residual_in_fp32 = False


def rounding(block):
    """What it returns is fp32, and went through bf16."""
    block.register_forward_hook(lambda _, inputs, found: (*found[:2], found[2].bfloat16().float()))


def uncompiled(block):
    block._compiled_call_impl = None


def compiled_by_nothing(block):
    block.compile(backend="eager")


def on_math(block):
    block.layers[0].attention_backend = "math"


SABOTAGED = {
    "half in fp32": ({"precision": "bf16"}, in_fp32, slice(0, None, 2)),
    "recomputing left to the last two": (RECOMPUTED, unwrapped, slice(0, -2)),
    "selective left to the last": (
        RECOMPUTED | {"checkpoint_policy": "selective"},
        unwrapped,
        slice(0, -1),
    ),
    "compiled, selective left to the last": (
        RECOMPUTED | {"checkpoint_policy": "selective", "compile": True},
        unwrapped,
        slice(0, -1),
    ),
    "a narrow stream but for the last": (
        {"residual_in_fp32": True, "precision": "bf16"},
        narrow,
        slice(0, -1),
    ),
    "a rounded stream": ({"residual_in_fp32": True, "precision": "bf16"}, rounding, slice(None)),
    "one block compiled": ({"compile": True}, uncompiled, slice(0, -1)),
    "half on math": ({"attention": "flash"}, on_math, slice(0, None, 2)),
    "compiled, half on math": ({"attention": "flash", "compile": True}, on_math, slice(0, None, 2)),
}


@pytest.mark.parametrize("case", SABOTAGED)
def test_a_technique_in_a_part_of_the_blocks_is_not_on(case):
    values, sabotage, where = SABOTAGED[case]
    key = key_of(values)
    clean, sabotaged = (
        sabotaged_ledger(values, blocks, sabotage) for blocks in (slice(0, 0), where)
    )
    assert clean[key].active == values[key]
    assert sabotaged[key].missing, sabotaged[key].evidence


def sabotaged_ledger(values, where, sabotage):
    model, step, stack, loader = assemble("dit", depth=3 if "compile" in values else 4, **values)
    for block in model.blocks[where]:
        sabotage(block)
    return {row.key: row for row in stack.warm_up(lambda: step([next(loader)]), model.blocks)}


def test_a_stream_rounded_between_two_blocks_is_seen(monkeypatch):
    monkeypatch.setattr(BlockProbe, "own_forward", BlockProbe.forward, raising=False)
    monkeypatch.setattr(
        BlockProbe,
        "forward",
        lambda self, b, g, r, c: self.own_forward(b, g, r.bfloat16().float(), c),
    )
    row = ledger_of("dit", depth=4, precision="bf16")["residual_in_fp32"]
    assert row.missing
    assert "1 of 4 blocks passed" in row.evidence  # nothing came before the first


def test_graphs_that_inductor_did_not_make_are_not_compiled(monkeypatch):
    """That those it made are is in test_accel.py, beside the one run with it."""
    monkeypatch.setattr(Compile, "backend", "inductor")
    row = sabotaged_ledger({"compile": True}, slice(None), compiled_by_nothing)["compile"]
    assert row.missing
    assert "0 of 3 blocks" in row.evidence


def test_micro_batches_are_all_looked_at():
    model, step, stack, loader = assemble("dit", depth=4, gradient_checkpointing=True)
    ledger = stack.warm_up(lambda: step([next(loader), next(loader)]), model.blocks)
    rows = {row.key: row for row in ledger}
    assert "4 of 4 blocks" in rows["gradient_checkpointing"].evidence
    assert "4 of 4 layers" in rows["attention"].evidence


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kept_bytes_are_those_of_inputs_and_of_kept_results(precision):
    (B, L, D), heads, size = (8, 16, 64), 2, 2 if precision == "bf16" else 4
    inputs = [
        torch.randn(shape, requires_grad=True)
        for shape in ((B, L, D), (B, D), (B, L, D), (B, 6, D))
    ]
    kept = {}
    for policy in ("", "blocks", "selective"):
        words = RECOMPUTED | {"checkpoint_policy": policy} if policy else {}
        block = assemble("dit", **words)[0].blocks[1]
        notes = []
        with torch.amp.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            outputs = BlockProbe(block, notes)(*inputs)
        kept[policy] = notes[-1].saved_bytes
        del outputs
    hidden = block.layers[1].w2.in_features
    assert kept["blocks"] == notes[-1].input_bytes
    # The results of qkv, attention, out_proj, w13 and w2; the logarithms of the sums of attention
    # are fp32.
    results = size * B * L * (3 * D + D + D + 2 * hidden + D) + 4 * B * heads * L
    assert kept["selective"] == notes[-1].input_bytes + results
    assert kept[""] > kept["selective"]


def test_graphs_compiled_after_warm_up_are_logged_and_warned_of_with_their_reason():
    training = tiny_training("dit", depth=1, compile=True)
    training.warm_up()
    meter = training.state.meter
    smaller = Batch(*(t[:4] for t in next(training.loader)))
    meter.start()
    meter.update(training.take_step())
    report = meter.report(0.0)
    assert (report["graphs"] > 0, report["recompiles"]) == (True, 0)
    meter.update(training.step([smaller]))
    with pytest.warns(UserWarning, match=r"1 graphs were compiled after warm-up.*size mismatch"):
        assert meter.report(0.0)["recompiles"] == 1
    meter.update(training.take_step())
    with meter.paused(), torch.no_grad():
        training.step.losses(smaller, held_out=True)
    after = meter.report(0.0)  # an evaluation's graphs are its own; no warning
    assert (after["graphs"], after["recompiles"]) == (report["graphs"] + 2, 1)


def test_queued_work_is_training_and_a_wait_is_the_devices_own(monkeypatch):
    """On a pretended GPU, whose queue holds work when the host looks."""
    done = []

    class Mark:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("mark")

        def query(self):
            return "end" in done

        def elapsed_time(self, later):
            return 250.0

    monkeypatch.setattr("training.metrics.uses_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronised"))
    meter = Meter(batch_size=8, tokens=1, flops_per_sample=1, peak_flops=None)
    monkeypatch.setattr(CLOCK, "kind", "start")
    monkeypatch.setattr(CLOCK, "seconds", defaultdict(float, steps=1.0))
    with meter.waiting():
        done.append("data")
    assert (done, CLOCK.seconds["data_wait"]) == (["mark", "data", "mark"], 0.0)
    with meter.paused():
        done.append("end")
    assert done[3:] == ["synchronised", "end"]
    meter.sum_waits()
    assert (CLOCK.seconds["steps"], CLOCK.seconds["data_wait"]) == (0.75, 0.25)


def test_a_window_has_its_own_peak_of_memory_and_the_share_of_its_kernels(monkeypatch):
    peaks = [300, 500, 200]  # bytes in use at most; as many again are held without use
    monkeypatch.setattr("training.metrics.uses_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * peaks[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.pop(0))
    monkeypatch.setattr(CLOCK, "kind", "start")
    monkeypatch.setattr(CLOCK, "seconds", defaultdict(float))
    meter = Meter(batch_size=8, tokens=1, flops_per_sample=1, peak_flops=None)
    meter.busy_ms = 150.0
    found = []
    for seconds in (0.2, 0.4, 0.1):
        CLOCK.seconds["steps"] += seconds
        meter.update(StepOutput(*torch.zeros(4)))
        found.append(meter.report(0.0))
    assert [line["memory_allocated"] for line in found] == [300, 500, 200]
    assert [line["memory_reserved"] for line in found] == [600, 1000, 400]
    assert [line["memory_reserved_peak"] for line in found] == [600, 1000, 1000]
    assert [round(line["gpu_busy"], 3) for line in found] == [0.75, 0.375, 1.0]


def test_flex_stays_compiled_in_evaluation():
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    windows = torch.randint(0, 5, (256,), dtype=torch.int32)
    windows[:128] += 5  # two blocks of scores that are skipped, two that are masked
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = attend(q, k, v, "flex", windows)
        ops = observe_ops(lambda: attend(q, k, v, "flex", windows))
    assert any(op.startswith("## Call CompiledFxGraph") for op in ops)
    assert not {"aten::bmm", "aten::matmul", "aten::_softmax"} & ops.keys()  # no scores
    torch.testing.assert_close(found, attend(q, k, v, "math", windows), rtol=1e-4, atol=1e-5)


def test_error_stops_where_a_step_shows_a_technique_to_be_off(monkeypatch):
    monkeypatch.setattr(FusedAdamW, "optimizer_kwargs", lambda self: {})
    model, step, _, loader = assemble()
    stack = AccelerationStack(EAGER | {"fused_adamw": True}, CPU, on_unavailable="error")
    with pytest.raises(ValueError, match=r"runtime\.fused_adamw"):
        stack.warm_up(lambda: step([next(loader)]), model.blocks)


def test_the_probe_leaves_the_model_as_it_was():
    model, step, _, loader = assemble()
    blocks = list(model.blocks)
    evidence = observe_step(lambda: step([next(loader)]), model.blocks)
    assert [a is b for a, b in zip(blocks, model.blocks, strict=True)] == [True] * 2
    assert [[call.residual_dtype for call in calls] for calls in evidence.blocks] == [
        [torch.float32]
    ] * 2
    assert evidence.where(lambda call: call.saved_bytes > call.input_bytes) == [True] * 2
    with pytest.raises(RuntimeError, match="boom"):
        observe_step(lambda: (_ for _ in ()).throw(RuntimeError("boom")), model.blocks)
    assert model.blocks[-1] is blocks[-1]


@pytest.mark.parametrize(
    ("rounded", "products", "convolutions", "active"),
    [
        ((True, True), 0, 0, UNUSED),
        ((True, False), 3, 0, True),
        ((True, False), 3, 1, False),  # its convolution keeps fp32
        ((False, True), 0, 1, True),
        ((False, True), 3, 1, False),
        ((False, False), 3, 1, False),
    ],
)
def test_tf32_is_what_a_product_shows(rounded, products, convolutions, active, monkeypatch):
    monkeypatch.setattr("accel.techniques.tf32.rounds_to_tf32", lambda device: rounded)
    ran = Counter({("aten::mm", "float"): products, ("aten::convolution", "float"): convolutions})
    row = Tf32(True, torch.device("cuda")).observe(Evidence(products=ran))
    assert row.active == active
    # nothing is lost, so on_unavailable=error does not stop
    assert not LedgerRow("tf32", True, UNUSED, "").missing


def test_a_product_in_fp32_does_not_round():
    assert rounds_to_tf32(CPU) == (False, False)


def test_the_autotuner_is_on_where_it_changes_the_kernels(monkeypatch):
    kernels = {True: {"gemm", "implicit_gemm"}, False: {"gemm", "winograd"}}
    monkeypatch.setattr(
        "accel.techniques.cudnn_benchmark.observe_kernels",
        lambda *_: kernels[torch.backends.cudnn.benchmark],
    )
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    evidence = Evidence(ops=Counter({"aten::cudnn_convolution": 2}))
    tuned = CudnnBenchmark(True, torch.device("cuda"))
    tuned.compare(lambda: None, evidence)
    assert tuned.observe(evidence).active is True
    assert "implicit_gemm" in tuned.observe(evidence).evidence
    assert torch.backends.cudnn.benchmark
    kernels[False] = kernels[True]
    tuned.compare(lambda: None, evidence)
    assert tuned.observe(evidence).active == UNUSED
    assert tuned.observe(Evidence()).active == UNUSED


@pytest.mark.parametrize("kernel", ["triton_tem_fused_mm_1", "## Call CompiledFxGraph a ##"])
@pytest.mark.parametrize("branch", [torch.bfloat16, torch.float32])
def test_products_that_are_kernels_of_inductor_are_judged_by_what_the_blocks_return(branch, kernel):
    call = BlockEvidence(1, 1, torch.float32, branch, (True, True), frozenset())
    evidence = Evidence(ops=Counter({kernel: 8}), blocks=[[call], [call]])
    row = Precision("bf16", CPU).observe(evidence)
    assert row.active == {torch.bfloat16: "bf16", torch.float32: "fp32"}[branch]
    assert "2 of 2 blocks" in row.evidence
    evidence.products["aten::mm", "BFloat16"] = 2  # and where a library computes some
    assert (
        Precision("bf16", CPU).observe(evidence).active
        == {torch.bfloat16: "bf16", torch.float32: "mixed"}[branch]
    )


def test_a_product_counts_once_however_often_it_is_entered():
    class Entered(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            return op(*args, **(kwargs or {}))

    a = torch.randn(4, 4)
    image = torch.randn(1, 2, 4, 4, requires_grad=True)
    weight = torch.randn(2, 2, 3, 3)

    def run():
        with Entered(), torch.amp.autocast("cpu", torch.bfloat16):
            torch.mm(a, a)
            torch.nn.functional.linear(a, a, a[0])
            torch.nn.functional.conv2d(image, weight).sum().backward()

    products = observe_step(run, None).products
    assert products == {
        ("aten::mm", "BFloat16"): 1,
        ("aten::addmm", "BFloat16"): 1,
        ("aten::convolution", "BFloat16"): 1,
        ("aten::convolution_backward", "BFloat16"): 1,
    }


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [True, False])
def test_tf32_is_measured(asked):
    technique = Tf32(asked, torch.device("cuda"))
    technique.on_process()
    assert rounds_to_tf32(technique.device) == (asked, asked)


@pytest.mark.gpu
def test_flex_and_the_kernels_of_inductor_are_seen_in_every_block(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "inductor")
    rows = ledger_of(
        "dit", device=torch.device("cuda"), attention="flex", compile=True, precision="bf16"
    )
    assert [rows[key].active for key in ("attention", "compile", "precision")] == [
        "flex",
        True,
        "bf16",
    ]


def test_the_ledgers_table_marks_what_is_missing():
    ledger = Ledger(
        [LedgerRow("tf32", True, False, "no GPU"), LedgerRow("precision", "bf16", "bf16", "seen")]
    )
    lines = ledger.table().splitlines()
    assert lines[1].startswith("! tf32")
    assert lines[2].startswith("  precision")
    assert ledger.as_dict()["tf32"] == {"requested": True, "active": False, "evidence": "no GPU"}


def test_one_line_says_what_is_on_and_not_what_was_asked_for():
    rows = [("tf32", True, "unused"), ("compile", True, False), ("fused_adamw", False, True)]
    rows += [("precision", "fp16", "bf16"), ("tune", "auto", "a=1 b=2")]
    told = Ledger([LedgerRow(*row, "seen") for row in rows]).line()
    expected = "compile=false fused_adamw=true amp=true amp_dtype=bf16 tf32=unused tune=a=1,b=2"
    assert told == f"Acceleration: {expected}"
    assert "amp=false amp_dtype=fp32" in Ledger([LedgerRow("precision", "bf16", "fp32", "")]).line()


def test_evidence_of_nothing_is_no_evidence():
    for variant in VARIANTS:
        key = key_of(variant)
        # these are flags, and read
        if key not in ("tf32", "cudnn_benchmark", "empty_cache_at_eval"):
            assert find_technique(key)(variant[key], CPU).observe(Evidence()).active in (False, UNUSED)


def test_a_graph_is_believed_only_when_it_was_launched():
    graph = CudaGraph(True, torch.device("cuda"))
    evidence = Evidence()
    assert graph.observe(evidence).active is False
    evidence.warm_ops["cudaGraphLaunch"] = 1
    assert graph.observe(evidence).active is True


def test_a_graph_needs_the_fused_optimizer(monkeypatch):
    monkeypatch.setattr(CudaGraph, "unavailable", lambda self: None)
    _, step, stack, _ = assemble(cuda_graph=True, fused_adamw=False)
    graph = stack.techniques[-1]
    assert step.update == step.one_step  # not captured
    active, evidence = graph.observe(Evidence())
    assert active is False
    assert "decides on the host" in evidence


def test_the_order_of_the_tuple():
    keys = [kind.key for kind in TECHNIQUES]
    assert (
        keys.index("gradient_checkpointing")
        < keys.index("compile")
        < keys.index("cuda_graph")
        == len(keys) - 1
    )
