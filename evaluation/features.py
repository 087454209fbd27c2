"""Feature spaces, which map images to vectors: the base class, two spaces that need no downloaded
weights, and two that use published networks.

The package of a published network is imported only if the configuration names its space.

Letters: B images, H W their size, D features, C channels.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from common.config.build import is_admitted
from common.config.schema import FdConfig
from common.errors import UserError
from common.files import hash_file, read_object
from common.libraries import disable_tf32
from models.autoencoders import DiffusersAutoencoder, PixelAutoencoder, find_folder
from models.images import Autoencoder, to_uint8

MAX_ENCODER_FEATURES = 256
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_URL = (
    f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILE}"
)
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Means and standard deviations of red, green and blue over ImageNet, for values in [0, 1]."""


class Features(nn.Module, ABC):
    """Base class of feature spaces, which map 8-bit RGB images to features. To add a space, derive
    a class whose constructor takes no arguments.

    Calling a space runs `forward` without gradients, in true fp32 (no TF32, no autocast), with
    deterministic convolutions. An image's features do not depend on the other images of its batch,
    up to rounding.
    """

    name: str
    dim: int
    """Number of features per image."""
    facts: Mapping[str, Any]
    """Facts besides `name` and `dim` on which the features depend, as JSON values: version or hash
    of the weights, and how images are resized. Figures are comparable only if these are equal."""

    @abstractmethod
    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        """Returns the features of the images, which must be on the module's device."""

    def describe(self) -> dict[str, Any]:
        """Returns all facts on which the features depend; figures are comparable only if these are
        equal."""
        return {"name": self.name, "dim": self.dim, **self.facts}

    def __call__(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        assert images.dtype == torch.uint8
        assert images.shape[3:] == (3,)
        with use_exact_arithmetic(images.device):
            return super().__call__(images).float()


@contextmanager
def use_exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Inside the `with` block PyTorch computes without gradients, autocast and TF32, and with the
    same convolution algorithms every time."""
    same_algorithms = torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False)
    no_autocast = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), same_algorithms, disable_tf32(), no_autocast:
        yield


def decode_images(
    autoencoder: Autoencoder, latents: Float[Tensor, "B C h w"]
) -> UInt8[Tensor, "B H W 3"]:
    """Decodes raw latents to 8-bit images on the CPU, in true fp32 whatever the process sets for
    TF32 and autocast."""
    with use_exact_arithmetic(latents.device):
        return torch.from_numpy(to_uint8(autoencoder.decode(latents)))


def resize_and_normalise(
    images: UInt8[Tensor, "B H W 3"], side: int, statistics: Sequence[Sequence[float]]
) -> Float[Tensor, "B 3 side side"]:
    """Resizes images to squares of `side` pixels by a bicubic filter, and normalises red, green and
    blue by `statistics`: their means, and their standard deviations, for values in [0, 1]."""
    x = F.interpolate(to_planes(images), (side, side), mode="bicubic", antialias=True)
    mean, std = (x.new_tensor(values).view(3, 1, 1) for values in statistics)
    return (x.clamp(0.0, 255.0) / 255.0 - mean) / std


def to_planes(images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 3 H W"]:
    """Moves the channels before height and width, and converts to fp32; values stay 0 to 255."""
    return images.permute(0, 3, 1, 2).float()


class RandomFeatures(Features):
    """A fixed random convolutional network: its features are 64 channels on a 2×2 grid, which keeps
    some of the image's layout.

    Random features rank generators much like trained ones (https://arxiv.org/abs/2208.09218). The
    weights come from numpy's RandomState, because numpy guarantees that its numbers never change.
    Whoever changes the network must change `version` in `facts`, because the new figures cannot be
    compared with older ones.
    """

    name = "random"
    dim = 256
    facts = MappingProxyType({"version": 1, "resize": "bilinear antialiased 64"})

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.RandomState(0)
        self.weights = nn.ParameterList()
        for C_in, C_out in pairwise((3, 32, 64, 64, 64)):
            # Initialisation of He et al. 2015.
            weight = generator.standard_normal((C_out, C_in, 3, 3)) * math.sqrt(2.0 / (9 * C_in))
            self.weights.append(torch.from_numpy(weight).float())

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 256"]:
        x = (
            F.interpolate(to_planes(images), (64, 64), mode="bilinear", antialias=True) / 127.5
            - 1.0
        )
        for weight in self.weights:
            x = F.conv2d(x, weight, stride=2, padding=1).relu()
        return F.adaptive_avg_pool2d(x, 2).flatten(1)


class EncoderFeatures(Features):
    """The mean latents from an autoencoder, average-pooled to a square grid so small that an image
    has at most `MAX_ENCODER_FEATURES` values; if there are more channels than that, an image has
    one value per channel.

    The autoencoder is that of the latent set (`name` is "encoder"), or `picture_encoder`, one for
    all sets ("picture"). All images must have the size of `example`. If the example has one
    channel, for grey images, only the first of the three equal channels is encoded.
    """

    def __init__(
        self, autoencoder: Autoencoder, example: Float[Tensor, "1 c H W"], name: str = "encoder"
    ) -> None:
        super().__init__()
        self.name = name
        self.autoencoder = autoencoder.eval()
        self.channels = example.shape[1]
        with torch.no_grad():
            self.latents = autoencoder.encode(example)[0].shape[1:]
        C, height, width = self.latents
        self.grid = max(1, min(height, width, math.isqrt(MAX_ENCODER_FEATURES // C)))
        self.dim = C * self.grid**2
        self.facts = {
            "latents": list(self.latents),
            "resize": "none",
            "class": autoencoder.kind,
            "sha256": autoencoder.weights_sha256,
        }

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        latents = self.autoencoder.encode(to_planes(images)[:, : self.channels] / 127.5 - 1.0)[0]
        if latents.shape[1:] != self.latents:
            raise UserError(
                f"features={self.name}: latents of shape {tuple(latents.shape[1:])} after "
                f"{tuple(self.latents)}; use one size."
            )
        return F.adaptive_avg_pool2d(latents, self.grid).flatten(1)


class InceptionFeatures(Features):
    """The 2048 pooled features of FID's Inception v3, computed by torch-fidelity.

    `weights` is the path of `INCEPTION_FILE`, checked by its hash; the class downloads nothing.
    Raises UserError if the file is missing or damaged, or if torch-fidelity or a torchvision that
    fits torch is missing.
    """

    name = "inception"
    dim = 2048

    def __init__(self, weights: str | None) -> None:
        super().__init__()
        file = Path(weights or "").expanduser()
        if not file.is_file() or hash_file(file) != INCEPTION_SHA256:
            raise UserError(
                f"inception={weights} is not {INCEPTION_FILE}, or is damaged; download "
                f"{INCEPTION_URL} and give its path."
            )
        module = "torch_fidelity.feature_extractor_inceptionv3"
        network = import_attribute(self.name, module, "FeatureExtractorInceptionV3")
        self.network = network("inception", ["2048"], feature_extractor_weights_path=str(file))
        self.facts = {"sha256": INCEPTION_SHA256, "resize": "bilinear 299 as TensorFlow 1"}

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 2048"]:
        return self.network(images.permute(0, 3, 1, 2).contiguous())[0]


class Dinov2Features(Features):
    """DINOv2's class token after the last norm (Oquab et al. 2023), 768 values for the base model.

    `path` is a folder or hub id with a model that transformers saved as safetensors. Raises
    UserError if the folder is missing or holds another model, or if transformers is missing.
    """

    name = "dinov2"

    def __init__(self, path: str | None) -> None:
        super().__init__()
        model = import_attribute(self.name, "transformers", "Dinov2Model")
        files = ["config.json", "model.safetensors"]
        folder, _ = find_folder(self.name, str(path), files, "facebook/dinov2-base.")
        try:
            kind = read_object(folder / "config.json").get("model_type")
            if kind != self.name:
                raise ValueError(f"it is of type {kind}")
            self.network, loaded = model.from_pretrained(
                folder,
                attn_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            if loaded["missing_keys"]:
                raise ValueError(f"missing_keys: {loaded['missing_keys']}")
        except Exception as error:
            raise UserError(
                f"dinov2={path} cannot be read ({error}); give a DINOv2 model that transformers "
                "saved."
            ) from error

        self.network.float().eval().requires_grad_(False)
        self.dim = self.network.config.hidden_size
        self.facts = {
            "sha256": hash_file(folder / "model.safetensors"),
            "resize": "bicubic antialiased 224",
        }

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        x = resize_and_normalise(images, 224, IMAGENET)
        return self.network(pixel_values=x).last_hidden_state[:, 0]


def import_attribute(space: str, module: str, name: str) -> Any:
    """Imports `name` from a module that the feature space `space` needs. If that fails, a
    UserError says how to install the package."""
    package = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        # The import may raise any exception: a torchvision built for another torch raises
        # RuntimeError, for example. If the package is installed, the message names such a mismatch
        # as the likely cause.
        if find_spec(package) is None:
            raise UserError(
                f"features={space} needs {package}, which is not installed; "
                "pip install 'fastlatent[evaluation]'."
            ) from error
        raise UserError(
            f"features={space}: {package} is installed and cannot be imported "
            f"({' '.join(str(error).split())}); mostly its torchvision is built for another torch: "
            f"install the one that belongs to torch {torch.__version__}."
        ) from error


def build_features(
    cfg: FdConfig, autoencoder: Autoencoder, example: Float[Tensor, "1 c H W"]
) -> dict[str, Features]:
    """Builds the feature spaces that `cfg.spaces` names: built-in ones, or classes in packages
    that the key `extensions` names. Returns a dict: name -> feature space, on the device of
    `example`, an image that the autoencoder decoded.

    Raises UserError if the list is empty, if a name in it is unknown or occurs twice, or if
    weights are missing or wrong.
    """
    builders: dict[str, Callable[[], Features]] = {
        # Pixels count from -1 to 1 in all sets.
        "encoder": lambda: EncoderFeatures(
            PixelAutoencoder() if isinstance(autoencoder, PixelAutoencoder) else autoencoder,
            example,
        ),
        "picture": lambda: EncoderFeatures(
            DiffusersAutoencoder(str(cfg.picture_encoder), key="picture_encoder").to(
                example.device
            ),
            example.expand(-1, 3, -1, -1),
            "picture",
        ),
        "random": RandomFeatures,
        "inception": lambda: InceptionFeatures(cfg.inception),
        "dinov2": lambda: Dinov2Features(cfg.dinov2),
    }

    known = ", ".join(builders)
    if not cfg.spaces or len(set(cfg.spaces)) < len(cfg.spaces):
        raise UserError(
            f"features={cfg.features} must name one space or more, each once; choose from {known}."
        )
    return {
        name: (builders.get(name) or import_feature_class(name, known))().to(example.device)
        for name in cfg.spaces
    }


def import_feature_class(name: str, known: str) -> Callable[[], Features]:
    """Imports the class of a user's feature space from its dotted path `name`. Raises UserError if
    the package is not allowed, or if the path leads to no subclass of `Features`. `known` lists the
    built-in names, for the message."""
    module, _, attribute = name.rpartition(".")
    if not module or not is_admitted(name):
        raise UserError(
            f"features={name} is unknown; choose from {known}, or give the path of a class in a "
            "package that extensions=[…] on this command line names."
        )
    try:
        feature_class = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise UserError(
            f"features={name}: there is no module {error.name}; correct the path, or install it "
            "(Features is in evaluation.features)."
        ) from error
    if not (isinstance(feature_class, type) and issubclass(feature_class, Features)):
        raise UserError(
            f"features={name} is no class derived from evaluation.features.Features, which it "
            "must be."
        )
    return feature_class
