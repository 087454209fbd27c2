"""Words of small runs, and what their folders hold in the end: state, metrics, checkpoints."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.distributed.ranks import Ranks
from common.files import read_object, write_json
from common.trees import flatten
from training.checkpoint.files import assemble_state
from training.checkpoint.load import find_damage, list_complete, read_state_file
from training.state import LAYOUTS

FOUR_STEPS = [
    "runtime=eager",
    "total_samples=48",
    "batch_size=12",
    "log_every=1",
    "schedule.kind=constant",
    "schedule.warmup_samples=0",
    "deterministic=true",
    "runtime.parallel.timeout_minutes=10",
]
TWELVE_STEPS = [
    "runtime=eager",
    "deterministic=true",
    "total_samples=96",
    "batch_size=8",
    "log_every=3",
    "eval_every=4",
    "save_every=2",
    "keep_checkpoints=2",
    "model.drop_path=0.2",
    "guards.spike_sigmas=6",
    "guards.spike_window=8",
]
"""Six checkpoints of every kind of state: moments, averages, generators, windows of norms and
metrics."""
TIMING = (
    "train_seconds",
    "samples_per_s",
    "tokens_per_s",
    "model_tflops",
    "data_wait",
    "save_stall_s",
    "save_s",
)


class Outcome(NamedTuple):
    """The part of a run that no interruption may change."""

    state: str
    """Hash of every tensor and counter of the last checkpoint."""
    metrics: list[dict[str, Any]]


def read_outcome(folder: Path) -> Outcome:
    last = list_complete(folder / "checkpoints")[-1]
    described = read_state_file(last)
    counters = [described["counters"], described["loader"], described["window"]]
    digest = hashlib.sha256(json.dumps(counters).encode())
    for rank in range(described["world_size"]):
        state = assemble_state(last, described, LAYOUTS, Ranks(rank, described["world_size"], rank))
        for name, leaf in sorted(flatten(state).items()):
            if isinstance(leaf, torch.Tensor):
                content = leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                digest.update(name.encode() + content)
    metrics = [
        {key: value for key, value in line.items() if key not in TIMING}
        for line in read_lines(folder)
    ]
    return Outcome(digest.hexdigest(), metrics)


def are_equal(tensors: Any, others: Any) -> bool:
    """Whether tensors, in a row or by name, have the same bits."""
    if isinstance(tensors, Mapping):
        return tensors.keys() == others.keys() and all(
            torch.equal(tensor, others[name]) for name, tensor in tensors.items()
        )
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, which must be strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def read_columns(folder: Path, *names: str) -> list[list[Any]]:
    return [[line.get(name) for name in names] for line in read_lines(folder)]


def assert_same_metrics(folder: Path, expected: Path, *names: str, rtol: float = 2e-5) -> None:
    """Rounding differs: the processes take the sum over a batch in another order."""
    columns = names or ("loss", "grad_norm")
    rows, wanted = (
        torch.tensor(read_columns(run, *columns), dtype=torch.float64) for run in (folder, expected)
    )
    torch.testing.assert_close(rows, wanted, rtol=rtol, atol=0.0)


def list_checkpoints(folder: Path) -> list[str]:
    """Names of the complete checkpoints of a run, oldest first."""
    return [checkpoint.name for checkpoint in list_complete(folder / "checkpoints")]


def copy_until(run: Path, folder: Path, step: int) -> Path:
    """Copies a run without the checkpoints after `step` and without its summary: what a kill
    leaves."""
    shutil.copytree(run, folder)
    (folder / "summary.json").unlink()
    for name in list_checkpoints(folder):
        if int(name.removeprefix("step-")) > step:
            shutil.rmtree(folder / "checkpoints" / name)
    return folder


def seal_checkpoint(folder: Path) -> None:
    """Makes the sizes and hashes of a checkpoint's manifest those of its files."""
    file = folder / "manifest.json"
    manifest = read_object(file)
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        manifest["files"][name] = {"bytes": len(content), "sha256": sha256}
    write_json(file, manifest)


def assert_newest_loads(folder: Path) -> None:
    """The newest complete checkpoint, if there is one, must verify at any moment."""
    if checkpoints := list_complete(folder / "checkpoints"):
        assert find_damage(checkpoints[-1]) is None


def assert_tidy(folder: Path) -> None:
    """A finished run must leave nothing but complete checkpoints in its folder of checkpoints."""
    names = {file.name for file in (folder / "checkpoints").iterdir()}
    assert names == set(list_checkpoints(folder))
