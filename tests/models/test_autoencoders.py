"""Autoencoders: what diffusers computes, from weights that fit exactly or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from encoding.images import decode_image
from models.autoencoders import WEIGHTS_FILE, DiffusersAutoencoder, PixelAutoencoder
from models.images import psnr
from tests.harness.sets import TINY, save_tiny_autoencoder

KINDS = sorted(TINY)
CHANNELS = {"AutoencoderKL": 2, "AutoencoderTiny": 4, "AutoencoderDC": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with random weights for each class. Read only."""
    folder = tmp_path_factory.mktemp("autoencoders")
    return {kind: save_tiny_autoencoder(kind, folder / kind) for kind in KINDS}


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """`folder(kind)` is a copy that a test may damage."""
    return lambda kind: Path(shutil.copytree(saved[kind], tmp_path / kind))


def images(count: int = 2, side: int = 16) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


# What is computed


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_types(saved: dict[str, Path], kind: str):
    autoencoder = DiffusersAutoencoder(str(saved[kind]))
    mean, std = autoencoder.encode(images())
    assert mean.shape == (2, CHANNELS[kind], 8, 8)
    assert mean.dtype == torch.float32
    if kind == "AutoencoderKL":
        assert std is not None
        assert std.shape == mean.shape
        assert std.min() > 0
    else:
        assert std is None
    decoded = autoencoder.decode(mean)
    assert decoded.shape == (2, 3, 16, 16)
    assert decoded.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_diffusers(saved: dict[str, Path], kind: str):
    ours = DiffusersAutoencoder(str(saved[kind]))
    theirs = getattr(diffusers, kind).from_pretrained(saved[kind]).eval().requires_grad_(False)
    mean, std = ours.encode(images())
    with torch.no_grad():
        encoded = theirs.encode(images())
        if kind == "AutoencoderKL":
            assert torch.equal(std, encoded.latent_dist.std)
        expected = {
            "AutoencoderKL": lambda: encoded.latent_dist.mode(),
            "AutoencoderTiny": lambda: encoded.latents,
            "AutoencoderDC": lambda: encoded.latent,
        }[kind]()
        assert torch.equal(mean, expected)
        assert torch.equal(ours.decode(mean), theirs.decode(expected).sample)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_and_described(saved: dict[str, Path], kind: str):
    autoencoder = DiffusersAutoencoder(str(saved[kind]))
    assert not any(module.training for module in autoencoder.vae.modules())
    assert not any(p.requires_grad for p in autoencoder.parameters())
    assert autoencoder.kind == kind
    assert autoencoder.scaling_factor == (0.5 if kind == "AutoencoderKL" else 1.0)
    assert (
        autoencoder.shift_factor
        == {"AutoencoderKL": 0.25, "AutoencoderTiny": 0.0, "AutoencoderDC": None}[kind]
    )
    assert (
        autoencoder.weights_sha256
        == hashlib.sha256((saved[kind] / WEIGHTS_FILE).read_bytes()).hexdigest()
    )


def test_half_precision_weights_compute_in_fp32(
    saved: dict[str, Path], folder: Callable[[str], Path]
):
    half = folder("AutoencoderKL")
    edit_tensors(half, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    mean, _ = DiffusersAutoencoder(str(half)).encode(images())
    exact, _ = DiffusersAutoencoder(str(saved["AutoencoderKL"])).encode(images())
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, exact, atol=1e-2, rtol=1e-2)


def test_a_subfolder_is_found(saved: dict[str, Path]):
    parent = saved["AutoencoderKL"].parent
    autoencoder = DiffusersAutoencoder(str(parent), subfolder="AutoencoderDC")
    assert autoencoder.kind == "AutoencoderDC"


def test_pixels_are_their_own_latents():
    pixels = PixelAutoencoder()
    assert pixels.encode(images())[1] is None
    assert torch.equal(pixels.decode(pixels.encode(images())[0]), images())
    assert pixels.decode(torch.zeros(2, 4, 8, 8)).shape == (2, 1, 8, 8)


# Refusals


def refusal(path: Path | str, **arguments: str) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        DiffusersAutoencoder(str(path), **arguments)
    assert Path(caught.traceback[-1].path).parent.name in ("models", "common"), (
        "a library's own message, not ours"
    )
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tensor_is_refused(folder: Callable[[str], Path], kind: str):
    broken = folder(kind)
    names = sorted(load_file(broken / WEIGHTS_FILE))
    edit_tensors(broken, lambda tensors: tensors.pop(names[3]))
    message = refusal(broken)
    assert f"{broken / WEIGHTS_FILE} does not fit {kind}" in message
    assert names[3] in message


@pytest.mark.parametrize("kind", KINDS)
def test_an_extra_tensor_is_refused(folder: Callable[[str], Path], kind: str):
    broken = folder(kind)
    edit_tensors(broken, lambda tensors: tensors.update({"encoder.junk.weight": torch.zeros(2)}))
    message = refusal(broken)
    assert f"{broken / WEIGHTS_FILE} does not fit {kind}" in message
    assert "encoder.junk.weight" in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_shape_is_refused(folder: Callable[[str], Path], kind: str):
    broken = folder(kind)
    name = sorted(load_file(broken / WEIGHTS_FILE))[3]
    edit_tensors(broken, lambda tensors: tensors.update({name: torch.zeros(3)}))
    message = refusal(broken)
    assert f"{broken / WEIGHTS_FILE} does not fit {kind}" in message
    assert name in message


def test_pickled_weights_are_not_read(folder: Callable[[str], Path]):
    broken = folder("AutoencoderKL")
    torch.save(load_file(broken / WEIGHTS_FILE), broken / "diffusion_pytorch_model.bin")
    (broken / WEIGHTS_FILE).unlink()
    message = refusal(broken)
    assert f"encoder.path={broken}" in message
    assert f"{broken / WEIGHTS_FILE} does not exist" in message


def test_truncated_weights_are_refused(folder: Callable[[str], Path]):
    broken = folder("AutoencoderKL")
    content = (broken / WEIGHTS_FILE).read_bytes()
    (broken / WEIGHTS_FILE).write_bytes(content[: len(content) // 2])
    message = refusal(broken)
    assert str(broken / WEIGHTS_FILE) in message
    assert "damaged" in message


def test_a_broken_config_is_refused(folder: Callable[[str], Path]):
    broken = folder("AutoencoderKL")
    (broken / "config.json").write_text("{")
    assert f"{broken / 'config.json'} cannot be read as JSON" in refusal(broken)


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "os.system", None])
def test_an_unknown_class_is_refused(folder: Callable[[str], Path], name: str | None):
    broken = folder("AutoencoderKL")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"_class_name": name}))
    message = refusal(broken)
    assert f"encoder.path={broken}" in message
    assert f"class {name} is not supported" in message
    assert "AutoencoderKL" in message


@pytest.mark.parametrize(
    "path", ["{tmp_path}/nowhere", "./nowhere", "~/no/where", "nowhere", "a/b/c"]
)
def test_a_path_that_is_nowhere_is_refused(tmp_path: Path, path: str):
    path = path.format(tmp_path=tmp_path)
    assert f"encoder.path={path} is neither an existing folder nor a hub id" in refusal(path)


def test_a_hub_id_without_network_is_refused(monkeypatch: pytest.MonkeyPatch):
    def no_network(*_: object, **__: object) -> str:
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    message = refusal("owner/name")
    assert "encoder.path=owner/name" in message
    assert "ConnectionError" in message
    assert "give a local folder" in message


def test_a_missing_subfolder_is_refused(saved: dict[str, Path]):
    assert "nowhere/config.json does not exist" in refusal(
        saved["AutoencoderKL"], subfolder="nowhere"
    )


# The real thing


def four_photos(assets: Path) -> Tensor:
    files = sorted((assets / "images").rglob("*.jpg"))
    chosen = files[:: len(files) // 4][:4]
    return (
        torch.stack([decode_image(file.read_bytes(), 128) for file in chosen]).float() / 127.5 - 1.0
    )


def test_taef2_reconstructs_photos_and_plain_diffusers_does_not(assets: Path):
    photos = four_photos(assets)
    folder = assets / "vae" / "taef2"
    ours = DiffusersAutoencoder(str(folder))
    latents, std = ours.encode(photos)
    assert std is None
    assert latents.shape[:2] == (4, 32)
    quality = psnr(ours.decode(latents), photos)
    assert quality > 24.0

    # diffusers drops the middle blocks' global branch without an error, only with a log line.
    plain = diffusers.AutoencoderTiny.from_pretrained(folder).eval()
    with torch.no_grad():
        assert psnr(plain.decode(plain.encode(photos).latents).sample, photos) < quality - 5.0


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_taef2_weights_must_fit_too(assets: Path, tmp_path: Path, damage: str):
    source = assets / "vae" / "taef2"
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / WEIGHTS_FILE)
    name = next(name for name in tensors if ".pool.3." in name)
    if damage == "missing":
        del tensors[name]
    else:
        tensors |= {f"{name}.junk" if damage == "extra" else name: torch.zeros(3)}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    message = refusal(tmp_path)
    assert f"{tmp_path / WEIGHTS_FILE} does not fit AutoencoderTiny" in message
    assert name in message
