"""Formats the metrics and the summary of a run for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.clock import format_shares


def format_log_line(metrics: Mapping[str, Any], time_left: str) -> str:
    """Formats the main metrics and the remaining time as one line for the terminal."""
    parts = [f"step {metrics['step']:>6}", f"loss {metrics['loss']:.4f}"]
    if "eval_loss" in metrics:
        parts.append(f"eval_loss {metrics['eval_loss']:.4f}")
        if "best_eval_loss" in metrics and metrics["best_step"] < metrics["step"]:
            parts[-1] += f" (best {metrics['best_eval_loss']:.4f} at step {metrics['best_step']})"

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
    printed at its start, and the number of the format."""
    shown = {k: v for k, v in summary.items() if k not in ("ledger", "format") and v is not None}
    shown.setdefault("eval_loss", "none: no image is held out, or eval_every=0")
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
