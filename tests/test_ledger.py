"""The ledger says what one real step shows, and notices when a technique does nothing."""

from __future__ import annotations

import pytest
import torch

from accel.compilation import Compile
from accel.cuda_graph import CudaGraph
from accel.evidence import Evidence, observe_step
from accel.fused_adamw import FusedAdamW
from accel.gradient_checkpointing import CheckpointBlocks
from accel.ledger import UNUSED, Ledger, LedgerRow
from accel.precision import Precision
from accel.residual_in_fp32 import ResidualInFp32
from accel.stack import TECHNIQUES, AccelerationStack
from accel.tf32 import Tf32
from tests.harness import CPU, EAGER, VARIANTS, assemble, cannot_be_had, key_of, ledger_of, named, technique


@pytest.fixture(autouse=True)
def quick_compiler_and_any_precision(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    monkeypatch.setattr(Precision, "unavailable", lambda self: None)


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_the_ledger_confirms_what_is_on(variant):
    if reason := cannot_be_had(variant):
        pytest.skip(reason)
    key = key_of(variant)
    assert ledger_of("dit", **variant)[key].active == variant[key]


def test_the_ledger_confirms_what_is_off():
    rows = ledger_of("dit")
    on = {"residual_in_fp32": True, "precision": "fp32", "attention": "flash", "parallel": "none"}
    assert {key: row.active for key, row in rows.items()} == dict.fromkeys(rows, False) | on
    # A residual that may be 16 bits wide is still fp32 where everything is.
    assert ledger_of(residual_in_fp32=False)["residual_in_fp32"].active is True


def test_a_model_without_attention_has_no_use_for_its_backend():
    row = ledger_of("mamba", attention="math")["attention"]
    assert row.active == UNUSED
    assert not row.missing


def test_the_residual_is_seen_in_16_bits_where_it_is():
    assert ledger_of(precision="bf16", residual_in_fp32=False)["residual_in_fp32"].active is False
    assert ledger_of(precision="bf16", residual_in_fp32=True)["residual_in_fp32"].active is True


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
        self.policy, policy_meant = "blocks", self.policy
        CheckpointBlocks.unpatched(self, model)
        self.policy = policy_meant
        return model

    monkeypatch.setattr(CheckpointBlocks, "unpatched", CheckpointBlocks.on_model, raising=False)
    monkeypatch.setattr(CheckpointBlocks, "on_model", without_policy)
    assert ledger_of(gradient_checkpointing=True, checkpoint_policy=policy)["gradient_checkpointing"].missing


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
    assert [block.residual_dtype for block in evidence.blocks] == [torch.float32] * 2
    assert all(block.saved_bytes > block.input_bytes for block in evidence.blocks)
    with pytest.raises(RuntimeError, match="boom"):
        observe_step(lambda: (_ for _ in ()).throw(RuntimeError("boom")), model.blocks)
    assert model.blocks[-1] is blocks[-1]


def test_a_flag_that_nothing_used_is_not_called_on():
    assert Tf32(True, torch.device("cuda")).observe(Evidence()).active in (False, UNUSED)
    row = LedgerRow("tf32", True, UNUSED, "allowed; 0 products in fp32")
    assert not row.missing  # nothing is lost, so on_unavailable=error does not stop


def test_the_ledgers_table_marks_what_is_missing():
    ledger = Ledger([LedgerRow("tf32", True, False, "no GPU"), LedgerRow("precision", "bf16", "bf16", "seen")])
    lines = ledger.table().splitlines()
    assert lines[1].startswith("! tf32")
    assert lines[2].startswith("  precision")
    assert ledger.as_dict()["tf32"] == {"requested": True, "active": False, "evidence": "no GPU"}


def test_evidence_of_nothing_is_no_evidence():
    for variant in VARIANTS:
        key = key_of(variant)
        if key not in ("tf32", "cudnn_benchmark", "empty_cache_at_eval"):  # these are flags, and read
            assert technique(key)(variant[key], CPU).observe(Evidence()).active in (False, UNUSED)


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
    assert keys.index("gradient_checkpointing") < keys.index("compile") < keys.index("cuda_graph") == len(keys) - 1
