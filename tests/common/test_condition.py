"""Labels and texts of a batch as one value."""

import torch

from common.condition import Condition, EncodedText


def test_a_condition_is_repeated_and_dropped_sample_by_sample():
    """The null label takes the text along: a denoiser replaces it."""
    numbers = torch.arange(2)
    both = Condition(numbers, EncodedText(numbers, numbers, numbers, numbers + 7)).repeat(2)
    assert both.y is both
    assert both.drop(torch.arange(4) > 1, 9).labels.tolist() == [0, 1, 9, 9]
    assert both.numbers.tolist() == [7, 8, 7, 8]
    assert Condition(numbers).y is Condition(numbers).numbers is numbers
