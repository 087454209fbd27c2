"""Adapters: what is frozen and what trains, what the ledger sees of it, the files, and what
sampling makes of them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accel.techniques.compilation import Compile
from common.files import hash_file
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
from models.denoiser import Denoiser
from sampling.load import load_run
from scripts.export.__main__ import ExportConfig, export
from scripts.export.__main__ import Format as ExportFormat
from scripts.sample import Format, SampleConfig, sample_run
from tests.harness.denoisers import fill_zero_layers, make_denoiser
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.steps import allow_any_precision
from tests.harness.words import CPU
from train import train
from training.assemble import Training, assemble
from training.checkpoint.files import make_header
from training.checkpoint.load import find_weights_file
from training.config.compose import compose
from training.failures import count_lasting_bytes
from training.weights.adapter_base import insert_pretrained
from training.weights.adapter_file import (
    CONFIG_FILE,
    PEFT_PREFIX,
    TENSORS_FILE,
    load_model,
    write_peft,
)
from training.weights.pretrained import build_model, fit_weights, load_pretrained

FAMILIES = ("mamba", "zigzag", "mamba1", "ssd_mlp", "conv", "dit")
WORDS = [
    "runtime=eager",
    "batch_size=16",
    "schedule.kind=constant",
    "schedule.warmup_samples=0",
    "sample_every=0",
]
FIRST = "data.classes=[0,1,2,3,4]"
SECOND = "data.classes=[3,4,5,6]"


def save_base(file: Path, family: str = "ssd_mlp") -> Path:
    """Weights of a model of five digits at which every layer matters."""
    training = assemble(compose([f"model={family}_xs", *WORDS, FIRST]).cfg, CPU)
    told = {"model": training.cfg.model, "spec": training.loader.spec.as_dict(), "step": 1}
    save_file(fill_zero_layers(training.model).state_dict(), file, make_header(told, "model"))
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "base.safetensors")


def adapted(base: Path, *words: str) -> Training:
    composed = compose([*WORDS, "model=pretrained", f"init_from={base}", SECOND, *words])
    return assemble(insert_pretrained(composed).cfg, CPU)


def inputs(model: Denoiser, batch: int = 3) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(batch, model.channels, 8, 8, generator=draw)
    return x, torch.rand(batch, generator=draw), torch.arange(batch) % (model.num_classes + 1)


ADAPTERS = {"lora": Lora(rank=3, alpha=5.0), "prompt": Prompt(), "mlp": Prompt(hidden=8)}


@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "lora") for family in FAMILIES), ("ssd_mlp", "prompt"), ("ssd_mlp", "mlp")],
)
def test_an_adapter_starts_as_the_model_and_merges(family, kind, tmp_path):
    adapter = ADAPTERS[kind]
    model, _ = load_pretrained(save_base(tmp_path / "base.safetensors", family), CPU)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    arguments = inputs(model)
    plain = model(*arguments)
    attach(model, adapter)
    assert torch.equal(model(*arguments), plain)
    assert find_trained_parameters(model)
    assert not any(name in before for name in find_trained_parameters(model))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in find_trained_parameters(model).values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    moved = model(*arguments)
    assert not torch.allclose(moved, plain, atol=1e-3)
    again, _ = load_pretrained(tmp_path / "base.safetensors", CPU)
    attach(again, adapter)
    again.load_state_dict(model.state_dict())
    merge_adapter(again)
    assert again.state_dict().keys() == before.keys()
    assert not find_adapted_layers(again)
    torch.testing.assert_close(again(*arguments), moved, atol=1e-5, rtol=0.0)
    below = {name.replace("base_layer.", ""): t for name, t in model.state_dict().items()}
    assert all(torch.equal(below[name], value) for name, value in before.items())


def test_lora_is_its_formula():
    layer = LoraLinear(nn.Linear(5, 7), rank=2, alpha=6.0)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    wide = layer.double()
    expected = (
        x @ wide.base_layer.weight.T
        + wide.base_layer.bias
        + 3.0 * (x @ wide.lora_A.T) @ wide.lora_B.T
    )
    torch.testing.assert_close(wide(x), expected)


def test_only_the_adapter_is_trained_averaged_and_kept(base):
    training = adapted(base, "adapter=lora", "adapter.rank=2")
    names = set(find_trained_parameters(training.model))
    assert {name.rsplit(".", 1)[1] for name in names} == {"lora_A", "lora_B", "weight"}
    # two new classes
    assert [name for name in names if name.endswith("weight")] == ["label_embed.table.weight"]
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    old = load_file(base)["label_embed.table.weight"]
    table = before["label_embed.table.weight"]
    assert torch.equal(table[:2], old[3:5])
    assert torch.equal(table[-1], old[-1])
    for _ in range(3):
        training.take_step()
    after = dict(training.model.named_parameters())
    assert {name for name in after if not torch.equal(after[name], before[name])} == names
    assert (
        set(training.state.ema.state_dict()) == names == set(training.state.state_dict()["model"])
    )
    sizes = count_lasting_bytes(training)
    small = sum(p.nbytes for p in find_trained_parameters(training.model).values())
    assert sizes.averages == sizes.gradients == small
    assert sizes.optimizer == pytest.approx(2 * small, rel=0.01)
    assert small < 0.05 * sizes.weights


def row(training: Training):
    return next(row for row in training.warm_up() if row.key == "adapter")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["runtime.gradient_checkpointing=true"],
        ["runtime.weights=bf16"],
        ["runtime.compile=true"],
    ],
)
def test_the_ledger_counts_every_layer(words, base, monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    found = row(adapted(base, "adapter=lora", *words))
    assert not found.missing
    assert "8 of 8 adapted layers in the backward pass" in found.evidence
    assert "lora_A 8 of 8 from step 2 on, lora_B 8 of 8 from step 1 on" in found.evidence


def test_a_skipped_step_of_fp16_makes_no_factor_idle(base, monkeypatch):
    training = adapted(base, "adapter=lora")
    update = training.step.update_parameters
    monkeypatch.setattr(
        training.step,
        "update_parameters",
        lambda grads, norm, taken: update(grads, norm, torch.zeros_like(taken)),
    )
    found = row(training)
    assert not found.missing
    assert "lora_A 0 of 8" in found.evidence


def test_the_ledger_counts_a_prompt(base):
    found = row(adapted(base, "adapter=prompt", "adapter.hidden=4"))
    assert not found.missing
    assert "1 of 1 adapted layers" in found.evidence
    assert "prompt 1 of 1 from step 2" in found.evidence


@pytest.mark.parametrize("fault", ["past the adapter", "past one", "zero"])
def test_an_adapter_that_trains_nothing_is_noticed(fault, base, monkeypatch):
    """What fused paths elsewhere do: they read the weight of the layer, and not the adapter on
    it."""
    training = adapted(base, "adapter=lora")
    layers = find_adapted_layers(training.model)
    for name in list(layers) if fault == "past the adapter" else list(layers)[:1]:
        layer = layers[name]
        product = layer.base_layer.forward

        def zero(x, layer=layer):
            return LoraLinear.forward(layer, x.detach() * 0.0) + layer.base_layer(x)

        monkeypatch.setattr(layer, "forward", zero if fault == "zero" else product)
    found = row(training)
    assert found.missing
    assert found.active == "partly"
    wanted = {
        "past the adapter": "0 of 8 adapted",
        "past one": "7 of 8 adapted",
        "zero": "8 of 8 adapted",
    }[fault]
    assert wanted in found.evidence
    assert next(iter(layers)) in found.evidence


def test_on_unavailable_error_ends_a_run_whose_adapter_trains_nothing(base, monkeypatch):
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: self.base_layer(x))
    training = adapted(base, "adapter=lora", "runtime.on_unavailable=error")
    with pytest.raises(ValueError, match=r"adapter \(0 of 8 adapted layers"):
        training.warm_up()


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory) -> tuple[Path, Path]:
    """A run of four steps with an adapter; and the same, stopped after two and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    words = [
        *WORDS,
        "adapter=lora",
        "model=pretrained",
        f"init_from={base}",
        SECOND,
        "deterministic=true",
    ]
    words += ["eval_every=0", "save_every=2", "keep_checkpoints=1", "sampling.steps=2"]
    whole = folder / "whole"
    cut = folder / "cut"
    train(compose([*words, "total_samples=64", f"run_dir={whole}"]))
    train(compose([*words, "total_samples=32", f"run_dir={cut}"]))
    train(compose([*words, "total_samples=64", f"run_dir={cut}"]))
    return whole, cut


def test_a_resumed_adapter_ends_with_the_same_bits_and_small_files(runs, base):
    whole, cut = (folder / "checkpoints" / "step-4" for folder in runs)
    for name in ("model.safetensors", "ema.safetensors"):
        one = load_file(whole / name)
        other = load_file(cut / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert (whole / name).stat().st_size < 0.15 * base.stat().st_size
    assert "lora" in (runs[0] / "ledger.json").read_text()


def test_a_run_a_folder_of_peft_and_a_file_give_the_same_samples(runs, base, tmp_path):
    write_peft(find_weights_file(str(runs[0]), "run_dir"), tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    assert config["peft_type"] == "LORA"
    assert config["r"] == 8
    assert config["modules_to_save"] == ["label_embed.table"]
    tensors = load_file(tmp_path / "peft" / TENSORS_FILE)
    factors = {
        f"{PEFT_PREFIX}{layer}.lora_{f}.weight" for layer in config["target_modules"] for f in "AB"
    }
    assert tensors.keys() == {*factors, f"{PEFT_PREFIX}label_embed.table.weight"}
    ema = runs[0] / "checkpoints" / "step-4" / "ema.safetensors"
    ways = {"run": {"run_dir": str(runs[0])}, "file": {"weights": str(base), "adapter": str(ema)}}
    ways["peft"] = {"weights": str(base), "adapter": str(tmp_path / "peft")}
    drawn = {}
    for name, where in ways.items():
        cfg = SampleConfig(
            **where, count=4, steps=2, format=Format.latents, out=str(tmp_path / name)
        )
        drawn[name] = sample_run(cfg).read_bytes()
    assert drawn["run"] == drawn["file"] == drawn["peft"]
    assert load_run(runs[0], device="cpu").spec.names == ["3", "4", "5", "6"]


def test_what_peft_saves_itself_opens_here(base, tmp_path):
    """Its file has no description of ours."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model, _ = load_pretrained(base, CPU)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["w13", "in_proj"], init_lora_weights=False
    )
    theirs = peft.get_peft_model(model, config)
    theirs.save_pretrained(tmp_path / "peft")
    arguments = inputs(model)
    ours = load_model(base, CPU, str(tmp_path / "peft")).model
    torch.testing.assert_close(ours(*arguments), theirs(*arguments), atol=1e-5, rtol=0.0)


def test_peft_opens_what_we_save(base, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    words = [
        *WORDS,
        "adapter=lora",
        "model=pretrained",
        f"init_from={base}",
        FIRST,
        "total_samples=32",
    ]
    train(compose([*words, f"run_dir={tmp_path / 'run'}", "eval_every=0"]))
    write_peft(find_weights_file(str(tmp_path / "run"), "run_dir"), tmp_path / "peft")
    model, _ = load_pretrained(base, CPU)
    ours = load_model(find_weights_file(str(tmp_path / "run"), "run_dir"), CPU).model
    arguments = inputs(model)
    plain = model(*arguments)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "peft")
    torch.testing.assert_close(theirs(*arguments), ours(*arguments), atol=1e-5, rtol=0.0)
    assert not torch.allclose(plain, ours(*arguments), atol=1e-4)


def test_a_prompt_with_an_mlp_is_saved_as_its_vectors(base, tmp_path):
    words = [
        *WORDS,
        "adapter=prompt",
        "adapter.hidden=4",
        "model=pretrained",
        f"init_from={base}",
        SECOND,
    ]
    train(compose([*words, "total_samples=32", "eval_every=0", f"run_dir={tmp_path / 'run'}"]))
    file = find_weights_file(str(tmp_path / "run"), "run_dir")
    write_peft(file, tmp_path / "peft")
    assert load_file(tmp_path / "peft" / TENSORS_FILE)["prompt_embeddings"].shape == (5, 96)
    here, there = (
        load_model(*way)[0].state_dict()
        for way in ((file, CPU), (base, CPU, str(tmp_path / "peft")))
    )
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["adapter=lora"], "adapter needs a trained model; set init_from="),
        (["model=pretrained"], "model=pretrained needs a trained model; set init_from="),
        (
            ["adapter=lora", "model=mamba_xs", "init_from={base}"],
            "does not fit this model.*Use model=pretrained",
        ),
        (
            ["adapter=lora", "model=pretrained", "init_from={base}", "adapter.targets=[head.*]"],
            "match no linear layer",
        ),
        (
            ["adapter=lora", "model=pretrained", "init_from={base}", "adapter.rank=0"],
            "adapter.rank=0 must be at least 1",
        ),
        (
            ["adapter=lora", "model=pretrained", "init_from={run}"],
            "is an adapter, not a model; merge it first",
        ),
        (
            ["adapter=lora", "model=pretrained", "init_from={base}", "adapter.ranks=0"],
            "adapter.ranks=0.*did you mean",
        ),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence, base, runs, tmp_path):
    words = [word.format(base=base, run=runs[0]) for word in words]
    with pytest.raises(ValueError, match=sentence):
        train(compose([*WORDS, SECOND, *words, f"run_dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_another_base_is_refused(runs, base, tmp_path):
    other = save_base(tmp_path / "other.safetensors")  # other random numbers
    with pytest.raises(ValueError, match="was trained on other weights"):
        load_model(other, CPU, str(runs[0]))
    words = [
        *WORDS,
        "adapter=lora",
        "model=pretrained",
        SECOND,
        "deterministic=true",
        "total_samples=96",
    ]
    with pytest.raises(ValueError, match="was made with another adapter: base_sha256 was"):
        train(compose([*words, f"init_from={other}", f"run_dir={runs[1]}"]))


def test_the_base_of_a_resumed_run_is_the_one_it_started_with(tmp_path):
    """`init_from` names a run, which has trained on; and a run with all weights needs its file no
    more."""
    first = [
        *WORDS,
        "model=ssd_mlp_xs",
        FIRST,
        "save_every=1",
        "eval_every=0",
        f"run_dir={tmp_path / 'base'}",
    ]
    train(compose([*first, "total_samples=16"]))
    words = [*WORDS, "model=pretrained", f"init_from={tmp_path / 'base'}", SECOND, "eval_every=0"]
    lora = [*words, "adapter=lora", f"run_dir={tmp_path / 'adapter'}"]
    tuned = [*words, "+model.drop_path=0.1", f"run_dir={tmp_path / 'tuned'}"]
    for run in (lora, tuned):
        train(compose([*run, "total_samples=16"]))
    train(compose([*first, "total_samples=32"]))
    assert train(compose([*lora, "total_samples=32"]))["steps"] == 2
    (tmp_path / "base").rename(tmp_path / "gone")
    assert train(compose([*tuned, "total_samples=32"]))["steps"] == 2
    # finished: it shows the summary
    assert train(compose([*tuned, "total_samples=32"]))["steps"] == 2


def test_the_rows_that_a_base_keeps_are_said(base, capsys):
    adapted(base, "adapter=lora")
    assert (
        "kept 2 of 5 rows of the label table by the names of their classes (3, 4)"
        in capsys.readouterr().out
    )


def test_classes_without_names_keep_their_number(base, tmp_path):
    told = json.loads(safe_open(base, "pt").metadata()["fastlatent"])
    told["spec"]["class_names"] = []
    save_file(load_file(base), tmp_path / "nameless.safetensors", {"fastlatent": json.dumps(told)})
    spec = load_pretrained(base, CPU)[1]
    other = dataclasses.replace(spec, class_names=[], num_classes=4)
    with pytest.raises(
        ValueError,
        match=r"label_embed.table.weight has shape \(6, 96\) in the file and has shape \(5",
    ):
        fit_weights(
            build_model(told["model"], other, CPU), other, tmp_path / "nameless.safetensors"
        )


@pytest.mark.parametrize(("key", "value"), [("path", "other/vae"), ("revision", "0" * 40)])
def test_another_encoder_without_a_hash_is_refused(key, value, base, tmp_path):
    told = json.loads(safe_open(base, "pt").metadata()["fastlatent"])
    told["spec"]["encoder"] = told["spec"]["encoder"] | {key: value}
    save_file(load_file(base), tmp_path / "other.safetensors", {"fastlatent": json.dumps(told)})
    with pytest.raises(
        ValueError, match=r"on latents of .*, and the data is of .*PixelAutoencoder; encode"
    ):
        adapted(tmp_path / "other.safetensors", "adapter=lora")


def write_as_peft(base: Path, folder: Path, **change: Any) -> dict[str, Any]:
    """A LoRA of rank 2 as PEFT saves it, without our header; returns its configuration."""
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["w13"],
        "use_qalora": False,
    } | change
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    name = f"{PEFT_PREFIX}blocks.0.layers.1.w13"
    rows, columns = load_file(base)["blocks.0.layers.1.w13.weight"].shape
    factors = {
        f"{name}.lora_A.weight": torch.ones(2, columns),
        f"{name}.lora_B.weight": torch.ones(rows, 2),
    }
    save_file(factors, folder / TENSORS_FILE)
    return config


@pytest.mark.parametrize(
    "change",
    [
        *({"init_lora_weights": "pissa"}, {"alora_invocation_tokens": [1]}, {"r": None}),
        *({"lora_alpha": math.nan}, {"lora_alpha": math.inf}, {"lora_alpha": 10**400}),
    ],
)
def test_what_peft_computes_otherwise_is_refused(change, base, tmp_path):
    config = write_as_peft(base, tmp_path, **change)
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.* is not read; plain LoRA is"):
        load_model(base, CPU, str(tmp_path))
    plain = config | {
        "init_lora_weights": True,
        "alora_invocation_tokens": None,
        "r": 2,
        "lora_alpha": 4,
    }
    (tmp_path / CONFIG_FILE).write_text(json.dumps(plain))
    load_model(base, CPU, str(tmp_path))


def test_an_adapter_that_makes_weights_infinite_is_refused(base, tmp_path):
    write_as_peft(base, tmp_path, lora_alpha=1e308)
    with pytest.raises(
        ValueError,
        match=r"adapter_model.safetensors makes blocks.0.layers.1.w13.weight .*not finite",
    ):
        load_model(base, CPU, str(tmp_path))


def test_what_peft_trained_opens_in_every_command(base, tmp_path):
    """PEFT's file has no description of ours, so it says neither its model nor its step."""
    (tmp_path / "peft").mkdir()
    write_as_peft(base, tmp_path / "peft")
    given = {"weights": str(base), "adapter": str(tmp_path / "peft")}
    npz = sample_run(
        SampleConfig(**given, count=2, steps=1, device="cpu", out=str(tmp_path / "drawn"))
    )
    assert np.load(npz)["arr_0"].shape[0] == 2
    told = json.loads((tmp_path / "drawn.json").read_text())["weights"]
    assert told["sha256"] == hash_file(tmp_path / "peft" / TENSORS_FILE)
    merged = load_model(base, CPU, given["adapter"]).model.state_dict()
    exported = export(
        ExportConfig(**given, out=str(tmp_path / "merged.safetensors"), format=ExportFormat.weights)
    )
    assert all(torch.equal(tensor, merged[name]) for name, tensor in load_file(exported).items())
    export(ExportConfig(**given, out=str(tmp_path / "folder"), format=ExportFormat.diffusers))


def test_latents_are_normalised_as_those_of_the_base(base, tmp_path):
    """The data's own statistics would be another scale than the base knows."""
    shards = [
        (split, random_samples(8, seed, (1, 8, 8)))
        for seed, split in enumerate(("train", "held_out"))
    ]
    save_latent_set(
        tmp_path / "set",
        shards,
        encoder_sha256=None,
        encoder={"_target_": "models.autoencoders.PixelAutoencoder"},
    )
    words = [
        *WORDS,
        "adapter=lora",
        f"init_from={base}",
        "data=resident",
        f"data.path={tmp_path / 'set'}",
    ]
    cfg = insert_pretrained(compose([*words, "model=pretrained"])).cfg
    training = assemble(cfg, CPU)
    spec = load_pretrained(base, CPU)[1]
    assert (training.loader.spec.mean, training.loader.spec.std) == (spec.mean, spec.std)
    with pytest.raises(
        ValueError, match="normalised otherwise than the data's; use model=pretrained"
    ):
        assemble(dataclasses.replace(cfg, data=cfg.data | {"normalisation": "scale_shift"}), CPU)


def test_fp8_and_narrow_weights_leave_the_factors_alone(base, monkeypatch):
    allow_any_precision(monkeypatch)
    training = adapted(base, "adapter=lora", "runtime.weights=bf16", "runtime.precision=bf16")
    factors = [layer.lora_A for layer in find_adapted_layers(training.model).values()]
    assert {p.dtype for p in factors} == {torch.float32}
    assert {layer.base_layer.weight.dtype for layer in find_adapted_layers(training.model).values()} == {
        torch.bfloat16
    }
    assert not any(row.missing for row in training.warm_up() if row.key in ("adapter", "weights"))


def test_planning_counts_the_adapter(base):
    from scripts.plan.memory import Question, forecast

    training = adapted(base, "adapter=lora")
    training.take_step()
    lasting = forecast(Question(training.cfg, training.loader.spec, gpu=False)).lasting
    here = count_lasting_bytes(training)
    assert lasting["gradients"] == here.gradients
    assert lasting["optimizer"] == pytest.approx(here.optimizer, rel=0.01)
    assert lasting["weights"] == here.weights


def test_a_model_of_another_shape_is_built_from_the_file(base):
    cfg = insert_pretrained(
        compose([*WORDS, "model=pretrained", "+model.drop_path=0.1", f"init_from={base}", SECOND])
    ).cfg
    model = build_model(cfg.model, load_pretrained(base, CPU)[1], CPU)
    assert model.drop_path == 0.1
    assert model.depth == 2


def test_a_file_names_no_class_that_is_none_of_a_model(base, tmp_path):
    told = {"model": {"_target_": "training.loggers.NoLogger"}, "step": 1}
    spec = load_pretrained(base, CPU)[1].as_dict()
    save_file(
        load_file(base), tmp_path / "evil.safetensors", make_header(told | {"spec": spec}, "model")
    )
    with pytest.raises(ValueError, match="NoLogger as part of its model"):
        insert_pretrained(
            compose([*WORDS, "model=pretrained", f"init_from={tmp_path / 'evil.safetensors'}"])
        )
    told = json.loads(safe_open(base, "pt").metadata()["fastlatent"])
    told["model"]["dim"] = 2**20
    save_file(load_file(base), tmp_path / "huge.safetensors", {"fastlatent": json.dumps(told)})
    with pytest.raises(
        ValueError, match="it would be larger by far than the tensors that are there"
    ):
        insert_pretrained(
            compose([*WORDS, "model=pretrained", f"init_from={tmp_path / 'huge.safetensors'}"])
        )


def test_the_header_of_an_adapter_allocates_nothing(base, runs, tmp_path):
    """A rank of a million, and tensors of another shape."""
    file = find_weights_file(str(runs[0]), "run_dir")
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["fastlatent"])
    told["adapter"]["node"]["rank"] = 10**6
    save_file(load_file(file), tmp_path / "evil.safetensors", {"fastlatent": json.dumps(told)})
    with pytest.raises(
        ValueError, match="it would be larger by far than the tensors that are there"
    ):
        load_model(base, CPU, str(tmp_path / "evil.safetensors"))
    told["adapter"]["node"]["rank"] = 7
    save_file(load_file(file), tmp_path / "odd.safetensors", {"fastlatent": json.dumps(told)})
    with pytest.raises(
        ValueError, match=r"does not fit the adapter that it describes: .*lora_A has shape \(8, "
    ):
        load_model(base, CPU, str(tmp_path / "odd.safetensors"))


@pytest.mark.parametrize(("targets", "expected"), [(["blocks.*"], 2.0), (["blocks.[3-5].*"], 1.5)])
def test_a_step_on_frozen_weights_costs_fewer_passes(targets, expected):
    """Gradients flow through the weights, and none are of them. Before the first block none flow,
    and the counter does not know the CPU's attention, so a little is missing."""
    torch.manual_seed(0)
    model = fill_zero_layers(make_denoiser("dit", depth=6))
    assert count_passes(model) == 3.0
    attach(model, Lora(rank=1, targets=targets))
    assert count_passes(model) == expected
    x, t, y = inputs(model, batch=2)
    with FlopCounterMode(display=False) as counter:
        model(x, t, y).square().mean().backward()
    assert (
        expected - 0.2 < counter.get_total_flops() / (2 * model.flops_per_sample()) < expected + 0.1
    )
