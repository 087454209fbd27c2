"""Power-function averages of the parameters (Karras et al. 2024, EDM2, arXiv 2312.02696).

A power-function average over N samples gives the parameters after n samples a weight proportional
to n^γ. Its length σ is the standard deviation of n under this weight, as a fraction of N:
σ = √(γ + 1) / ((γ + 2)·√(γ + 3)).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from common.errors import UserError
from training.optim.ema import MovingAverage

LENGTHS = (0.05, 0.10)
"""Lengths σ of the averages that a run keeps."""


def find_exponent(length: float) -> float:
    """Returns the exponent γ of the power-function average of length σ = `length`, which must be
    above 0 and below 0.28."""
    # The definition of σ, squared, is (γ + 2)²·(γ + 3) = (γ + 1) / σ². This cubic equation has one
    # root above -1, which is the largest.
    roots = np.roots([1.0, 7.0, 16.0 - length**-2, 12.0 - length**-2])
    return float(roots.real.max())


class PowerAverage(MovingAverage):
    """Power-function average of the parameters in fp32, over all samples of the run so far.

    With n samples seen, the weight of the new parameters is w = 1 - (1 - batch / n)^(γ + 1).
    """

    def __init__(self, model: nn.Module, length: float) -> None:
        super().__init__(model)
        self.length = length
        self.exponent = find_exponent(length)

    def compute_weight(self, samples: int, batch_size: int) -> float:
        return 1.0 - (1.0 - batch_size / samples) ** (self.exponent + 1.0)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the average. Raises UserError if `state` is empty, because an average of the whole
        run cannot begin in its middle."""
        if not state:
            raise UserError(
                "it has no averages for ema.snapshots, and they begin with the first sample of a "
                "run; use ema.snapshots=0, or a new run."
            )
        super().load_state_dict(state)
