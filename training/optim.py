"""Parameter groups: what weight decay applies to."""

from __future__ import annotations

from typing import Any

from models.denoiser import Denoiser


def parameter_groups(model: Denoiser, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and all that the model's `no_weight_decay()` names."""
    exempt = model.no_weight_decay()
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name not in exempt], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name in exempt], "weight_decay": 0.0},
    ]
