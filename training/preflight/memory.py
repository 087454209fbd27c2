"""Counts the bytes that a run keeps, and compares the memory that a step takes with the memory that
is there, before the first step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accel.composite_optimizer import collect_state, count_bytes
from accel.counted_rows import OptimizerState
from accel.device_memory import WORKER_BYTES, count_each, find_device_room
from accel.sharding import to_local
from common.condition import Condition
from common.memory import Need, refuse_excess
from data.caption_table import make_blank_table
from data.loader import Batch
from training.assemble import Training
from training.inputs import find_text_level


def make_blank_batch(training: Training, samples: int) -> Batch:
    """Makes a batch of zeros with the shapes of the run's batches."""
    spec = training.loader.spec
    device = training.device
    latents = torch.zeros(samples, *spec.shape, device=device)
    numbers = torch.zeros(samples, dtype=torch.int64, device=device)
    table = make_blank_table(spec.text, find_text_level(training.cfg.model), device)
    condition = Condition(numbers, table and table.columns.select(numbers))
    return Batch(latents, condition, numbers, numbers)


class LastingBytes(NamedTuple):
    """Bytes of tensors that this process keeps for the whole run, apart from the gradients."""

    weights: int
    gradients: int
    """Bytes of gradients, which are held from the first micro-batch of a step until its update."""
    averages: int
    optimizer: int
    """Bytes of the optimizer's state on the device."""
    on_host: int
    """Bytes of the optimizer's state in host memory."""


def count_lasting_bytes(training: Training) -> LastingBytes:
    """Counts this process's bytes of weights, gradients, averages and optimizer state. The run must
    have taken a step (one of warm-up suffices), because the first step creates the optimizer's
    state."""
    step = training.step
    sizes = [(to_local(p.detach()).nbytes, p.requires_grad) for p in step.parameters]
    averages = sum(to_local(t).nbytes for average, _ in step.averages for t in average.averages)

    # Count the bytes of the optimizer's state, and separately the bytes of tensors that techniques
    # keep in host memory.
    state = sum(
        to_local(value).nbytes
        for p in step.parameters
        for value in collect_state(step.optimizer, p).values()
        if isinstance(value, Tensor)
    )
    on_host = sum(
        count_bytes(tensor)
        for technique in training.stack.techniques
        for tensor in technique.planning.list_host_tensors(technique)
    )
    return LastingBytes(
        weights=sum(size for size, _ in sizes),
        gradients=sum(size for size, trains in sizes if trains),
        averages=averages,
        optimizer=state - on_host,
        on_host=on_host,
    )


def count_step(training: Training) -> Need:
    """Counts the bytes on the device that training takes beyond what the process holds before its
    first step. Changes no weight, no generator and no place in the data."""
    cfg = training.cfg
    step = training.step
    techniques = training.stack.techniques

    # Make the gradients before: in the passes of few samples they would make the peak.
    for parameter in step.parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    passes, each = count_each(
        training.device, lambda samples: step.accumulate([make_blank_batch(training, samples)])
    )
    step.optimizer.zero_grad(set_to_none=True)

    held = count_lasting_bytes(training)
    parts = {"gradients": held.gradients, "any batch": passes}
    unsure = {}
    state = sum(t.foresee_bytes() for t in techniques if isinstance(t, OptimizerState))
    if training.device.type != "cuda":
        # In warm-up a copy of the state before it is in host memory, later that of a checkpoint.
        parts["a copy of the weights"] = held.weights + held.averages
        parts["workers"] = WORKER_BYTES * (cfg.data.get("num_workers") or 0)
        if cfg.async_checkpoints and cfg.save_every:
            unsure["the rest of a checkpoint"] = state
    elif any(t.planning.count_part_bytes(t, 1) == 0.0 for t in techniques):
        state = 0.0  # in host memory
    parts["the optimizer's state"] = state
    compiled = any(t.value in t.planning.may_keep_less for t in techniques)
    doubt = " at most, for compiled code may keep less" if compiled else ""
    return Need(parts, each, training.micro_batch, unsure, doubt)


def refuse_large_step(training: Training) -> None:
    """Raises a UserError if a step surely needs more memory than is there, and prints a warning if
    it may. All ranks must call the function together."""
    cfg = training.cfg
    room = find_device_room(training.device)  # before the count, whose memory glibc keeps
    need = count_step(training)
    share = training.micro_batch * cfg.accumulation_steps

    def advise(fitting: int) -> str:
        for steps in range(1, share + 1):
            if share % steps == 0 and share // steps <= fitting:
                return f"accumulation_steps={steps} fits, {share // steps} samples at a time"
        return "no batch fits; use a smaller model, or runtime.gradient_checkpointing=true"

    setting = f"batch_size={cfg.batch_size}: a step"
    training.ranks.broadcast_result(lambda: refuse_excess(setting, need, room, advise))
