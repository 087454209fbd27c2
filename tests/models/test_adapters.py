"""Adapters: frozen and trained parameters, and their row in the ledger."""

from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models.adapters import (
    Lora,
    LoraLinear,
    Prompt,
    attach,
    count_passes,
    find_adapted_layers,
    find_trained_parameters,
    merge_adapter,
)
from scripts.plan.memory import forecast
from scripts.plan.question import Question
from tests.harness.adapters import FAMILIES, assemble_on, save_base
from tests.harness.denoisers import make_denoiser, make_inputs
from tests.harness.steps import read_ledger
from tests.harness.words import CPU
from training.preflight.memory import count_lasting_bytes
from training.weights.pretrained import load_pretrained

ADAPTERS = {"lora": Lora(rank=3, alpha=5.0), "prompt": Prompt(), "mlp": Prompt(hidden=8)}


@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "lora") for family in FAMILIES), ("ssd_mlp", "prompt"), ("ssd_mlp", "mlp")],
)
def test_an_adapter_starts_as_the_model_and_merges(family, kind, tmp_path):
    model, _ = load_pretrained(save_base(tmp_path / "base.safetensors", family), CPU)
    before = deepcopy(model.state_dict())
    inputs = make_inputs(model)
    plain = model(*inputs)
    attach(model, ADAPTERS[kind])
    assert torch.equal(model(*inputs), plain)

    trained = find_trained_parameters(model)
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.1 * torch.randn(parameter.shape)
    adapted = model(*inputs)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    frozen = {name.replace("base_layer.", ""): t for name, t in model.state_dict().items()}
    assert all(torch.equal(frozen[name], value) for name, value in before.items())

    merge_adapter(model)
    assert model.state_dict().keys() == before.keys()
    assert not find_adapted_layers(model)
    torch.testing.assert_close(model(*inputs), adapted, atol=1e-5, rtol=0.0)


def test_lora_is_its_formula():
    layer = LoraLinear(nn.Linear(5, 7).half(), rank=2, alpha=6.0)
    assert {layer.lora_A.dtype, layer.lora_B.dtype} == {torch.float32}
    layer.double()
    nn.init.normal_(layer.lora_B)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    expected = layer.base_layer(x) + 3.0 * (x @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(layer(x), expected)


def test_only_the_adapter_is_trained_averaged_and_saved(base):
    training = assemble_on(base, "adapter=lora", "adapter.rank=2")
    trained = find_trained_parameters(training.model)
    factors = {name for name in trained if name.endswith(("lora_A", "lora_B"))}
    # two new classes
    assert trained.keys() - factors == {"label_embed.table.weight"}
    before = deepcopy(dict(training.model.named_parameters()))
    rows = load_file(base)["label_embed.table.weight"]
    table = before["label_embed.table.weight"]
    assert torch.equal(table[:2], rows[3:5])
    assert torch.equal(table[-1], rows[-1])

    for _ in range(3):
        training.take_step()
    after = dict(training.model.named_parameters())
    assert {name for name in after if not torch.equal(after[name], before[name])} == trained.keys()
    assert training.state.ema.state_dict().keys() == trained.keys()
    assert training.state.state_dict()["model"].keys() == trained.keys()

    sizes = count_lasting_bytes(training)
    trained_bytes = sum(p.nbytes for p in trained.values())
    assert sizes.averages == sizes.gradients == trained_bytes
    assert sizes.optimizer == pytest.approx(2 * trained_bytes, rel=0.01)
    plan = forecast(Question(training.cfg, training.loader.spec, gpu=False)).lasting
    for part in ("gradients", "optimizer", "weights"):
        assert plan[part] == pytest.approx(getattr(sizes, part), rel=0.01)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("adapter=lora", "lora_A 8 of 8 from step 2 on, lora_B 8 of 8 from step 1 on"),
        ("adapter=lora runtime.gradient_checkpointing=true", "8 of 8 adapted layers"),
        ("adapter=lora runtime.compile=true", "8 of 8 adapted layers"),
        ("adapter=prompt adapter.hidden=4", "prompt 1 of 1 from step 2"),
    ],
)
@pytest.mark.usefixtures("quick_compiler")
def test_the_ledger_counts_every_layer(words, count, base):
    row = read_ledger(assemble_on(base, *words.split()))["adapter"]
    assert not row.missing
    assert count in row.evidence


def test_a_skipped_step_of_fp16_makes_no_factor_idle(base):
    training = assemble_on(base, "adapter=lora")
    training.step.measure_norm = lambda: torch.tensor(torch.inf)
    row = read_ledger(training)["adapter"]
    assert not row.missing
    assert "lora_A 0 of 8" in row.evidence


@pytest.mark.parametrize(
    ("fault", "count"), [("all idle", "0 of 8"), ("one idle", "7 of 8"), ("zero", "8 of 8")]
)
def test_an_adapter_that_trains_nothing_is_noticed(fault, count, base):
    """Fused paths elsewhere have this fault: they read the weight of the layer, and not the adapter
    on it."""
    training = assemble_on(base, "adapter=lora")
    layers = find_adapted_layers(training.model)
    for layer in list(layers.values())[: None if fault == "all idle" else 1]:
        layer.forward = layer.base_layer.forward
        if fault == "zero":
            layer.forward = lambda x, layer=layer: (
                LoraLinear.forward(layer, x.detach() * 0.0) + layer.base_layer(x)
            )
    row = read_ledger(training)["adapter"]
    assert row.missing
    assert f"{count} adapted" in row.evidence
    assert next(iter(layers)) in row.evidence


@pytest.mark.usefixtures("any_precision")
def test_narrow_weights_leave_the_factors_alone(base):
    training = assemble_on(base, "adapter=lora", "runtime.weights=bf16", "runtime.precision=bf16")
    layers = find_adapted_layers(training.model).values()
    assert {layer.lora_A.dtype for layer in layers} == {torch.float32}
    assert {layer.base_layer.weight.dtype for layer in layers} == {torch.bfloat16}
    ledger = read_ledger(training)
    assert not any(ledger[key].missing for key in ("adapter", "weights"))


@pytest.mark.parametrize(
    ("targets", "passes"), [(None, 3.0), (["blocks.*"], 2.0), (["blocks.[3-5].*"], 1.5)]
)
def test_a_step_on_frozen_weights_costs_fewer_passes(targets, passes):
    """Gradients flow through frozen weights, and frozen weights get none; before the first adapted
    block no gradient flows."""
    with torch.device("meta"):
        model = make_denoiser("dit", depth=6)
        if targets is not None:
            attach(model, Lora(rank=1, targets=targets))
        assert count_passes(model) == passes
        with FlopCounterMode(display=False) as counter:
            model(*make_inputs(model)).square().mean().backward()
    assert abs(counter.get_total_flops() / (2 * model.flops_per_sample()) - passes) < 0.1
