"""Autoencoders compute the same as diffusers, and refuse weights that do not fit."""

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.files import hash_file
from encoding.images import decode_image
from models.autoencoders import WEIGHTS_FILE, DiffusersAutoencoder, PixelAutoencoder
from models.images import psnr
from tests.harness.refusals import expect_refusal
from tests.harness.sets import TINY, save_tiny_autoencoder

KINDS = sorted(TINY)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with random weights for each class. Read only."""
    folder = tmp_path_factory.mktemp("autoencoders")
    return {kind: save_tiny_autoencoder(kind, folder / kind) for kind in KINDS}


@pytest.fixture
def folder(saved, tmp_path):
    """`folder(kind)` is a copy that a test may damage."""
    return lambda kind: Path(shutil.copytree(saved[kind], tmp_path / kind))


IMAGES = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0


def edit_tensors(folder, edit):
    tensors = load_file(folder / WEIGHTS_FILE)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


FACTORS = {
    "AutoencoderKL": (0.5, 0.25),
    "AutoencoderTiny": (1.0, 0.0),
    "AutoencoderDC": (1.0, None),
}
"""Scaling and shift of the latents of each class that has some."""


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_diffusers_frozen_and_described(saved, kind):
    ours = DiffusersAutoencoder(str(saved[kind].parent), subfolder=kind)
    theirs = getattr(diffusers, kind).from_pretrained(saved[kind]).eval().requires_grad_(False)
    # the statistics by which the model of FLUX.2 normalises stay out
    for buffer in ours.buffers():
        buffer.fill_(1e6)
    mean, std = ours.encode(IMAGES)
    # a video has its frames in the third axis
    video = (slice(None), slice(None), None) if "Qwen" in kind else ...
    encoded = theirs.encode(IMAGES[video])
    if "KL" in kind:
        expected = encoded.latent_dist.mode()
        assert std is not None
        assert torch.equal(std[video], encoded.latent_dist.std)
    else:
        expected = encoded.latents if kind == "AutoencoderTiny" else encoded.latent
        assert std is None
    assert mean.dtype == torch.float32
    assert torch.equal(mean[video], expected)
    assert torch.equal(ours.decode(mean)[video], theirs.decode(expected).sample)
    assert not any(p.requires_grad for p in ours.parameters())
    assert (ours.scaling_factor, ours.shift_factor) == FACTORS.get(kind, (None, None))
    assert ours.weights_sha256 == hash_file(saved[kind] / WEIGHTS_FILE)


def test_half_precision_weights_compute_in_fp32(folder):
    half = folder("AutoencoderKL")
    edit_tensors(half, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    kinds = {parameter.dtype for parameter in DiffusersAutoencoder(str(half)).parameters()}
    assert kinds == {torch.float32}


def test_pixels_are_their_own_latents():
    pixels = PixelAutoencoder()
    latents, std = pixels.encode(IMAGES)
    assert std is None
    assert torch.equal(pixels.decode(latents), IMAGES)
    assert pixels.decode(torch.zeros(2, 4, 8, 8)).shape == (2, 1, 8, 8)


def read_refusal(path, **arguments):
    """Returns the message of our refusal; a library's own error fails the test."""
    with expect_refusal(".") as caught:
        DiffusersAutoencoder(str(path), **arguments)
    return str(caught.value)


DAMAGES = {
    "missing": lambda tensors, name: tensors.pop(name),
    "extra": lambda tensors, name: tensors.update({f"{name}.junk": torch.zeros(2)}),
    "shape": lambda tensors, name: tensors.update({name: torch.zeros(3)}),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_do_not_fit_are_refused(folder, kind, damage):
    broken = folder(kind)
    name = sorted(load_file(broken / WEIGHTS_FILE))[3]
    edit_tensors(broken, lambda tensors: DAMAGES[damage](tensors, name))
    message = read_refusal(broken)
    assert f"{broken / WEIGHTS_FILE} does not fit {kind}" in message
    assert name in message


REFUSED = {
    "pickled": (
        lambda broken: (broken / WEIGHTS_FILE).rename(broken / "diffusion_pytorch_model.bin"),
        f"{WEIGHTS_FILE} does not exist",
    ),
    "truncated": (lambda broken: os.truncate(broken / WEIGHTS_FILE, 1000), "damaged"),
    "no JSON": (
        lambda broken: (broken / "config.json").write_text("{"),
        "config.json cannot be read as JSON",
    ),
    "another class": (
        lambda broken: (broken / "config.json").write_text('{"_class_name": "os.system"}'),
        "class os.system is not supported",
    ),
}


@pytest.mark.parametrize(("damage", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_broken_folder_is_refused(damage, sentence, folder):
    broken = folder("AutoencoderKL")
    damage(broken)
    message = read_refusal(broken)
    assert str(broken) in message
    assert sentence in message


def test_what_is_no_folder_of_an_autoencoder_is_refused(saved, tmp_path):
    for path in ("./nowhere", "a/b/c"):
        sentence = f"encoder.path={path} is neither an existing folder nor a hub id"
        assert sentence in read_refusal(path)
    folder = saved["AutoencoderKL"]
    assert "nowhere/config.json does not exist" in read_refusal(folder, subfolder="nowhere")
    shutil.copytree(folder, tmp_path / "vae")
    assert "take encoder.subfolder=vae" in read_refusal(tmp_path)


def test_a_hub_id_without_network_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=ConnectionError))
    message = read_refusal("owner/name")
    assert message.startswith("encoder.path=owner/name")
    assert "ConnectionError" in message


def test_taef2_reconstructs_photos(assets):
    files = sorted((assets / "images").rglob("*.jpg"))
    pixels = [decode_image(file.read_bytes(), 128) for file in files[:: len(files) // 4][:4]]
    photos = torch.stack(pixels).float() / 127.5 - 1.0
    ours = DiffusersAutoencoder(str(assets / "vae" / "taef2"))
    latents, _ = ours.encode(photos)
    assert latents.shape[:2] == (4, 32)
    assert psnr(ours.decode(latents), photos) > 24.0
