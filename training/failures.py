"""What ends a run: steps that are only skipped, a disk that is full, memory that runs out and what
takes it."""

from __future__ import annotations

import math
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.composite_optimizer import collect_state, count_bytes
from accel.sharding import to_local, total_norm
from common.errors import DISK_ERRNOS, UserError, is_out_of_memory
from common.files import make_folder, write_json
from data.loader import Batch
from training.assemble import Training, to_json_types
from training.checkpoint.load import describe_resume
from training.checkpoint.save import Checkpoints
from training.distributed.exit import Request
from training.environment import GIB, memory_of
from training.tune import run_apart

SAVINGS_PROGRAM = ["-m", "scripts.plan.savings"]
"""The program that counts what would save memory; it is told the run in a file."""
COUNTING_SECONDS = 60.0
"""Seconds in which it begins to count a change."""


def end_if_failed(
    training: Training,
    folder: Path,
    batches: Sequence[Batch],
    checkpoints: Checkpoints,
    asked: Request,
) -> None:
    """Ends a run that cannot get on: ValueError once `guards.max_skipped_in_row` steps were skipped
    one after the other, or if a save has failed in the background. All processes call it.

    `folder/dumps` then describes the last step, made of `batches`.
    """
    limit = training.cfg.guards.max_skipped_in_row
    state = training.state
    skipped = state.meter.skipped_in_row
    if skipped >= limit:
        file = write_dump(training, batches, folder / "dumps" / f"step-{state.step}.json")
        # the sentence below names the newest checkpoint, which may still be on its way to the disk
        checkpoints.wait()
        raise UserError(
            f"step {state.step}: the last {skipped} steps were skipped, for their gradients were "
            f"not finite or spikes (guards.max_skipped_in_row={limit}); the weights are those "
            f"before them. {file} has the batch, its times and losses, and norms by block. Lower "
            f"optim.lr or use runtime.precision=fp32; {describe_resume(checkpoints.folder, state.samples)}."
        )
    if asked is Request.look:
        checkpoints.finish(state.samples)


def write_dump(training: Training, batches: Sequence[Batch], file: Path) -> Path:
    """Repeats the step's forward and backward pass, which changes nothing, and writes what they
    show to `file`.

    `samples`: id, position in the stream, label, t and loss of each sample of the batch; `blocks`:
    the norms of the gradient and of the parameters of each part of the model.
    """
    state = training.state
    content = {"step": state.step, "skipped_in_row": state.meter.skipped_in_row}
    with torch.compiler.set_stance("force_eager"):
        content |= {
            "samples": describe_samples(training, batches),
            "blocks": measure_norms(training, batches),
        }
    if training.ranks.first:
        make_folder(file.parent)
        write_json(file, content)
    return file


@torch.no_grad()
def describe_samples(training: Training, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Describes each sample of a step, of all processes, in the order of the stream."""
    rows = []
    for batch in batches:
        loss, t = training.step.losses(batch)
        columns = (batch.position, batch.ids, batch.labels, t, loss)
        rows += zip(*(column.tolist() for column in columns), strict=True)
    shares = training.ranks.gather_objects(rows)
    return [
        {
            "id": i,
            "position": position,
            "label": label,
            "t": to_json_number(t),
            "loss": to_json_number(loss),
        }
        for position, i, label, t, loss in sorted(row for share in shares for row in share)
    ]


def measure_norms(training: Training, batches: Sequence[Batch]) -> dict[str, Any]:
    """The norms of the gradient and of the parameters of each part of the model."""
    step = training.step
    step.accumulate(batches)
    scale = 1.0 if step.scaler is None else float(step.scaler.scale)
    parts: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
    for name, parameter in training.state.model.named_parameters():
        depth = 2 if name.startswith("blocks.") else 1
        parts[".".join(name.split(".")[:depth])].append(parameter)

    found = {}
    for name, parameters in parts.items():
        gradients = [p.grad for p in parameters if p.grad is not None]
        found[name] = {
            "gradient_norm": to_json_number(float(total_norm(gradients)) / scale),
            "parameter_norm": to_json_number(float(total_norm([p.detach() for p in parameters]))),
        }
    step.optimizer.zero_grad(set_to_none=True)
    return found


def to_json_number(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


@contextmanager
def explain_failures(training: Training, folder: Path) -> Iterator[None]:
    """Turns running out of memory or disk into a ValueError: where, how much was taken, what helps
    most."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            what = describe_out_of_memory(training)
        elif isinstance(error, OSError) and error.errno in DISK_ERRNOS:
            what = (
                f"step {training.state.step}: {error.filename or 'a file'} cannot be written "
                f"({error.strerror}); free space or mend the disk"
            )
        else:
            raise
        raise UserError(
            f"{what}; {describe_resume(folder / 'checkpoints', training.state.samples)}."
        ) from error


def describe_out_of_memory(training: Training) -> str:
    """Says where memory ran out, what takes it, and what helps most."""
    step = training.step
    device = training.device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = count_lasting_bytes(training)
    lasting = held.on_device - held.gradients
    return (
        f"out of memory in {step.phase} at step {training.state.step}: {peak / GIB:.3g} of "
        f"{memory_of(device) / GIB:.3g} GiB were taken at the peak, {lasting / GIB:.3g} of them by "
        f"weights, averages and the optimizer's state. {describe_savings(training)}"
    )


def describe_savings(training: Training) -> str:
    """Says which changes save most of this run's memory, as a process of its own counts them
    without the device; where that does not answer, says so."""
    job = {
        "cfg": to_json_types(asdict(training.cfg)),
        "spec": training.loader.spec.as_dict(),
        "processes": training.ranks.world_size,
        "gpu": training.device.type == "cuda",
        "barred": training.stack.list_unavailable_savings(),
        "until": time.monotonic() + COUNTING_SECONDS,
    }

    # The last change that is begun may end.
    limit = 1.5 * COUNTING_SECONDS
    print(f"Counting for at most {limit:.0f} s what would help …", file=sys.stderr, flush=True)
    found = None
    with suppress(OSError), tempfile.TemporaryFile() as log:
        _, found = run_apart(job, limit, log, SAVINGS_PROGRAM)

    # No change is named whose bytes were not counted.
    if found is None:
        return (
            "What helps most was not counted, for the process that counts it gave no answer; "
            "`python -m scripts.plan` with the words of this run does"
        )
    told = [
        f"{' '.join(row['words'])} (saves {row['bytes'] / GIB:.3g} GiB)"
        for row in found["savings"][:4]
    ]
    if not told:
        return (
            "No change of a key was counted to help; use a smaller model, or more GPUs with "
            "runtime.parallel.mode=fsdp"
        )
    return f"What helps most, as counted: {', '.join(told)}"


class LastingBytes(NamedTuple):
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


def count_lasting_bytes(training: Training) -> LastingBytes:
    """Counts the tensors of a run that has stepped, or was warmed up."""
    step = training.step
    sizes = [(to_local(p.detach()).nbytes, p.requires_grad) for p in step.parameters]
    averages = sum(to_local(average).nbytes for average in training.state.ema.averages)

    # The optimizer's state, some of which a technique may keep in host memory.
    entries = [
        value for p in step.parameters for value in collect_state(step.optimizer, p).values()
    ]
    state = sum(to_local(value).nbytes for value in entries if isinstance(value, Tensor))
    away = [t for technique in training.stack.techniques for t in technique.list_host_tensors()]
    on_host = sum(count_bytes(tensor) for tensor in away)
    return LastingBytes(
        weights=sum(size for size, _ in sizes),
        gradients=sum(size for size, trains in sizes if trains),
        averages=averages,
        optimizer=state - on_host,
        on_host=on_host,
    )
