"""Whole runs: what their folders hold, and runs on data without classes."""

import math
from pathlib import Path

import pytest
from PIL import Image

from common.files import read_object, write_json
from sampling.load import load_run
from tests.harness.outcomes import read_columns, seal_checkpoint
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_named_set
from training.checkpoint.load import FORMAT_VERSION, list_complete


def test_a_run_leaves_all_that_it_promises(run, run_dir):
    summary = run(
        "sample_every=2", "save_every=1", "eval_every=1", "sampling.per_class=2", "sampling.steps=2"
    )
    assert summary == read_object(run_dir / "summary.json")
    assert {"samples_per_s", "mfu", "memory_reserved_peak", "ledger"} <= summary.keys()
    assert (summary["steps"], summary["samples"]) == (2, 16)
    lines = read_columns(run_dir, "step", "loss", "eval_loss")
    assert None not in [*lines[0], *lines[1]]
    assert Path(summary["sample_grid"]).is_file()
    assert (Path(summary["checkpoint"]) / "ema.safetensors").is_file()
    assert {"config.yaml", "ledger.json"} <= {file.name for file in run_dir.iterdir()}
    assert "total_samples=16" in read_object(run_dir / "environment.json")["overrides"]


@pytest.mark.parametrize("planted", [1, None])
def test_a_folder_of_another_format_is_refused_and_its_weights_open(
    planted, run, tmp_path, run_dir
):
    """A finished run, one that goes on, and a checkpoint to resume from."""
    run("save_every=1")
    checkpoint = list_complete(run_dir / "checkpoints")[-1]
    for file in (run_dir / "summary.json", checkpoint / "state.json"):
        content = read_object(file)
        assert content.pop("format") == FORMAT_VERSION
        write_json(file, content | ({"format": planted} if planted else {}))
    seal_checkpoint(checkpoint)
    with expect_refusal("holds a finished run, made by an earlier checkout; .*init_from="):
        run()
    for words in (["total_samples=32"], [f"resume={run_dir}", f"run_dir={tmp_path / 'branch'}"]):
        with expect_refusal("step-2 was made by an earlier checkout. Use a new run_dir, or init_"):
            run("save_every=1", *words)
    assert run(f"init_from={run_dir}", f"run_dir={tmp_path / 'anew'}")["samples"] == 16


def test_a_fullrun_shows_its_fastrun_or_warns(run, tmp_path, capsys):
    words = ["runtime=eager", "schedule.warmup_samples=0"]

    def start(name, *more):
        run(f"experiment={name}", *words, *more, folder=name)
        return capsys.readouterr().out

    assert "holds no fastrun" in start("fullrun")
    start("fastrun")
    (tmp_path / "second").mkdir()
    output = start("fullrun", f"run_dir={tmp_path / 'second'}")
    assert f"latest fastrun of this model and runtime: {tmp_path / 'fastrun'}" in output
    assert "ended without a word" not in output


def test_data_without_classes_is_trained_on_and_sampled(run, tmp_path):
    """The one label, 0, is the null label: dropping it changes nothing, and grids have one row."""
    small = [
        "sampling.guidance=1",
        "sampling.steps=2",
        "sampling.per_class=3",
        "sample_every=1",
        "eval_every=1",
        "save_every=1",
    ]
    words = save_named_set(tmp_path / "set", [])
    summary = run(*words, *small, "objective.label_dropout=0.5")
    assert math.isfinite(summary["eval_loss"])
    with Image.open(summary["sample_grid"]) as grid:
        assert grid.width / grid.height == 3 * (6 + 2) / (4 + 2)  # each tile has a frame
    trained = load_run(tmp_path / "run", device="cpu")
    assert trained.model.label_embed.table.weight.shape[0] == 1
    assert trained.sample([0, 0], steps=2).shape == (2, 4, 6, 3)
    with expect_refusal("labels: 1 is no class"):
        trained.sample([1])
    unguided = r"guidance=1.5: the data has no classes"
    with expect_refusal(unguided):
        trained.sample([0], guidance=1.5)
    with expect_refusal(unguided):
        run(*words, folder="guided")
