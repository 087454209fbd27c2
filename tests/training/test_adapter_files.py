"""Files of adapters: resuming, sampling, exporting, PEFT's layout, and refusals."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sampling.load import load_run
from scripts.export.__main__ import ExportConfig, export
from scripts.export.__main__ import Format as ExportFormat
from scripts.sample import Format, SampleConfig, sample_run
from tests.harness.adapters import (
    BASE_CLASSES,
    EAGER_RUN,
    assemble_on,
    edit_header,
    save_base,
    train_on,
)
from tests.harness.denoisers import make_inputs
from tests.harness.outcomes import are_equal
from tests.harness.refusals import expect_refusal
from tests.harness.sets import draw_random_samples, save_latent_set
from tests.harness.words import CPU
from train import train
from training.assemble import assemble
from training.checkpoint.load import find_weights_file
from training.config.compose import compose
from training.weights.adapter_base import compose_pretrained
from training.weights.adapter_file import (
    CONFIG_FILE,
    PEFT_PREFIX,
    TENSORS_FILE,
    load_model,
    write_peft,
)
from training.weights.pretrained import load_pretrained

SAVING = [
    "adapter=lora",
    "deterministic=true",
    "save_every=2",
    "keep_checkpoints=1",
    "sampling.steps=2",
]


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A run of four steps with an adapter. Read only."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train_on(base, folder, 64, *SAVING)
    return folder


def test_a_resumed_adapter_ends_with_the_same_bits_and_small_files(run, base, tmp_path):
    for samples in (32, 64):
        train_on(base, tmp_path / "run", samples, *SAVING)
    for name in ("model.safetensors", "ema.safetensors"):
        file = run / "checkpoints" / "step-4" / name
        assert are_equal(
            load_file(file), load_file(tmp_path / "run" / "checkpoints" / "step-4" / name)
        )
        assert file.stat().st_size < 0.15 * base.stat().st_size

    # another base cannot take its place
    other = save_base(tmp_path / "other.safetensors")
    with expect_refusal("was trained on other weights"):
        load_model(other, CPU, str(run))
    with expect_refusal("was made with another adapter: base_sha256 was"):
        train_on(other, tmp_path / "run", 96, *SAVING)


def test_a_run_a_folder_of_peft_and_a_file_give_the_same_samples(run, base, tmp_path):
    peft = tmp_path / "peft"
    write_peft(find_weights_file(str(run), "run_dir"), peft)
    file = run / "checkpoints" / "step-4" / "ema.safetensors"
    drawn = []
    weights = {"weights": str(base)}
    for source in (
        {"run_dir": str(run)},
        weights | {"adapter": str(file)},
        weights | {"adapter": str(peft)},
    ):
        cfg = SampleConfig(
            **source, count=4, steps=2, format=Format.latents, out=str(tmp_path / "drawn")
        )
        drawn.append(sample_run(cfg).read_bytes())
    assert drawn[0] == drawn[1] == drawn[2]
    assert load_run(run, device="cpu").spec.names == ["3", "4", "5", "6"]


def test_peft_opens_our_files_and_we_open_its_files(base, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    train_on(base, tmp_path / "run", 32, "adapter=lora", BASE_CLASSES)
    file = find_weights_file(str(tmp_path / "run"), "run_dir")
    write_peft(file, tmp_path / "ours")
    model, _ = load_pretrained(base, CPU)
    inputs = make_inputs(model)
    plain = model(*inputs)
    opened = peft.PeftModel.from_pretrained(model, tmp_path / "ours")
    expected = load_model(file, CPU).model(*inputs)
    torch.testing.assert_close(opened(*inputs), expected, atol=1e-5, rtol=0.0)
    assert not torch.allclose(plain, expected, atol=1e-4)

    config = peft.LoraConfig(r=4, target_modules=["w13", "in_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(load_pretrained(base, CPU)[0], config)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(base, CPU, str(tmp_path / "theirs")).model
    torch.testing.assert_close(ours(*inputs), theirs(*inputs), atol=1e-5, rtol=0.0)


def test_a_prompt_with_an_mlp_is_saved_as_its_vectors(base, tmp_path):
    train_on(base, tmp_path / "run", 32, "adapter=prompt", "adapter.hidden=4")
    file = find_weights_file(str(tmp_path / "run"), "run_dir")
    write_peft(file, tmp_path / "peft")
    assert load_file(tmp_path / "peft" / TENSORS_FILE)["prompt_embeddings"].shape == (5, 96)
    ours = load_model(file, CPU).model.state_dict()
    theirs = load_model(base, CPU, str(tmp_path / "peft")).model.state_dict()
    assert are_equal(ours, theirs)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["adapter=none", "init_from=null"], "model=pretrained needs a trained model"),
        (["model=mamba_xs"], "does not fit this model.*Use model=pretrained"),
        (["adapter.targets=[head.*]"], "match no linear layer"),
        (["adapter.rank=0"], "adapter.rank=0 must be at least 1"),
        (["init_from={run}"], "is an adapter, not a model; merge it first"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence, base, run, tmp_path):
    words = [word.format(run=run) for word in words]
    with expect_refusal(sentence):
        train_on(base, tmp_path / "run", 16, "adapter=lora", *words)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_resumed_run_keeps_the_base_that_it_started_with(tmp_path):
    """`init_from` names a run that has trained on since; a run that saves all weights no longer
    needs the file."""
    base = tmp_path / "base"
    words = [*EAGER_RUN, "model=ssd_mlp_xs", BASE_CLASSES, "save_every=1", f"run_dir={base}"]
    train(compose([*words, "total_samples=16"]))
    train_on(base, tmp_path / "lora", 16, "adapter=lora")
    train_on(base, tmp_path / "tuned", 16, "+model.drop_path=0.1")
    train(compose([*words, "total_samples=32"]))
    assert train_on(base, tmp_path / "lora", 32, "adapter=lora")["steps"] == 2
    base.rename(tmp_path / "gone")
    # the second call finds a finished run and shows its summary
    for _ in range(2):
        assert train_on(base, tmp_path / "tuned", 32, "+model.drop_path=0.1")["steps"] == 2


def test_another_encoder_without_a_hash_is_refused(base, tmp_path):
    edited = tmp_path / "other.safetensors"
    edit_header(base, edited, lambda header: header["spec"]["encoder"].update(revision="0" * 40))
    with expect_refusal(r"on latents of .*, and the data is of .*PixelAuto"):
        assemble_on(edited, "adapter=lora")


def write_as_peft(base, folder, **changes):
    """Writes a LoRA of rank 2 as PEFT saves it, which describes neither its model nor its step;
    returns the folder."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["w13"]}
    config |= {"init_lora_weights": True, "alora_invocation_tokens": None} | changes
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    layer = "blocks.0.layers.1.w13"
    rows, columns = load_file(base)[f"{layer}.weight"].shape
    factors = {"A": torch.ones(2, columns), "B": torch.ones(rows, 2)}
    tensors = {f"{PEFT_PREFIX}{layer}.lora_{name}.weight": t for name, t in factors.items()}
    save_file(tensors, folder / TENSORS_FILE)
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights=.* is not supported; plain LoRA is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.* is not supported"),
        ({"r": None}, "r=.* is not supported"),
        ({"lora_alpha": 10**400}, "lora_alpha=.* is not supported"),
        ({"lora_alpha": 1e308}, "safetensors makes blocks.0.layers.1.w13.weight .*not finite"),
    ],
)
def test_an_adapter_that_peft_computes_otherwise_is_refused(changes, sentence, base, tmp_path):
    with expect_refusal(sentence):
        load_model(base, CPU, write_as_peft(base, tmp_path / "peft", **changes))


def test_an_adapter_that_peft_trained_opens_in_every_command(base, tmp_path):
    source = {"weights": str(base), "adapter": write_as_peft(base, tmp_path / "peft")}
    out = str(tmp_path / "drawn")
    sample_run(SampleConfig(**source, count=2, steps=1, device="cpu", out=out))
    merged = load_model(base, CPU, source["adapter"]).model.state_dict()
    file = str(tmp_path / "merged.safetensors")
    exported = load_file(export(ExportConfig(**source, out=file, format=ExportFormat.weights)))
    assert are_equal(exported, merged)
    export(ExportConfig(**source, out=str(tmp_path / "folder"), format=ExportFormat.diffusers))


def test_latents_are_normalised_as_those_of_the_base(base, tmp_path):
    """The statistics of the data would scale latents otherwise than in the base's training."""
    shards = [(split, draw_random_samples(8, 0, (1, 8, 8))) for split in ("train", "held_out")]
    encoder = {"_target_": "models.autoencoders.PixelAutoencoder"}
    save_latent_set(tmp_path / "set", shards, encoder_sha256=None, encoder=encoder)
    words = [*EAGER_RUN, "adapter=lora", "data=resident", f"data.path={tmp_path / 'set'}"]
    words += ["model=pretrained", f"init_from={base}"]
    cfg = compose_pretrained(words).cfg
    loaded = assemble(cfg, CPU).loader.spec
    spec = load_pretrained(base, CPU)[1]
    assert (loaded.mean, loaded.std) == (spec.mean, spec.std)
    scaled = dataclasses.replace(cfg, data=cfg.data | {"normalisation": "scale_shift"})
    with expect_refusal("with another normalisation than the data's"):
        assemble(scaled, CPU)


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [
        (10**6, "it would be much larger than the tensors in the file"),
        (7, r"does not fit the adapter that it describes: .*lora_A has shape \(8, "),
    ],
)
def test_the_header_of_an_adapter_allocates_nothing(rank, sentence, base, run, tmp_path):
    edited = tmp_path / "edited.safetensors"
    file = find_weights_file(str(run), "run_dir")
    edit_header(file, edited, lambda header: header["adapter"]["node"].update(rank=rank))
    with expect_refusal(sentence):
        load_model(base, CPU, str(edited))
