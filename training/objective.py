"""The training objective: flow matching.

Letters in shapes: B samples, C channels, H and W height and width of the latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from accel.kernels.counter_noise import Purpose, counter_normal, counter_uniform
from common.errors import UserError
from models.sampler import shift_times

if TYPE_CHECKING:
    from data.loader import Batch


@dataclass
class FlowMatching:
    """Flow-matching loss: mean squared error of the model's velocity on straight paths from data to
    noise.

    The path from latents z to noise ε is x = (1-t)·z + t·ε, and the target velocity is v = ε - z
    (Lipman et al. 2023; Liu et al. 2023). t is logit-normal (`logit_mean`, `logit_std`; Esser et
    al. 2024), then shifted by `timestep_shift`. The null label replaces a share `label_dropout` of
    the labels: classifier-free guidance needs a model that is also trained without labels.
    """

    logit_mean: float = 0.0
    logit_std: float = 1.0
    timestep_shift: float = 1.0
    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.logit_std <= 0.0 or self.timestep_shift <= 0.0:
            raise UserError(
                f"objective.logit_std={self.logit_std} and "
                f"objective.timestep_shift={self.timestep_shift} must be above 0."
            )
        if not 0.0 <= self.label_dropout <= 1.0:
            raise UserError(
                f"objective.label_dropout={self.label_dropout} must lie between 0 and 1."
            )

    def compute_losses(
        self,
        model: Callable[..., Tensor],
        batch: Batch,
        *,
        seed: int,
        null_label: int,
        drop_path_depth: int = 0,
        held_out: bool = False,
    ) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Returns loss and time t of each sample, both in fp32. Noise, t and dropped labels depend
        only on (seed, position); training and held-out data draw different values.

        `drop_path_depth` is the number of blocks with stochastic depth; 0 if the model has none.
        """
        latents = batch.latents
        labels = batch.labels
        position = batch.position

        # Draw counter-based noise, so that a resumed run, or one with another number of ranks,
        # draws the same values.
        purpose = Purpose.EVAL_NOISE if held_out else Purpose.NOISE
        noise = counter_normal(seed, purpose, position, latents.shape[1:])
        purpose = Purpose.EVAL_TIME if held_out else Purpose.TIME
        normal = counter_normal(seed, purpose, position, (1,)).squeeze(1)
        t = shift_times(
            torch.sigmoid(self.logit_mean + self.logit_std * normal), self.timestep_shift
        )

        # In training only, replace a share of the labels by the null label, and drop blocks by
        # stochastic depth.
        extra = {}
        if not held_out:
            drop = counter_uniform(seed, Purpose.LABEL_DROP, position).squeeze(1)
            labels = torch.where(drop < self.label_dropout, null_label, labels)
            if drop_path_depth:
                extra["drop_uniforms"] = counter_uniform(
                    seed, Purpose.DROP_PATH, position, drop_path_depth
                )

        # Compare the model's velocity at x with the velocity of the path, noise - latents.
        x = torch.lerp(latents, noise, t.view(-1, 1, 1, 1))
        velocity = model(x, t, labels, **extra)
        return (velocity.float() - (noise - latents)).square().mean(dim=(1, 2, 3)), t
