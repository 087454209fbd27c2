"""Steps of the benchmarks: the newcomer's loop, times, and what bounds a step."""

import math

import pytest
import torch

from scripts.bench.cases import SETTINGS
from scripts.bench.newcomer import NewcomersLoop
from scripts.bench.step import Workload, sum_phases
from scripts.timing import compute_ratios, judge_ratio, measure_seconds, summarise, time_in_turn
from tests.harness.words import CPU

TINY = [*SETTINGS["tiny"]["words"].split(), "runtime.device=cpu"]
DIGITS = [word for word in TINY if not word.startswith("data")]
DIGITS += ["data=digits", "model.prediction=clean", "objective.logit_mean=-2"]


def test_repeats_are_interleaved_and_turned_round():
    order = []
    time_in_turn({name: lambda name=name: order.append(name) for name in "abc"}, 2, CPU)
    assert "".join(order) == "abccba"


def test_a_clock_waits_for_the_device(monkeypatch):
    """Before it starts, and before it stops. The seconds are those of the given clock."""
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    clock = iter((1.0, 4.0)).__next__
    assert measure_seconds(lambda: done.append("ran"), torch.device("cuda"), clock) == 3.0
    assert done == ["waited", "ran", "waited"]


def test_times_have_quartiles_and_ratios_are_of_the_same_turn():
    assert compute_ratios([4.0, 8.0, 4.0], [2.0, 4.0, 4.0]) == [2.0, 2.0, 1.0]
    figures = {"ms_min": 1.0, "ms_q1": 1.5, "ms": 2.0, "ms_q3": 2.5, "ms_max": 3.0}
    assert summarise("ms", [3.0, 1.0, 2.0]) == figures | {"n": 3}


@pytest.mark.parametrize(
    ("q1", "q3", "n", "word"),
    [
        (1.1, 1.2, 5, ""),
        (0.8, 0.9, 5, ""),
        (1.0, 1.0, 3, "no difference"),
        (1.1, 1.2, 3, "unsettled"),
    ],
)
def test_a_ratio_whose_quartiles_straddle_one_is_no_difference(q1, q3, n, word):
    assert judge_ratio({"speed_q1": q1, "speed_q3": q3, "n": n}, "speed") == word


@pytest.mark.parametrize(
    ("storage", "overrides"),
    [("files", TINY), ("memory", TINY), ("resident", TINY), ("memory", DIGITS)],
)
def test_the_newcomers_loop_learns_as_the_framework_does(storage, overrides, tmp_path, monkeypatch):
    """The weights, samples, noise and rates are the same, so the losses are, too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    newcomer = NewcomersLoop(overrides, storage)
    workload = Workload([*overrides, "runtime=eager"])
    assert math.isclose(newcomer.measure_loss(6), workload.measure_loss(6), rel_tol=1e-5)


def test_a_phase_takes_what_lies_between_its_marks():
    assert sum_phases([("start", 0.0), ("forward", 1.0), ("backward", 3.0), ("forward", 3.5)]) == {
        "forward": 1500.0,
        "backward": 2000.0,
    }
