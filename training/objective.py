"""The training objective: flow matching.

Letters in shapes: B samples, C channels, H and W height and width of the latents.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from accel.kernels.counter_noise.draws import MASK, Purpose, counter_normal, counter_uniform
from common.errors import UserError
from common.text import is_shift
from models.layers import Layer
from models.sampler import find_shift, shift_times

if TYPE_CHECKING:
    from data.loader import Batch
    from training.heads import ModelWithHeads

BETA = 0.05
"""Difference between two normalised values below which the smooth L1 distance is quadratic."""
Network = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""Type of the forward pass of `ModelWithHeads`, with the techniques of the run."""
TIME_FLOOR = 0.05
"""Time below which the loss of a model that predicts clean latents has the weight of this time."""
GOLDEN = 0x9E3779B9
"""2³² divided by the golden ratio, rounded to an odd number."""


class Losses(NamedTuple):
    """What an objective computes for the samples of a batch, in fp32. Training minimises the mean
    of `flow` plus the means of all extra terms."""

    flow: Float[Tensor, "B"]
    """Loss of each sample; its mean is the metric `loss`, on held-out data `eval_loss`."""
    t: Float[Tensor, "B"]
    """Time of each sample."""
    extra: Mapping[str, Float[Tensor, "B"]] = {}
    """Name of an extra term -> the term of each sample, already multiplied by its weight. The mean
    is the metric `loss_<name>`. The names must be the same in every training step; on held-out data
    the extra terms are ignored."""

    def name_terms(self) -> dict[str, Float[Tensor, "B"]]:
        """Returns the terms that training minimises: name of the metric -> term."""
        return {"loss": self.flow} | {f"loss_{name}": term for name, term in self.extra.items()}


def measure_square(
    velocity: Float[Tensor, "B C H W"], target: Float[Tensor, "B C H W"]
) -> Float[Tensor, "B"]:
    """Returns the mean square of the error of each sample's velocity, in fp32."""
    return (velocity.float() - target).square().mean(dim=(1, 2, 3))


class LatentHead(Layer):
    """Auxiliary head that estimates the clean latents, as patches of `patch_values` values, from
    the residual stream of width `dim`, by an MLP with one hidden layer."""

    def __init__(self, dim: int, patch_values: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, patch_values)
        if not self.fc1.weight.is_meta:
            self.init_weights()

    def forward(
        self, stream: Float[Tensor, "B L D"], embedded: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B L E"]:
        return self.fc2(F.silu(self.fc1(stream)))


def compute_held_out_times(position: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Returns the time t in (0, 1) of each held-out sample, in fp32. `position` is the sample's
    place in the held-out split.

    The time depends on the position only, so every evaluation, seed and objective has the same, and
    held-out losses of different objectives can be compared, if the models predict the same. The
    times are quantiles of the standard logit-normal distribution: t = sigmoid(Φ⁻¹(u)) with
    u = frac(1/2 + position/φ), where φ is the golden ratio. The first n numbers u cover the
    interval (0, 1) more evenly than random numbers, for every n: shares of them are wrong by
    O(log n / n) instead of O(1/√n) (Knuth, "The Art of Computer Programming", volume 3, section
    6.4, Fibonacci hashing).
    """
    # Compute u as an odd multiple of 2⁻³³ with integers, which are exact on every device. An
    # overflow of the product does no harm, because its low 32 bits are right.
    place = (position * GOLDEN + (1 << 31)) & MASK
    u = (place.double() + 0.5) / 2.0**32
    return torch.sigmoid(torch.special.ndtri(u)).float()


class Objective(ABC):
    """Base class of objectives: what a step minimises."""

    def attach_heads(self, network: ModelWithHeads) -> None:  # noqa: B027 - most need none
        """Attaches the auxiliary heads that the loss needs to the model."""

    @abstractmethod
    def compute_losses(
        self,
        network: Network,
        batch: Batch,
        *,
        seed: int,
        null_label: int,
        drop_path_depth: int = 0,
        held_out: bool = False,
    ) -> tuple[Any, ...]:
        """Returns the `Losses` of a batch's samples, or only the pair of losses and times.

        `null_label` is the label that drops a condition, `drop_path_depth` the number of blocks
        with stochastic depth, 0 if the model has none. Every random draw must be a function of
        `seed` and the samples' positions.
        """


@dataclass
class FlowMatching(Objective):
    """Flow-matching loss: mean squared error of the model's velocity on straight paths from data to
    noise. For a model with `prediction="clean"`, whose estimate of the latents is ẑ, it is
    |ẑ - z|²/max(t, 0.05)², which is the same for t ≥ 0.05: near t = 0 the velocity's error has no
    bound (JiT, https://arxiv.org/abs/2511.13720).

    The path from latents z to noise ε is x = (1-t)·z + t·ε, and the target velocity is v = ε - z
    (Lipman et al. 2023; Liu et al. 2023). t is logit-normal (`logit_mean`, `logit_std`; Esser et
    al. 2024), then shifted by `timestep_shift`, a number or "auto" (`find_shift` in
    models/sampler.py); on held-out data `compute_held_out_times` gives t.
    A share `label_dropout` of the samples has its condition dropped: classifier-free guidance needs
    a model that is also trained without one.

    If `align_weight` is above 0, a small MLP (`LatentHead`) estimates the clean latents from the
    residual stream after block `align_block`, from 1 (null: after a third of the blocks), and
    `align_weight` times the smooth L1 distance to the clean latents is added to the loss
    (self-representation alignment, SRA 2, https://arxiv.org/abs/2601.17830). From
    `align_until_samples` samples on the weight is 0 (null: never).
    """

    logit_mean: float = 0.0
    logit_std: float = 1.0
    timestep_shift: float | Literal["auto"] = 1.0
    label_dropout: float = 0.1
    align_weight: float = 0.0
    align_block: int | None = None
    align_until_samples: int | None = None
    time_floor: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.logit_std <= 0.0 or not is_shift(self.timestep_shift):
            raise UserError(
                f"objective.logit_std={self.logit_std} and "
                f"objective.timestep_shift={self.timestep_shift} must be above 0, or this one auto."
            )
        if not 0.0 <= self.label_dropout <= 1.0:
            raise UserError(
                f"objective.label_dropout={self.label_dropout} must lie between 0 and 1."
            )
        if self.align_weight < 0.0:
            raise UserError(f"objective.align_weight={self.align_weight} must be at least 0.")

    def attach_heads(self, network: ModelWithHeads) -> None:
        """Attaches the auxiliary head that the loss needs, if any. UserError if there is no block
        of the number `align_block`, or if the model predicts clean latents itself."""
        model = network.model
        clean = getattr(model, "prediction", "") == "clean"
        self.time_floor = TIME_FLOOR if clean else 0.0
        if not self.align_weight:
            return

        if clean:
            raise UserError(
                f"objective.align_weight={self.align_weight}: the model estimates the clean "
                "latents itself, by model.prediction=clean; leave align_weight out."
            )
        block = self.align_block
        if block is None:
            block = max(1, round(model.depth / 3))
        if not 1 <= block <= model.depth:
            raise UserError(
                f"objective.align_block={block} must be from 1 to model.depth={model.depth}."
            )
        network.tap("latent", block, f"objective.align_weight={self.align_weight}")
        weight = model.head.weight
        with torch.device(weight.device):
            network.aux_heads["latent"] = LatentHead(model.dim, len(weight))

    def compute_losses(
        self,
        network: Network,
        batch: Batch,
        *,
        seed: int,
        null_label: int,
        drop_path_depth: int = 0,
        held_out: bool = False,
    ) -> Losses:
        """Returns loss and time t of each sample. Noise, t and dropped conditions depend only on
        (seed, position), on held-out data t only on the position; training and held-out data have
        different values."""
        latents = batch.latents
        condition = batch.condition
        position = batch.position

        # Draw counter-based noise, so that a resumed run, or one with another number of ranks,
        # draws the same values.
        purpose = Purpose.EVAL_NOISE if held_out else Purpose.NOISE
        noise = counter_normal(seed, purpose, position, latents.shape[1:])

        # In training only, draw t, drop a share of the conditions, and drop blocks by stochastic
        # depth.
        extra: dict[str, Any] = {}
        if held_out:
            t = compute_held_out_times(position)
        else:
            normal = counter_normal(seed, Purpose.TIME, position, (1,)).squeeze(1)
            t = torch.sigmoid(self.logit_mean + self.logit_std * normal)
            shift = find_shift(self.timestep_shift, latents.shape[1:])
            if shift != 1.0:
                t = shift_times(t, shift)
            drop = counter_uniform(seed, Purpose.LABEL_DROP, position).squeeze(1)
            condition = condition.drop(drop < self.label_dropout, null_label)
            if drop_path_depth:
                extra["drop_uniforms"] = counter_uniform(
                    seed, Purpose.DROP_PATH, position, drop_path_depth
                )

        # Compare the model's velocity at x with the velocity of the path, noise - latents.
        x = torch.lerp(latents, noise, t.view(-1, 1, 1, 1))
        velocity, outputs = network(x, t, condition.y, **extra)
        target = noise - latents

        def measure(estimate: Tensor) -> Tensor:
            error = measure_square(estimate, target)
            # The velocity's error is that of the clean latents, divided by t.
            return error * (t / t.clamp(min=self.time_floor)) ** 2 if self.time_floor else error

        terms = {}
        if "internal" in outputs:
            terms["internal"] = measure(outputs["internal"])
        if "latent" in outputs:
            guess = outputs["latent"].float()
            distance = F.smooth_l1_loss(guess, latents, reduction="none", beta=BETA)
            # Keep the term when it has ended: without it ddp would wait for the head's gradients.
            until = math.inf if self.align_until_samples is None else self.align_until_samples
            weight = self.align_weight * (position < until)
            terms["latent"] = weight * distance.mean(dim=(1, 2, 3))
        return Losses(measure(velocity), t, terms)
