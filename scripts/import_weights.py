"""Converts published weights to a weights file of this framework: for sampling, evaluation, and as
a base for training.

    python -m scripts.import_weights source=SiT-XL-2-256x256.pt kind=sit \\
        out=pretrained/sit_xl.safetensors
    python -m scripts.import_weights source=lightningdit-xl-imagenet256-800ep.pt \\
        kind=lightningdit statistics=latents_stats.pt encoder=models/vavae \\
        out=pretrained/lightningdit_xl.safetensors

`source` is a .safetensors or .pt checkpoint; from a training checkpoint the command takes the
averaged weights (weights=model: the trained ones). From a .pt it unpickles only tensors, plain
values and an argparse.Namespace. The file that it writes also names the encoder and the
normalisation with which the model was trained, because with any others its samples are noise:
kind=sit knows both (Stable Diffusion's VAE and 0.18215), kind=lightningdit needs encoder= and
statistics=. docs/exchange.md explains the conversion.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from common.config.paths import refuse_missing
from common.config.schema import refuse_unset
from common.errors import UserError
from scripts.commands import run_command

if TYPE_CHECKING:
    from data.spec import LatentSpec
    from scripts.published_weights import Published

SD_SCALE = 0.18215
"""The factor by which SiT multiplies the latents of Stable Diffusion's VAE."""
SD_CHANNELS = 4
LIGHTNINGDIT_NAMES = {
    "feat_rope.freqs_cos",
    "blocks.0.mlp.w12.weight",
    "blocks.0.norm1.weight",
    "blocks.0.attn.q_norm.weight",
}
"""Names of tensors that a LightningDiT may have, and a SiT has not."""


Kind = StrEnum("Kind", "sit lightningdit dit")
WeightsChoice = StrEnum("WeightsChoice", "ema model")


@dataclass(frozen=True)
class WeightsConfig:
    """Keys of the command: the checkpoint, and what the user knows about its latents."""

    source: str | None = None
    kind: Kind | None = None
    out: str | None = None
    encoder: str | None = None
    """Encoder of the model's latents: a file of conf/encoder, or a folder or hub id in the
    diffusers format; null: sd, which only kind=sit allows."""
    statistics: str | None = None
    """File with the mean and std of each channel, LightningDiT's latents_stats.pt; required for
    kind=lightningdit."""
    weights: WeightsChoice = WeightsChoice.ema
    classes: str | None = None
    """A text file with one class name per line; null: the classes have numbers as names."""
    head_dim: int | None = None
    """Channels per attention head; null: read from the checkpoint if a tensor's shape shows them,
    else the published number (72 in a model of width 1152, 64 in all others)."""

    def check(self) -> None:
        """Checks the keys. Raises UserError if some are missing or contradict each other."""
        # Ask for each missing key and guess none, because a model draws noise if its encoder or
        # normalisation is wrong.
        hints = {
            "source": "<file>.pt or .safetensors",
            "kind": "sit or lightningdit",
            "out": "<file>.safetensors",
        }
        refuse_unset(self, hints)

        if self.kind is Kind.dit:
            raise UserError(
                "kind=dit: DiT predicts the noise on another schedule, which is no velocity; use "
                "a SiT."
            )
        for key in ("statistics", "encoder"):
            if self.kind is Kind.lightningdit and vars(self)[key] is None:
                raise UserError(
                    f"{key} is not set; kind=lightningdit needs the {key} of its latents."
                )
        if self.kind is Kind.sit and self.statistics is not None:
            raise UserError(
                f"statistics={self.statistics} is for kind=lightningdit; SiT's latents are × "
                f"{SD_SCALE}."
            )
        if not str(self.out).endswith(".safetensors"):
            raise UserError(f"out={self.out} must end in .safetensors.")
        for key in ("source", "statistics", "classes"):
            refuse_missing(key, vars(self)[key], "name a file")


def import_weights(cfg: WeightsConfig) -> Path:
    """Writes the weights file and returns its path. Raises UserError if the checkpoint holds
    another model than `kind`."""
    cfg.check()
    import torch

    from common.files import make_folder, replace_file
    from scripts.published_weights import DIT_NAME, DIT_REFUSAL, convert_published, read_checkpoint
    from training.checkpoint.files import make_header, write_tensors
    from training.weights.pretrained import load_pretrained

    source = Path(str(cfg.source)).expanduser()
    out = Path(str(cfg.out)).expanduser()
    if out.exists():
        raise UserError(f"out={cfg.out} is there already; choose another file, or delete it.")
    if cfg.kind is Kind.sit and DIT_NAME.search(source.name):
        raise UserError(
            f"source={source}: {DIT_REFUSAL}. If it is none of DiT's, give the file another name."
        )

    tensors = {
        name.removeprefix("module."): tensor
        for name, tensor in read_checkpoint(source, cfg.weights).items()
    }
    kind = "lightningdit" if tensors.keys() & LIGHTNINGDIT_NAMES else "sit"
    if kind != cfg.kind:
        raise UserError(
            f"source={source} holds a {kind}, by the names of its tensors; use kind={kind}."
        )
    published = convert_published(source, tensors, cfg.head_dim)
    if cfg.encoder is None and published.channels != SD_CHANNELS:
        raise UserError(
            f"source={source} draws latents of {published.channels} channels, and Stable "
            f"Diffusion's VAE, which kind=sit stands for, makes {SD_CHANNELS}; name the encoder of "
            "its latents by encoder=."
        )

    # After writing the file, load it as a run does: that checks that all tensors fit the model.
    spec = make_spec(cfg, published)
    description = {"model": published.node, "spec": spec.as_dict(), "step": 0}
    make_folder(out.parent)
    with replace_file(out) as temporary:
        write_tensors(temporary, published.tensors, make_header(description, cfg.weights))
        model, _ = load_pretrained(temporary, torch.device("cpu"))
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{out}: {count:,} parameters, {published.classes} classes, latents "
        f"{published.channels}×{published.side}×{published.side}"
    )
    return out


def read_statistics(file: Path, channels: int) -> tuple[list[float], list[float]]:
    """Reads mean and std of each channel from LightningDiT's `latents_stats.pt`."""
    import torch

    from encoding.foreign import read_plain_tensors

    content = read_plain_tensors(file)
    values = [content.get(name) for name in ("mean", "std")] if isinstance(content, dict) else []
    columns = [
        value.flatten().tolist()
        for value in values
        if isinstance(value, torch.Tensor) and value.numel() == channels
    ]
    if len(columns) != 2:
        raise UserError(f"{file} must hold the tensors mean and std of {channels} channels each.")
    return columns[0], columns[1]


def make_spec(cfg: WeightsConfig, published: Published) -> LatentSpec:
    """Returns the description of the model's latents: shape, classes, encoder and normalisation."""
    from common.config.build import build
    from data.spec import LatentSpec
    from models.autoencoders import locate_encoder
    from models.images import Autoencoder
    from scripts.commands import find_encoder_node
    from scripts.import_latents import read_class_names

    mean = [0.0] * published.channels
    std = [1.0 / SD_SCALE] * published.channels
    if cfg.statistics is not None:
        mean, std = read_statistics(Path(cfg.statistics).expanduser(), published.channels)
    names = read_class_names(cfg.classes) if cfg.classes else []
    if len(names) not in (0, published.classes):
        raise UserError(
            f"classes={cfg.classes} names {len(names)} classes, and the model has "
            f"{published.classes}."
        )

    # The hash of the encoder's weights is known only if they are on this disk.
    name = cfg.encoder or "sd"
    node = locate_encoder(find_encoder_node("encoder", name), None)
    sha256 = None
    if os.path.isdir(node["path"]):
        sha256 = build(node, "encoder", kind=Autoencoder).weights_sha256
    elif node.get("revision") is None:
        raise UserError(
            f"encoder={name} is no folder, and no commit pins it; download it and name the folder."
        )
    return LatentSpec(
        channels=published.channels,
        height=published.side,
        width=published.side,
        num_classes=published.classes,
        count=0,
        class_names=names,
        mean=mean,
        std=std,
        encoder=node,
        encoder_sha256=sha256,
    )


if __name__ == "__main__":
    run_command(import_weights, WeightsConfig, __doc__)
