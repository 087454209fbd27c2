"""Samples latents from noise: ODE and SDE solvers for a velocity model, with classifier-free
guidance.

Letters: B samples, C channels, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from accel.kernels.counter_noise.draws import Purpose, counter_normal
from common.condition import Condition
from common.errors import UserError
from common.text import is_shift

Velocity = Callable[[Tensor, float], Tensor]
SOLVERS = ("euler", "heun", "ab2", "sde")
STEP_STRIDE = 1 << 40
"""A solver that adds noise draws the noise of step i at the sample's stream position plus i ·
`STEP_STRIDE`. No sample's position reaches `STEP_STRIDE`, so no two draws share a position."""


def shift_times(t: Float[Tensor, "..."], shift: float) -> Float[Tensor, "..."]:
    """Shifts times by `t' = s·t / (1 + (s - 1)·t)`, where s is `shift`: s > 1 spends more steps
    near t = 1, the noise (Esser et al. 2024, eq. 23)."""
    return shift * t / (1.0 + (shift - 1.0) * t)


def find_shift(shift: float | str | None, shape: Sequence[int]) -> float:
    """Returns the shift s for latents of this shape (C, H, W): `shift`, 1 if that is None, or for
    "auto" max(1, √(values/4096)): the same noise hides less of neighbours that are alike.

    The root is that of Esser et al. 2024, eq. 23; the count of values and 4096, that of 4×32×32
    latents, are those of RAE, https://arxiv.org/abs/2510.11690.
    """
    if shift == "auto":
        return max(1.0, math.sqrt(math.prod(shape) / 4096))
    shift = 1.0 if shift is None else shift
    if not is_shift(shift):
        raise UserError(f"shift={shift} must be above 0, or auto.")
    return float(shift)


def make_guided_velocity(
    model: Callable[..., Tensor], condition: Condition, null_label: int, settings: Mapping[str, Any]
) -> Velocity:
    """Returns a function of (x, t) that computes the velocity in fp32: v_null + guidance·(v_y -
    v_null) for t inside `guidance_interval`, v_y outside it, where v_y has the condition of each
    sample and v_null has it dropped. `settings` has the keys of `SamplingConfig`.

    Guidance: Ho & Salimans 2022; limited to an interval: Kynkäänniemi et al. 2024,
    https://arxiv.org/abs/2404.07724. With guidance the model runs on a doubled batch, for both
    velocities at once. If guidance is 1 or t is outside the interval, the model runs with the
    conditions only. For t inside `internal_interval` each velocity, v_y and v_null, first gets
    `internal_guidance`, unless that is 1; see `Denoiser.forward`.
    """
    doubled = condition
    if settings["guidance"] != 1.0:
        kept = torch.zeros_like(condition.labels, dtype=torch.bool)
        doubled = condition.repeat(2).drop(torch.cat((kept, ~kept)), null_label)

    def is_on(t: float, key: str, interval: str) -> bool:
        first, last = settings[interval]
        return settings[key] != 1.0 and first <= t <= last

    def run(x: Tensor, t: float, y: Tensor | Condition) -> Tensor:
        options = {}
        if is_on(t, "internal_guidance", "internal_interval"):
            options["internal_guidance"] = settings["internal_guidance"]
        return model(x, torch.full((len(x),), t, device=x.device), y, **options).float()

    def velocity(x: Tensor, t: float) -> Tensor:
        if not is_on(t, "guidance", "guidance_interval"):
            return run(x, t, condition.y)
        with_condition, with_null = run(torch.cat((x, x)), t, doubled.y).chunk(2)
        return with_null + settings["guidance"] * (with_condition - with_null)

    return velocity


@torch.no_grad()
def sample(
    velocity: Velocity,
    noise: Float[Tensor, "B C H W"],
    steps: int,
    solver: str,
    shift: float = 1.0,
    fresh: Callable[[int], Float[Tensor, "B C H W"]] | None = None,
) -> Float[Tensor, "B C H W"]:
    """Integrates dx/dt = v(x, t) from t = 1 (`noise`) to t = 0 and returns the clean latents.

    It takes `steps` steps: their times are first equally spaced, then shifted by `shift_times` with
    `shift`. `solver` is one of `SOLVERS`:

    - "euler" calls the model once a step.
    - "heun" (second order, Karras et al. 2022) calls the model twice a step, except in the last
      step.
    - "ab2" is the two-step Adams–Bashforth method for unequal steps (second order, one call a step;
      Hairer, Nørsett & Wanner, Solving Ordinary Differential Equations I, III.5). The first step is
      Euler's.
    - "sde" is Euler–Maruyama for dx = [v + ½·ε̂] dt + √t dw̄, SiT's reverse SDE with diffusion
      w(t) = t (Ma et al. 2024, https://arxiv.org/abs/2401.08740, eq. 4). The score is -ε̂/t with
      ε̂ = x + (1 - t)·v. `fresh(i)` returns the standard normal noise of step i; the last step adds
      none.

    Raises UserError for fewer than one step, an unknown solver, or "sde" without `fresh`.
    """
    if steps < 1:
        raise UserError(f"steps={steps} must be at least 1.")
    if solver not in SOLVERS:
        raise UserError(f"solver={solver} is unknown; choose {', '.join(SOLVERS)}.")
    if solver == "sde" and fresh is None:
        raise UserError("solver=sde needs noise for its steps; give `fresh`.")
    times = shift_times(torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64), shift).tolist()
    x = noise.float()

    # (step size, velocity) of the previous step, which solver ab2 uses; None before the first step.
    previous: tuple[float, Tensor] | None = None
    for i, (t, t_next) in enumerate(pairwise(times)):
        dt = t_next - t
        v = velocity(x, t)
        slope = v
        if solver == "ab2" and previous is not None:
            previous_dt, previous_v = previous
            slope = v + 0.5 * dt / previous_dt * (v - previous_v)
        elif solver == "sde":
            slope = v + 0.5 * (x + (1.0 - t) * v)
        x_next = x + dt * slope
        if solver == "heun" and t_next > 0.0:
            x_next = x + dt * 0.5 * (v + velocity(x_next, t_next))
        elif solver == "sde" and fresh is not None and t_next > 0.0:
            x_next = x_next + math.sqrt(-dt * t) * fresh(i)
        x = x_next
        previous = (dt, v)
    return x


def draw_normalised(
    model: Callable[..., Tensor],
    condition: Condition,
    null_label: int,
    noise: Float[Tensor, "B C H W"],
    position: Int[Tensor, "B"],
    seed: int,
    settings: Mapping[str, Any],
) -> Float[Tensor, "B C H W"]:
    """Draws normalised latents from `noise` with the `settings` of the sampler, whose keys are
    those of `SamplingConfig`. A solver that adds noise draws it by `seed` and the samples' entries
    of `position`."""

    def fresh(step: int) -> Tensor:
        place = position + step * STEP_STRIDE
        return counter_normal(seed, Purpose.SAMPLE_STEP, place, noise.shape[1:])

    velocity = make_guided_velocity(model, condition, null_label, settings)
    shift = find_shift(settings["shift"], noise.shape[1:])
    return sample(velocity, noise, settings["steps"], settings["solver"], shift, fresh)


def check_internal_guidance(model: object, guidance: float, prefix: str = "") -> None:
    """Raises a UserError if internal guidance is on (not 1) but the model has no internal head;
    `prefix` stands before the key in the message."""
    if guidance != 1.0 and not getattr(model, "internal_block", 0):
        raise UserError(
            f"{prefix}internal_guidance={guidance} needs a model that was trained with "
            f"model.internal_block; set {prefix}internal_guidance=1."
        )
