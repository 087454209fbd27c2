"""Builds what training and sampling feed a model with: the loader of its data. Says what of
texts the model reads, forecasts the memory that latents take, and tries fused kernels on inputs
of zeros."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel.stack import AccelerationStack
from accel.trial.kernels import choose_kernels
from common.clock import CLOCK
from common.config.build import build, check_arguments, resolve_target
from common.config.schema import TrainConfig
from common.distributed.ranks import SINGLE, Ranks
from data.loader import LatentLoader, LoaderArgs
from data.spec import LatentSpec
from models.denoiser import Denoiser


def build_loader(
    node: dict[str, Any],
    seed: int,
    micro_batch: int,
    device: torch.device,
    ranks: Ranks = SINGLE,
    text: str = "none",
) -> LatentLoader:
    """Builds the loader of this rank, whose batches have `micro_batch` samples each, and of their
    texts what `text` says (see `LoaderArgs`)."""
    place: dict[str, Any] = {"device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    if text != "none":
        place["text"] = text
    return build(node, "data", batch_size=micro_batch, seed=seed, **place)


def find_text_level(model: Mapping[str, Any]) -> str:
    """Returns what batches must carry of their texts for a model of this configuration: "none",
    "pooled" or "tokens"."""
    if model.get("conditioning", "class") == "class":
        return "none"
    return "tokens" if model.get("text_tokens") else "pooled"


def foresee_latents(cfg: TrainConfig, memory: float) -> tuple[LatentSpec, float]:
    """Returns the spec of a run's latent set, and the bytes that its latents, and the texts that
    the model reads, take on a device with `memory` bytes. If the loader's class cannot forecast
    both, builds a loader on the CPU for the spec, and returns 0 bytes."""
    kind = resolve_target(cfg.data.get("_target_", ""), "data")
    if issubclass(kind, LatentLoader):
        settings = check_arguments(kind, cfg.data, "data", LoaderArgs.__annotations__)
        level = find_text_level(cfg.model)
        settings |= {"text": level} if level != "none" else {}
        forecast = kind.foresee(memory, **settings)
        if forecast is not None:
            return forecast
    return build_loader(cfg.data, cfg.seed, 1, torch.device("cpu")).spec, 0.0


@CLOCK.count_as("warm_up")
def prove_kernels(
    stack: AccelerationStack, model: Denoiser, spec: LatentSpec, samples: int, folder: Path | None
) -> dict[str, Any]:
    """Tests and times the fused kernels that the stack requests on micro-batches of `samples`
    samples. Returns the chosen kernels and their measurements, which the run writes to kernels.json
    in its folder."""
    device = next(model.parameters()).device
    latents = torch.zeros(2, *spec.shape, device=device)
    t = torch.full((2,), 0.5, device=device)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    return choose_kernels(stack, model, lambda: model(latents, t, labels), samples, folder)
