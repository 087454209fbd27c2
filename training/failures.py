"""Ends a run with an explanation when it only skips steps, or runs out of memory or disk."""

from __future__ import annotations

import math
import resource
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from accel.sharding import list_grads, total_norm
from common.distributed.exit import Request
from common.environment import memory_of
from common.errors import DISK_ERRNOS, UserError, is_out_of_memory
from common.files import create_file, make_folder, write_json
from common.memory import GIB
from training.assemble import Training
from training.checkpoint.load import describe_resume
from training.checkpoint.save import Checkpoints
from training.preflight.memory import count_lasting_bytes
from training.run import RUNNING_FILE


def end_if_failed(
    training: Training, folder: Path, checkpoints: Checkpoints, request: Request
) -> None:
    """Raises UserError if the last `guards.max_skipped_in_row` steps were skipped, or a background
    save has failed. All ranks must call this function.

    If the steps were skipped, it also repeats the forward and backward pass of the last step on its
    micro-batches, without an update, and writes a report to a file in `folder/dumps`.
    The report's key `samples` lists id, position in the stream, label, t and loss of each sample;
    its key `blocks` maps each part of the model to the norm of the part's gradient and the norm of
    its parameters.
    """
    limit = training.cfg.guards.max_skipped_in_row
    state = training.state
    skipped = int(state.meter.window.in_row)  # waits for the device
    if skipped >= limit:
        with torch.compiler.set_stance("force_eager"):
            content = {
                "step": state.step,
                "skipped_in_row": skipped,
                "samples": describe_samples(training),
                "blocks": measure_norms(training),
            }
        file = folder / "dumps" / f"step-{state.step}.json"
        if training.ranks.first:
            make_folder(file.parent)
            write_json(file, content)

        # Wait until a background save has ended, because the error message names the newest
        # complete checkpoint.
        checkpoints.wait()
        resume = describe_resume(checkpoints.folder, state.samples)
        raise UserError(
            f"step {state.step}: the last {skipped} steps were skipped, for their gradients were "
            f"not finite or spikes (guards.max_skipped_in_row={limit}); the weights are those "
            f"before them. {file} has the batch, its times and losses, and norms by block. Lower "
            f"optim.lr or use runtime.precision=fp32; {resume}."
        )
    if request is Request.look:
        checkpoints.finish(state.samples)


@torch.no_grad()
def describe_samples(training: Training) -> list[dict[str, Any]]:
    """Returns a dict (id, position, label, t, loss, extra terms) for each sample of the step, those
    of all ranks, sorted by the sample's position in the training stream."""
    rows = []
    for batch in training.batches:
        losses = training.step.compute_losses(batch)
        columns = {"id": batch.ids, "position": batch.position, "label": batch.condition.labels}
        columns |= {"t": losses.t, **losses.name_terms()}
        for values in zip(*(column.tolist() for column in columns.values()), strict=True):
            rows.append(dict(zip(columns, map(to_json_number, values), strict=True)))
    rank_rows = training.ranks.gather_objects(rows)
    return sorted((row for rows in rank_rows for row in rows), key=lambda row: row["position"])


def measure_norms(training: Training) -> dict[str, Any]:
    """Returns part of the model -> norms of the part's gradient and of its parameters."""
    step = training.step
    step.accumulate(training.batches)
    scale = 1.0 if step.scaler is None else float(step.scaler.scale)

    # Group the parameters by part: a block, or a top-level module outside of the blocks.
    parts: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
    network = training.state.network
    heads = network.aux_heads.named_parameters("aux_heads")
    for name, parameter in [*network.model.named_parameters(), *heads]:
        depth = 2 if name.startswith("blocks.") else 1
        parts[".".join(name.split(".")[:depth])].append(parameter)

    norms = {}
    for name, parameters in parts.items():
        norms[name] = {
            "gradient_norm": to_json_number(float(total_norm(list_grads(parameters))) / scale),
            "parameter_norm": to_json_number(float(total_norm([p.detach() for p in parameters]))),
        }
    step.optimizer.zero_grad(set_to_none=True)
    return norms


def to_json_number(value: float) -> float | str:
    """Returns `value`, or its text if it is NaN or infinite, because JSON has no such numbers."""
    return value if math.isfinite(value) else str(value)


@contextmanager
def explain_failures(training: Training, folder: Path) -> Iterator[None]:
    """If the code in the `with` block runs out of memory or disk, raises a UserError that says
    where this happened, how much memory was in use, and which configuration keys save most.
    Meanwhile the first rank keeps the file `RUNNING_FILE` in `folder`, by which the next start sees
    that this process was killed."""
    first = training.ranks.first
    if first:
        with suppress(OSError):
            make_folder(folder)
            create_file(folder / RUNNING_FILE).close()

    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            reason = describe_out_of_memory(training)
        elif isinstance(error, OSError) and error.errno in DISK_ERRNOS:
            reason = (
                f"step {training.state.step}: {error.filename or 'a file'} cannot be written "
                f"({error.strerror}); free space or mend the disk"
            )
        else:
            raise
        raise UserError(
            f"{reason}; {describe_resume(folder / 'checkpoints', training.state.samples)}."
        ) from error
    finally:
        if first:
            with suppress(OSError):
                (folder / RUNNING_FILE).unlink(missing_ok=True)
                folder.rmdir()  # fails if the run has written to it


def describe_out_of_memory(training: Training) -> str:
    """Returns a text that says in which phase of the step memory ran out, how much memory the
    weights, averages and optimizer state take, and which configuration keys save memory."""
    step = training.step
    device = training.device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = count_lasting_bytes(training)
    lasting = held.weights + held.averages + held.optimizer
    savings = training.stack.list_savings()
    return (
        f"out of memory in {step.phase} at step {training.state.step}: {peak / GIB:.3g} of "
        f"{memory_of(device) / GIB:.3g} GiB were taken at the peak, {lasting / GIB:.3g} of them by "
        f"weights, averages and the optimizer's state. What helps, the cheapest first: "
        f"{', '.join(['a larger accumulation_steps', *savings])}, a smaller model; `python -m "
        "scripts.plan` with the words of this run counts what each saves"
    )
