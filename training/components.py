"""Parts of a run for those who need no training: its loader and its choice of kernels."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import torch

from accel.stack import AccelerationStack
from data.blocks import open_set
from data.loader import LatentLoader, LatentSpec
from data.resident import bytes_of_a_sample
from models.denoiser import Denoiser
from training.config.build import build
from training.distributed.ranks import SINGLE, Ranks
from training.goodput import CLOCK


def spine(node: Any) -> dict[str, Any]:
    """A typed node as keyword arguments, choices as plain strings."""
    return {k: v.value if isinstance(v, Enum) else v for k, v in vars(node).items()}


def build_loader(
    node: dict[str, Any], seed: int, micro_batch: int, device: torch.device, ranks: Ranks = SINGLE
) -> LatentLoader:
    """The loader of this process's share: `micro_batch` samples of each micro-batch."""
    shared = {"seed": seed, "device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    return build(node, "data", batch_size=micro_batch, **shared)


def latents_of(node: dict[str, Any], seed: int, memory: float) -> tuple[LatentSpec, float]:
    """The spec of the latents that `data` describes, read from as little of them as can be, and the
    bytes that they would take of a device with `memory` bytes."""
    device = torch.device("cpu")
    if "count" in node:  # made by a generator; all of it lies on the device
        spec = build_loader(node | {"count": 1}, seed, 1, device).spec
        return spec, 2.2 * node["count"] * spec.channels * spec.height * spec.width
    if node.get("path") is None or "normalisation" not in node:
        return build_loader(node, seed, 1, device).spec, 0.0
    expected: Any = {name: node.get(name) for name in ("encoder", "latent_scale")}
    spec, *splits = open_set("resident", node["path"], node["normalisation"], **expected)
    if "storage" not in node:
        return spec, 0.0
    whole = bytes_of_a_sample(splits[0], node["storage"]) * sum(split.count for split in splits)
    given = node.get("device_memory_gib")
    return spec, min(whole, memory / 2 if given is None else given * 2**30)


@CLOCK.spending("warm_up")
def prove_kernels(
    stack: AccelerationStack,
    model: Denoiser,
    spec: LatentSpec,
    samples: int,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Has the stack decide about fused kernels for micro-batches of `samples`; returns what the run
    has to keep."""
    device = model.pos_embed.device
    latents = torch.zeros(2, spec.channels, spec.height, spec.width, device=device)
    t = torch.full((2,), 0.5, device=device)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    return stack.prove_kernels(model, lambda: model(latents, t, labels), samples, folder)
