"""Makes an average of a run's weights that has another length, from the snapshots of the run.

    python -m scripts.average run_dir=runs/mine length=0.08
    python -m scripts.average run_dir=runs/mine length=0.15 samples=51200 out=ema15.safetensors
    python -m scripts.sample weights=runs/mine/averages/length-0.08-at-102400.safetensors

The run must have trained with ema.snapshots=<n>, such as 32. `length`, from 0.03 to 0.2, is the
standard deviation of the average's weights over training, as a fraction of the samples seen. The
command approximates this average by a sum of snapshots, each times a number, and prints how well
the numbers fit (Karras et al. 2024, EDM2, arXiv 2312.02696). Other commands take the file that it
writes as weights=<file>.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from torch import Tensor

from common.config.paths import refuse_missing
from common.config.schema import refuse_unset, refuse_values
from common.errors import UserError
from common.output import Progress
from scripts.commands import run_command
from training.checkpoint.files import METADATA_KEY
from training.checkpoint.snapshots import Snapshot, list_snapshots, write_average
from training.optim.power_averages import LENGTHS, find_exponent
from training.weights.pretrained import read_description, read_tensors

GRID_CELLS = 5000
"""Number of parts of the run in which `fit_profile` compares profiles."""
MAX_RESIDUAL = 0.11
"""Largest error of the fit, as a fraction of the norm of the profile that was asked for. From eight
snapshots on, spread evenly over the run, the error is smaller for all lengths that are
accepted; the average of a random walk is then within 1 % of the one that a run would keep."""


@dataclass(frozen=True)
class AverageConfig:
    """Keys of the command: the run, and the average to make."""

    run_dir: str | None = None
    """Folder of the run, which has snapshots."""
    length: Annotated[float, Ge(0.03), Le(0.2)] | None = None
    """Length of the average: the standard deviation of its weights over training, as a fraction of
    the samples seen."""
    samples: int | None = None
    """Number of training samples at the end of the average; null: those of the last snapshot."""
    out: str | None = None
    """File to write; null: <run_dir>/averages/length-<length>-at-<samples>.safetensors."""


def fit_profile(snapshots: Sequence[Snapshot], wanted: Snapshot) -> tuple[np.ndarray, float]:
    """Finds the numbers, with sum 1, by which to multiply the snapshots so that the sum of their
    profiles is nearest to that of the average `wanted`, by least squares. Returns the numbers, and
    the norm of the remaining difference as a fraction of the norm of the profile of `wanted`.

    The profile of an average with exponent γ at time T is (γ + 1)·t^γ / T^(γ + 1) for t from 0 to
    T, and 0 later.
    """
    # Compute each profile, a row, at the middle of GRID_CELLS equal parts of the time from 0 to 1,
    # the time of `wanted`.
    averages = [*snapshots, wanted]
    exponents = np.array([[find_exponent(average.length)] for average in averages])
    ends = np.array([[average.samples / wanted.samples] for average in averages])
    times = (np.arange(GRID_CELLS) + 0.5) / GRID_CELLS
    profiles = (exponents + 1.0) * (times / ends) ** exponents / ends * (times < ends)

    # The numbers have the sum 1 if the last snapshot gets 1 minus the sum of the others. So
    # subtract its profile from all others, and fit these differences.
    differences = (profiles[:-2] - profiles[-2]).T
    target = profiles[-1] - profiles[-2]
    numbers = np.linalg.lstsq(differences, target)[0]
    residual = np.linalg.norm(target - differences @ numbers) / np.linalg.norm(profiles[-1])
    return np.append(numbers, 1.0 - numbers.sum()), float(residual)


def average(cfg: AverageConfig) -> Path:
    """Writes the average that `cfg` describes, and returns the path of the file. Raises UserError
    if a key is missing or out of range, or if the run's snapshots do not suffice."""
    refuse_unset(cfg, {"run_dir": "runs/<name>", "length": "0.08"})
    refuse_values(cfg)
    refuse_missing("run_dir", cfg.run_dir, "name the run_dir of a run")
    assert cfg.run_dir
    assert cfg.length

    # Select the snapshots up to the end of the average.
    run = Path(cfg.run_dir).expanduser()
    snapshots = list_snapshots(run)
    if not snapshots:
        raise UserError(f"run_dir={cfg.run_dir} has no snapshots; train with ema.snapshots=32.")
    samples = snapshots[-1].samples if cfg.samples is None else cfg.samples
    ends = {snapshot.samples for snapshot in snapshots}
    if samples not in ends:
        raise UserError(f"samples={samples} has no snapshot; choose one of {sorted(ends)}.")
    snapshots = [snapshot for snapshot in snapshots if snapshot.samples <= samples]

    default = run / f"averages/length-{cfg.length}-at-{samples}.safetensors"
    out = Path(cfg.out or default).expanduser()
    if cfg.out is None and out.is_file():
        print(f"{out} is there already", flush=True)
        return out
    if out.suffix != ".safetensors" or out.exists():
        raise UserError(f"out={out} must be a new file whose name ends in .safetensors.")
    numbers, residual = fit_profile(snapshots, Snapshot(samples, cfg.length, out))
    facts = (
        f"length={cfg.length} from {len(snapshots)} files: the fit has an error of {residual:.2%}"
    )
    if residual > MAX_RESIDUAL:
        raise UserError(
            f"{facts}, and at most {MAX_RESIDUAL:.0%} is accepted; use a length nearer to one of "
            f"{LENGTHS}, or train with a larger ema.snapshots."
        )

    # Sum the snapshots, each times its number, in fp64; memory holds one snapshot at a time.
    sums: dict[str, Tensor] = {}
    progress = Progress(len(snapshots), "snapshots", lasting=False)
    for snapshot, number in zip(snapshots, numbers.tolist(), strict=True):
        for name, tensor in read_tensors(snapshot.file).items():
            sums[name] = sums.get(name, 0.0) + number * tensor.double()
        progress.advance(1)
    progress.close()
    tensors = {name: total.float() for name, total in sums.items()}
    if not all(total.isfinite().all() for total in tensors.values()):
        raise UserError(f"run_dir={cfg.run_dir}: the sum of its snapshots is not finite.")
    header = json.dumps(asdict(read_description(snapshots[-1].file)))
    write_average(out, tensors, {METADATA_KEY: header})
    print(f"{out}: {facts}", flush=True)
    return out


if __name__ == "__main__":
    run_command(average, AverageConfig, __doc__)
