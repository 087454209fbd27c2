"""Makes a benchmark's batch fit the device, by what a forward pass keeps a sample: measured, not
guessed."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import cache
from math import lcm
from typing import NamedTuple

import torch

from accel.saved_tensors import keeping
from common.errors import UserError
from data.loader import Batch
from training.assemble import Training, assemble
from training.config.compose import compose
from training.hardware import memory_of

BATCHES = (2, 4)
"""Samples of the two forward passes whose difference tells what grows with the batch."""
BYTES_A_PARAMETER = 20
"""Parameter, gradient, two moments and the average, fp32."""
RESERVE = 2**30
"""Bytes for the driver's context, workspaces of libraries and the loader."""
USABLE = 0.9
"""Share of the memory that may be planned for: gradients of activations and fragmentation take the
rest."""


class Needs(NamedTuple):
    """What one configuration takes of the device."""

    kept: float
    """Bytes a sample that the forward pass keeps for the backward pass."""
    constant: float
    """Bytes that it keeps at any batch size: weights that autocast has cast."""
    parameters: int
    captured: bool
    """A CUDA graph holds on to the memory of its step."""
    batch_size: int
    accumulation_steps: int

    def activations(self, batch_size: int) -> float:
        """Bytes kept for the backward pass at another batch size."""
        return self.constant + self.kept * batch_size / self.accumulation_steps


@cache
def needs_of(overrides: tuple[str, ...], device: torch.device) -> Needs:
    """Builds what would train, runs it eagerly on `device`, and frees it again.

    Random number generators are as before afterwards. Process-wide flags are those of these
    overrides, and what was compiled before compiles again: as whenever a run is built.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        training = assemble(compose(list(overrides)).cfg, device)
        few, many = (kept_at(training, samples) for samples in BATCHES)
    parameters = sum(p.numel() for p in training.model.parameters())
    cfg = training.cfg
    captured = training.stack.value("cuda_graph") is True
    del training
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    kept = (many - few) / (BATCHES[1] - BATCHES[0])
    constant = few - BATCHES[0] * kept
    return Needs(kept, constant, parameters, captured, cfg.batch_size, cfg.accumulation_steps)


def predicted(needs: Sequence[Needs], batch_size: int) -> float:
    """Bytes that configurations take together that are in memory at the same time and train in
    turn.

    Each has its parameters. A captured one keeps its activations while another trains; those of the
    others share the allocator's cache, which holds the largest.
    """
    in_turn = max((n.activations(batch_size) for n in needs if not n.captured), default=0.0)
    held = sum(n.activations(batch_size) for n in needs if n.captured)
    return RESERVE + BYTES_A_PARAMETER * sum(n.parameters for n in needs) + in_turn + held


def fitted(
    overrides: Sequence[Sequence[str]], device: torch.device, memory: float | None = None
) -> tuple[int, str | None]:
    """The batch size at which configurations of one batch size fit `device` together, and a
    sentence if it is smaller.

    `memory` are the device's bytes; None asks it. ValueError for unlike batch sizes, and if no
    batch fits.
    """
    needs = [needs_of(tuple(words), device) for words in overrides]
    asked = needs[0].batch_size
    unit = lcm(*(n.accumulation_steps for n in needs))
    if any(n.batch_size != asked for n in needs):
        raise UserError(
            f"batch sizes {[n.batch_size for n in needs]}: what is compared must have one."
        )
    memory = memory_of(device) if memory is None else memory

    def needed(batch_size: int) -> str:
        gib = predicted(needs, batch_size) / 2**30
        return f"batch {batch_size} needs a predicted {gib:.3g} GiB of {memory / 2**30:.3g}"

    batch_size = asked
    while predicted(needs, batch_size) > USABLE * memory:
        if batch_size == unit:
            raise UserError(f"{needed(unit)}: it does not fit.")
        batch_size = max(batch_size // 2 // unit, 1) * unit
    return batch_size, None if batch_size == asked else f"{needed(asked)}: measured at {batch_size}"


def fitted_pairs(
    base: Sequence[str], others: Sequence[Sequence[str]], device: torch.device
) -> tuple[int, str | None]:
    """`fitted` of a configuration with each of the others in turn: the smallest batch."""
    return min((fitted([base, other], device) for other in others), key=lambda found: found[0])


def kept_at(training: Training, samples: int) -> int:
    """Bytes that really stay on the device for the backward pass, of the loss on `samples` samples
    of zeros. Nothing runs compiled."""
    spec = training.loader.spec
    device = training.device
    latents = torch.zeros(samples, spec.channels, spec.height, spec.width, device=device)
    numbers = torch.arange(samples, device=device)
    batch = Batch(latents, torch.zeros_like(numbers), numbers, numbers)
    with torch.compiler.set_stance("force_eager"), keeping(training.model) as kept:
        losses, _ = training.step.losses(batch)
    del losses
    return sum(kept.left.values())
