"""`precision=fp8`: which layers compute in 8 bits, what of it a step shows, and that a run goes on
bit for bit.

A CPU emulates 8-bit products, so all of torchao's code runs here; the sizes that it asks for are
lowered.
"""

from collections import Counter

import pytest
import torch
from torch import nn

from accel.evidence import EIGHT_BIT, Evidence
from accel.stack import AccelerationStack
from accel.techniques import float8
from accel.techniques.precision import Precision
from common.config.build import build
from common.config.compose import compose
from sampling.load import load_run
from tests.harness.outcomes import copy_until, read_columns, read_outcome
from tests.harness.refusals import expect_refusal
from tests.harness.steps import (
    allow_any_precision,
    checkpoint_values,
    compile_values,
    compose_words,
    explain_no_fp8,
    ledger_of,
    read_ledger,
    tiny_training,
)
from tests.harness.words import CPU, TINY_RUN, slow
from tests.harness.zygote import read_output
from train import train

pytestmark = pytest.mark.usefixtures("quick_compiler", "any_precision")
EIGHT = {"precision": "fp8"}
GW_HP = {"precision": "fp8", "fp8_recipe": "rowwise_with_gw_hp"}
HERE = pytest.mark.skipif(explain_no_fp8() is not None, reason=explain_no_fp8() or "")
ROWWISE = pytest.mark.skipif(
    explain_no_fp8("rowwise") is not None, reason=explain_no_fp8("rowwise") or ""
)


@HERE
def test_the_layers_of_the_blocks_are_exchanged_and_nothing_else():
    training = tiny_training("dit", **EIGHT)
    model = training.model
    exchanged = {name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"}
    layers = ("layers.0.qkv", "layers.0.out_proj", "layers.1.w13", "layers.1.w2")
    assert exchanged == {f"blocks.{i}.{name}" for i in range(2) for name in layers}
    trained = {id(p) for group in training.step.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters()}


def test_the_filter_takes_large_layers_of_these_models(monkeypatch):
    """The test takes the true limit; sizes are (outputs, inputs)."""
    monkeypatch.setattr(float8, "MIN_FEATURES", 1024)
    expected = {
        "dit_xl": {(3456, 1152), (1152, 1152), (6144, 1152), (1152, 3072)},
        # The other layer has 4,936 outputs, no multiple of 16.
        "mamba_xl": {(1152, 2304)},
    }
    for name, sizes in expected.items():
        with torch.device("meta"):
            node = compose_words(f"model={name}").model
            model = build(node, "model", channels=4, height=32, width=32, num_classes=9)
        layers = filter(float8.is_large, model.blocks[0].modules())
        assert {tuple(layer.weight.shape) for layer in layers} == sizes
    assert not float8.is_large(nn.Linear(2048, 1024))


@HERE
def test_tokens_that_are_no_multiple_are_padded():
    """The gradient of a weight sums over tokens; a GPU takes multiples of 16 only, and a CPU any
    number."""
    training = tiny_training("dit", "data=synthetic", "data.height=6", "data.width=6", **EIGHT)
    assert training.model.tokens == 9
    assert training.model.blocks[0].layers[1].w2.config.pad_inner_dim
    assert read_ledger(training)["precision"].active == "fp8"


POLICIES = [None, "blocks", *(slow(policy) for policy in ("every_2", "selective"))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "values",
    [pytest.param(EIGHT, marks=HERE), pytest.param(GW_HP, marks=[ROWWISE, pytest.mark.slow])],
)
@pytest.mark.parametrize("scope", [None, *(slow(scope) for scope in ("blocks", "model"))])
def test_products_are_counted_whatever_recomputes_and_compiles_them(policy, values, scope):
    rows = ledger_of("dit", **values, **checkpoint_values(policy), **compile_values(scope))
    assert not [key for key, row in rows.items() if row.missing]
    products_per_layer = 2 if "fp8_recipe" in values else 3
    recomputed = {"blocks": 8, "every_2": 4}.get(policy, 0)
    # A compiler leaves out products without a use.
    if scope is None:
        assert rows["precision"].evidence.startswith(f"{8 * products_per_layer + recomputed} of ")


def restore_linear(layers):
    """Undoes the conversion of a layer."""
    converted = layers[1].w2
    layers[1].w2 = nn.Linear(converted.in_features, converted.out_features, bias=False)
    layers[1].w2.weight = converted.weight


def leave_gradient_in_bf16(layers):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.config import CastConfig, ScalingType

    off = ScalingType.DISABLED
    layers[1].w2.config = Float8LinearConfig(
        cast_config_input_for_grad_weight=CastConfig(off),
        cast_config_grad_output_for_grad_weight=CastConfig(off, target_dtype=torch.float8_e5m2),
    )


@HERE
@pytest.mark.parametrize(("fault", "converted"), [(restore_linear, 7), (leave_gradient_in_bf16, 8)])
def test_one_layer_that_is_left_out_is_seen(fault, converted):
    training = tiny_training("dit", **checkpoint_values("blocks"), **EIGHT)
    fault(training.model.blocks[1].layers)
    row = read_ledger(training)["precision"]
    assert row.active == "mixed"
    assert f"{converted} of 8 large layers" in row.evidence


def test_a_model_without_a_large_layer_says_so_or_stops(monkeypatch):
    monkeypatch.setattr(Precision, "find_obstacle", lambda self: None)
    monkeypatch.setattr(float8, "MIN_FEATURES", 1024)
    assert ledger_of("dit", **EIGHT)["precision"].active == "bf16"
    with expect_refusal(r"runtime\.precision \(0 of 8 layers are large enough"):
        ledger_of("dit", "runtime.on_unavailable=error", **EIGHT)


def test_8_bits_that_nobody_asked_for_are_mixed():
    evidence = Evidence(
        products=Counter({(EIGHT_BIT, "Float8_e4m3fn"): 3, ("aten::mm", "BFloat16"): 9})
    )
    assert Precision("bf16", CPU).observe(evidence).active == "mixed"


RUN = [
    *TINY_RUN,
    "model=dit_s",
    "deterministic=true",
    "runtime=eager",
    "runtime.precision=fp8",
    "total_samples=64",
    "save_every=4",
    "keep_checkpoints=9",
    "accumulation_steps=2",
    "model.drop_path=0.2",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of eight steps. Read only."""
    folder = tmp_path_factory.mktemp("float8") / "run"
    with pytest.MonkeyPatch.context() as patch:
        allow_any_precision(patch)
        train(compose([*RUN, f"run_dir={folder}"]))
    return folder


@HERE
def test_a_run_that_is_resumed_ends_bit_for_bit_the_same(whole, tmp_path):
    folder = copy_until(whole, tmp_path / "resumed", 4)
    assert train(compose([*RUN, f"run_dir={folder}"]))["ledger"]["precision"]["active"] == "fp8"
    assert read_outcome(folder) == read_outcome(whole)


@HERE
def test_samples_are_drawn_in_8_bits_too(whole):
    trained = load_run(whole, device="cpu")
    ledger = trained.warm_up(trained.make_conditions([0]), 2, 1.5)
    row = next(row for row in ledger if row.key == "precision")
    assert row.active == "fp8"
    images = trained.sample([0, 1], steps=2)
    plain = load_run(whole, device="cpu", runtime={"precision": "fp32"}).sample([0, 1], steps=2)
    # Pixels are 0 to 255.
    assert abs(images.astype(int) - plain.astype(int)).mean() < 8


@HERE
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_train_in_8_bits(mode, zygote, whole, run_dir):
    """Each process has its own scales, so losses differ from one process's within rounding to 8
    bits."""
    words = [*RUN, "runtime.gradient_checkpointing=true", f"runtime.parallel.mode={mode}"]
    codes = zygote(run_dir, *words, ranks=2, environment={"ANY_PRECISION": "1"})
    output = read_output(run_dir)
    assert codes == [0, 0], output
    assert " fp8 " in next(line for line in output.splitlines() if "precision" in line)
    losses, expected = (torch.tensor(read_columns(run, "loss")) for run in (run_dir, whole))
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=0.0)


@HERE
def test_the_protocol_of_samples_names_the_recipe():
    values = {"precision": "fp8", "fp8_recipe": "tensorwise"}
    for expected in (values, {"precision": "fp32"}):
        stack = AccelerationStack(values | expected, CPU, only=("precision",))
        assert stack.describe_arithmetic() == expected
