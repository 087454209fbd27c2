"""The two sides of a comparison, summed piece by piece, and the figures that come of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evaluation.distances import (
    Moments,
    copied,
    frechet,
    kernel_distance,
    precision_recall,
    too_few,
)

ROWS = 10_000
"""Samples of each side, the first ones, from which kernel distance, precision and recall are
made."""
NEIGHBOURS = 3
FAR = 3.0
"""Times what is expected, and five standard errors more than it, is the share of copies that a
sentence tells."""


class Side:
    """What distances need of the features of one side: moments of all, of both halves, and the
    first `ROWS` features.

    The halves are the samples of even and of odd number. Memory does not grow with the number of
    samples.
    """

    def __init__(self, dim: int) -> None:
        self.all = Moments(dim)
        self.halves = (Moments(dim), Moments(dim))
        self.first: list[Tensor] = []

    def add(self, features: Float[Tensor, "B D"]) -> None:
        """Appends samples."""
        start = self.all.count
        room = ROWS - self.all.count
        self.all.add(features)
        for half in (0, 1):
            self.halves[half].add(features[(half - start) % 2 :: 2])
        if room > 0:
            self.first.append(features[:room])

    @property
    def rows(self) -> Float[Tensor, "N D"]:
        return torch.cat(self.first)


def distances(fake: Side, real: Side) -> dict[str, Any]:
    """`fd`, `kd` and `kd_std` between two sides; `fd` is None where samples are too few, and `why`
    says so."""
    kd, spread = kernel_distance(fake.rows, real.rows)
    why = too_few(min(fake.all.count, real.all.count), len(real.all.mean))
    found = {"fd": None if why else frechet(fake.all, real.all), "kd": kd, "kd_std": spread}
    return found | ({"why": why} if why else {})


def floor(real: Side) -> dict[str, Any]:
    """The same between the halves of the reference, as `floor_fd` and `floor_kd`: a distance
    between equals.

    Both halves are smaller than the reference, and the bias of a Fréchet distance falls like 1/n,
    so as many samples as the reference has may come out below `floor_fd`.
    """
    few = too_few(min(half.count for half in real.halves), len(real.all.mean))
    rows = real.rows
    kd, _ = kernel_distance(rows[::2], rows[1::2])
    found = {"floor_fd": None if few else frechet(*real.halves), "floor_kd": kd}
    return found | ({"why": f"the floor is of halves: {few}"} if few else {})


def figures(fake: Mapping[str, Side], real: Mapping[str, Side]) -> dict[str, dict[str, Any]]:
    """All figures of each feature space."""
    found = {}
    for space, side in fake.items():
        precision, recall = precision_recall(real[space].rows, side.rows, NEIGHBOURS)
        share, expected = copied(real[space].rows, side.rows)
        shares = {"precision": precision, "recall": recall, "copied": share}
        found[space] = floor(real[space]) | distances(side, real[space]) | shares
        error = (
            expected * (1 - expected) * (1 / len(side.rows) + 1 / len(real[space].rows))
        ) ** 0.5
        if share > max(FAR * expected, expected + 5 * error):
            why = (
                f"copied={share:.2g}, and {expected:.2g} is expected: the model may repeat images "
                "of the reference"
            )
            found[space]["why"] = "; ".join(filter(None, (found[space].get("why"), why)))
    return found
