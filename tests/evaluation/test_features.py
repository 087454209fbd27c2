"""Feature spaces of images agree with their definitions, and refuse files that are none."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import interpolate

from common.config import build
from common.config.schema import FdConfig
from common.files import hash_file
from evaluation import features
from evaluation.features import (
    Dinov2Features,
    EncoderFeatures,
    InceptionFeatures,
    RandomFeatures,
    build_features,
)
from models.autoencoders import DiffusersAutoencoder, PixelAutoencoder
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_tiny_autoencoder


def build_spaces(*names, **keys):
    """Builds feature spaces by name, for grey images whose pixels are their latents."""
    cfg = FdConfig(features=[*names], **keys)
    return build_features(cfg, PixelAutoencoder(), torch.zeros(1, 1, 8, 8))


def make_images(count=3, side=16):
    """Images with smooth and rough parts that differ from channel to channel; nothing is
    random."""
    i = torch.arange(count * side * side * 3)
    pixels = (i * 7 + i % 11 * 13 + i // 97 * 3) % 256
    return pixels.to(torch.uint8).view(count, side, side, 3)


@pytest.fixture
def dinov2(tmp_path):
    """The folder of a tiny DINOv2 with random weights."""
    reason = "pip install 'fastlatent[evaluation]'"
    transformers = pytest.importorskip("transformers", reason=reason)
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.Dinov2Model(config).save_pretrained(tmp_path / "dino")
    return tmp_path / "dino"


def check_space(space, images):
    """Checks what holds for every space, and returns the features."""
    rows = space(images)
    assert rows.shape == (len(images), space.dim)
    assert rows.dtype == torch.float32
    assert not rows.requires_grad
    assert rows.std(0).max() > 0
    alone = torch.cat([space(image[None]) for image in images])
    torch.testing.assert_close(alone, rows, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(space(images), rows)
    about = space.describe()
    assert json.loads(json.dumps(about)) == about
    assert (about["name"], about["dim"]) == (space.name, space.dim)
    return rows


def test_features_are_exact_whatever_the_process_has_set(monkeypatch):
    actual = []

    def read_flags():
        cudnn = torch.backends.cudnn
        precision = torch.get_float32_matmul_precision()
        flags = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark)
        return precision, *flags, torch.is_grad_enabled()

    class WatchedFeatures(RandomFeatures):
        def forward(self, images):
            actual.append(read_flags())
            return super().forward(images)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.set_float32_matmul_precision("high")
    before = read_flags()
    WatchedFeatures()(make_images())
    assert actual == [("highest", False, True, False, False)]
    assert read_flags() == before == ("high", True, False, True, True)


def test_random_features_never_change():
    """If these figures change, the network has changed: increase `version`."""
    space = RandomFeatures()
    images = make_images(side=100)
    state = torch.get_rng_state()
    rows = check_space(space, images)
    assert space.dim == 256
    assert space.describe()["version"] == 1
    pinned = [0.16509, 0.03184, 0.07906, 0.00000, 0.21578, 0.08425, 0.00270, 0.00000]
    torch.testing.assert_close(rows[0, ::32], torch.tensor(pinned), rtol=1e-4, atol=1e-5)
    assert torch.equal(RandomFeatures()(images), rows)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "channels", "side", "dim"),
    [
        ("AutoencoderKL", 3, 16, 2 * 8 * 8),
        ("AutoencoderKL", 3, 64, 2 * 11 * 11),
        ("pixels", 1, 8, 64),
        ("pixels", 3, 16, 3 * 9 * 9),
    ],
)
def test_encoder_features(kind, channels, side, dim, tmp_path):
    autoencoder = PixelAutoencoder()
    if kind != "pixels":
        autoencoder = DiffusersAutoencoder(str(save_tiny_autoencoder(kind, tmp_path)))
    images = make_images(side=side)
    space = EncoderFeatures(autoencoder, torch.zeros(1, channels, side, side))
    rows = check_space(space, images)
    assert space.dim == dim

    # the first feature of each channel averages the first cell of its latents
    planes = images.permute(0, 3, 1, 2).float()[:, :channels] / 127.5 - 1
    latents = autoencoder.encode(planes)[0].detach()
    cell = -(-latents.shape[-1] // space.grid)
    corner = latents[:, :, :cell, :cell].mean((2, 3))
    first = rows.view(3, latents.shape[1], -1)[..., 0]
    torch.testing.assert_close(first, corner, rtol=1e-4, atol=1e-5)
    with expect_refusal("use one size"):
        space(make_images(side=side + 4))


def test_picture_features_are_those_of_one_encoder_for_all_latent_spaces(tmp_path):
    """They are computed anew by diffusers itself."""
    import diffusers

    cfg = FdConfig(picture_encoder=str(save_tiny_autoencoder("AutoencoderKL", tmp_path)))
    assert cfg.list_scores() == ["fd_picture", "fd_random", "kd_picture", "kd_random"]
    images = make_images(side=8)
    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    with torch.no_grad():
        means = vae.encode(images.permute(0, 3, 1, 2) / 127.5 - 1)[0].mean
    grey, colour = (
        build_features(cfg, PixelAutoencoder(), torch.zeros(1, channels, 8, 8))["picture"]
        for channels in (1, 3)
    )
    torch.testing.assert_close(grey(images), means.flatten(1), rtol=1e-4, atol=1e-5)
    assert torch.equal(grey(images), colour(images))
    with expect_refusal("picture_encoder=/none is neither an existing folder nor a hub id"):
        build_spaces("picture", picture_encoder="/none")


def test_dinov2_features(dinov2):
    space = Dinov2Features(str(dinov2))
    images = make_images()
    rows = check_space(space, images)
    assert space.dim == 24
    from transformers import Dinov2Model

    planes = images.permute(0, 3, 1, 2).float()
    x = interpolate(planes, (224, 224), mode="bicubic", antialias=True).clamp(0, 255) / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    with torch.no_grad():
        model = Dinov2Model.from_pretrained(dinov2).eval()
        right = model(pixel_values=(x - mean) / std).pooler_output
    torch.testing.assert_close(rows, right, rtol=1e-4, atol=1e-4)


def test_dinov2_that_is_none(dinov2, tmp_path, monkeypatch):
    def drop_tensor():
        tensors = load_file(dinov2 / "model.safetensors")
        tensors.popitem()
        save_file(tensors, dinov2 / "model.safetensors", metadata={"format": "pt"})

    faults = [
        (drop_tensor, "missing_keys"),
        (lambda: (dinov2 / "model.safetensors").write_bytes(b"nothing"), "cannot be read"),
        (lambda: (dinov2 / "config.json").write_text('{"model_type": "vit"}'), "of type vit"),
    ]
    for plant, sentence in faults:
        plant()
        with expect_refusal(sentence):
            Dinov2Features(str(dinov2))
    for path, sentence in ((None, "is neither an existing"), (str(tmp_path), "No.*config.json")):
        with expect_refusal(sentence):
            Dinov2Features(path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with expect_refusal(r"transformers, which is not installed; pip install 'fastlatent\[evalu"):
        Dinov2Features(str(dinov2))


def test_inception_that_is_none(tmp_path, monkeypatch, forget_fidelity):
    other = tmp_path / "other.pth"
    other.write_bytes(b"other weights")
    for weights, sentence in (
        (None, "inception=None is not weights-inception"),
        (str(other), "is not weights-inception-2015-12-05-6726825d.pth"),
    ):
        with expect_refusal(sentence):
            InceptionFeatures(weights)

    # with the right weights the package may be absent, or broken
    monkeypatch.setattr(features, "INCEPTION_SHA256", hash_file(other))
    forget_fidelity()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch_fidelity", None)
        with expect_refusal("torch_fidelity, which is not installed; pip install"):
            InceptionFeatures(str(other))
    (tmp_path / "torch_fidelity.py").write_text("raise RuntimeError('nms does not exist')")
    forget_fidelity()
    monkeypatch.syspath_prepend(tmp_path)
    with expect_refusal(r"nms does not exist.*; mostly its torchvision is built for another torch"):
        InceptionFeatures(str(other))


def test_inception_features(fidelity, tmp_path, monkeypatch):
    """The weights are random, for the real ones are a download of 95 MB."""
    from torch_fidelity import feature_extractor_inceptionv3 as published

    with monkeypatch.context() as patch:
        patch.setattr(published, "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(published.FeatureExtractorInceptionV3, "load_state_dict", lambda *args: None)
        network = published.FeatureExtractorInceptionV3("any", ["2048"])
    file = tmp_path / "weights.pth"
    torch.save(network.state_dict(), file)
    monkeypatch.setattr(features, "INCEPTION_SHA256", hash_file(file))
    images = make_images(2)
    space = InceptionFeatures(str(file))
    rows = space(images)
    assert rows.shape == (2, space.dim) == (2, 2048)
    torch.testing.assert_close(rows, network(images.permute(0, 3, 1, 2))[0])
    assert space.describe()["sha256"] == hash_file(file)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "must name one space"),
        (["random", "random"], "each once"),
        (["fid"], "features=fid is unknown; choose from encoder, picture, random, inception"),
        (["torch.nn.Linear"], "extensions="),
    ],
)
def test_names_of_no_space_are_refused(names, sentence):
    with expect_refusal(sentence):
        build_spaces(*names)


COLOUR = """import torch
from evaluation.features import Features


class Colour(Features):
    name, dim = "colour", 3

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, images):
        return images.float().mean((1, 2)) * self.scale

    def describe(self):
        return {"name": self.name, "dim": self.dim, "version": 1}


class Other:
    pass
"""


def test_a_space_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "myspaces").mkdir()
    (tmp_path / "myspaces" / "colour.py").write_text(COLOUR)
    monkeypatch.syspath_prepend(tmp_path)
    name = "myspaces.colour.Colour"
    with expect_refusal("is unknown"):
        build_spaces(name)
    monkeypatch.setattr(build, "admitted_packages", {"myspaces"})
    check_space(build_spaces(name)[name], make_images())
    for name, sentence in (
        ("myspaces.colour.Other", "no class derived from"),
        ("myspaces.nowhere.Colour", "no module myspaces.nowhere"),
    ):
        with expect_refusal(sentence):
            build_spaces(name)
