"""The ODE solvers that a sampler may use. No torch in here: the configuration's schema needs the names alone."""

from __future__ import annotations

from enum import Enum


class Solver(str, Enum):
    """First order with one call of the model a step, or second order with two."""

    euler, heun = "euler", "heun"
