"""Captions as tensors: what a text encoder returns, data loaders yield, and a denoiser reads.

Letters: B captions, T tokens of a caption, E width of the text encoder.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class EncodedText(NamedTuple):
    """Encoded captions. Tokens after the first `lengths` of a caption are padding, which a reader
    must mask. Tokens may be integers: only the direction of a token's vector has a meaning."""

    pooled: Float[Tensor, "B E"]
    """One vector for each caption."""
    tokens: Float[Tensor, "B T E"]
    """One vector for each token; T is 0 if only pooled vectors are known."""
    lengths: Int[Tensor, "B"]
    """Number of tokens of each caption, at most T."""
    numbers: Int[Tensor, "B"]
    """Place of each caption in the table or list from which it comes; -1 for the empty caption."""

    def select(self, rows: Tensor | slice) -> EncodedText:
        """Returns the captions at the indices `rows`."""
        return EncodedText(*(part[rows] for part in self))

    def to(self, device: torch.device, non_blocking: bool = False) -> EncodedText:
        return EncodedText(*(part.to(device, non_blocking=non_blocking) for part in self))

    def repeat_to(self, count: int) -> EncodedText:
        """Returns `count` captions: these, over and over; `count` is a multiple of their number."""
        times = count // len(self.lengths)
        return EncodedText(*(torch.cat([part] * times) for part in self))
