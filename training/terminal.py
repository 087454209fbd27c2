"""Formats the metrics and the summary of a run for the terminal, and those of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import read_object
from training.goodput import READ_ERRORS, format_shares


def format_log_line(metrics: Mapping[str, Any], time_left: str) -> str:
    """Formats the main metrics and the remaining time as one line for the terminal."""
    parts = [f"step {metrics['step']:>6}", f"loss {metrics['loss']:.4f}"]
    if "eval_loss" in metrics:
        parts.append(f"eval_loss {metrics['eval_loss']:.4f}")

    # Show kernel distances only if there are no Fréchet distances, to keep the line short.
    for kind in ("fd_", "kd_"):
        distances = [f"{name} {metrics[name]:.4g}" for name in metrics if name.startswith(kind)]
        parts += distances
        if distances:
            break
    parts += [f"lr {metrics['lr']:.2e}", f"{metrics['samples_per_s']:.1f} samples/s"]
    for name in ("mfu", "gpu_busy"):
        if metrics.get(name) is not None:
            parts.append(f"{name} {metrics[name]:.1%}")
    parts.append(f"data wait {metrics['data_wait']:.1%}")

    # Show these counts only if they are above 0, because in a healthy run they stay 0.
    notes = {
        "skipped": "{} steps skipped: their gradients were not finite or spikes",
        "skipped_data": "{} samples of damaged data were replaced by others",
        "backed_off": "{} steps spent on finding fp16's loss scale",
    }
    parts += [note.format(metrics[name]) for name, note in notes.items() if metrics.get(name)]
    return "  ".join([*parts, time_left])


def format_summary(summary: Mapping[str, Any]) -> str:
    """Formats the summary as one line per value, aligned; leaves out the ledger, which the run
    printed at its start."""
    shown = {k: v for k, v in summary.items() if k != "ledger" and v is not None}
    if "time" in shown:
        shown["time"] = format_shares(shown["time"])

    damaged = summary.get("skipped_data") or {}
    shown["skipped_data"] = "none"
    if damaged:
        names = ", ".join([*damaged][:5]) + ", …" * (len(damaged) > 5)
        shown["skipped_data"] = (
            f"{sum(damaged.values())} samples of {len(damaged)} damaged blocks were replaced by "
            f"others: {names}"
        )
    width = max(map(len, shown))
    values = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in shown.items()}
    return "\n".join(f"  {k.ljust(width)}  {v}" for k, v in values.items())


def find_time(file: Path) -> float:
    """Returns a file's time of modification, in seconds of Unix time."""
    return file.stat().st_mtime


def describe_rehearsal(folder: Path, choices: Mapping[str, str], versions: object) -> str:
    """Describes the latest run, in `folder` or in runs/, of the experiment, model and runtime of
    `choices` with the same versions: its ledger and speed. Returns a warning if there is none."""
    chosen = {key: choices.get(key) for key in ("experiment", "model", "runtime")}
    experiment = chosen["experiment"]
    files = {f.resolve() for place in (folder, Path("runs")) for f in place.glob("*/summary.json")}
    for file in sorted(files, key=find_time, reverse=True):
        try:
            summary = read_object(file)
            environment = read_object(file.with_name("environment.json"))
            same = chosen.items() <= environment["choices"].items()
            rows = [
                f"    {k}: {row['requested']} -> {row['active']}"
                for k, row in summary["ledger"].items()
            ]
            rate = f"{summary['samples_per_s'] or 0.0:.1f} samples/s"
            if same and environment["versions"] == versions:
                head = f"latest {experiment} of this model and runtime: {file.parent}, {rate}"
                return "\n".join([head, *rows])
        except READ_ERRORS:
            continue  # skip a file that is no summary of a run

    return (
        f"warning: {folder} holds no {experiment} of model={chosen['model']} "
        f"runtime={chosen['runtime']} with these versions; a few minutes of "
        f"`experiment={experiment}` can save hours."
    )
