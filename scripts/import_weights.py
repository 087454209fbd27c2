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
statistics=. kind=repa, for REPA, iREPA and their forks, knows those of REPA; iREPA needs
statistics=. docs/exchange.md explains the conversion.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.config.paths import refuse_missing
from common.config.schema import Positive, refuse_unset, refuse_values
from common.errors import UserError
from scripts.commands import run_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from data.spec import LatentSpec
    from scripts.published_weights import Keys, Published

Kind = StrEnum("Kind", "sit repa lightningdit dit")
WeightsChoice = StrEnum("WeightsChoice", "ema model")


class Family(NamedTuple):
    """What is known of the models of one kind, and of their latents."""

    marks: tuple[str, ...] = ()
    """Names of tensors of which such a model has some, and those of the kinds below it none; empty
    for SiT and REPA."""
    needs: Mapping[str, str] = {}
    """Keys that the user must give -> what to give."""
    encoder: str = ""
    """File of conf/encoder for the encoder of its latents; the user may name another."""
    channels: int = 0
    """Channels of that encoder's latents."""
    scale: float = 0.0
    """Factor by which it multiplies latents; 0: it normalises them by their statistics."""
    is_reversed: bool = True
    """Says that the model's time is 1 for the image and 0 for noise, the reverse of ours."""


KINDS = {
    Kind.lightningdit: Family(
        marks=(
            "feat_rope.freqs_cos",
            "blocks.0.mlp.w12.weight",
            "blocks.0.norm1.weight",
            "blocks.0.attn.q_norm.weight",
        ),
        needs={"encoder": "<folder of its VA-VAE>", "statistics": "<its latents_stats.pt>"},
    ),
    Kind.sit: Family(encoder="sd", channels=4, scale=0.18215),
    Kind.repa: Family(encoder="sd", channels=4, scale=0.18215, is_reversed=False),
}
"""The kinds of models that are read; a file holds the first of which it has a mark, unless it shows
that it is of REPA (see `check_checkpoint`)."""


@dataclass(frozen=True)
class WeightsConfig:
    """Keys of the command: the checkpoint, and what the user knows about its latents."""

    source: str | None = None
    """The checkpoint, a .safetensors or .pt file."""
    kind: Kind | None = None
    """What the checkpoint holds: sit, repa or lightningdit; dit is refused. Where neither its
    tensors nor its arguments tell REPA from SiT, your word counts."""
    out: str | None = None
    """The weights file to write, a new .safetensors."""
    encoder: str | None = None
    """Encoder of the model's latents: a file of conf/encoder, or a folder or hub id in the
    diffusers format; null: sd, which kind=sit and kind=repa allow."""
    statistics: str | None = None
    """File with the mean and std of each channel, LightningDiT's latents_stats.pt or iREPA's
    sdvae-ft-mse-f8d4-latents-stats.pt; required for both."""
    weights: WeightsChoice = WeightsChoice.ema
    """Which weights of a training checkpoint to take: ema (the averaged ones) or model."""
    classes: str | None = None
    """A text file with one class name per line; null: the classes have numbers as names."""
    head_dim: Positive | None = None
    """Channels per attention head; null: read from the checkpoint if a tensor's shape shows them,
    else the published number (72 in a model of width 1152, 64 in all others)."""

    def check(self) -> Family:
        """Checks the keys, and returns what is known of `kind`. Raises UserError if keys are
        missing or contradict each other."""
        # Ask for each missing key and guess none, because a model draws noise if its encoder or
        # normalisation is wrong.
        refuse_unset(
            self,
            {
                "source": "<file>.pt or .safetensors",
                "kind": " or ".join(KINDS),
                "out": "<file>.safetensors",
            },
        )
        refuse_values(self)
        family = KINDS.get(Kind(self.kind))
        if family is None:
            raise UserError(
                "kind=dit: DiT predicts the noise on another schedule, which is no velocity; use "
                "a SiT."
            )
        refuse_unset(self, family.needs)
        if self.statistics is not None and self.kind == Kind.sit:
            raise UserError(
                f"statistics={self.statistics} does not go with kind={self.kind}, whose latents "
                f"are × {family.scale}; leave it out."
            )
        if not str(self.out).endswith(".safetensors"):
            raise UserError(f"out={self.out} must end in .safetensors.")
        for key in ("source", "statistics", "classes"):
            refuse_missing(key, vars(self)[key], "name a file")
        return family


def import_weights(cfg: WeightsConfig) -> Path:
    """Writes the weights file and returns its path. Raises UserError if the checkpoint holds
    another model than `kind`."""
    family = cfg.check()
    import torch

    from common.files import make_folder, replace_file
    from scripts.published_weights import convert_published, read_checkpoint
    from training.checkpoint.files import make_header, write_tensors
    from training.weights.pretrained import load_pretrained

    out = Path(str(cfg.out)).expanduser()
    if out.exists():
        raise UserError(f"out={cfg.out} is there already; choose another file, or delete it.")
    source = Path(str(cfg.source)).expanduser()
    keys = read_checkpoint(source, cfg.weights)
    check_checkpoint(keys, cfg)
    published = convert_published(keys, cfg.head_dim, family.is_reversed)
    if cfg.encoder is None and published.channels != family.channels:
        raise UserError(
            f"source={source} draws latents of {published.channels} channels, and "
            f"encoder={family.encoder}, which kind={cfg.kind} stands for, makes {family.channels}; "
            "name the encoder of its latents by encoder=."
        )

    # After writing the file, load it as a run does: that checks that all tensors fit the model.
    spec = make_spec(cfg, family, published)
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


def check_checkpoint(keys: Keys, cfg: WeightsConfig) -> None:
    """Raises UserError if the tensors or arguments of a checkpoint show another model than
    `cfg.kind`, another flow than ours, or an iREPA whose statistics are not given."""
    held = next(kind for kind, of in KINDS.items() if not of.marks or keys.keys() & of.marks)
    # REPA calls a velocity v, SiT calls it velocity. If nothing tells one from the other, believe
    # the user.
    word = keys.args.get("prediction", cfg.kind if held == Kind.sit else "")
    names = " ".join([*keys, *keys.args])
    if word in ("v", Kind.repa) or "projectors." in names or "enc_type" in names:
        held = Kind.repa
    if held != cfg.kind:
        raise UserError(
            f"source={keys.file} holds a {held}, by its tensors and arguments; use kind={held}."
        )

    flow = f"{keys.args.get('path_type', 'linear')} {keys.args.get('prediction', 'v')}".lower()
    if flow not in ("linear v", "linear velocity"):
        raise UserError(
            f"source={keys.file} was trained with path_type and prediction {flow}, and this "
            "sampler knows linear paths and velocities; give another checkpoint."
        )
    if cfg.statistics is None and "projection_layer" in names:
        raise UserError(
            f"source={keys.file} holds an iREPA, which normalises latents by their statistics; set "
            "statistics=<its sdvae-ft-mse-f8d4-latents-stats.pt>."
        )


def read_statistics(file: Path, channels: int) -> list[list[float]]:
    """Reads mean and std of each channel from LightningDiT's `latents_stats.pt`, or from the file
    of iREPA, whose names are other ones, and which holds the reciprocal of the std."""
    from encoding.foreign import is_dense, read_content

    content = read_content(file, "mean")
    is_irepa = "latents_scale" in content
    columns = [
        content[name].flatten()
        for name in (("latents_bias", "latents_scale") if is_irepa else ("mean", "std"))
        if is_dense(content.get(name)) and content[name].numel() == channels
    ]
    if len(columns) != 2 or not columns[1].all():
        raise UserError(
            f"{file} must hold the tensors mean and std, or latents_bias and latents_scale, of "
            f"{channels} channels each, and neither std nor scale may be 0."
        )
    if is_irepa:
        columns[1] = 1.0 / columns[1]
    return [column.tolist() for column in columns]


def make_spec(cfg: WeightsConfig, family: Family, published: Published) -> LatentSpec:
    """Returns the description of the model's latents: shape, classes, encoder and normalisation."""
    from common.config.build import build
    from data.spec import LatentSpec
    from models.autoencoders import locate_encoder
    from models.images import Autoencoder
    from scripts.commands import find_encoder_node
    from scripts.import_latents import read_class_names

    channels = published.channels
    if cfg.statistics is None:
        mean = [0.0] * channels
        std = [1.0 / family.scale] * channels
    else:
        mean, std = read_statistics(Path(cfg.statistics).expanduser(), channels)
    names = read_class_names(cfg.classes) if cfg.classes else []
    if len(names) not in (0, published.classes):
        raise UserError(
            f"classes={cfg.classes} names {len(names)} classes, and the model has "
            f"{published.classes}."
        )

    # The hash of the encoder's weights is known only if they are on this disk.
    name = cfg.encoder or family.encoder
    node = locate_encoder(find_encoder_node("encoder", name), None)
    sha256 = None
    if os.path.isdir(node["path"]):
        sha256 = build(node, "encoder", kind=Autoencoder).weights_sha256
    elif node.get("revision") is None:
        raise UserError(
            f"encoder={name} is no folder, and no commit pins it; download it and name the folder."
        )
    return LatentSpec(
        channels=channels,
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
