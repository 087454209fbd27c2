"""Formats metrics for the terminal: a line at each log step, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.goodput import told as shares


def log_line(metrics: Mapping[str, Any], left: str) -> str:
    """One line of the figures that matter while a run goes on, and the time that is left."""
    parts = [f"step {metrics['step']:>6}", f"loss {metrics['loss']:.4f}"]
    if "eval_loss" in metrics:
        parts.append(f"eval_loss {metrics['eval_loss']:.4f}")
    shown = [name for name in metrics if name.startswith("fd_")] or [
        name for name in metrics if name.startswith("kd_")
    ]
    parts += [f"{name} {metrics[name]:.4g}" for name in shown]
    parts += [f"lr {metrics['lr']:.2e}", f"{metrics['samples_per_s']:.1f} samples/s"]
    if metrics.get("mfu") is not None:
        parts.append(f"mfu {metrics['mfu']:.1%}")
    parts.append(f"data wait {metrics['data_wait']:.1%}")
    if metrics.get("skipped"):
        parts.append(
            f"{metrics['skipped']} steps skipped: their gradients were not finite or spikes"
        )
    if metrics.get("skipped_data"):
        parts.append(f"others stand in for {metrics['skipped_data']} samples of damaged data")
    if metrics.get("backed_off"):
        parts.append(f"{metrics['backed_off']} steps spent on finding fp16's loss scale")
    return "  ".join([*parts, left])


def summary_table(summary: Mapping[str, Any]) -> str:
    """The summary as aligned lines, the ledger left out (it was printed at the start)."""
    damaged = summary.get("skipped_data") or {}
    names = ", ".join([*damaged][:5]) + ", …" * (len(damaged) > 5)
    told = (
        f"others stood in for {sum(damaged.values())} samples of {len(damaged)} damaged blocks: "
        f"{names}"
    )
    shown = {k: v for k, v in summary.items() if k != "ledger" and v is not None}
    shown |= {"skipped_data": told if damaged else "none"}
    shown |= {"time": shares(summary["time"])} if "time" in shown else {}
    width = max(len(k) for k in shown)
    return "\n".join(
        f"  {k.ljust(width)}  {v:.6g}" if isinstance(v, float) else f"  {k.ljust(width)}  {v}"
        for k, v in shown.items()
    )
