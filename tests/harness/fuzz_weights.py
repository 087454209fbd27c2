"""Subject of the fuzzer: a file of weights, from which a run is sampled or started."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save

from data.loader import LatentSpec
from models.images import to_uint8
from sampling.load import draw_latents, find_class_numbers
from tests.harness.fuzz import Say, as_json, at, mutate_bytes, mutate_tree, places
from tests.harness.fuzz_sets import mutate_header, mutate_tensors
from tests.harness.words import CPU
from training.checkpoint.files import METADATA_KEY, make_header
from training.config.schema import SamplingConfig
from training.weights.pretrained import (
    PIN,
    build_autoencoder,
    build_model,
    fit_weights,
    load_pretrained,
    read_description,
)

MIXERS: dict[str, dict[str, Any]] = {
    "models.mixers.attention.Attention": {},
    "models.mixers.convolution.Convolution": {},
    "models.mixers.zigzag_ssd.ZigzagSSD": {"expand": 2, "state_dim": 8},
    "models.mixers.selective_scan.SelectiveScan": {"expand": 2, "state_dim": 8},
}
PIXELS = {"_target_": "models.autoencoders.PixelAutoencoder"}
ON_A_HUB = {
    "_target_": "models.autoencoders.DiffusersAutoencoder",
    "path": "someone/some-vae",
    "revision": "main",
}
SIZES = (0, -3, 7, 10**6, 10**9, 2**40, 2**62, 10**30)


def node_of(mixer: str) -> dict[str, Any]:
    shape = {
        "dim": 16,
        "depth": 2,
        "head_dim": 8,
        "patch_size": 2,
        "mlp_ratio": 2.0,
        "drop_path": 0.0,
    }
    mixing = {"_target_": mixer, "_partial_": True, **MIXERS[mixer]}
    return {"_target_": "models.denoiser.Denoiser", **shape, "mixer": mixing}


def spec_with(names: list[str], encoder: dict[str, Any], sha256: str | None = None) -> LatentSpec:
    return LatentSpec(1, 4, 4, len(names), 9, names, [0.5], [2.0], encoder, sha256, "f", "e")


@cache
def good_file(mixer: str, encoder: str) -> bytes:
    spec = spec_with(["apple", "pear", "plum"], {"pixels": PIXELS, "hub": ON_A_HUB}[encoder])
    model = build_model(node_of(mixer), spec, CPU)
    described = {"model": node_of(mixer), "spec": spec.as_dict(), "step": 4}
    return save(model.state_dict(), {"format": "pt", **make_header(described, "ema")})


def described_otherwise(payload: bytes, text: bytes) -> bytes:
    """The file with another description in its header, whose length is made right."""
    size = struct.unpack("<Q", payload[:8])[0]
    head = json.loads(payload[8 : 8 + size])
    head.setdefault("__metadata__", {})[METADATA_KEY] = text.decode(errors="surrogatepass")
    encoded = json.dumps(head).encode()
    return struct.pack("<Q", len(encoded)) + encoded + payload[8 + size :]


def description_of(payload: bytes) -> Any:
    size = struct.unpack("<Q", payload[:8])[0]
    return json.loads(json.loads(payload[8 : 8 + size])["__metadata__"][METADATA_KEY])


def mutate_description(rng: Random, payload: bytes) -> tuple[bytes, str]:
    """Changes what the header says of the model and its latents: anywhere, or a size to one that
    nothing has."""
    told = description_of(payload)
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        numbers = [path for path in places(told) if isinstance(at(told, path), int | float)]
        if numbers and rng.random() < 0.4:
            path = rng.choice(numbers)
            at(told, path[:-1])[path[-1]] = rng.choice(SIZES)
            words.append(f"{'.'.join(map(str, path))} = {at(told, path)}")
        else:
            words.append(mutate_tree(rng, told))
    text = as_json(told)
    if rng.random() < 0.15:
        text, more = mutate_bytes(rng, text)
        words.append(more)
        text = text.decode(errors="replace").encode()
    return described_otherwise(payload, text), "; ".join(words)


def mutate_content(rng: Random, payload: bytes) -> tuple[bytes, str]:
    told = as_json(description_of(payload))
    content, words = mutate_tensors(rng, payload)
    return described_otherwise(content, told), words


def weights(rng: Random, folder: Path, say: Say) -> None:
    """A weights file: its bytes, its header, its tensors, or what its header says of the model."""
    file = folder / "ema.safetensors"
    mixer = rng.choice(list(MIXERS))
    payload = good_file(mixer, rng.choice(("pixels", "pixels", "hub")))
    how = rng.choice((mutate_bytes, mutate_header, mutate_content, *[mutate_description] * 5))
    payload, words = how(rng, payload)
    say(f"{mixer.rpartition('.')[2]}: {words}")
    file.write_bytes(payload)
    asked: list[Any] = []

    def ask(*_: Any, revision: str | None, **__: Any) -> str:
        asked.append(revision)
        raise OSError("there is no network")

    sha256 = None
    with patch("huggingface_hub.snapshot_download", ask):
        if rng.random() < 0.25:
            spec = spec_with(["plum", "kiwi"], PIXELS)
            model = build_model(node_of(mixer), spec, CPU)
            tensors, _ = fit_weights(model, spec, file)
            model.load_state_dict(tensors)
            return
        model, spec = load_pretrained(file, CPU)
        assert all(tensor.device == CPU for tensor in model.state_dict().values())
        read_description(file)
        try:
            autoencoder = build_autoencoder(spec, CPU)
        finally:
            sha256 = spec.encoder_sha256
            assert all(
                PIN.fullmatch(pin or "") or PIN.fullmatch(sha256 or "") for pin in asked
            ), asked
        labels = torch.tensor(find_class_numbers([0, *spec.names[-1:]], spec)[-1:])
        latents = draw_latents(
            model, spec, labels, torch.zeros(1).long(), 0, SamplingConfig(steps=2, guidance=1.0)
        )
        to_uint8(autoencoder.decode(latents))
