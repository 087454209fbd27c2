"""Solvers, the shift of their times, and guidance."""

import pytest
import torch

from common.condition import Condition
from common.config.compose import compose
from common.config.schema import SamplingConfig
from data.spec import LatentSpec
from models.sampler import find_shift, make_guided_velocity, sample
from tests.harness.steps import tiny_training
from tests.harness.words import CPU
from training.drawing import Conditions, SampleStream, describe_shifts


def test_the_shift_moves_the_times_at_which_a_sampler_calls_the_model():
    times = []
    sample(lambda x, t: times.append(t) or x, torch.ones(1, 1, 1, 1), 4, "euler", shift=3.0)
    # 3t / (1 + 2t) at 1, 3/4, 1/2 and 1/4
    assert times == pytest.approx([1.0, 0.9, 0.75, 0.5])


def test_the_shift_of_samples_is_that_of_training_unless_it_is_given():
    auto = "objective.timestep_shift=auto"
    words = {(): 1.0, (auto,): "auto", (auto, "sampling.shift=2"): 2}
    for given, shift in words.items():
        composed = compose(given)
        assert composed.cfg.sampling.shift == composed.source["sampling"]["shift"] == shift
    shifts = [find_shift(shift, (3, 256, 256)) for shift in ("auto", 2, None)]
    assert shifts == [pytest.approx(48**0.5), 2.0, 1.0]
    spec = LatentSpec(3, 64, 64, 0, 1, [], [], [])
    said = describe_shifts(compose([auto, "sampling.shift=2"]).cfg, spec)
    assert said == "\ntimes are shifted by 1.73 in training, by 2 in sampling"


def test_every_setting_of_the_sampler_reaches_the_samples():
    training = tiny_training("mamba", "model.internal_block=1")
    training.model.eval()

    settings = {
        "shift": 3.0,
        "steps": 3,
        "solver": "euler",
        "guidance": 3.0,
        "guidance_interval": [0.1, 0.9],
        "internal_guidance": 2.0,
    }

    def draw(*keys):
        cfg = SamplingConfig(**{"steps": 4} | {key: settings[key] for key in keys})
        spec = training.loader.spec
        turns = Conditions.of_classes(spec, range(4), "balanced", CPU)
        return SampleStream(training.model, spec, cfg, turns, 0, 4).draw_batch(0)[1]

    for key in settings:
        assert not torch.allclose(draw(key), draw()), key


def test_each_guidance_extrapolates_inside_its_interval_only_the_internal_one_first():
    calls = []

    def model(x, t, y, internal_guidance=None):
        """The internal head estimates half the velocity."""
        calls.append((len(x), internal_guidance))
        return (0.5 + 0.5 * (internal_guidance or 1.0)) * y.view(-1, 1, 1, 1).float().expand_as(x)

    labels = Condition(torch.tensor([1, 2]))
    x = torch.zeros(2, 1, 1, 1)
    settings = {"guidance": 3.0, "guidance_interval": (0.0, 0.7)}
    settings |= {"internal_guidance": 1.5, "internal_interval": (0.3, 0.9)}
    velocity = make_guided_velocity(model, labels, 5, settings)
    for t, (null, *with_labels) in {0.2: (5, 1, 2), 0.5: (6.25, 1.25, 2.5)}.items():
        assert velocity(x, t).flatten().tolist() == [null + 3 * (v - null) for v in with_labels]
    assert velocity(x, 0.8).flatten().tolist() == [1.25, 2.5]
    assert velocity(x, 1.0).flatten().tolist() == [1, 2]
    make_guided_velocity(model, labels, 5, settings | {"internal_guidance": 1.0})(x, 0.5)
    assert calls == [(4, None), (4, 1.5), (2, 1.5), (2, None), (4, None)]


@pytest.mark.parametrize(("steps", "solver"), [(0, "heun"), (4, "dpm")])
def test_sampling_refuses_what_it_cannot_do(steps, solver):
    with pytest.raises(ValueError, match=r"steps=0|solver=dpm"):
        sample(lambda x, t: x, torch.zeros(1, 1, 1, 1), steps, solver)
