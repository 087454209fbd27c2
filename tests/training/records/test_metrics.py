"""The meter: graphs, waits, memory and the GPU's share of a window."""

from collections import defaultdict

import pytest
import torch

from common.clock import CLOCK
from tests.harness.batches import select
from tests.harness.steps import tiny_training
from training.records.metrics import Meter, StepOutput


@pytest.mark.usefixtures("quick_compiler")
def test_graphs_compiled_after_warm_up_are_logged_and_warned_of_with_their_reason():
    training = tiny_training("dit", depth=1, compile=True)
    training.warm_up()
    meter = training.state.meter
    smaller = select(next(training.loader), slice(4))
    meter.start()
    training.take_step()
    report = meter.report(0.0)
    assert report["recompiles"] == 0
    meter.update(training.step([smaller]))
    with pytest.warns(UserWarning, match=r"1 graphs were compiled after warm-up.*size mismatch"):
        assert meter.report(0.0)["recompiles"] == 1

    # The graphs of an evaluation are expected, so there is no warning.
    training.take_step()
    with meter.pause(), torch.no_grad():
        training.step.compute_losses(smaller, held_out=True)
    after = meter.report(0.0)
    assert (after["graphs"], after["recompiles"]) == (report["graphs"] + 2, 1)


@pytest.fixture
def meter(monkeypatch):
    """A meter on a pretended GPU, at the start of a run."""
    monkeypatch.setattr("training.records.metrics.uses_gpu", lambda: True)
    monkeypatch.setattr(CLOCK, "kind", "start")
    monkeypatch.setattr(CLOCK, "seconds", defaultdict(float))
    return Meter(batch_size=8, tokens=1, train_flops=3, peak_flops=None)


def test_queued_work_is_training_and_a_wait_is_the_devices_own(meter, monkeypatch):
    """The queue holds work when the host looks."""
    done = []

    class Mark:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("mark")

        def query(self):
            return "end" in done

        def elapsed_time(self, later):
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronised"))
    CLOCK.seconds["steps"] = 1.0
    with meter.measure_wait():
        done.append("data")
    assert done == ["mark", "data", "mark"]
    assert CLOCK.seconds["data_wait"] == 0.0
    with meter.pause():
        done.append("end")
    assert done[3:] == ["synchronised", "end"]
    meter.sum_waits()
    assert CLOCK.seconds["steps"] == 0.75
    assert CLOCK.seconds["data_wait"] == 0.25


def test_a_window_has_its_own_peak_of_memory_and_the_share_of_its_kernels(meter, monkeypatch):
    peaks = [300, 500, 200]
    for name in ("allocated", "reserved"):
        monkeypatch.setattr(torch.cuda, f"max_memory_{name}", lambda: peaks[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.pop(0))
    meter.busy_ms = 150.0
    reports = []
    for seconds in (0.2, 0.4, 0.1):
        CLOCK.seconds["steps"] += seconds
        meter.update(StepOutput({"loss": torch.tensor(0.0)}, *torch.zeros(3)))
        reports.append(meter.report(0.0))
    expected = {
        "memory_allocated": [300, 500, 200],
        "memory_reserved_peak": [300, 500, 500],
        "gpu_busy": [0.75, 0.375, 1.0],
    }
    for key, values in expected.items():
        assert [report[key] for report in reports] == pytest.approx(values)


def test_the_first_rate_after_a_resume_is_of_new_steps_only():
    meter = Meter(batch_size=8, tokens=1, train_flops=3, peak_flops=None)
    sums = {"loss": 3.0, "skipped": 0.0, "backed_off": 0.0, "in_row": 0.0, "steps": 3}
    meter.window.load_state_dict(sums)
    meter.update(StepOutput({"loss": torch.tensor(5.0)}, *torch.zeros(3)))
    # The mean loss is that of all four steps.
    assert meter.report(lr=0.1)["loss"] == 2.0
    assert meter.trained_samples == 8
