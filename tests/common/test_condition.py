"""Labels and texts of a batch as one value."""

import torch

from common.condition import Condition, EncodedText


def test_a_condition_is_repeated_and_dropped_sample_by_sample():
    """The null label takes the text along: a denoiser replaces it."""
    numbers = torch.arange(2)
    text = EncodedText(torch.randn(2, 3), torch.randn(2, 4, 3), numbers + 1, numbers + 7)
    both = Condition(numbers, text).repeat(2).drop(torch.tensor([False, False, True, True]), 9)
    assert both.y is both
    assert both.labels.tolist() == [0, 1, 9, 9]
    assert both.numbers.tolist() == [7, 8, 7, 8]
    assert all(torch.equal(part[:2], part[2:]) for part in both.text)
    classes = Condition(numbers)
    assert classes.y is classes.numbers is numbers
    assert classes.repeat(1).text is None
