"""Tests set the length of a run in samples, epochs or minutes, and find its best checkpoint."""

import shutil

import pytest

from common.config.compose import compose
from common.files import read_object
from tests.harness.outcomes import copy_until, list_checkpoints, read_lines, read_outcome
from tests.harness.refusals import expect_refusal
from tests.harness.sets import edit_json, save_named_set, save_random_set
from tests.harness.words import CPU, TINY_RUN
from train import train
from training.checkpoint.load import choose_checkpoint
from training.preflight import length
from training.preflight.length import LENGTH_FILE, spend_budget

EXACT = ("runtime=eager", "deterministic=true", "sampling.steps=1", "sampling.per_class=1")
SECONDS = {"step_s": 0.5, "evaluation_s": 2.0, "grid_s": 60.0}


def save_set(folder):
    return ["data=resident", f"data.path={save_random_set(folder / 'set', 12, held_out=4)}"]


def start(*words):
    words = [word for word in (*TINY_RUN, *words) if word != "total_samples=16"]
    return train(compose(words))


def test_epochs_are_passes_over_the_images(tmp_path, capsys):
    words = (*save_set(tmp_path), f"run_dir={tmp_path / 'run'}", "epochs=2.5", "eval_every=2")
    assert start(*words)["samples"] == 32, "the steps that hold 30 samples"
    assert "30 samples = 2.5 epochs of 12 images; held out: 4" in capsys.readouterr().out
    assert start(*words)["samples"] == 32
    assert "there is nothing to do" in capsys.readouterr().out


def test_the_command_has_one_word_for_the_length():
    with expect_refusal("epochs=2 and budget_minutes=3 both say how long the run is; give one"):
        compose(["epochs=2", "budget_minutes=3"])
    compose(["epochs=2", "budget_minutes=null"])
    photos = ["experiment=photos", "data.path=nowhere"]
    assert compose(photos).cfg.budget_minutes == 10
    for word in ("total_samples=16", "epochs=3"):
        cfg = compose([*photos, word]).cfg
        assert cfg.budget_minutes is None
        assert (cfg.total_samples, cfg.epochs) in ((16, None), (104_960, 3))


def test_a_budget_covers_steps_evaluations_and_grids():
    cfg = compose(["budget_minutes=20"]).cfg
    long = spend_budget(cfg, SECONDS)
    steps = long.total_samples / long.batch_size
    evaluations, grids = steps // long.eval_every, steps // long.sample_every
    assert (evaluations, grids) == (4, 2), "as many as the configuration has"
    assert 1199 < 0.5 * steps + 2 * evaluations + 60 * grids <= 1200
    factor = pytest.approx(long.total_samples / cfg.total_samples, rel=1e-3)
    assert long.schedule.warmup_samples / cfg.schedule.warmup_samples == factor
    assert long.ema.half_life_samples / cfg.ema.half_life_samples == factor
    short = spend_budget(compose(["budget_minutes=2"]).cfg, SECONDS)
    assert short.total_samples / 64 == short.sample_every, "one grid, for two would take the half"
    with expect_refusal(
        "budget_minutes=1 is too short: a step takes 0.5 s, evaluations and grids 66 s"
    ):
        spend_budget(compose(["budget_minutes=1"]).cfg, SECONDS | {"evaluation_s": 6.0})


def test_a_budget_is_measured_once_and_continues_to_the_same_bits(tmp_path, monkeypatch):
    """The first start measures in a process of its own."""
    data = save_set(tmp_path)
    words = [*data, *EXACT, "budget_minutes=0.002", "eval_every=1", "save_every=1", "keep_every=1"]
    monkeypatch.setattr(length, "measure_apart", lambda job: seen.append(job) or SECONDS | found)
    seen, found = [], {"step_s": 0.02, "evaluation_s": 0.001}
    assert start(*words, f"run_dir={tmp_path / 'whole'}")["steps"] == 5
    assert read_object(tmp_path / "whole" / LENGTH_FILE)["step_s"] == 0.02
    killed = copy_until(tmp_path / "whole", tmp_path / "killed", 3)
    assert start(*words, f"run_dir={killed}")["steps"] == 5
    assert read_outcome(killed).state == read_outcome(tmp_path / "whole").state
    assert len(seen) == 1


def test_the_measuring_process_times_what_pauses_a_run(tmp_path):
    data = save_named_set(tmp_path, ["cat"])
    words = [*TINY_RUN[1:], *data, *EXACT, "budget_minutes=1", "eval_every=1"]
    seconds = length.measure_seconds(compose([*words, "sample_every=1"]).cfg, CPU, 1)
    assert seconds.keys() == SECONDS.keys()
    assert min(seconds.values()) > 0.0


def test_a_best_step_is_saved_named_and_found(tmp_path, run_dir):
    data = save_set(tmp_path)
    summary = start(
        *data, "total_samples=48", "eval_every=2", "save_every=100", f"run_dir={run_dir}"
    )
    lines = [line for line in read_lines(run_dir) if "eval_loss" in line]
    best = min((line["eval_loss"], line["step"]) for line in lines)
    assert (summary["best_eval_loss"], summary["best_step"]) == best
    assert f"step-{summary['best_step']}" in list_checkpoints(run_dir)

    # let the best be an earlier one, first by less than its noise, and then by more
    first, last = run_dir / "checkpoints/step-2", run_dir / "checkpoints/step-6"
    if not first.exists():
        shutil.copytree(last, first)
    for losses, noted in (([1.3, 0.8], False), ([1.3, 1.2], True)):
        for checkpoint, score, parts in ((first, 1.0, [1.0, 1.0]), (last, 1.05, losses)):
            changes = {"scores": {"eval_loss": score}, "parts": parts}
            edit_json(checkpoint / "state.json", changes)
        path, note = choose_checkpoint(str(run_dir), "last")
        assert path == str(run_dir)
        assert bool(note) == noted
    assert note == "note: the best eval_loss is 1, at step 2: checkpoint=best"
    assert choose_checkpoint(str(run_dir), "best")[0] == str(first)
    assert choose_checkpoint(str(run_dir), "6")[0] == str(last)
    with expect_refusal(r"checkpoint=3: .* has only steps 2, .*6; best needs one with eval_loss"):
        choose_checkpoint(str(run_dir), "3")
