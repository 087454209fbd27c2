"""`precision=fp8`: which layers compute in 8 bits, what of it a step shows, and that a run goes on
bit for bit.

A CPU emulates 8-bit products, so all of torchao's code runs here; the sizes that it asks for are
lowered.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter

import pytest
import torch
from torch import nn

from accel.evidence import EIGHT_BIT, BlockEvidence, Evidence, observe_step
from accel.stack import AccelerationStack
from accel.techniques import float8
from accel.techniques.compilation import Compile
from accel.techniques.precision import Precision
from sampling.load import load_run
from tests.harness.outcomes import read_columns, read_outcome
from tests.harness.steps import (
    allow_any_precision,
    assemble,
    compose_words,
    explain_no_fp8,
    ledger_of,
)
from tests.harness.words import CPU, TINY_RUN
from tests.harness.zygote import Zygote, read_output
from train import train
from training.config.build import build
from training.config.compose import compose

EIGHT = {"precision": "fp8"}
GW_HP = {"precision": "fp8", "fp8_recipe": "rowwise_with_gw_hp"}
HERE = pytest.mark.skipif(explain_no_fp8() is not None, reason=explain_no_fp8() or "")
ROWWISE = pytest.mark.skipif(explain_no_fp8("rowwise") is not None, reason=explain_no_fp8("rowwise") or "")


@pytest.fixture(autouse=True)
def quick_compiler_and_any_precision(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    allow_any_precision(monkeypatch)


def sizes_of(layers):
    return {tuple(layer.weight.shape) for layer in layers}


@HERE
def test_the_layers_of_the_blocks_are_exchanged_and_nothing_else():
    plain, model, step = assemble("dit")[0], *assemble("dit", **EIGHT)[:2]
    exchanged = {name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    layers = ("layers.0.qkv", "layers.0.out_proj", "layers.1.w13", "layers.1.w2")
    assert exchanged == {f"blocks.{i}.{name}" for i in range(2) for name in layers}
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    trained = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters()}


def test_the_filter_takes_large_layers_of_these_models(monkeypatch):
    """By the true limits; sizes as (outputs, inputs)."""
    monkeypatch.setattr(float8, "MIN_FEATURES", 1024)
    taken = {}
    for name in ("dit_s", "dit_b", "dit_l", "dit_xl", "mamba_l", "mamba_xl"):
        with torch.device("meta"):
            node = compose_words(f"model={name}").model
            model = build(node, "model", channels=4, height=32, width=32, num_classes=9)
        taken[name] = sizes_of(m for m in model.blocks[0].modules() if float8.is_large(m))
    assert taken["dit_s"] == taken["dit_b"] == set()
    assert taken["dit_l"] == {(3072, 1024), (5440, 1024)}
    assert taken["dit_xl"] == {(3456, 1152), (1152, 1152), (6144, 1152), (1152, 3072)}
    assert taken["mamba_l"] == {(4416, 1024)}
    assert taken["mamba_xl"] == {(1152, 2304)}  # the other has 4,936 outputs, no multiple of 16

    class Own(nn.Linear):
        """Computes in its own way."""

    assert not float8.is_large(Own(2048, 2048, device="meta"))
    assert not float8.is_large(nn.Embedding(2048, 2048, device="meta"))


@HERE
def test_tokens_that_are_no_multiple_are_padded():
    """The gradient of a weight sums over them; a GPU takes multiples of 16 only, and a CPU any
    number."""
    words = ["data=synthetic", "data.height=6", "data.width=6"]
    model, step, stack, loader = assemble("dit", *words, **EIGHT)
    layer = model.blocks[0].layers[1].w2
    assert (model.tokens % 16, layer.config.pad_inner_dim) == (9, True)
    rows = {row.key: row for row in stack.warm_up(lambda: step([next(loader)]), model.blocks)}
    assert rows["precision"].active == "fp8"
    assert not assemble("dit", **EIGHT)[0].blocks[0].layers[1].w2.config.pad_inner_dim  # 16 tokens


POLICIES = [
    None,
    "blocks",
    *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("every_2", "selective")),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "values",
    [pytest.param(EIGHT, marks=HERE), pytest.param(GW_HP, marks=[ROWWISE, pytest.mark.slow])],
)
@pytest.mark.parametrize("scope", [None, "blocks", pytest.param("model", marks=pytest.mark.slow)])
def test_products_are_counted_whatever_recomputes_and_compiles_them(policy, values, scope):
    how = {"gradient_checkpointing": policy is not None, "checkpoint_policy": policy or "blocks"}
    how |= {"compile": scope is not None, "compile_scope": scope or "blocks"}
    rows = ledger_of("dit", **values, **how)
    assert [key for key, row in rows.items() if row.missing] == []
    ran = (
        8 * (3 if "fp8_recipe" not in values else 2)
        + {None: 0, "blocks": 8, "every_2": 4, "selective": 0}[policy]
    )
    if scope is None:  # a compiler leaves out what nobody needs
        assert rows["precision"].evidence.startswith(f"{ran} of ")
    assert "8 of 8 large layers" in rows["precision"].evidence


@HERE
def test_micro_batches_are_counted_each():
    model, step, stack, loader = assemble("dit", **EIGHT)
    ledger = stack.warm_up(lambda: step([next(loader), next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "precision")
    assert (row.active, row.evidence.split(" of ")[0]) == ("fp8", "48")


def back_to_linear(layers):
    """The conversion undone."""
    own = layers[1].w2
    plain = nn.Linear(own.in_features, own.out_features, bias=False)
    plain.weight = own.weight
    layers[1].w2 = plain


def one_gradient_in_bf16(layers):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.config import CastConfig, ScalingType

    off = ScalingType.DISABLED
    layers[1].w2.config = Float8LinearConfig(
        cast_config_input_for_grad_weight=CastConfig(off),
        cast_config_grad_output_for_grad_weight=CastConfig(off, target_dtype=torch.float8_e5m2),
    )


@HERE
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("fault", [back_to_linear, one_gradient_in_bf16])
def test_one_layer_that_is_left_out_is_seen(fault, recomputed):
    model, step, stack, loader = assemble("dit", gradient_checkpointing=recomputed, **EIGHT)
    fault(model.blocks[1].layers)
    rows = {row.key: row for row in stack.warm_up(lambda: step([next(loader)]), model.blocks)}
    assert (rows["precision"].active, rows["precision"].missing) == ("mixed", True)
    assert f"{7 if fault is back_to_linear else 8} of 8 large layers" in rows["precision"].evidence
    assert "meant to be" in rows["precision"].evidence


@HERE
def test_a_conversion_that_misses_layers_is_seen(monkeypatch):
    own = float8.Float8Layers.exchange
    fewer = lambda self, blocks, chosen, tokens: own(self, blocks, set(sorted(chosen)[1:]), tokens)  # noqa: E731
    monkeypatch.setattr(float8.Float8Layers, "exchange", fewer)
    assert ledger_of("dit", **EIGHT)["precision"].missing
    monkeypatch.setattr(float8.Float8Layers, "exchange", lambda *_: None)
    row = ledger_of("dit", **EIGHT)["precision"]
    assert (row.active, row.missing) == ("bf16", True)
    assert "0 of 8 large layers" in row.evidence


def test_a_model_without_a_large_layer_says_so_or_stops(monkeypatch):
    monkeypatch.setattr(Precision, "unavailable", lambda self: None)
    monkeypatch.setattr(float8, "MIN_FEATURES", 1024)
    row = ledger_of("dit", **EIGHT)["precision"]
    assert (row.active, row.missing) == ("bf16", True)
    assert row.evidence.startswith(
        "0 of 8 layers are large enough for fp8: 1,024 inputs, more than 1,024 outputs"
    )
    model, step, stack, loader = assemble("dit", **EIGHT)
    stack.strict = True
    with pytest.raises(ValueError, match=r"runtime\.precision \(0 of 8 layers are large enough"):
        stack.warm_up(lambda: step([next(loader)]), model.blocks)


def test_an_8_bit_product_counts_in_the_place_of_those_around_it_and_in_it():
    eight = torch.ones(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())

    def run():
        torch._scaled_mm(eight, eight.t(), one, one, out_dtype=torch.bfloat16)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    assert observe_step(run, None).products == {
        (EIGHT_BIT, "Float8_e4m3fn"): 1,
        ("aten::mm", "float"): 1,
    }


def test_8_bits_that_nobody_asked_for_are_mixed():
    evidence = Evidence(
        products=Counter({(EIGHT_BIT, "Float8_e4m3fn"): 3, ("aten::mm", "BFloat16"): 9})
    )
    row = Precision("bf16", CPU).observe(evidence)
    assert (row.active, "9 of 12 products in bf16" in row.evidence) == ("mixed", True)


def test_where_nothing_trains_the_forward_pass_is_all():
    layers = float8.Float8Layers(nn.Module(), "tensorwise")
    assert (layers.large, layers.too_small()[:6]) == ([], "0 of 0")  # an encoder has no blocks
    call = BlockEvidence(8, 0, torch.float32, torch.bfloat16, (True, True), frozenset())
    assert (layers.passes(call), call.trains) == (1, False)


@pytest.mark.parametrize(
    ("device", "capability", "package", "sentence"),
    [
        (
            "cpu",
            None,
            True,
            "tensor cores of an NVIDIA GPU; this run is on cpu; use runtime.precision=bf16.",
        ),
        (
            "cuda",
            (8, 6),
            True,
            "fp8 needs compute capability 8.9 or newer; use runtime.precision=bf16 on this GPU.",
        ),
        (
            "cuda",
            (8, 9),
            False,
            "fp8 needs torchao; pip install torchao, or use runtime.precision=bf16.",
        ),
        ("cuda", (9, 0), True, None),
    ],
)
def test_what_fp8_needs_is_said_in_a_sentence(device, capability, package, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if package else None)
    found = float8.find_obstacle(torch.device(device))
    assert found == sentence if sentence is None else found.endswith(sentence)


def test_what_torchao_says_at_its_import_is_not_heard(caplog, recwarn):
    with float8.quiet():
        logging.getLogger("torchao").warning("Failed to load _C.so")
        import warnings

        warnings.warn("and so on", stacklevel=1)
    logging.getLogger("torchao").warning("heard")
    assert caplog.messages == ["heard"]
    assert not recwarn.list


RUN = [
    *TINY_RUN,
    "model=dit_s",
    "deterministic=true",
    "runtime=eager",
    "runtime.precision=fp8",
    "total_samples=64",
]
RUN += [
    "save_every=4",
    "log_every=1",
    "keep_checkpoints=9",
    "accumulation_steps=2",
    "model.drop_path=0.2",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of eight steps. Read only."""
    folder = tmp_path_factory.mktemp("float8") / "run"
    with pytest.MonkeyPatch.context() as patch:
        allow_any_precision(patch)
        train(compose([*RUN, f"run_dir={folder}"]))
    return folder


@HERE
def test_a_run_that_is_resumed_ends_bit_for_bit_the_same(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(folder / "checkpoints" / "step-8")
    summary = train(compose([*RUN, f"run_dir={folder}"]))
    assert summary["ledger"]["precision"]["active"] == "fp8"
    assert read_outcome(folder) == read_outcome(whole)


@HERE
def test_samples_are_drawn_in_8_bits_too(whole):
    trained = load_run(whole, device="cpu")
    rows = {row.key: row for row in trained.warm_up(2, 1.5)}
    assert rows["precision"].active == "fp8"
    assert rows["precision"].evidence.startswith("8 of ")
    images = trained.sample([0, 1], steps=2)
    assert images.shape[0] == 2
    plain = load_run(whole, device="cpu", runtime={"precision": "fp32"}).sample([0, 1], steps=2)
    assert abs(images.astype(int) - plain.astype(int)).mean() < 8  # of 255


@HERE
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_train_in_8_bits(mode, zygote: Zygote, whole, tmp_path):
    """Each has scales of its own, so what they train differs from one process within rounding to 8
    bits."""
    words = [*RUN, "runtime.gradient_checkpointing=true", f"runtime.parallel.mode={mode}"]
    codes = zygote(tmp_path / "run", *words, ranks=2, environment={"ANY_PRECISION": "1"})
    assert codes == [0, 0], read_output(tmp_path / "run")
    assert " fp8 " in next(
        line for line in read_output(tmp_path / "run").splitlines() if "precision" in line
    )
    found, alone = (torch.tensor(read_columns(folder, "loss")) for folder in (tmp_path / "run", whole))
    torch.testing.assert_close(found, alone, rtol=2e-2, atol=0.0)


def test_the_protocol_of_samples_names_the_recipe():
    values = {"precision": "fp8", "fp8_recipe": "tensorwise"}
    stack = AccelerationStack(values, CPU, only=("precision",))
    expected = values if explain_no_fp8() is None else {"precision": "fp32"}
    assert stack.arithmetic() == expected
    values = {"precision": "fp32", "fp8_recipe": "rowwise"}
    assert AccelerationStack(values, CPU, only=("precision",)).arithmetic() == {"precision": "fp32"}
