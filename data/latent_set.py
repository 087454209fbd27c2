"""Opening a latent set: its manifest, held against what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.loader import LatentSpec
from data.manifest import Manifest, read_manifest
from data.source import Source, open_source


def open_set(
    group: str,
    path: str | None,
    normalisation: str,
    encoder: str | None,
    latent_scale: float | None,
    **remote: Any,
) -> tuple[Source, Manifest, LatentSpec]:
    """Source, manifest and spec of the set at `path`, for `data=<group>`; ValueError if it is not what was expected.

    `encoder` and `latent_scale` are expectations, None for none; `remote`: see `open_source`.
    """
    if path is None:
        raise ValueError(
            f"data={group} needs data.path=<folder of latents>; make one with "
            f"`python precompute_latents.py source=<images> out=<folder>`, or use data=digits."
        )
    source = open_source(path, **remote)
    manifest = read_manifest(source)
    check_expectations(manifest, source, encoder, latent_scale)
    return source, manifest, spec_of(manifest, source, normalisation)


def check_expectations(manifest: Manifest, source: Source, encoder: str | None, latent_scale: float | None) -> None:
    made_with = str(manifest.encoder.get("path", manifest.encoder.get("_target_")))
    if encoder is not None and made_with not in (encoder, str(Path(encoder).expanduser().resolve())):
        raise ValueError(f"data.encoder={encoder}, but {source} was encoded with {made_with}; change one of them.")
    if latent_scale is not None and latent_scale != manifest.scaling_factor:
        raise ValueError(
            f"data.latent_scale={latent_scale}, but the encoder of {source} has {manifest.scaling_factor}; "
            f"change one of them."
        )


def spec_of(manifest: Manifest, source: Source, normalisation: str) -> LatentSpec:
    """The spec of the training split under the chosen normalisation: (z - mean) / std per channel."""
    if normalisation not in ("channel", "scale_shift"):
        raise ValueError(f"data.normalisation={normalisation} is unknown; choose channel or scale_shift.")
    mean, std = manifest.mean, manifest.std
    if normalisation == "scale_shift":
        if manifest.scaling_factor is None:
            raise ValueError(
                f"data.normalisation=scale_shift, but the encoder of {source} has no scaling factor; use channel."
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
