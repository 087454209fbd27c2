"""The order of the stream, as a pure function."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def seeded(*key: int) -> torch.Generator:
    """A generator on the CPU for each tuple of numbers."""
    state = 0
    for number in key:
        state = (state * GOLDEN + number) % 2**63
    return torch.Generator().manual_seed(state)


class EpochOrder:
    """Sample ids by stream position: position p is the (p mod N)-th entry of the permutation of epoch p div N.

    The permutation of an epoch is drawn on the CPU from (seed, epoch), so it is the same on every device. The two
    latest epochs are kept on `device`, for batches that run across an end.
    """

    def __init__(self, count: int, seed: int, device: torch.device) -> None:
        self.count, self.seed, self.device = count, seed, device
        self.cache: dict[int, Int[Tensor, "N"]] = {}

    def permutation(self, epoch: int) -> Int[Tensor, "N"]:
        if epoch not in self.cache:
            order = torch.randperm(self.count, generator=seeded(self.seed, epoch)).to(self.device)
            self.cache = {e: o for e, o in self.cache.items() if e == epoch - 1} | {epoch: order}
        return self.cache[epoch]

    def ids(self, start: int, count: int) -> Int[Tensor, "B"]:
        """Ids at stream positions start … start + count - 1."""
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self.count)
            part = self.permutation(epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return torch.cat(parts)
