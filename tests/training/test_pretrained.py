"""Runs that start from the weights of another one."""

import dataclasses
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.compose import compose, read_config
from tests.harness.outcomes import are_equal
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_named_set
from tests.harness.steps import tiny_training
from tests.harness.words import CPU, TINY_MODEL, TINY_RUN
from train import train
from training.assemble import restore
from training.checkpoint.files import make_header
from training.checkpoint.load import read_state_file
from training.checkpoint.save import Checkpoints
from training.weights.first_weights import insert_pretrained
from training.weights.pretrained import load_pretrained, read_description, refuse_other_function


def make_training(folder, names, *words):
    return tiny_training("dit", *save_named_set(folder, names), "sampling.guidance=1", *words)


def save_weights(training, file, described=True):
    """Saves the model as a checkpoint would, or without a description, as another tool would."""
    facts = {"model": training.cfg.model, "spec": training.loader.spec.as_dict(), "step": 1}
    metadata = make_header(facts, "model") if described else None
    save_file(training.model.state_dict(), file, metadata)


def start_from(file, training):
    cfg = dataclasses.replace(training.cfg, init_from=str(file))
    return restore(cfg, training.state, Checkpoints(file.parent / "none"), {})


CLASSES = ["apple", "pear", "plum"]


@pytest.mark.parametrize(
    ("then", "now", "rows", "sentence"),
    [
        (
            CLASSES,
            ["kiwi", "plum"],
            [None, 2, 3],
            "kept 1 of 3 rows of the label table by the names .*plum.* rows: 1",
        ),
        (CLASSES, ["pear", "plum", "apple"], [1, 2, 0, 3], "kept 3 of 3 .* new rows: 0"),
        ([], CLASSES, [None, None, None, 0], "kept 0 of 0 .* new rows: 3"),
        (CLASSES, [], [3], "kept 0 of 3 .* new rows: 0"),
        (CLASSES, CLASSES, [0, 1, 2, 3], "safetensors$"),
    ],
)
def test_fine_tuning_keeps_the_label_rows_of_equal_names(then, now, rows, sentence, tmp_path):
    """Everything else is kept as it is, in the averages too."""
    old = make_training(tmp_path / "then", then)
    new = make_training(tmp_path / "now", now)
    with torch.no_grad():
        for parameter in old.model.parameters():
            parameter.add_(1.0)
    trained = old.model.state_dict()
    fresh = new.model.label_embed.table.weight.detach().clone()
    save_weights(old, tmp_path / "old.safetensors")
    assert re.search(sentence, start_from(tmp_path / "old.safetensors", new))
    for state in (new.model.state_dict(), new.state.ema.state_dict()):
        table = state.pop("label_embed.table.weight")
        old_table = trained["label_embed.table.weight"]
        expected = [fresh[i] if row is None else old_table[row] for i, row in enumerate(rows)]
        assert torch.equal(table, torch.stack(expected))
        assert are_equal(state, {name: trained[name] for name in state})


def test_positions_are_resized_to_another_grid(tmp_path):
    """Rows to rows and columns to columns, though both grids have as many tokens."""
    sides = (4, 12), (12, 4)
    old, new = (
        tiny_training("dit", "data=synthetic", f"data.height={height}", f"data.width={width}")
        for height, width in sides
    )
    axes = torch.meshgrid(torch.arange(2.0), torch.arange(6.0), indexing="ij")
    with torch.no_grad():
        old.model.pos_embed[0, :, :2] = torch.stack(axes, 2).flatten(0, 1)
    save_weights(old, tmp_path / "old.safetensors")
    said = start_from(tmp_path / "old.safetensors", new)
    assert said.endswith("; positions resized from 2×6 to 6×2 tokens")
    rows, columns = new.model.pos_embed[0, :, :2].unflatten(0, (6, 2)).unbind(2)
    for values, axis in ((rows, 0), (columns, 1)):
        assert (values.diff(dim=1 - axis).abs() < 1e-5).all()
        assert (values.diff(dim=axis) > -1e-5).all()
        assert values.max() - values.min() > 0.9


def test_weights_without_a_description_start_a_run_that_they_fit(tmp_path):
    """Others are named by the first tensor that does not fit."""
    old = make_training(tmp_path / "old", CLASSES)
    file = tmp_path / "old.safetensors"
    save_weights(old, file, described=False)
    assert start_from(file, make_training(tmp_path / "new", CLASSES)).endswith("old.safetensors")
    for names, word, sentence in (
        (
            ["a", "b"],
            "model.depth=2",
            r"label_embed.table.weight has shape \(4, .* and the file names no classes",
        ),
        (
            CLASSES,
            "model.dim=32",
            r"init_from=.*does not fit this model: pos_embed has shape \(1, 6, 64\) in the file",
        ),
    ):
        other = make_training(tmp_path / names[0], names, word)
        with expect_refusal(sentence):
            start_from(file, other)


@pytest.mark.fault("a description too long to be read again", "refused before training")
def test_a_description_that_no_command_could_read_is_refused_before_training(run, tmp_path):
    words = save_named_set(tmp_path / "set", [letter * 2**23 for letter in "abc"])
    with expect_refusal("3 names of classes has .* and more than 16777216 are not read again"):
        run("model=dit_xs", *words, "sampling.guidance=1")
    assert not (tmp_path / "run").exists()


# The scan's order of tokens belongs to the weights.

SCAN_RUN = [*TINY_RUN, "save_every=1"]


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """A run whose description lacks the order, as in earlier versions, and one that scans columns
    too, as the model's file in conf/ says. Read only."""
    folder = tmp_path_factory.mktemp("scans")
    train(compose([*SCAN_RUN, f"run_dir={folder / 'rows'}", "~model.mixer.columns"]))
    train(compose([*SCAN_RUN, f"run_dir={folder / 'columns'}"]))
    return folder


def start_with(run, way, folder):
    """Returns run_dir and an override of a run that starts with the weights of `run`."""
    if way == "run_dir":
        return shutil.copytree(run, folder / "copy"), "resume=auto"
    if way == "file":
        return folder / "new", f"init_from={run / 'checkpoints/step-2/model.safetensors'}"
    return folder / "new", f"{way}={run}"


@pytest.mark.parametrize("way", ["run_dir", "resume", "init_from", "file"])
def test_a_run_keeps_the_order_of_the_weights_with_which_it_starts(way, scans, tmp_path, capsys):
    """A command that asks for another one is refused."""
    run, word = start_with(scans / "rows", way, tmp_path)
    words = [*SCAN_RUN, f"run_dir={run}", word]
    with expect_refusal("model.mixer.columns=true: the weights in .* leave the word out"):
        train(compose([*words, "model.mixer.columns=true"]))
    train(compose([*words, "total_samples=32"]))
    sentence = "need model.mixer.columns=false, so this run keeps"
    assert capsys.readouterr().out.count(sentence) == 1
    checkpoint = run / "checkpoints" / "step-4"
    for model in (
        read_config(run / "config.yaml")["model"],
        read_state_file(checkpoint)["model"],
        read_description(checkpoint / "ema.safetensors").model,
    ):
        assert model["mixer"]["columns"] is False
    blocks = load_pretrained(checkpoint / "ema.safetensors", CPU)[0].blocks
    assert [block.rows_1 for block in blocks] == [None, None]


def test_a_model_without_the_key_gets_the_order_of_its_weights(scans, tmp_path):
    words = [*SCAN_RUN, f"run_dir={tmp_path / 'run'}", f"init_from={scans / 'columns'}"]
    composed = insert_pretrained(compose([*words, "~model.mixer.columns"]))
    assert composed.cfg.model["mixer"]["columns"] is True
    other = compose([*words, "model=conv_xs"])
    assert insert_pretrained(other) == other
    with expect_refusal("model.mixer.columns=false: .* need model.mixer.columns=true; leave"):
        insert_pretrained(compose([*words, "model.mixer.columns=false"]))


def test_weights_without_a_description_take_the_order_of_the_command(scans, tmp_path):
    file = tmp_path / "plain.safetensors"
    save_file(load_file(scans / "columns/checkpoints/step-2/model.safetensors"), file)
    for given in ([], ["model.mixer.columns=true"]):
        words = [*SCAN_RUN, f"run_dir={tmp_path / 'run'}", f"init_from={file}", *given]
        assert insert_pretrained(compose(words)).cfg.model["mixer"]["columns"] is bool(given)


MIXER = "models.mixers.bidirectional_ssd.BidirectionalSSD"


def test_an_absent_argument_has_its_default_and_another_value_is_refused(tmp_path):
    node = {"_target_": "models.denoiser.Denoiser", "mixer": {"_target_": MIXER}}
    given = node | {"eps": 1e-6, "mixer": {"_target_": MIXER, "columns": False}}
    given |= {"mlp": {"_target_": "models.block.SwiGLU", "_partial_": True}}
    # No block has attention, whatever it would be.
    given |= {"attention_every": 0, "attention": {"_target_": "models.mixers.attention.Attention"}}
    refuse_other_function(tmp_path, node, given)
    for key, value in {"eps": 1e-5, "norm": "layer", "time_scale": 1.0}.items():
        with expect_refusal(f"model.{key}={value}"):
            refuse_other_function(tmp_path, given | {key: value}, node)


def test_weights_of_another_function_are_refused_though_all_tensors_fit(run, tmp_path):
    """Attention in windows has the tensors of attention without."""
    dit = ["model=dit_xs", *TINY_MODEL]
    run(*dit, "model.mixer.window=2", "save_every=1", folder="base")
    for adapter in ("none", "lora"):
        words = [*dit, f"adapter={adapter}", f"init_from={tmp_path / 'base'}"]
        with expect_refusal("model with model.mixer.window=2, which shows in no tensor"):
            run(*words)
        run(*words, "model.mixer.window=2", "model.drop_path=0.1", folder=adapter)
