"""The account of a run's time: every second has one kind, over restarts too, and long waits are
reported once with their cure."""

import json
import shutil
import time

import pytest

import common.clock
from common.clock import Clock, explain_bound
from common.config.compose import compose
from common.files import read_object, write_json
from data.synthetic import SyntheticLatents
from tests.harness.words import TINY_SYNTHETIC
from train import train
from training.step import TrainStep

RUN = [
    *TINY_SYNTHETIC,
    "model.dim=16",
    "runtime=eager",
    "batch_size=8",
    "eval_every=0",
    "sample_every=0",
    "log_every=2",
]


SLOW = ["extensions=[tests]", "data._target_=tests.common.test_clock.Slow"]
NO_NUMBERS = dict.fromkeys(common.clock.KINDS, float("nan"))


def test_every_second_has_one_kind(monkeypatch):
    now = iter([0.0, 3.0, 5.0, 6.0, 8.0, 9.0, 10.0, 15.0])
    monkeypatch.setattr(common.clock.time, "perf_counter", lambda: next(now))
    clock = Clock()
    clock.switch("steps")
    with clock.count_as("evaluation"), clock.count_as("saving"):
        pass
    clock.move(1.0, "steps", "data_wait")
    clock.switch("idle")
    assert dict(clock.seconds) == {
        "start": 3.0,
        "steps": 7.0,
        "evaluation": 2.0,
        "saving": 2.0,
        "data_wait": 1.0,
    }


class FakeTime:
    """A clock on which a look at it takes a second, a slow batch 400 s and a step 100 s."""

    BATCH = 400.0
    STEP = 100.0
    now = 2e9

    def perf_counter(self):
        self.now += 1.0
        return self.now

    time = perf_counter


FAKE_TIME = FakeTime()


@pytest.fixture
def fake_time(monkeypatch):
    step = TrainStep.__call__

    def timed(self, *arguments):
        FAKE_TIME.now += FAKE_TIME.STEP
        return step(self, *arguments)

    monkeypatch.setattr(TrainStep, "__call__", timed)
    monkeypatch.setattr(common.clock, "time", FAKE_TIME)
    return FAKE_TIME


class Slow(SyntheticLatents):
    """Synthetic latents whose batches take time on that clock."""

    def __next__(self):
        FAKE_TIME.now += FAKE_TIME.BATCH
        return super().__next__()


def run(folder, *words):
    return train(compose([*RUN, f"run_dir={folder}", "save_every=20", *words]))


def test_a_run_and_its_restart_add_up_to_the_clock(run_dir, monkeypatch, fake_time):
    """40 steps, of which the last 20 are lost; a pause; 25 steps from the twentieth on."""
    monkeypatch.setattr(common.clock, "WRITE_INTERVAL_SECONDS", 0.0)
    began = fake_time.now
    summary = run(run_dir, "total_samples=320", *SLOW)
    before = summary["time"]
    total = sum(before.values())
    assert total == pytest.approx(fake_time.now - began, abs=5.0)
    assert summary["goodput"] == pytest.approx(before["steps"] / total, abs=1e-4)
    reached = read_object(run_dir / common.clock.TIME_FILE)["reached"]
    shutil.rmtree(run_dir / "checkpoints" / "step-40")
    (run_dir / "summary.json").unlink()
    fake_time.now += 5000.0
    account = run(run_dir, "total_samples=360", *SLOW)["time"]
    assert sum(account.values()) == pytest.approx(fake_time.now - began, abs=5.0)
    assert account["idle"] == pytest.approx(5000.0, abs=5.0)
    assert account["redone"] == pytest.approx(reached["40"] - reached["20"], abs=5.0)
    assert account["redone"] == pytest.approx(20 * fake_time.STEP, rel=0.2)
    assert account["saving"] > before["saving"] > 0.0


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"first": "x", "last": 0, "seconds": {}, "reached": {}}',
        json.dumps({"first": 0.0, "last": 0.0, "seconds": NO_NUMBERS, "reached": {}}),
    ],
)
def test_a_damaged_account_starts_again(tmp_path, content):
    (tmp_path / common.clock.TIME_FILE).write_text(content)
    clock = Clock()
    with pytest.warns(UserWarning, match="the account of the run's time starts again"):
        clock.resume(tmp_path / common.clock.TIME_FILE, 5)
    assert clock.account["idle"] == clock.account["redone"] == 0.0


def test_a_clock_that_was_set_back_costs_no_time(tmp_path):
    file = tmp_path / common.clock.TIME_FILE
    Clock().write(file, 3)
    write_json(file, read_object(file) | {"last": time.time() + 3600.0})
    clock = Clock()
    clock.resume(file, 3)
    assert clock.account["idle"] == 0.0


def test_waiting_for_data_is_told_once_with_its_cure(tmp_path, capsys, fake_time):
    run(tmp_path / "quick", "total_samples=80")
    assert "data-bound" not in capsys.readouterr().out
    slow = run(tmp_path / "slow", "total_samples=160", *SLOW)
    output = capsys.readouterr().out
    assert output.count("data-bound") == 1
    assert "of the step; try data=resident, more data.num_workers" in output
    assert slow["time"]["data_wait"] == pytest.approx(20 * fake_time.BATCH, rel=0.01)


def test_waiting_for_launches_is_told_with_what_is_left_to_try():
    left = ["runtime.cuda_graph=true"]
    assert explain_bound(10.0, 0.2, 9.0, left, {}) is None
    bound = explain_bound(10.0, 0.2, 5.0, left, {})
    assert bound is not None
    assert bound[0] == "launch-bound"
    assert bound[2] == [*left, "a larger batch_size"]
