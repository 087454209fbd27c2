"""Parts of a run for those who need no training: its loader, its runtime keys, its choice of kernels."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import torch

from accel.stack import AccelerationStack
from data.loader import LatentLoader, LatentSpec
from models.denoiser import Denoiser
from training.config.build import build
from training.config.schema import RuntimeConfig
from training.process.ranks import SINGLE, Ranks


def spine(node: Any) -> dict[str, Any]:
    """A typed node as keyword arguments, choices as plain strings."""
    return {k: v.value if isinstance(v, Enum) else v for k, v in vars(node).items()}


def runtime_values(runtime: RuntimeConfig) -> dict[str, Any]:
    """The runtime keys by technique: those of `parallel` beside the others, its mode under the technique's name."""
    parallel = spine(runtime.parallel)
    return spine(runtime) | parallel | {"parallel": parallel["mode"]}


def build_loader(
    node: dict[str, Any], seed: int, micro_batch: int, device: torch.device, ranks: Ranks = SINGLE
) -> LatentLoader:
    """The loader of this process's share: `micro_batch` samples of each micro-batch."""
    shared = {"seed": seed, "device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    return build(node, "data", batch_size=micro_batch, **shared)


def prove_kernels(
    stack: AccelerationStack, model: Denoiser, spec: LatentSpec, samples: int, folder: Path | None = None
) -> dict[str, Any]:
    """Has the stack decide about fused kernels for micro-batches of `samples`; returns what the run has to keep."""
    device = model.pos_embed.device
    latents = torch.zeros(2, spec.channels, spec.height, spec.width, device=device)
    t, labels = torch.full((2,), 0.5, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    return stack.prove_kernels(model, lambda: model(latents, t, labels), samples, folder)
