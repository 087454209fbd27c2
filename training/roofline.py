"""How long an operation takes on a card: as its FLOPs, its bytes or its launch need, whichever is
longest.

A range, for no kernel reaches a data sheet's rates. No constant here was checked on a GPU yet.
"""

from __future__ import annotations

from typing import NamedTuple

from training.hardware import Card
from training.tracker import Op

REACHED = {"best": 0.85, "worst": 0.5}
"""Share of a data sheet's rates that kernels reach."""
REACHED_MEASURED = {"best": 1.0, "worst": 0.7}
"""The same of rates that were measured with large products and copies."""
FUSED = {"best": 0.15, "worst": 0.5}
"""Share of its bytes that an operation in a compiled block still moves."""
KERNEL = 2e-6
"""Seconds that the smallest kernel takes."""
LAUNCH = {"best": 4e-6, "worst": 10e-6}
"""Seconds in which the host launches an operation; none where the step is replayed as a graph."""
LAUNCH_FUSED = {"best": 0.5e-6, "worst": 2e-6}
"""The same for one that shares its kernel with others."""


class Time(NamedTuple):
    """Seconds of a step at best and at worst."""

    best: float
    worst: float

    @property
    def middle(self) -> float:
        """The geometric mean."""
        return (self.best * self.worst) ** 0.5


class Running(NamedTuple):
    """A card, and how a step runs on it."""

    card: Card
    tf32: bool
    captured: bool


def seconds_of(op: Op, on: Running, end: str) -> float:
    """Seconds of one operation at the "best" or "worst" end of the range: its work, or its launch
    by the host."""
    card = on.card
    share = (REACHED_MEASURED if card.measured else REACHED)[end]
    products = op.flops / (share * card.rate(op.bits, on.tf32)) if op.flops else 0.0
    moved = op.bytes * (FUSED[end] if op.fused else 1.0) / (share * card.bandwidth)
    launch = 0.0 if on.captured else (LAUNCH_FUSED if op.fused else LAUNCH)[end]
    return max(products, moved, launch, 0.0 if op.fused else KERNEL)
