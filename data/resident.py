"""Latents made by precompute_latents.py, all of them in the device's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from data.in_memory import InMemoryLatents, LatentTensors
from data.loader import LatentSpec
from data.manifest import Manifest, read_manifest
from data.shards import read_shard


class ResidentLatents(InMemoryLatents):
    """The latent set in folder `path`, verified shard by shard.

    `normalisation`: "channel" uses the mean and std that were measured per channel, "scale_shift" the autoencoder's own
    constants. `encoder` and `latent_scale` are expectations: a set made with another encoder or scale is refused.
    """

    def __init__(
        self,
        *,
        path: str | None,
        normalisation: Literal["channel", "scale_shift"] = "channel",
        encoder: str | None = None,
        latent_scale: float | None = None,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if path is None:
            raise ValueError(
                "data=resident needs data.path=<folder of latents>; make one with "
                "`python precompute_latents.py source=<images> out=<folder>`, or use data=digits."
            )
        folder = Path(path).expanduser()
        manifest = read_manifest(folder)
        check_expectations(manifest, folder, encoder, latent_scale)
        spec = spec_of(manifest, folder, normalisation)
        super().__init__(
            spec,
            read_split(manifest, folder, "train"),
            read_split(manifest, folder, "held_out"),
            batch_size=batch_size,
            seed=seed,
            device=device,
            rank=rank,
            world_size=world_size,
        )


def check_expectations(manifest: Manifest, folder: Path, encoder: str | None, latent_scale: float | None) -> None:
    made_with = str(manifest.encoder.get("path", manifest.encoder.get("_target_")))
    if encoder is not None and made_with not in (encoder, str(Path(encoder).expanduser().resolve())):
        raise ValueError(f"data.encoder={encoder}, but {folder} was encoded with {made_with}; change one of them.")
    if latent_scale is not None and latent_scale != manifest.scaling_factor:
        raise ValueError(
            f"data.latent_scale={latent_scale}, but the encoder of {folder} has {manifest.scaling_factor}; "
            f"change one of them."
        )


def spec_of(manifest: Manifest, folder: Path, normalisation: str) -> LatentSpec:
    """The spec of the training split under the chosen normalisation: (z - mean) / std per channel."""
    if normalisation not in ("channel", "scale_shift"):
        raise ValueError(f"data.normalisation={normalisation} is unknown; choose channel or scale_shift.")
    mean, std = manifest.mean, manifest.std
    if normalisation == "scale_shift":
        if manifest.scaling_factor is None:
            raise ValueError(
                f"data.normalisation=scale_shift, but the encoder of {folder} has no scaling factor; use channel."
            )
        mean = [manifest.shift_factor or 0.0] * manifest.channels
        std = [1.0 / manifest.scaling_factor] * manifest.channels
    return LatentSpec(
        channels=manifest.channels,
        height=manifest.height,
        width=manifest.width,
        num_classes=len(manifest.class_names),
        count=manifest.count,
        class_names=manifest.class_names,
        mean=mean,
        std=std,
        encoder=manifest.encoder,
        encoder_sha256=manifest.encoder_sha256,
        fingerprint=f"{manifest.fingerprint()}-{normalisation}",
    )


def read_split(manifest: Manifest, folder: Path, split: str) -> LatentTensors:
    """All shards of one split as tensors in the stored dtype; ValueError if counts do not add up."""
    parts = [read_shard(folder, shard) for shard in manifest.shards if shard.split == split]
    expected = manifest.count if split == "train" else manifest.held_out
    found = sum(len(part["labels"]) for part in parts)
    if found != expected:
        raise ValueError(
            f"{folder}: the {split} shards hold {found} samples, the manifest says {expected}; "
            f"run precompute_latents.py again to rebuild the manifest."
        )
    if not parts:
        shape = (0, manifest.channels, manifest.height, manifest.width)
        return LatentTensors(torch.zeros(shape), torch.zeros(0, dtype=torch.long))
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return LatentTensors(**joined)
