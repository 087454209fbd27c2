"""Pixels of 8 bits, and the quality of a reconstruction."""

import pytest
import torch

from models.images import psnr, to_uint8


def test_values_become_the_nearest_of_256():
    values = torch.tensor([-2.0, -1.0, 1.6 / 127.5 - 1.0, 2.4 / 127.5 - 1.0, 0.9999, 1.0])
    assert to_uint8(values.view(1, 1, 2, 3))[0, ..., 0].tolist() == [[0, 0, 2], [2, 255, 255]]


def test_psnr_is_of_a_peak_to_peak_of_two():
    black = torch.full((1, 3, 4, 4), -1.0)
    # an error of a hundredth of the range
    assert psnr(black, black + 0.02) == pytest.approx(40.0, abs=1e-3)
    assert psnr(black - 5.0, black) > 100.0  # values outside show as the nearest colour
