"""Checks that mixers share."""

from common.errors import UserError


def heads_of(width: int, head_dim: int, what: str) -> int:
    """Number of heads of `head_dim` in `width`; ValueError if they do not fit."""
    if width % head_dim:
        raise UserError(
            f"model.head_dim={head_dim} does not divide {what}={width}; choose a divisor of "
            f"{width}."
        )
    return width // head_dim
