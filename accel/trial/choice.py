"""Asks for the proof of the fused kernels that a stack requests, and settles their techniques."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.stack import AccelerationStack
from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.fused_kernels import FusedKernel
from accel.trial.proof import Question, prove


def choose_kernels(
    stack: AccelerationStack,
    model: nn.Module,
    forward: Callable[[], object],
    samples: int,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Decides which fused kernels this run uses on its device (accel/trial/proof.py). Returns the
    dict to write to kernels.json in the run's `folder`; {} if no kernel was requested.

    `forward()` runs the unchanged model on two samples; `samples` is the number of samples in a
    micro-batch. Call this before `on_model`. Raises UserError if a kernel that was requested with
    `true` fails its parity test, under on_unavailable=error; otherwise the kernel stays off.
    """
    kernels = [
        t for t in stack.techniques if isinstance(t, FusedKernel) and t.asks_for_proof(model)
    ]
    if not kernels:
        return {}

    acting = [t for t in stack.techniques if t.changes_kernels]
    question = Question(
        requested={t.key: t.value for t in kernels},
        runtime={name: value for t in acting for name, value in t.settings.items()},
        samples=samples,
        device=stack.device,
        deterministic=stack.deterministic,
        captured=bool(stack.values.get(CudaGraph.key)),
        change_times_only={
            name for t in acting if t.changes_kernels == "time" for name in t.settings
        },
    )
    with stack.autocast(), torch.no_grad():
        proofs, record = prove(question, model, forward, folder)

    for technique in kernels:
        technique.settle(proofs[technique.key])
    stack.refuse(
        [
            f"runtime.{key}=true ({proof.why})"
            for key, proof in proofs.items()
            if stack.requested[key] is True and not proof.on
        ]
    )
    return record
