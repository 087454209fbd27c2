"""Learning rates, in samples."""

import pytest

from training.optim.schedule import Schedule


def test_warm_up_and_cosine_in_samples():
    schedule = Schedule("cosine", total_samples=1000, warmup_samples=100, final=0.1)
    rates = [schedule(samples) for samples in (50, 100, 550, 1000)]
    assert rates == pytest.approx([0.5, 1.0, 0.55, 0.1])
    assert Schedule("constant", 1000, 100)(999) == 1.0


def test_the_last_step_of_a_cosine_to_zero_learns():
    schedule = Schedule("cosine", total_samples=1000)
    # A step has the rate of its end, the last one that of its middle, even past the horizon.
    assert schedule(990, 10) == schedule(990)
    assert schedule(1000, 10) == schedule(995) > 0.0
    assert schedule(1008, 16) == schedule(992)
