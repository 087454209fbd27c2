"""LoRA by PEFT and diffusers: opens with the weights that PEFT merges, or is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.export.__main__ import ExportConfig, Format, export
from scripts.sample import SampleConfig, sample_run
from tests.harness.adapters import BASE_CLASSES, save_base, train_on
from tests.harness.outcomes import are_equal
from tests.harness.refusals import expect_refusal
from tests.harness.sets import edit_json
from tests.harness.words import CPU
from training.checkpoint.load import find_weights_file
from training.weights.adapter_file import (
    CONFIG_FILE,
    DIFFUSERS_FILE,
    PEFT_DEFAULTS,
    TENSORS_FILE,
    load_model,
    write_peft,
)
from training.weights.pretrained import load_pretrained

peft = pytest.importorskip("peft", reason="PEFT is not installed")

LAYERS = ["w13", "in_proj"]
RANDOM = {"r": 4, "lora_alpha": 7, "target_modules": LAYERS, "init_lora_weights": False}


def make_lora(base, **settings):
    """The model in `base` with a LoRA of PEFT, whose products are random."""
    model = load_pretrained(base, CPU)[0]
    return peft.get_peft_model(model, peft.LoraConfig(**RANDOM | settings))


def assert_merges_as_peft(base, adapter, theirs):
    merged = theirs.merge_and_unload().state_dict()
    assert are_equal(load_model(base, CPU, str(adapter)).model.state_dict(), merged)
    assert not are_equal(merged, load_pretrained(base, CPU)[0].state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": "all-linear", "lora_dropout": 0.1, "task_type": "FEATURE_EXTRACTION"},
        {"rank_pattern": {"w13": 2}, "alpha_pattern": {"in_proj": 3.3, "blocks.0.*": 5}},
        {"rank_pattern": {"^blocks.1.layers.0.in_proj": 1, r"layers\.\d.in_proj": 3}},
        {"layers_to_transform": [1], "layers_pattern": "blocks"},
    ],
)
def test_what_peft_saves_opens_with_the_weights_that_peft_merges(settings, base, tmp_path):
    make_lora(base, **settings).save_pretrained(tmp_path / "lora")
    model = load_pretrained(base, CPU)[0]
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "lora")  # which sorts the patterns
    assert_merges_as_peft(base, tmp_path / "lora", theirs)


def test_a_key_at_the_default_of_peft_is_harmless():
    defaults = peft.LoraConfig().to_dict()
    assert {key: defaults[key] for key in PEFT_DEFAULTS} == PEFT_DEFAULTS


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"use_dora": True}, "use_dora=True is not supported; plain LoRA is"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"bias": "lora_only"}, "bias=lora_only"),
        ({"modules_to_save": ["head"]}, "modules_to_save="),
        ({"init_lora_weights": "olora"}, "init_lora_weights=olora"),
    ],
)
def test_other_kinds_of_lora_are_refused(settings, sentence, base, tmp_path):
    make_lora(base, **settings).save_pretrained(tmp_path / "lora")
    with expect_refusal(sentence):
        load_model(base, CPU, str(tmp_path / "lora"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.* is not supported"),
        ({"r": None}, "r=None is not supported"),
        ({"lora_alpha": 10**400}, "lora_alpha=.* is not supported"),
        ({"alpha_pattern": {"w13": "8"}}, "alpha_pattern=.* is not supported"),
        ({"rank_pattern": 5}, "rank_pattern=5 is not supported"),
        ({"alpha_pattern": {"(w13": 8}}, r"\(.*\(w13.* is no regular expression"),
        ({"lora_alpha": 1e308}, r"safetensors makes blocks\.\S+ of the model not finite"),
    ],
)
def test_a_configuration_that_would_give_other_weights_is_refused(
    changes, sentence, base, tmp_path
):
    make_lora(base).save_pretrained(tmp_path)
    edit_json(tmp_path / CONFIG_FILE, changes)
    with expect_refusal(sentence):
        load_model(base, CPU, str(tmp_path))


def test_a_lora_of_peft_opens_in_every_command(base, tmp_path):
    make_lora(base).save_pretrained(tmp_path / "lora")
    source = {"weights": str(base), "adapter": str(tmp_path / "lora")}
    sample_run(SampleConfig(**source, count=2, steps=1, device="cpu", out=str(tmp_path / "drawn")))
    weights = {"out": str(tmp_path / "merged.safetensors"), "format": Format.weights}
    merged = load_file(export(ExportConfig(**source, **weights)))
    assert are_equal(merged, load_model(base, CPU, source["adapter"]).model.state_dict())
    export(ExportConfig(**source, out=str(tmp_path / "folder"), format=Format.diffusers))


def test_other_adapters_are_refused(base, tmp_path):
    config = peft.LoHaConfig(r=4, target_modules=LAYERS)
    peft.get_peft_model(load_pretrained(base, CPU)[0], config).save_pretrained(tmp_path / "loha")
    with expect_refusal("peft_type=LOHA is not supported; LORA is"):
        load_model(base, CPU, str(tmp_path / "loha"))


def save_by_diffusers(theirs, folder, **other):
    """Saves a LoRA as the training scripts of diffusers do; `other` is that of a text encoder."""
    from diffusers.loaders import SD3LoraLoaderMixin

    tensors = peft.get_peft_model_state_dict(theirs)
    tensors = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    SD3LoraLoaderMixin.save_lora_weights(
        folder,
        transformer_lora_layers=tensors,
        transformer_lora_adapter_metadata=theirs.peft_config["default"].to_dict(),
        **other,
    )
    return folder / DIFFUSERS_FILE


def test_a_single_file_of_diffusers_opens_by_its_header(base, tmp_path):
    theirs = make_lora(base, rank_pattern={"blocks.1.layers.1.w13": 2})
    save_by_diffusers(theirs, tmp_path)
    assert_merges_as_peft(base, tmp_path, theirs)


def test_a_lora_without_its_alpha_is_refused(base, tmp_path):
    make_lora(base).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    file = save_by_diffusers(make_lora(base), tmp_path)
    save_file(load_file(file), file)
    for name in (TENSORS_FILE, DIFFUSERS_FILE):
        with expect_refusal(f"{name} does not say its alpha, neither in adapter_config.json"):
            load_model(base, CPU, str(tmp_path / name))


def test_a_lora_of_another_model_is_refused_with_a_count(base, tmp_path):
    other = save_base(tmp_path / "other.safetensors", "mamba")
    make_lora(other).save_pretrained(tmp_path / "lora")
    with expect_refusal(r"4 of \d+ tensors are LoRA matrices of linear layers"):
        load_model(base, CPU, str(tmp_path / "lora"))
    text = {"text.q.lora_A.weight": torch.zeros(1, 1), "text.q.lora_B.weight": torch.zeros(1, 1)}
    file = save_by_diffusers(make_lora(base), tmp_path, text_encoder_lora_layers=text)
    with expect_refusal(r"8 of 10 tensors are LoRA .*text_encoder\.text\.q\S+ is none"):
        load_model(base, CPU, str(file))


def test_peft_opens_what_we_save(base, tmp_path):
    train_on(base, tmp_path / "run", 32, "adapter=lora", BASE_CLASSES)
    file = find_weights_file(str(tmp_path / "run"), "run_dir")
    write_peft(file, tmp_path / "ours")
    model, _ = load_pretrained(base, CPU)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "ours")
    merged = theirs.merge_and_unload().state_dict()
    assert are_equal(load_model(file, CPU).model.state_dict(), merged)


def test_a_lora_that_peft_trained_on_an_exported_model_opens(base, tmp_path):
    cfg = ExportConfig(weights=str(base), out=str(tmp_path / "exported"))
    folder = export(cfg)
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    theirs = peft.get_peft_model(pipe.transformer, peft.LoraConfig(**RANDOM))
    theirs.save_pretrained(tmp_path / "lora")
    assert_merges_as_peft(base, tmp_path / "lora", theirs)
