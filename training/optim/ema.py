"""Moving averages of the parameters, with which a run is evaluated and sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accel.composite_optimizer import list_parameters, split_parts
from accel.sharding import slice_like, to_local
from common.errors import UserError
from models.adapters import find_trained_parameters


class MovingAverage:
    """Average of the parameters in fp32, which each step moves towards the new parameters:
    average ← average + w·(parameter - average). Subclasses compute the weight w."""

    def __init__(self, model: nn.Module) -> None:
        named = find_trained_parameters(model)
        self.names = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.averages = [p.detach().float().clone() for p in self.parameters]
        """One fp32 average per trained parameter, sharded like the parameter: the update is
        elementwise, so each rank updates its own shard."""
        average_by_parameter = dict(zip(self.parameters, self.averages, strict=True))
        self.parts = [
            [(parameter, average_by_parameter[parameter]) for parameter in list_parameters(part)]
            for part in split_parts([{"params": self.parameters}])
        ]
        """Pairs (parameter, average), in several parts: `update` handles one part after the other,
        so that it needs temporary memory for one part only, while the gradients also take
        memory."""

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Moves each average towards its parameter by the fraction `weight`, a scalar tensor on the
        device; with 0 the averages do not change."""
        # Do not use _foreach_lerp_: it takes a weight for all tensors only as a Python number, and
        # the host must wait for the device to read that number from `weight`.
        for part in self.parts:
            averages = [to_local(average) for _, average in part]
            differences = torch._foreach_sub([to_local(p.detach()) for p, _ in part], averages)
            torch._foreach_mul_(differences, weight)
            torch._foreach_add_(averages, differences)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Puts the averages into the model inside the `with` block, then restores the model's
        parameters bit for bit.

        Parameters narrower than fp32 hold rounded averages inside the block, and are restored from
        copies.
        """
        narrow = [(p, p.detach().clone()) for p in self.parameters if p.dtype != torch.float32]
        self.exchange()
        try:
            yield
        finally:
            self.exchange()
            with torch.no_grad():
                for parameter, copy in narrow:
                    parameter.copy_(copy)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swaps fp32 parameters with their averages; overwrites parameters narrower than fp32 with
        their averages."""
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            before = parameter.detach().clone()
            parameter.copy_(average)
            if before.dtype == torch.float32:
                average.copy_(before)

    def restart(self) -> None:
        """Sets each average to its parameter."""
        self.load_state_dict(
            {name: p.detach() for name, p in zip(self.names, self.parameters, strict=True)}
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Returns parameter name -> its average, which is a state dict that the model can load."""
        return dict(zip(self.names, self.averages, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        averages = self.state_dict()
        if state.keys() != averages.keys():
            raise UserError(
                "the averages do not fit the model; they differ in "
                f"{sorted(state.keys() ^ averages.keys())[:5]}."
            )
        for name, average in averages.items():
            to_local(average).copy_(slice_like(state[name], average))


class EMA(MovingAverage):
    """Exponential moving average of the parameters in fp32, with its half-life in samples.

    The weight of the new parameters is w = 1 - 0.5^(batch / half_life). The half-life is
    `half_life_samples`, but at most `ramp` times the samples seen, so that the initial weights do
    not dominate the average early in training (Karras et al. 2024, EDM2).
    """

    def __init__(self, model: nn.Module, half_life_samples: float, ramp: float = 0.05) -> None:
        if half_life_samples <= 0.0 or ramp <= 0.0:
            raise UserError(
                f"ema.half_life_samples={half_life_samples} and ema.ramp={ramp} must be above 0."
            )

        super().__init__(model)
        self.half_life_samples = half_life_samples
        self.ramp = ramp

    def compute_weight(self, samples: int, batch_size: int) -> float:
        """Returns the weight w of the new parameters in the average, for the step after which the
        run has seen `samples` samples."""
        half_life = min(self.half_life_samples, self.ramp * samples)
        return 1.0 - 0.5 ** (batch_size / max(half_life, 1e-8))
