"""What the layers of all models share."""

from __future__ import annotations

from torch import nn

from common.errors import UserError


def heads_of(width: int, head_dim: int, what: str) -> int:
    """Number of heads of `head_dim` in `width`; ValueError if they do not fit."""
    if width % head_dim:
        raise UserError(
            f"model.head_dim={head_dim} does not divide {what}={width}; choose a divisor of "
            f"{width}."
        )
    return width // head_dim


def init_linear(layer: nn.Linear) -> None:
    """Xavier's uniform weights (Glorot & Bengio 2010), and a bias of zero where there is one."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
