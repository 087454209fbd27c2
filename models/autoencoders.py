"""Frozen autoencoders with one interface: they turn images in [-1, 1] into raw latents (mean and
std) and back.

"Raw" latents are the encoder's outputs before any scaling, shift or normalisation; the manifest of
a latent set stores the numbers for these three steps. Letters: B samples, C latent channels, h w
latent size, H W image size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from common.errors import UserError
from common.files import hash_file, read_object
from common.libraries import silence_libraries
from models.images import Autoencoder, select_rgb

VIDEO_CLASS = "AutoencoderKLQwenImage"
"""The class that takes and gives videos, (B, C, frames, H, W); an image is one frame."""
SUPPORTED_CLASSES = (
    "AutoencoderKL",
    "AutoencoderTiny",
    "AutoencoderDC",
    "AutoencoderKLFlux2",
    VIDEO_CLASS,
)
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


class PixelAutoencoder(Autoencoder):
    """An autoencoder that changes nothing: the latents are the pixels. It serves small images and
    synthetic data.

    Decoding returns one or three channels as they are; with another number of channels, it returns
    only the first, a grey image.
    """

    kind = "PixelAutoencoder"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()  # `runtime.compile` finds nothing to compile

    def encode(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B C H W"], None]:
        return images, None

    def decode(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        return select_rgb(latents)


class ByteAutoencoder(PixelAutoencoder):
    """An autoencoder whose latents are the pixels as 8-bit numbers, 0 to 255, which dtype=uint8
    stores exactly."""

    kind = "ByteAutoencoder"

    def encode(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B C H W"], None]:
        return ((images + 1.0) * 127.5).round(), None

    def decode(self, latents: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        return super().decode(latents) / 127.5 - 1.0


class DiffusersAutoencoder(Autoencoder):
    """An autoencoder in the diffusers format: AutoencoderKL (SD, SDXL, SD3, FLUX), AutoencoderTiny,
    AutoencoderDC, AutoencoderKLFlux2 or AutoencoderKLQwenImage.

    Latents are raw: the batch norm of FLUX.2 and `latents_mean` of Qwen-Image, by which their own
    models normalise, stay out, because a latent set has statistics of its own.

    `path` is a local folder or a hub id, the owner/name of a Hugging Face repository; `revision`
    pins a hub id to a commit; messages call the path `key`. It reads weights from safetensors only,
    and runs no code of the folder. Raises UserError if the weights do not fit exactly, that is, if
    a tensor is missing, unknown or of another shape.
    """

    def __init__(
        self,
        path: str,
        subfolder: str | None = None,
        revision: str | None = None,
        key: str = "encoder.path",
    ) -> None:
        super().__init__()
        prefix = f"{subfolder}/" if subfolder else ""
        repository, self.revision = find_folder(
            key,
            path,
            [f"{prefix}config.json", f"{prefix}{WEIGHTS_FILE}"],
            "'owner/name'; give a folder in the format of diffusers.",
            revision,
        )

        folder = repository / (subfolder or "")
        weights = folder / WEIGHTS_FILE
        config_file = folder / "config.json"
        for file in (config_file, weights):
            if not os.path.isfile(file):
                inner = folder / "vae" / file.name
                hint = "; take encoder.subfolder=vae" if inner.is_file() else ""
                raise UserError(
                    f"{key}={path}: {file} does not exist; a diffusers autoencoder folder "
                    f"has it{hint}."
                )
        config = read_object(config_file)
        self.kind = str(config.get("_class_name"))
        if self.kind not in SUPPORTED_CLASSES:
            raise UserError(
                f"{key}={path}: class {self.kind} is not supported; use one of "
                f"{', '.join(SUPPORTED_CLASSES)}."
            )
        self.vae = load_strictly(self.kind, folder, config).float().eval().requires_grad_(False)
        self.scaling_factor = config.get("scaling_factor")
        self.shift_factor = config.get("shift_factor")
        self.weights_sha256 = hash_file(weights)

    @property
    def blocks(self) -> nn.ModuleList:
        """The encoder as the only block, because `runtime.compile` compiles the modules in `blocks`
        in place."""
        return nn.ModuleList([self.vae.get_submodule("encoder")])

    @torch.no_grad()
    def encode(
        self, images: Float[Tensor, "B 3 H W"]
    ) -> tuple[Float[Tensor, "B C h w"], Float[Tensor, "B C h w"] | None]:
        return encode_raw(self.vae, images)

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "B C h w"]) -> Float[Tensor, "B 3 H W"]:
        return decode_raw(self.vae, latents)


def add_frame(vae: Any, images: Tensor) -> Tensor:
    """Adds the axis of frames if `vae`, a model of diffusers, is of `VIDEO_CLASS`."""
    return images.unsqueeze(2) if type(vae).__name__ == VIDEO_CLASS else images


def encode_raw(vae: Any, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encodes images (B, 3, H, W) by `vae`, a model of diffusers; see `Autoencoder.encode`."""
    encoded = vae.encode(add_frame(vae, images))[0]
    # These classes encode to a normal distribution, so return the distribution's mean and std,
    # without the axis of a single frame.
    if type(vae).__name__.startswith("AutoencoderKL"):
        return encoded.mean.float().flatten(1, -3), encoded.std.float().flatten(1, -3)
    return encoded.float(), None


def decode_raw(vae: Any, latents: Tensor) -> Tensor:
    """Decodes raw latents (B, C, h, w) by `vae`, a model of diffusers, to images (B, 3, H, W) in
    fp32."""
    return vae.decode(add_frame(vae, latents)).sample.float().flatten(1, -3)


def find_folder(
    key: str, path: str, files: list[str], example: str, revision: str | None = None
) -> tuple[Path, str | None]:
    """Returns `path` and None if it is a local folder; otherwise treats `path` as a hub id,
    downloads `files`, and returns the folder in the hub's cache and the commit of the files.

    Error messages show `key`, the configuration key that holds the path, and `example`, an example
    of a hub id.
    """
    local = os.path.expanduser(path)
    if os.path.isdir(local):
        return Path(local), None
    if path.count("/") != 1 or path.startswith((".", "/", "~")) or os.path.exists(path):
        raise UserError(
            f"{key}={path} is neither an existing folder nor a hub id such as {example}"
        )
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=files))
    except Exception as error:
        raise UserError(
            f"{key}={path} is no local folder, and the download from the hub failed "
            f"({type(error).__name__}); check the id, the network, or give a local folder."
        ) from error
    # The hub's cache names a folder by its commit.
    return folder, folder.name


def load_strictly(kind: str, folder: Path, config: dict) -> nn.Module:
    """Builds the diffusers class named `kind` and loads its weights from `folder`; raises
    UserError if a tensor does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    # Silence the messages of torchao and bitsandbytes, which diffusers imports if they are
    # installed.
    with silence_libraries():
        import diffusers

        cls = getattr(diffusers, kind)
    file = folder / WEIGHTS_FILE
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}); download it again.") from error
    found = sorted({key.split(".pool.")[0] for key in tensors if ".pool." in key})
    pools = found if kind == "AutoencoderTiny" else []
    if config.get("mid_block_global_branch") and not pools:
        raise UserError(f"{file} lacks the global branches that its config.json promises.")
    try:
        if pools:
            unknown = ("block_out_channels", "mid_block_global_branch")
            model = cls.from_config({k: v for k, v in config.items() if k not in unknown})
            for name in pools:
                shape = tensors[f"{name}.pool.0.weight"].shape
                add_global_branch(model.get_submodule(name), *shape[:2])
            model.load_state_dict(tensors, strict=True)
            return model
        # Load by from_pretrained, because it also renames the keys of checkpoints that are older
        # than diffusers 0.17.
        model, info = cls.from_pretrained(
            folder,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
            # meant for much larger models, and needs the package accelerate
            low_cpu_mem_usage=False,
        )
    # Loading raises RuntimeError if a tensor has another shape than the model's.
    except RuntimeError as error:
        facts = " ".join(str(error).split())  # torch lists tensors on lines of their own
        raise UserError(f"{file} does not fit {kind}: {facts}") from error
    problems = [
        f"{k}: {info[k]}" for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[k]
    ]
    if problems:
        raise UserError(f"{file} does not fit {kind}: {'; '.join(problems)}")
    return model


def add_global_branch(block: nn.Module, hidden: int, channels: int) -> None:
    """Adds the branch of TAEF2's middle blocks that diffusers' AutoencoderTiny lacks: `block(x +
    pool(x))`.

    As published in https://github.com/madebyollin/taesd: 1×1 convolution, GroupNorm of 4 groups,
    ReLU, 1×1 convolution.
    """
    pool = nn.Sequential(
        nn.Conv2d(channels, hidden, 1, bias=False),
        nn.GroupNorm(4, hidden),
        nn.ReLU(),
        nn.Conv2d(hidden, channels, 1, bias=False),
    )
    block.add_module("pool", pool)
    forward = block.forward
    block.forward = lambda x: forward(x + pool(x))


def locate_encoder(node: Mapping[str, Any], revision: str | None) -> dict[str, Any]:
    """Returns an encoder's configuration node with the full path of a local folder, or with the
    commit `revision` of a hub id."""
    encoder = dict(node)
    folder = os.path.expanduser(encoder.get("path") or "")
    if os.path.isdir(folder):
        encoder["path"] = str(Path(folder).resolve())
    if revision is not None:
        encoder["revision"] = revision
    return encoder
