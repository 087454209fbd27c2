"""Exponential moving average of the parameters, in fp32, with its length in samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accel.sharding import local, part_of
from common.errors import UserError
from models.adapters import trained

PART = 2**24
"""Elements after which a part of an update ends: 64 MiB of fp32, and the last tensor."""


class EMA:
    """ema ← ema + w·(parameter - ema), with w = 1 - 0.5^(batch / half_life).

    The half-life is `half_life_samples`, and early in training at most `ramp` times the samples
    seen, so that the average is not dominated by initialisation (Karras et al. 2024, EDM2).
    """

    def __init__(self, model: nn.Module, half_life_samples: float, ramp: float = 0.05) -> None:
        if half_life_samples <= 0.0 or ramp <= 0.0:
            raise UserError(
                f"ema.half_life_samples={half_life_samples} and ema.ramp={ramp} must be above 0."
            )
        self.half_life_samples = half_life_samples
        self.ramp = ramp
        named = trained(model)
        self.names = list(named)
        self.parameters = list(named.values())
        self.averages = [p.detach().float().clone() for p in self.parameters]
        """Sharded like the parameters: the arithmetic is elementwise, so each process updates its
        own part."""
        self.parts: list[list[tuple[Tensor, Tensor]]] = [[]]
        """Parameters with their averages, cut so that an update, while the gradients live, needs
        little more memory."""
        for pair in zip(self.parameters, self.averages, strict=True):
            if sum(local(average).numel() for _, average in self.parts[-1]) > PART:
                self.parts.append([])
            self.parts[-1].append(pair)

    def weight(self, samples: int, batch_size: int) -> float:
        """w for the step that ends at `samples` samples."""
        half_life = min(self.half_life_samples, self.ramp * samples)
        return 1.0 - 0.5 ** (batch_size / max(half_life, 1e-8))

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """`weight` is a device scalar; 0 leaves the averages bit for bit as they are."""
        # Not _foreach_lerp_: it takes one weight as a host number only, which would wait for the
        # device.
        for part in self.parts:
            averages = [local(average) for _, average in part]
            moves = torch._foreach_sub([local(p.detach()) for p, _ in part], averages)
            torch._foreach_mul_(moves, weight)
            torch._foreach_add_(averages, moves)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the averages inside and its own parameters again after, bit for bit.

        Parameters narrower than fp32 hold rounded averages, from copies that are made for the
        while.
        """
        narrow = [(p, p.detach().clone()) for p in self.parameters if p.dtype != torch.float32]
        self.exchange()
        try:
            yield
        finally:
            self.exchange()
            with torch.no_grad():
                for parameter, own in narrow:
                    parameter.copy_(own)

    @torch.no_grad()
    def exchange(self) -> None:
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            if parameter.dtype != torch.float32:
                parameter.copy_(average)
                continue
            copy = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(copy)

    def state_dict(self) -> dict[str, Tensor]:
        """Averages by parameter name: a state dict that the model itself can load."""
        return dict(zip(self.names, self.averages, strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state.keys() != set(self.names):
            raise UserError(
                "the averages do not fit the model; they differ in "
                f"{sorted(state.keys() ^ set(self.names))[:5]}."
            )
        for name, average in zip(self.names, self.averages, strict=True):
            local(average).copy_(part_of(state[name], average))
