"""TensorBoard and W&B after a crash, and a run that is made longer."""

import re
import sys

import pytest

from tests.harness.outcomes import read_columns
from training.assemble import Training

STEPS = ["runtime=eager", "log_every=1", "save_every=4"]


@pytest.fixture
def crash(run, monkeypatch):
    """`crash("key=value", …)` ends a run after its sixth step, and runs the same command again."""

    def start(*words):
        take_step = Training.take_step

        def stop(training):
            take_step(training)
            if training.state.step == 7:
                sys.exit(9)

        with monkeypatch.context() as patch:
            patch.setattr(Training, "take_step", stop)
            with pytest.raises(SystemExit):
                run(*STEPS, "total_samples=80", *words)
        return run(*STEPS, "total_samples=80", *words)

    return start


def test_tensorboard_shows_each_step_once(crash, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    crash("logger=tensorboard")
    folder = f"{tmp_path}/run/tensorboard"
    assert f"TensorBoard: tensorboard --logdir {folder}\n" in capsys.readouterr().out
    events = EventAccumulator(folder)
    events.Reload()
    points = events.Scalars("loss")
    assert [point.step for point in points] == [*range(8, 88, 8)]
    losses = [row[0] for row in read_columns(tmp_path / "run", "loss")]
    assert [point.value for point in points] == pytest.approx(losses)


def test_wandb_tells_a_restart(crash, tmp_path, monkeypatch, capfd):
    """Each start and end is one line of ours, and none of W&B's. W&B itself fails at an empty
    WANDB_SILENT."""
    monkeypatch.setenv("WANDB_SILENT", "")
    crash("logger=wandb", "logger.mode=offline")
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    records = [next(folder.glob("*.wandb")).read_bytes() for folder in folders]
    assert len(records) == 2
    for number, record in enumerate(records):
        assert record.count(b"restart\x82\x01\x01%d" % number) > 3
    said = capfd.readouterr()
    lines = re.findall(r"^W&B: (?:finished; )?offline in (.*); `wandb sync \1` ", said.out, re.M)
    assert lines == [str(folder) for folder in folders for _ in range(2)]
    assert "wandb:" not in said.out + said.err


def test_wandb_without_a_login_says_so_and_logs_offline(run, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for place in ("NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "none"))
    run("logger=wandb")
    line = f"W&B: not logged in (run `wandb login`); offline in {tmp_path}/run/wandb/offline-run-"
    assert line in capsys.readouterr().out


def test_a_longer_run_says_how_its_rate_jumps(run, capsys):
    words = ["schedule.kind=cosine", "schedule.warmup_samples=0", "optim.lr=1.0e-2"]
    run(*STEPS, "total_samples=80", *words)
    run(*STEPS, "total_samples=160", *words)
    said = capsys.readouterr().out
    assert "total_samples was 80, is 160; so the learning rate at this step was 6.2e-05, is" in said
