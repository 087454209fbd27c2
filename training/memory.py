"""Compares the memory that a command needs with the memory that is there, before its work
begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from accel.counted_rows import OptimizerState
from accel.live_bytes import measure_peak
from common.memory import Need, Room, find_room, refuse_excess
from data.caption_table import make_blank_table
from data.loader import Batch
from training.assemble import Training
from training.failures import count_lasting_bytes
from training.inputs import find_text_level

WORKER_BYTES = 40 * 2**20
"""Bytes of a process that reads data ahead, beyond those that it shares with its parent (20 MiB for
tars of 256 samples) and the batches that wait; measured with PyTorch 2.14 on Linux."""


def find_device_room(device: torch.device) -> Room:
    """Finds the memory of a device that this process may take (see `find_room`)."""
    if device.type != "cuda":
        names = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")  # of torchrun and srun
        return find_room(int(next(filter(None, map(os.environ.get, names)), 1)))
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return Room(free, "free memory of the GPU", torch.cuda.memory_allocated(device), False)


def count_each(device: torch.device, run: Callable[[int], object]) -> tuple[float, float]:
    """Counts the bytes that `run(samples)` takes at its peak, by running it with two and with three
    samples, eagerly. Returns those that any number of samples takes, and those of each sample."""
    devices = [device] if device.type == "cuda" else []
    with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices):
        two, three = (measure_peak(device, partial(run, samples)) for samples in (2, 3))
    each = max(0.0, three - two)
    return max(0.0, two - 2 * each), each


def make_blank_batch(training: Training, samples: int) -> Batch:
    """Makes a batch of zeros with the shapes of the run's batches."""
    spec = training.loader.spec
    device = training.device
    latents = torch.zeros(samples, spec.channels, spec.height, spec.width, device=device)
    numbers = torch.zeros(samples, dtype=torch.int64, device=device)
    table = make_blank_table(spec.text, find_text_level(training.cfg.model), device)
    return Batch(latents, numbers, numbers, numbers, table and table.gather(numbers))


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
    elif any(t.count_part_bytes(1) == 0.0 for t in techniques):
        state = 0.0  # in host memory
    parts["the optimizer's state"] = state
    compiled = any(t.value in t.may_keep_less for t in techniques)
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


def refuse_large_batch(
    batch_size: int, device: torch.device, run: Callable[[int], object], ahead: float = 0.0
) -> None:
    """Raises a UserError if a batch of a command surely needs more memory than is there, and prints
    a warning if it may. `run(n)` does the work of n samples; `ahead` is the number of bytes that
    other processes take, which prepare samples."""
    room = find_device_room(device)
    always, each = count_each(device, run)
    refuse_excess(
        f"batch_size={batch_size}: a batch",
        Need({"read ahead": ahead, "any batch": always}, each, batch_size),
        room,
        lambda fitting: f"batch_size={fitting} fits" if fitting else "no batch fits",
    )
