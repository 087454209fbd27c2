"""Safetensors files whose header is other than their writer would make it."""

from __future__ import annotations

import json
import struct
from functools import cache
from typing import Any

from safetensors.torch import save

from data.spec import LatentSpec
from tests.harness.words import CPU
from training.checkpoint.files import METADATA_KEY, make_header
from training.weights.pretrained import build_model

DEEP = "DEEP"
"""Stands in a JSON tree for a list nested deeper than Python's own writer goes."""
PIXELS = {"_target_": "models.autoencoders.PixelAutoencoder"}
ON_A_HUB = {
    "_target_": "models.autoencoders.DiffusersAutoencoder",
    "path": "someone/some-vae",
    "revision": "main",
}
CONVOLUTION = "models.mixers.convolution.Convolution"


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).encode()


def read_header(payload: bytes) -> dict[str, Any]:
    size = struct.unpack("<Q", payload[:8])[0]
    return json.loads(payload[8 : 8 + size])


def with_header(payload: bytes, tree: Any) -> bytes:
    """The file with another header, whose length is right."""
    size = struct.unpack("<Q", payload[:8])[0]
    encoded = as_json(tree)
    return struct.pack("<Q", len(encoded)) + encoded + payload[8 + size :]


def read_description(payload: bytes) -> dict[str, Any]:
    """Model and latents that the header of a weights file describes."""
    return json.loads(read_header(payload)["__metadata__"][METADATA_KEY])


def with_description(payload: bytes, tree: Any) -> bytes:
    head = read_header(payload)
    head["__metadata__"] = {METADATA_KEY: as_json(tree).decode()}
    return with_header(payload, head)


@cache
def make_weights(mixer: str = CONVOLUTION, on_a_hub: bool = False, **arguments: int) -> bytes:
    """A weights file of a tiny model of three classes."""
    model: dict[str, Any] = {
        "_target_": "models.denoiser.Denoiser",
        "dim": 16,
        "depth": 2,
        "head_dim": 8,
        "patch_size": 2,
        "mixer": {"_target_": mixer, "_partial_": True, **arguments},
    }
    names = ["apple", "pear", "plum"]
    encoder = ON_A_HUB if on_a_hub else PIXELS
    spec = LatentSpec(1, 4, 4, 3, 9, names, [0.5], [2.0], encoder, None, "f")
    described = {"model": model, "spec": spec.as_dict(), "step": 4}
    tensors = build_model(model, spec, CPU).state_dict()
    return save(tensors, {"format": "pt", **make_header(described, "ema")})
