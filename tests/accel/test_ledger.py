"""The ledger says what one real step shows, and notices when a technique does nothing."""

import inspect
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from accel.counted_rows import AdapterGradients, OptimizerState
from accel.evidence import BlockProbe
from accel.ledger import NO_GPU, UNUSED, Ledger, LedgerRow
from accel.stack import TECHNIQUES
from accel.techniques.gradient_checkpointing import CheckpointBlocks
from tests.harness.steps import (
    checkpoint_values,
    compile_values,
    key_of,
    ledger_of,
    read_ledger,
    tiny_training,
)
from tests.harness.words import CUDA, slow

pytestmark = pytest.mark.usefixtures("quick_compiler", "any_precision")
SELECTIVE = checkpoint_values("selective")
COMPILED = compile_values("blocks")


# What is on, and what is off.


def test_the_ledger_confirms_what_is_off():
    rows = ledger_of("dit")
    on = {"residual_in_fp32": True, "precision": "fp32", "attention": "flash", "parallel": "none"}
    on |= {"weights": "fp32", "optim": "fp32"}
    assert {key: row.active for key, row in rows.items()} == dict.fromkeys(rows, False) | on


def test_a_model_without_attention_has_no_use_for_its_backend():
    row = ledger_of("mamba", attention="math")["attention"]
    assert row.active == UNUSED
    assert not row.missing


@pytest.mark.parametrize(("precision", "wide"), [("bf16", False), ("fp32", True)])
def test_a_residual_that_may_be_16_bits_wide_is_so_where_products_are(precision, wide):
    rows = ledger_of("dit", precision=precision, residual_in_fp32=False)
    assert rows["residual_in_fp32"].active is wide


@pytest.mark.parametrize(
    ("scope", "policy"),
    [
        ("blocks", "selective"),
        *(
            slow(*row)
            for row in product((None, "blocks", "model"), (None, "blocks", "every_2", "selective"))
            if row != ("blocks", "selective")
        ),
    ],
)
def test_checkpointing_is_seen_in_what_the_blocks_keep(scope, policy):
    rows = ledger_of("hybrid", **checkpoint_values(policy), **compile_values(scope))
    assert rows["gradient_checkpointing"].active is (policy is not None)
    assert rows["compile"].active is (scope is not None)


def test_micro_batches_are_all_looked_at():
    rows = ledger_of("dit", "accumulation_steps=2", depth=4, **checkpoint_values("blocks"))
    assert "4 of 4 blocks" in rows["gradient_checkpointing"].evidence
    assert "4 of 4 layers" in rows["attention"].evidence


@pytest.mark.gpu
def test_flex_and_the_kernels_of_inductor_are_seen_in_every_block(inductor):
    values = {"attention": "flex", "compile": True, "precision": "bf16"}
    rows = ledger_of("dit", device=CUDA, **values)
    assert {key: rows[key].active for key in values} == values


# A technique that does nothing, or something else.


@pytest.mark.parametrize(
    ("policy", "applied"), [("every_3", "every_3"), ("every_3", "blocks"), ("selective", "blocks")]
)
def test_a_policy_counts_only_where_blocks_follow_it(policy, applied, monkeypatch):
    on_model = CheckpointBlocks.on_model

    def apply_other(self, model):
        self.checkpoint_policy = applied
        model = on_model(self, model)
        self.checkpoint_policy = policy
        return model

    monkeypatch.setattr(CheckpointBlocks, "on_model", apply_other)
    row = ledger_of("dit", depth=5, **checkpoint_values(policy))["gradient_checkpointing"]
    assert row.missing is (policy != applied)


@pytest.mark.parametrize(("saved", "scope"), [("mul", None), ("no operation", "blocks")])
def test_a_selective_policy_that_keeps_other_results_is_not_on(saved, scope, monkeypatch):
    def decide(context, op, *arguments, **kwargs):
        wanted = op.name().startswith(f"aten::{saved}")
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    monkeypatch.setattr("accel.techniques.gradient_checkpointing.decide", decide)
    assert ledger_of("dit", **SELECTIVE, **compile_values(scope))["gradient_checkpointing"].missing


def test_a_weight_that_is_multiplied_in_fp32_by_another_operation_is_named():
    """einsum calls bmm. A bmm in fp32 may also be of two activations, which is allowed."""

    def with_einsum(x):
        with torch.amp.autocast("cpu", enabled=False):
            return torch.einsum("bld,od->blo", x.float(), layer.weight)

    training = tiny_training("dit", precision="bf16", **COMPILED)
    layer = training.model.blocks[1].layers[0].out_proj
    layer.forward = with_einsum
    row = read_ledger(training)["precision"]
    assert row.evidence.endswith(": blocks.1.layers.0.out_proj.weight")


# A technique that does its work in some blocks only.


def compute_in_fp32(block):
    forward = block.forward
    block.forward = torch.amp.autocast("cpu", enabled=False)(
        lambda *inputs, **more: forward(*(t.float() for t in inputs), **more)
    )


def keep_activations(block):
    """Removes the forward that recomputes."""
    del block.forward


def narrow_residual(block):
    block.residual_in_fp32 = False


def leave_uncompiled(block):
    block._compiled_call_impl = None


def attend_by_math(block):
    block.layers[0].attention_backend = "math"


IN_BF16 = {"residual_in_fp32": True, "precision": "bf16"}
FLASH = {"attention": "flash"}
SABOTAGED = {
    "half in fp32": ({"precision": "bf16"}, compute_in_fp32, slice(0, None, 2)),
    "recomputing left to the last two": (
        checkpoint_values("blocks"),
        keep_activations,
        slice(0, -2),
    ),
    "selective left to the last": (SELECTIVE, keep_activations, slice(0, -1)),
    "a narrow stream but for the last": (IN_BF16, narrow_residual, slice(0, -1)),
    "one block compiled": (COMPILED, leave_uncompiled, slice(0, -1)),
    "half on math": (FLASH, attend_by_math, slice(0, None, 2)),
    "compiled, half on math": (FLASH | COMPILED, attend_by_math, slice(0, None, 2)),
}


@pytest.mark.parametrize(("values", "sabotage", "where"), SABOTAGED.values(), ids=SABOTAGED)
def test_a_technique_in_a_part_of_the_blocks_is_not_on(values, sabotage, where):
    training = tiny_training("dit", depth=3, **values)
    for block in training.model.blocks[where]:
        sabotage(block)
    row = read_ledger(training)[key_of(values)]
    assert row.missing, row.evidence


def test_a_stream_rounded_between_two_blocks_is_seen(monkeypatch):
    forward = BlockProbe.forward

    def forward_rounded(self, b, g, r, c, **more):
        return forward(self, b, g, r.bfloat16().float(), c, **more)

    monkeypatch.setattr(BlockProbe, "forward", forward_rounded)
    assert ledger_of("dit", precision="bf16")["residual_in_fp32"].missing


def test_graphs_that_inductor_did_not_make_are_not_compiled(inductor):
    training = tiny_training("dit", **COMPILED)
    for block in training.model.blocks:
        block.compile(backend="eager")
    assert read_ledger(training)["compile"].missing


def test_every_row_says_what_would_fool_it():
    for kind in (*TECHNIQUES, OptimizerState, AdapterGradients):
        source = Path(inspect.getfile(kind)).read_text()
        assert 'What would still say "on" if this did nothing?' in source, kind


# What a person reads.


def test_the_ledgers_table_marks_what_is_missing_and_its_line_says_what_is_on():
    rows = [("tf32", True, "unused"), ("compile", True, False), ("fused_adamw", False, True)]
    rows += [("precision", "fp16", "bf16"), ("trials", "auto", "a=1 b=2")]
    ledger = Ledger([LedgerRow(*row, "seen") for row in rows])
    lines = ledger.format_table().splitlines()
    marked = [line.split()[1] for line in lines if line.startswith("!")]
    assert marked == ["compile", "precision"]
    expected = "compile=false fused_adamw=true amp=true amp_dtype=bf16 trials=a=1,b=2"
    assert ledger.format_line() == f"Acceleration: {expected}"
    ledger.append(LedgerRow("cuda_graph", True, False, NO_GPU))
    *_, last = ledger.format_table("short").splitlines()
    assert last == "  off: tf32; without a GPU: cuda_graph (ledger=full says why)"
