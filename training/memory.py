"""The bytes of a run, counted from its tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from accel.composite_optimizer import kept_by, nbytes_of
from accel.sharding import local
from training.assemble import Training


class Bytes(NamedTuple):
    """What a run holds from one step to the next, in bytes of this process."""

    weights: int
    gradients: int
    """From the first micro-batch of a step to its update."""
    averages: int
    optimizer: int
    on_host: int
    """Of the optimizer's state, in host memory."""

    @property
    def on_device(self) -> int:
        return self.weights + self.gradients + self.averages + self.optimizer


def lasting_bytes(training: Training) -> Bytes:
    """Counts the tensors of a run that has stepped, or was warmed up."""
    step = training.step
    sizes = [(local(p.detach()).nbytes, p.requires_grad) for p in step.parameters]
    averages = sum(local(average).nbytes for average in training.state.ema.averages)

    # The optimizer's state, some of which a technique may keep in host memory.
    entries = [value for p in step.parameters for value in kept_by(step.optimizer, p).values()]
    state = sum(local(value).nbytes for value in entries if isinstance(value, Tensor))
    away = [t for technique in training.stack.techniques for t in technique.in_host_memory()]
    on_host = sum(nbytes_of(tensor) for tensor in away)
    return Bytes(
        weights=sum(size for size, _ in sizes),
        gradients=sum(size for size, trains in sizes if trains),
        averages=averages,
        optimizer=state - on_host,
        on_host=on_host,
    )
