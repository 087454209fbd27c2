"""A trained model in one file: `model.safetensors` or `ema.safetensors` of a checkpoint, wherever it was copied to.

The header of the file says what the model is and what its latents are, so sampling needs nothing else of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from data.loader import LatentSpec
from models.autoencoders import Autoencoder
from models.denoiser import Denoiser
from training.config.build import build
from training.config.extensions import is_admitted

KEY = "fastlatent"
"""Of the header's metadata."""


def header(described: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Metadata for the header of the weights file `kind`, "model" or "ema"."""
    told = {name: described[name] for name in ("model", "spec", "step")}
    return {KEY: json.dumps({"weights": kind, **told})}


def told_by(file: Path) -> dict[str, Any]:
    """What the header of a weights file of ours says: `weights` ("ema" or "model"), `model`, `spec` and `step`."""
    with safe_open(file, "pt") as opened:
        return json.loads((opened.metadata() or {})[KEY])


def load_pretrained(file: Path, device: torch.device) -> tuple[Denoiser, LatentSpec]:
    """The model in evaluation mode, and the latents it knows; ValueError if the file does not describe its model.

    A file comes from anywhere, so its `_target_`s may only name classes of the package `models`, and of packages that
    this command has admitted itself.
    """
    try:
        told = told_by(file)
        node, spec = told["model"], LatentSpec(**told["spec"])
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}).") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} does not say which model it holds; name a file of a checkpoint of ours.") from error
    if outside := [name for name in targets(node) if not is_part_of_model(name)]:
        raise ValueError(
            f"{file} names {outside[0]} as part of its model, which is none of ours; do not trust this file. If "
            f"that code is your own, add extensions=[{str(outside[0]).partition('.')[0]}] to the command."
        )
    model = build_model(node, spec, device)
    try:
        model.load_state_dict(load_file(file))
    except RuntimeError as error:
        raise ValueError(f"{file} does not fit the model that it describes: {error}") from error
    return model.eval(), spec


def is_part_of_model(target: Any) -> bool:
    return str(target).startswith("models.") or is_admitted(target)


def targets(node: Any) -> Iterator[Any]:
    """Every `_target_` in a configuration tree."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from [value] if key == "_target_" else targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from targets(value)


def build_model(node: Mapping[str, Any], spec: LatentSpec, device: torch.device) -> Denoiser:
    """Builds the denoiser for `spec` on `device`, initialised."""
    model = build_on_meta(node, spec).to_empty(device=device)
    model.init_weights()
    return model


def build_on_meta(node: Mapping[str, Any], spec: LatentSpec) -> Denoiser:
    """Builds the denoiser for `spec` on the meta device, which takes no memory: it has shapes and no values."""
    shape = {name: getattr(spec, name) for name in ("channels", "height", "width", "num_classes")}
    with torch.device("meta"):
        return build(node, "model", kind=nn.Module, **shape)


def build_autoencoder(spec: LatentSpec, device: torch.device, path: str | None = None) -> Autoencoder:
    """The autoencoder that made the latents, or the same one at `path`; ValueError if its weights are others."""
    node = spec.encoder if path is None else spec.encoder | {"path": path}
    named = list(targets(node))  # by whoever made the latents or the weights
    if len(named) != 1 or not is_part_of_model(named[0]):
        raise ValueError(f"the latents name {named} as their encoder, which is none; do not trust where they are from.")
    autoencoder = build(node, "encoder", kind=Autoencoder).to(device)
    if spec.encoder_sha256 not in (None, autoencoder.weights_sha256):
        raise ValueError(
            f"the encoder at {node.get('path')} has other weights than the one that made the latents "
            f"(sha256 {autoencoder.weights_sha256} instead of {spec.encoder_sha256}); restore it or encode again."
        )
    return autoencoder
