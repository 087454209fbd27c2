"""The schedule of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.config.schema import ScheduleKind


@dataclass(frozen=True)
class Schedule:
    """Schedule of the learning rate: a factor that rises linearly from 0 to 1 over
    `warmup_samples`, then stays 1 or falls along a cosine to `final`."""

    kind: str
    total_samples: int
    warmup_samples: int = 0
    final: float = 0.0

    def __call__(self, samples: float, batch_size: int = 0) -> float:
        """Returns the factor of the learning rate for a step of `batch_size` samples; `samples` is
        the number of samples that the run has seen when the step ends.

        The last step of a cosine uses the factor at the step's middle, because at the step's end
        the factor is `final`, by default 0.
        """
        if samples < self.warmup_samples:
            return samples / self.warmup_samples
        if self.kind == ScheduleKind.constant:
            return 1.0
        samples = min(samples, self.total_samples - batch_size / 2)
        length = max(1, self.total_samples - self.warmup_samples)
        progress = min((samples - self.warmup_samples) / length, 1.0)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
