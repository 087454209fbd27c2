"""Draws by kernel against their definition: equal integers, equal uniforms, normals within
rounding."""

import pytest
import torch

from accel.kernels.counter_noise.draws import DEFINITIONS, Purpose
from accel.kernels.counter_noise.kernels_triton import launch

POSITION = torch.tensor([0, 1, 5, 2**31 + 3, 2**33 + 5, 2**40])


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**63 - 1])
@pytest.mark.parametrize("words", [1, 7, 600])
def test_draws_are_those_of_the_definition(seed, words, poison):
    arguments = (seed, Purpose.SYNTHETIC, POSITION, words)
    expected = {kind: make(*arguments) for kind, make in DEFINITIONS.items()}
    poison()
    for kind in ("bits", "uniform"):
        assert torch.equal(launch(kind, *arguments), expected[kind])
    actual = launch("normal", *arguments)
    torch.testing.assert_close(actual, expected["normal"], rtol=1e-5, atol=2e-6)


def test_no_draws_are_no_launch():
    assert launch("normal", 0, 0, torch.tensor([], dtype=torch.int64), 4).shape == (0, 4)
