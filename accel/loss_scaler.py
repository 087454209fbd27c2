"""Dynamic loss scaling for fp16, decided on the device: the host never waits to learn whether a
step overflowed.

Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740; constants as in torch.amp.GradScaler,
which is not used itself because it overwrites the `found_inf` that also skips steps whose gradients
are not finite for other reasons.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

GROWTH = 2.0
BACKOFF = 0.5
INTERVAL = 2000


class LossScaler:
    """`scale` multiplies the loss and divides the gradients; both are scalars on the device.

    It halves after a step that overflowed and doubles after 2,000 steps in a row that did not.
    """

    def __init__(self, device: torch.device, initial: float = 65536.0) -> None:
        self.scale = torch.full((), initial, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        """`found_inf` is 1.0 after a step whose scaled gradients were not finite."""
        torch._amp_update_scale_(self.scale, self.good_steps, found_inf, GROWTH, BACKOFF, INTERVAL)

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.scale.copy_(state["scale"])
        self.good_steps.copy_(state["good_steps"])
