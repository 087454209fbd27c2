"""The solvers that a sampler may use. No torch in here: the configuration's schema needs the names
alone."""

from __future__ import annotations

from enum import Enum


class Solver(str, Enum):
    """How samples are drawn from a velocity model.

    `euler`: first order, one call of the model a step. `heun`: second order, two calls a step.
    `ab2`: second order, one call a step, with the velocity of the step before. `sde`: adds noise on
    the way, one call a step.
    """

    euler = "euler"
    heun = "heun"
    ab2 = "ab2"
    sde = "sde"
