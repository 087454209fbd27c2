"""Watches what the steps of warm-up do to the parameters, because calls of an optimizer and counts
of its work do not show whether anything came of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.composite_optimizer import parameters_of
from accel.sharding import list_grads, to_local

WATCHED_ELEMENTS = 4096
"""Number of elements of a parameter, its first ones on this process, that are watched."""
LEFT_ALONE = 1
MOVED = 2


class Update(NamedTuple):
    """Records what one step did to the parameters of its optimizer."""

    fates: dict[Tensor, Tensor]
    """Parameter with a gradient -> a scalar on the device: 0 if the gradient times the rate is lost
    in the parameter's rounding, otherwise whether the parameter `MOVED` or was `LEFT_ALONE`."""
    norm: Tensor
    """Norm of the gradients, as this process computed it."""
    taken: Tensor
    """Flag on the device, true if the step was taken: fp16 skips steps whose gradients overflow."""


def watch(tensor: Tensor) -> Tensor:
    return to_local(tensor.detach()).reshape(-1)[:WATCHED_ELEMENTS]


@contextmanager
def watch_updates(step: Any) -> Iterator[list[Update]]:
    """Inside the context, each update by the training step `step` adds what it did to the list that
    the context returns; the host does not wait for it. Without a training step (None) the list
    stays empty."""
    updates: list[Update] = []
    if step is None:
        yield updates
        return
    update_parameters = step.update_parameters

    def update_and_look(grads: list[Tensor], norm: Tensor, taken: Tensor) -> None:
        parameters = [p for p in parameters_of(step.optimizer) if p.grad is not None]
        before = [watch(p).clone() for p in parameters]
        rate = step.lr / (1.0 if step.scaler is None else step.scaler.scale.to(taken.device))
        slopes = [
            (rate * watch(grad).abs() > torch.finfo(old.dtype).eps * old.abs()).any()
            for grad, old in zip(list_grads(parameters), before, strict=True)
        ]
        update_parameters(grads, norm, taken)

        fates = {
            parameter: slope * (1 + (watch(parameter) != old).any())
            for parameter, slope, old in zip(parameters, slopes, before, strict=True)
        }
        updates.append(Update(fates, norm, taken))

    step.update_parameters = update_and_look
    try:
        yield updates
    finally:
        del step.update_parameters
