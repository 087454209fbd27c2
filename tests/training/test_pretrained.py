"""Runs that start from the weights of another one."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.outcomes import are_equal
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_named_set
from tests.harness.steps import tiny_training
from training.assemble import restore
from training.checkpoint.files import make_header
from training.checkpoint.save import Checkpoints


def test_weights_of_another_run_start_a_new_one(run, tmp_path):
    run("save_every=2")
    ema = load_file(tmp_path / "run/checkpoints/step-2/ema.safetensors")
    summary = run(f"init_from={tmp_path / 'run'}", "optim.lr=0", "save_every=2", folder="second")
    weights = load_file(Path(summary["checkpoint"]) / "model.safetensors")
    assert are_equal(weights, ema)


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


def test_weights_that_do_not_fit_are_named_by_the_first_tensor(tmp_path):
    old = make_training(tmp_path / "old", CLASSES, "model.depth=3")
    new = make_training(tmp_path / "new", CLASSES)
    save_weights(old, tmp_path / "old.safetensors")
    sentence = r"init_from=.*does not fit this model: modulation.weight has shape \(1280"
    with expect_refusal(sentence):
        start_from(tmp_path / "old.safetensors", new)


def test_weights_without_a_description_start_a_run_that_they_fit(tmp_path):
    old = make_training(tmp_path / "old", CLASSES)
    save_weights(old, tmp_path / "old.safetensors", described=False)
    new = make_training(tmp_path / "new", CLASSES)
    assert start_from(tmp_path / "old.safetensors", new).endswith("old.safetensors")
    other = make_training(tmp_path / "other", ["a", "b"])
    with expect_refusal(
        r"label_embed.table.weight has shape \(4, .* and the file names no classes"
    ):
        start_from(tmp_path / "old.safetensors", other)
