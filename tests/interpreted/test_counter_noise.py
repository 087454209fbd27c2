"""Draws by kernel against their definition: equal integers, equal uniforms, normals within
rounding."""

import pytest
import torch

from accel.kernels.counter_noise import DEFINITIONS, Purpose
from accel.kernels.counter_noise_triton import launch

POSITION = torch.tensor([0, 1, 5, 2**31 + 3, 2**33 + 5, 2**40])


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**63 - 1])
@pytest.mark.parametrize("words", [1, 7, 600])
def test_draws_are_those_of_the_definition(seed, words, poison):
    for purpose in (Purpose.NOISE, Purpose.SYNTHETIC):
        expected = {
            kind: make(seed, purpose, POSITION, words) for kind, make in DEFINITIONS.items()
        }
        poison()
        assert torch.equal(launch("bits", seed, purpose, POSITION, words), expected["bits"])
        assert torch.equal(launch("uniform", seed, purpose, POSITION, words), expected["uniform"])
        actual = launch("normal", seed, purpose, POSITION, words)
        torch.testing.assert_close(actual, expected["normal"], rtol=1e-5, atol=2e-6)


def test_no_draws_are_no_launch():
    assert launch("normal", 0, 0, torch.tensor([], dtype=torch.int64), 4).shape == (0, 4)
