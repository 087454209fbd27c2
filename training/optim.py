"""Parameter groups, and the learning-rate schedule: in samples, so that it does not move with the
batch size."""

from __future__ import annotations

import math
from typing import Any

from models.adapters import trained
from models.denoiser import Denoiser
from training.config.schema import ScheduleKind


def parameter_groups(model: Denoiser, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of what is trained: matrices, which decay, and all that the model's
    `no_weight_decay()` names."""
    exempt = model.no_weight_decay()
    named = trained(model).items()
    groups = [
        {"params": [p for name, p in named if name not in exempt], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Schedule:
    """Factor on the learning rate: linear warm-up over `warmup_samples`, then constant, or cosine
    to `final` of it."""

    def __init__(
        self, kind: str, total_samples: int, warmup_samples: int = 0, final: float = 0.0
    ) -> None:
        self.kind = kind
        self.total_samples = total_samples
        self.warmup_samples = warmup_samples
        self.final = final

    def __call__(self, samples: float, batch_size: int = 0) -> float:
        """Factor for the step of `batch_size` samples that ends at `samples`.

        Of a cosine's last step it is that of its middle: at its end a cosine to 0 has reached 0.
        """
        if samples < self.warmup_samples:
            return samples / self.warmup_samples
        if self.kind == ScheduleKind.constant:
            return 1.0
        samples = min(samples, self.total_samples - batch_size / 2)
        progress = (samples - self.warmup_samples) / max(
            1, self.total_samples - self.warmup_samples
        )
        return self.final + (1.0 - self.final) * 0.5 * (
            1.0 + math.cos(math.pi * min(progress, 1.0))
        )
