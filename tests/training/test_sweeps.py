"""Sweeps: each trial is the run it would be by itself, and a failed trial fails alone."""

import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from common.config.compose import compose, to_yaml
from common.distributed.exit import RESUMABLE_EXIT_CODE, StopRequest
from common.errors import UserError
from common.files import read_object, write_json
from common.text import replace_non_finite
from tests.harness.adapters import make_words, save_base
from tests.harness.commands import run_command, run_here
from tests.harness.refusals import expect_refusal
from tests.harness.words import TINY_RUN, TINY_SYNTHETIC
from train import train
from training import sweeps
from training.sweeps import refuse_other_run, refuse_sweep
from training.weights.first_weights import compose_pretrained


def learn(composed, began):
    """Stands in for a training run, whose loss is optim.lr; its seed decides how it ends."""
    seed = composed.cfg.seed
    loss = composed.cfg.optim["lr"]
    if seed == 1:
        raise UserError("batch_size=7 is no good; choose 8.")
    if seed == 2:
        raise ZeroDivisionError("a bug")
    if seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 4:
        loss = float("nan")
    if seed in (5, 6):
        os.kill(os.getppid(), signal.SIGUSR1)
        signal.alarm(60)  # ends a trial that hears nothing
        signal.pause()  # a signal comes before training catches signals
    if seed == 5:
        with StopRequest():
            signal.pause()
    if seed in (5, 8):
        sys.exit(RESUMABLE_EXIT_CODE)
    os.environ["LEAKED"] = "yes"
    summary = replace_non_finite({"loss": loss, "samples_per_s": 1 / loss})
    write_json(Path(composed.cfg.run_dir) / "summary.json", summary)


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """`sweep("key=value", …)` runs trials that do not train, as a command would; returns its exit
    code, None for a good end."""

    def start(*words):
        monkeypatch.setattr("train.train", learn)
        monkeypatch.setattr("atexit.register", print)
        try:
            run_here(monkeypatch, "-m", f"run_dir={tmp_path / 'sweep'}", *words)
        except SystemExit as ending:
            return ending.code

    return start


@pytest.mark.slow
def test_a_trial_has_the_bits_of_the_same_run_by_itself(tmp_path):
    """Also after a trial that was refused; and its clock begins with the trial."""
    words = [*TINY_RUN, *TINY_SYNTHETIC, "runtime=eager", "save_every=2", "sample_every=2"]
    output = run_command("-m", *words, "optim.lr=1e-3,-1,2e-3", f"run_dir={tmp_path}")
    assert output.startswith("1\n")
    assert output.endswith("error: optim: Invalid learning rate: -1.0; AdamW refuses that value.\n")
    train(compose([*words, "optim.lr=2e-3", f"run_dir={tmp_path / 'alone'}"]))
    for name in ("checkpoints/step-2/model.safetensors", "checkpoints/step-2/ema.safetensors"):
        assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    times = [read_object(tmp_path / name / "time.json") for name in "02"]
    assert times[1]["first"] >= times[0]["last"]


def test_a_failed_trial_fails_alone(sweep, tmp_path, capfd):
    assert sweep("seed=1,2,3,4,0", "sweep_metric=loss", "optim.lr=0.5") == 1
    output, errors = capfd.readouterr()
    for trial, reason in enumerate(
        (
            "batch_size=7 is no good; choose 8.",
            "run_dir=.*/1: its process ended with code 1.",
            "run_dir=.*/2: its process ended with code -9.",
            "loss is not finite at the end of run_dir=.*/3.",
        )
    ):
        assert re.search(rf"trial {trial} \(.*\) failed: {reason}\n", errors)
    assert errors.count("Traceback") == errors.count("ZeroDivisionError: a bug") == 1
    assert errors.endswith("error: batch_size=7 is no good; choose 8.\n")
    assert re.search(r"trial 4 \(.*\) ended; loss: 0\.5\n", output)
    assert {file.name for file in (tmp_path / "sweep").iterdir()} == {*"01234", "multirun.yaml"}
    assert "LEAKED" not in os.environ


def test_a_sweep_ends_with_a_table_also_if_a_trial_fails(sweep, monkeypatch, capfd):
    monkeypatch.setattr(sweeps, "ENDED", [])
    assert sweep("optim.lr=0.5,0.25,0.75", "seed=0") is None
    assert sweep("optim.lr=0.125", "seed=1") == 1
    assert re.search(r"trial 0 .*optim.lr=0.5 seed=0\) ended; loss: 0.5\n", capfd.readouterr().out)
    sweeps.print_table()
    rows = ["trial 0  loss 0.5  optim.lr=0.5", "trial 1  loss 0.25  optim.lr=0.25  best"]
    assert capfd.readouterr().out.splitlines() == [*rows, "trial 2  loss 0.75  optim.lr=0.75"]
    # of a rate the largest is best
    sweeps.ENDED[:] = [(i, [], "samples_per_s", value) for i, value in enumerate((5.0, 7.0))]
    sweeps.print_table()
    assert capfd.readouterr().out.splitlines()[1] == "trial 1  samples_per_s 7    best"


@pytest.mark.fault("SIGTERM to a sweep before its trial listens", "the trial saves, the sweep ends")
@pytest.mark.parametrize(("seed", "ending"), [(5, "stopped"), (6, "ended"), (8, "stopped")])
def test_a_signal_ends_the_sweep_and_not_one_trial(seed, ending, sweep, capfd):
    """Also one that comes before the trial catches signals; and it says how the trial ended."""
    assert sweep(f"seed=0,{seed},7") == RESUMABLE_EXIT_CODE
    output = "".join(capfd.readouterr())
    assert re.search(rf"trial 1 \(.*\) {ending}; the same command with run_dir=", output)
    assert "trial 2" not in output


@pytest.mark.filterwarnings("ignore::Warning")  # Optuna 2 is older than its libraries
@pytest.mark.skipif(not find_spec("optuna"), reason="Optuna is not installed; it is in .[sweep]")
@pytest.mark.parametrize(("metric", "pick"), [("loss", min), ("samples_per_s", max)])
def test_optuna_searches_on_after_a_failed_trial(metric, pick, sweep, tmp_path, capfd):
    words = ["optim.lr=interval(0.1,0.9)", "seed=choice(0,4)", "hydra.sweeper.n_trials=6"]
    search = ["hydra/sweeper=search", f"sweep_metric={metric}"]
    assert sweep(*search, *words) is None
    values = [read_object(file)[metric] for file in tmp_path.glob("sweep/*/summary.json")]
    finite = [value for value in values if value is not None]
    assert 0 < len(finite) < len(values) == 6
    results = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert results["best_value"] == pick(finite)
    assert sweep(*search, "seed=4", words[0], "hydra.sweeper.n_trials=2") == 1
    assert capfd.readouterr().err.endswith(
        "error: every trial of the sweep failed; the lines above say why.\n"
    )


def test_a_trial_continues_that_trains_on_from_a_base(tmp_path):
    words = make_words(save_base(tmp_path / "base.safetensors"), f"run_dir={tmp_path}")
    (tmp_path / "config.yaml").write_text(to_yaml(compose_pretrained(words).source))
    refuse_other_run(compose(words))


def test_a_trial_continues_no_other_run(sweep, tmp_path, capfd):
    (tmp_path / "sweep/0").mkdir(parents=True)
    (tmp_path / "sweep/0/config.yaml").write_text("seed: 7\n")
    assert sweep("seed=0") == 1
    assert "holds a run with other settings" in capfd.readouterr().err


def test_a_sweep_that_cannot_compare_its_trials_is_refused(monkeypatch):
    composed = compose(["sweep_metric=loss"])
    with expect_refusal("sweep_metric=null; choose eval_loss, loss, samples_per_s"):
        refuse_sweep(compose().cfg, "search", {})
    with expect_refusal("direction=maximize looks for the worst loss; set .*=minimize"):
        refuse_sweep(composed.cfg, "search", {"direction": "maximize"})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with expect_refusal("WORLD_SIZE=2"):
        refuse_sweep(composed.cfg, "basic", {})
