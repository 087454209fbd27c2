"""Writes snapshots of a run's power-function averages, from which `scripts.average` makes averages
of other lengths after the run (training/optim/power_averages.py).

If `ema.snapshots` is S, a run writes a snapshot after each step at which the number of samples seen
reaches or passes a multiple of total_samples / S. A snapshot is a file for each of `LENGTHS`, with
the model's description in its header, so that it can be sampled from like other weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from common.clock import CLOCK
from common.config.schema import TrainConfig
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.files import make_folder, replace_file
from common.text import format_bytes
from models.adapters import find_trained_parameters
from training.checkpoint.files import HASH_KEY, hash_tensors, make_header, stage, write_tensors
from training.optim.power_averages import LENGTHS
from training.state import Layout, TrainState


class Snapshot(NamedTuple):
    """A file that holds the power-function average of a length over the first samples of a run."""

    samples: int
    length: float
    file: Path


def list_snapshots(run: Path) -> list[Snapshot]:
    """Lists the snapshots in the run folder `run`, oldest first; empty if it has none."""
    snapshots = []
    for file in run.glob("averages/samples-*.safetensors"):
        _, samples, length = file.stem.split("-")
        snapshots.append(Snapshot(int(samples), float(length), file))
    return sorted(snapshots)


def count_due(cfg: TrainConfig, samples: int) -> int:
    """Returns how many snapshots a run must have written when it has seen `samples` samples."""
    return samples * cfg.ema.snapshots // cfg.total_samples


def prepare_snapshots(cfg: TrainConfig, state: TrainState, run: Path) -> str:
    """Prepares the run folder `run` for the snapshots after the step at which this process starts.
    Returns a line about the space that they will need at most, or "" if the run writes none. Raises
    UserError if the disk has less space. Only the first rank may call the function."""
    if not cfg.ema.snapshots:
        return ""

    # Remove snapshots of steps that this process takes again.
    for snapshot in list_snapshots(run):
        if snapshot.samples > state.samples:
            snapshot.file.unlink()

    # Compare the space that later snapshots need with the free space; each has averages of all
    # `LENGTHS` in fp32.
    folder = run / "averages"
    make_folder(folder)
    count = cfg.ema.snapshots - count_due(cfg, state.samples)
    averaged = find_trained_parameters(state.model)
    size = count * 4 * len(LENGTHS) * sum(p.numel() for p in averaged.values())
    free = shutil.disk_usage(folder).free
    sentence = f"{count} snapshots of {len(LENGTHS)} averages: {format_bytes(size)} in {folder}"
    if free < size:
        raise UserError(
            f"ema.snapshots={cfg.ema.snapshots}: {sentence}, where {format_bytes(free)} are free; "
            "free space, or use fewer snapshots."
        )
    return f"\n{sentence}"


def save_snapshot_if_due(
    cfg: TrainConfig, state: TrainState, ranks: Ranks, run: Path, described: Mapping[str, Any]
) -> None:
    """Writes a snapshot to the run folder `run` if one is due after the last step. `described` is
    the description of the run that `describe_run` returns.

    Meanwhile the meter pauses, so that the time does not lower the training rate. All ranks must
    call the function, because it gathers sharded averages. Raises OSError if a file cannot be
    written.
    """
    before = state.samples - cfg.batch_size
    if not state.moved or count_due(cfg, state.samples) == count_due(cfg, before):
        return
    header = make_header({**described, "step": state.step}, "ema")
    for average in state.power_averages:
        file = run / f"averages/samples-{state.samples}-{average.length:.2f}.safetensors"
        with state.meter.pause(), CLOCK.count_as("saving"):
            staged = stage(
                {"ema": average.state_dict()}, {"ema": Layout.whole}, ranks.first, copy=False
            )
            tensors = staged.whole.get("ema", {})
            ranks.broadcast_result(partial(write_average, file, tensors, header))


def write_average(file: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Writes an average to a weights file, all or nothing, with a hash of its tensors."""
    make_folder(file.parent)
    with replace_file(file) as temporary:
        write_tensors(temporary, tensors, {**header, HASH_KEY: hash_tensors(tensors)})
