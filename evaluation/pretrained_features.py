"""Feature spaces of published networks, whose packages are imported only when asked for: Inception
and DINOv2."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from common.errors import UserError
from common.files import file_sha256
from evaluation.space import Features, planes

INSTALL = "pip install 'fastlatent[evaluation]'"
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_URL = (
    f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILE}"
)
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of red, green and blue in [0, 1]."""


class InceptionFeatures(Features):
    """The 2048 pooled features of FID's Inception v3, as torch-fidelity computes them from
    TensorFlow's weights.

    `weights` is the local file `INCEPTION_FILE`, told by its hash; nothing is downloaded.
    ValueError without it, and without torch-fidelity or a torchvision that fits torch.
    """

    name = "inception"
    dim = 2048

    def __init__(self, weights: str | None) -> None:
        super().__init__()
        remedy = f"download {INCEPTION_URL} and give its path"
        if weights is None:
            raise UserError(f"features=inception needs inception=<file>; {remedy}.")
        file = Path(weights).expanduser()
        if not file.is_file():
            raise UserError(f"inception={weights} does not exist; {remedy}.")
        if file_sha256(file) != INCEPTION_SHA256:
            raise UserError(
                f"inception={weights} is not {INCEPTION_FILE}, or is damaged; {remedy}."
            )
        try:
            found: Any = import_module("torch_fidelity.feature_extractor_inceptionv3")
        except (
            Exception
        ) as error:  # a torchvision built for another torch raises RuntimeError, OSError and others
            raise UserError(not_importable("inception", "torch_fidelity", error)) from error
        self.network = found.FeatureExtractorInceptionV3(
            "inception", ["2048"], feature_extractor_weights_path=str(file)
        )

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 2048"]:
        return self.network(images.permute(0, 3, 1, 2).contiguous())[0]

    def describe(self) -> dict[str, Any]:
        resize = "bilinear 299 as TensorFlow 1"
        return {"name": self.name, "dim": self.dim, "sha256": INCEPTION_SHA256, "resize": resize}


class Dinov2Features(Features):
    """DINOv2's class token after the last norm (Oquab et al. 2023): 768 values of the base model,
    1024 of the large.

    `path` is a folder or a hub id in the format of transformers; only safetensors are read.
    ValueError where it is missing or another model, and where transformers is.
    """

    name = "dinov2"
    SIDE = 224

    def __init__(self, path: str | None) -> None:
        super().__init__()
        if path is None:
            raise UserError(
                "features=dinov2 needs dinov2=<folder or hub id>, for example facebook/dinov2-base."
            )
        try:
            model: Any = import_module("transformers").Dinov2Model
        except Exception as error:  # as above: it imports torchvision where there is one
            raise UserError(not_importable("dinov2", "transformers", error)) from error
        folder = dinov2_folder(path)
        arguments = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        try:
            self.network, loaded = model.from_pretrained(
                folder, attn_implementation="eager", **arguments
            )
        except Exception as error:
            raise UserError(
                f"dinov2={path} cannot be read ({error}); download it again."
            ) from error
        if problems := [
            f"{key}: {loaded[key]}" for key in ("missing_keys", "mismatched_keys") if loaded[key]
        ]:
            raise UserError(
                f"dinov2={path} does not hold the model of its config.json; {'; '.join(problems)}."
            )
        self.network.float().eval().requires_grad_(False)
        self.dim = self.network.config.hidden_size
        self.sha256 = file_sha256(folder / "model.safetensors")

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        x = F.interpolate(
            planes(images), (self.SIDE, self.SIDE), mode="bicubic", antialias=True
        ).clamp(0.0, 255.0)
        mean, std = (x.new_tensor(values).view(3, 1, 1) for values in IMAGENET)
        return self.network(pixel_values=(x / 255.0 - mean) / std).last_hidden_state[:, 0]

    def describe(self) -> dict[str, Any]:
        resize = f"bicubic antialiased {self.SIDE}"
        return {"name": self.name, "dim": self.dim, "sha256": self.sha256, "resize": resize}


def dinov2_folder(path: str) -> Path:
    """The folder itself, or the cache folder of a hub id with its config and weights; ValueError if
    not DINOv2's."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.count("/") != 1 or path.startswith((".", "/", "~")):
            raise UserError(
                f"dinov2={path} is neither an existing folder nor a hub id such as "
                "facebook/dinov2-base."
            )
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(path, allow_patterns=["config.json", "model.safetensors"])
            )
        except Exception as error:
            raise UserError(
                f"dinov2={path} is no local folder and could not be downloaded from the hub "
                f"({type(error).__name__}); check the id, the network, or give a local folder."
            ) from error
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(
                f"dinov2={path}: {folder / name} does not exist; give a folder that transformers "
                "saved."
            )
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if kind != "dinov2":
        raise UserError(f"dinov2={path} is a model of type {kind}; give one of type dinov2.")
    return folder


def not_importable(space: str, package: str, error: Exception) -> str:
    """Why a feature space's package could not be imported, and the fix."""
    if find_spec(package) is None:
        return f"features={space} needs {package}, which is not installed; {INSTALL}."
    cause = " ".join(str(error).split())
    return (
        f"features={space}: {package} is installed and cannot be imported ({cause}); mostly its "
        "torchvision is built for another torch: install the one that belongs to torch "
        f"{torch.__version__}."
    )
