"""Files of adapters: resuming, sampling, exporting, PEFT's layout, and refusals."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from common.config.compose import compose
from sampling.load import load_run
from scripts.sample import Format, SampleConfig, sample_run
from tests.harness.adapters import (
    BASE_CLASSES,
    EAGER_RUN,
    assemble_on,
    edit_header,
    save_base,
    train_on,
)
from tests.harness.outcomes import are_equal, copy_until, read_outcome
from tests.harness.refusals import expect_refusal
from tests.harness.sets import PIXELS, draw_random_samples, save_latent_set, save_named_set
from tests.harness.words import CPU
from train import train
from training.assemble import assemble
from training.checkpoint.load import find_weights_file
from training.weights.adapter_file import TENSORS_FILE, load_model, write_peft
from training.weights.first_weights import compose_pretrained
from training.weights.pretrained import load_pretrained

SAVING = [
    "adapter=lora",
    "deterministic=true",
    "save_every=2",
    "keep_checkpoints=2",
    "sampling.steps=2",
]


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A run of four steps with an adapter. Read only."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train_on(base, folder, 64, *SAVING)
    return folder


def test_a_resumed_adapter_ends_with_the_same_bits_and_small_files(run, base, tmp_path):
    resumed = copy_until(run, tmp_path / "run", 2)
    train_on(base, resumed, 64, *SAVING)
    assert read_outcome(resumed).state == read_outcome(run).state
    for file in run.glob("checkpoints/step-4/[em]*.safetensors"):
        assert file.stat().st_size < 0.15 * base.stat().st_size

    # another base cannot take its place
    other = save_base(tmp_path / "other.safetensors")
    with expect_refusal("was trained on other weights"):
        load_model(other, CPU, str(run))
    with expect_refusal("was made with another adapter: base_sha256 was"):
        train_on(other, resumed, 96, *SAVING)


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


def test_a_prompt_with_an_mlp_is_saved_as_its_vectors(base, tmp_path, run_dir):
    train_on(base, run_dir, 32, "adapter=prompt", "adapter.hidden=4")
    file = find_weights_file(str(run_dir), "run_dir")
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
def test_a_mistake_is_a_sentence(words, sentence, base, run, run_dir):
    words = [word.format(run=run) for word in words]
    with expect_refusal(sentence):
        train_on(base, run_dir, 16, "adapter=lora", *words)
    assert not (run_dir / "checkpoints").exists()


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


def test_latents_are_normalised_as_those_of_the_base(base, tmp_path):
    """The statistics of the data would scale latents otherwise than in the base's training."""
    shards = [(split, draw_random_samples(8, 0, (1, 8, 8))) for split in ("train", "held_out")]
    save_latent_set(tmp_path / "set", shards, encoder_sha256=None, encoder=PIXELS)
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


def test_the_classes_of_the_base_can_still_be_drawn(tmp_path):
    """They follow those of the data, with their own rows of the table, also in latents of another
    height and width."""
    small = ["model=conv_xs", "model.dim=32", "model.depth=1", "model.head_dim=16", *EAGER_RUN]
    words = save_named_set(tmp_path / "old", ["cat", "dog"])
    train(compose([*words, *small, "total_samples=16", f"run_dir={tmp_path / 'base'}"]))
    words = save_named_set(tmp_path / "new", ["bird", "dog"], (1, 6, 2))[:2]
    words += [
        *EAGER_RUN,
        "adapter=lora",
        "model=pretrained",
        f"init_from={tmp_path / 'base'}",
        "total_samples=32",
    ]
    train(compose([*words, f"run_dir={tmp_path / 'run'}"]))
    trained = load_run(tmp_path / "run")
    assert trained.spec.names == ["bird", "dog", "cat"]
    base = load_run(tmp_path / "base").model.label_embed.table.weight
    assert torch.equal(trained.model.label_embed.table.weight[2], base[0])
    assert trained.sample(["cat", 0], steps=1).shape == (2, 6, 2, 3)
