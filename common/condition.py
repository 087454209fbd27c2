"""What conditions the samples of a batch: a label each, and an encoded text each if the model reads
text.

Letters: B samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from common.encoded_text import EncodedText


class Condition(NamedTuple):
    """Labels, and texts or None, of the samples of a batch."""

    labels: Int[Tensor, "B"]
    text: EncodedText | None = None

    @property
    def y(self) -> Tensor | Condition:
        """The argument `y` of a denoiser: the labels alone if there are no texts, so that a model
        of classes needs to know nothing else."""
        return self.labels if self.text is None else self

    @property
    def numbers(self) -> Int[Tensor, "B"]:
        """Place of each sample's text in the table or list from which it comes; without texts, of
        its class."""
        return self.labels if self.text is None else self.text.numbers

    def repeat(self, times: int) -> Condition:
        """Returns the conditions of all samples, then of all again, `times` times."""
        text = self.text and EncodedText(*(torch.cat([part] * times) for part in self.text))
        return Condition(torch.cat([self.labels] * times), text)

    def drop(self, dropped: Bool[Tensor, "B"], null_label: int) -> Condition:
        """Returns the conditions with the null label where `dropped` is true. A denoiser replaces
        the text of a sample with the null label by the empty one."""
        return self._replace(labels=torch.where(dropped, null_label, self.labels))
