"""Converts published weights of SiT and LightningDiT to weights of our models/denoiser.py.

SiT and LightningDiT are transformers on latents with the condition in the norms (adaLN-Zero),
trained on x = t·z + (1-t)·ε (z latents, ε noise) with the velocity u = z - ε. In our denoiser noise
has the time 1, and the velocity is v = ε - z, so v(x, t) = -u(x, 1-t). The conversion changes the
weights so that our denoiser computes v; each step is exact in real numbers:

- weight and bias of the head change their sign, because v = -u;
- the first layer of the time MLP gets cos(ωt) and sin(ωt) for each frequency ω, but was trained on
  cos(ω(1-t)) and sin(ω(1-t)): these are the rotation by ω of cos(ωt) and -sin(ωt), which is
  multiplied into the layer's weights;
- the weight w of an RMSNorm goes into the scale s of its modulation: w·(1 + s) = 1 + (w·s + w - 1);
- the linear layers that compute the modulations become one layer for all blocks, reordered from
  (shift, scale, gate) to (scale, shift, gate);
- the rows of the head are reordered from (row, column, channel) to (channel, row, column), without
  the rows for a learned sigma;
- zeros pad the hidden width of a SwiGLU to a multiple of 32.

Sources: https://github.com/willisma/SiT (Ma et al. 2024, https://arxiv.org/abs/2401.08740),
https://github.com/hustvl/LightningDiT (Yao et al. 2025, https://arxiv.org/abs/2501.01423).
Letters: D width, C channels, P patch size, L tokens, K classes.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from encoding.foreign import is_dense, read_plain_tensors
from models.layers import FREQUENCIES
from models.mixers.attention import axial_rotations
from training.weights.pretrained import read_tensors

ROPE_BASE = 10_000.0
MLP_WIDTH_MULTIPLE = 32
"""models/denoiser.py rounds the hidden width of an MLP to a multiple of this number, so the
converted width must be such a multiple too."""
DIT_NAME = re.compile(r"(?<![A-Za-z])DiT[-_]", re.IGNORECASE)
DIT_REFUSAL = (
    "DiT predicts the noise on another schedule, which is no velocity, and this sampler has no "
    "use for it; SiT and LightningDiT are read"
)


class Published(NamedTuple):
    """A published model, converted to this project's denoiser (models/denoiser.py)."""

    node: dict[str, Any]
    """Configuration of the denoiser."""
    tensors: dict[str, Tensor]
    channels: int
    side: int
    """Height and width of the latents."""
    classes: int


def read_checkpoint(file: Path, weights: str) -> dict[str, Tensor]:
    """Reads the tensors of a .safetensors or .pt file; a .pt may also hold an `argparse.Namespace`.

    From a training checkpoint it takes the tensors under the name `weights`: "ema" (the averaged
    ones) or "model". Raises UserError if a value is no tensor, or if the file is a checkpoint of
    DiT.
    """
    if file.suffix == ".safetensors":
        return read_tensors(file)

    with torch.serialization.safe_globals([argparse.Namespace]):
        content = read_plain_tensors(file)
    if not isinstance(content, dict):
        raise UserError(
            f"{file} holds a {type(content).__name__}, not tensors by name; give a checkpoint."
        )
    name = getattr(content.get("args"), "model", "")
    if isinstance(name, str) and DIT_NAME.search(name):
        raise UserError(f"{file} is a checkpoint of {name[:40]}: {DIT_REFUSAL}.")
    if "ema" in content or "model" in content:
        if not isinstance(content.get(weights), dict):
            raise UserError(
                f"{file} has no {weights}; use weights={'model' if weights == 'ema' else 'ema'}."
            )
        content = content[weights]

    for key, value in content.items():
        is_plain = is_dense(value) and value.is_floating_point() and value.is_contiguous()
        if not isinstance(key, str) or not is_plain:
            raise UserError(
                f"{file}: {str(key)[:80]} is no tensor of numbers; give a checkpoint of a model."
            )
    if sum(value.nbytes for value in content.values()) > file.stat().st_size:
        raise UserError(
            f"{file}: its tensors share memory, and would be larger than the file; give another "
            "copy."
        )
    return content


class Keys:
    """A file's tensors by their published names; `take` checks a tensor's shape, removes the tensor
    and returns it, so `remaining` has the tensors that are not converted yet."""

    def __init__(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        self.file = file
        self.remaining = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.remaining

    def read_shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Returns the shape of a tensor that `take` has not removed yet. Raises UserError if the
        tensor is absent, or if it does not have `dims` dimensions."""
        if name not in self.remaining:
            raise UserError(
                f"{self.file} has no {name}, which SiT and LightningDiT have; is it one of them?"
            )
        if self.remaining[name].ndim != dims:
            raise UserError(
                f"{self.file}: {name} has shape {tuple(self.remaining[name].shape)}, not {dims} "
                "dimensions."
            )
        return tuple(self.remaining[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """Removes the tensor `name` from `remaining` and returns it in fp32. Raises UserError if
        the tensor is absent or does not have this shape."""
        file_shape = self.read_shape(name, len(shape))
        if file_shape != shape:
            raise UserError(
                f"{self.file}: {name} has shape {file_shape}, and the rest of the model asks for "
                f"{shape}."
            )
        return self.remaining.pop(name).float()

    def take_linear(self, name: str, rows: int, columns: int) -> Tensor:
        """Removes weight and bias of a linear layer, and returns both as one matrix (rows, 1 +
        columns) with the bias in the first column, so that one operation reorders or scales
        both."""
        weight = self.take(f"{name}.weight", rows, columns)
        return torch.cat([self.take(f"{name}.bias", rows)[:, None], weight], dim=1)

    def refuse_rest(self) -> None:
        """Raises a UserError if `take` has not removed all tensors: our model has no place for a
        tensor that remains."""
        if self.remaining:
            first, *others = self.remaining
            more = f", and {len(others)} more" if others else ""
            raise UserError(f"{self.file} has {first}{more}, which this version does not know.")


def convert_published(
    file: Path, tensors: Mapping[str, Tensor], head_dim: int | None = None
) -> Published:
    """Converts a published model to our denoiser; `tensors` maps its published names to tensors.

    `head_dim` is the width of an attention head (None: `find_head_dim` finds it). Raises UserError
    if a tensor is missing or unknown, or does not fit the shapes of the others.
    """
    keys = Keys(file, tensors)
    dim, channels, patch, _ = keys.read_shape("x_embedder.proj.weight", 4)
    tokens = keys.read_shape("pos_embed", 3)[1]
    rows = math.isqrt(tokens)
    if rows * rows != tokens:
        raise UserError(f"{file}: pos_embed has {tokens} tokens, which are no square.")
    classes = keys.read_shape("y_embedder.embedding_table.weight", 2)[0] - 1
    numbers = [re.match(r"blocks\.(\d+)\.", name) for name in keys.remaining]
    depth = 1 + max((int(number[1]) for number in numbers if number), default=-1)

    node: dict[str, Any] = {"dim": dim, "depth": depth, "patch_size": patch}
    node |= make_node(keys, rows, head_dim or find_head_dim(keys, dim))

    # Take each published tensor once. Our model has no place for a tensor that then remains, so
    # `refuse_rest` refuses the file.
    patches = keys.take("x_embedder.proj.weight", dim, channels, patch, patch)
    labels = keys.take("y_embedder.embedding_table.weight", classes + 1, dim)
    converted = {
        "patch_embed.weight": patches.flatten(1),
        "patch_embed.bias": keys.take("x_embedder.proj.bias", dim),
        "pos_embed": keys.take("pos_embed", 1, tokens, dim),
        "label_embed.table.weight": labels,
    }
    first = keys.take_linear("t_embedder.mlp.0", dim, 2 * FREQUENCIES)
    first[:, 1:] = reverse_time(first[:, 1:])
    second = keys.take_linear("t_embedder.mlp.2", dim, dim)
    converted |= name_tensors("time_embed", {"fc1": first, "fc2": second})

    modulation = []
    for i in range(depth):
        layers, node["mlp_ratio"], node["mlp"] = convert_block(keys, f"blocks.{i}", dim)
        converted |= name_tensors(f"blocks.{i}.layers", layers)
        modulation += convert_modulations(keys, f"blocks.{i}", ("norm1", "norm2"), dim)
    modulation += convert_modulations(keys, "final_layer", ("norm_final",), dim)
    converted |= name_tensors("modulation", torch.cat(modulation))
    converted |= name_tensors("head", convert_head(keys, dim, channels, patch))
    keys.refuse_rest()
    return Published(node, converted, channels, rows * patch, classes)


def make_node(keys: Keys, rows: int, head_dim: int) -> dict[str, Any]:
    """Returns the denoiser's configuration without width, depth, patch size and MLP, which
    `convert_published` adds. `rows` is the number of patches along one side of the latents."""
    # If the model has a rotary embedding, its cosines and sines must be those that our attention
    # computes from `ROPE_BASE`.
    rope_base = None
    if "feat_rope.freqs_cos" in keys:
        tokens, width = keys.read_shape("feat_rope.freqs_cos", 2)
        if width != head_dim or width % 4:
            raise UserError(
                f"{keys.file}: feat_rope has width {width}, the heads {head_dim}: one multiple of "
                "4 is read."
            )
        rotations = torch.stack(
            [keys.take(f"feat_rope.freqs_{part}", tokens, width) for part in ("cos", "sin")]
        )
        rope_base = ROPE_BASE
        if tokens != rows * rows or not torch.allclose(
            rotations, axial_rotations((rows, rows), width, rope_base), rtol=0.0, atol=1e-4
        ):
            raise UserError(
                f"{keys.file}: feat_rope turns otherwise than LightningDiT's, which this version "
                "reads."
            )
    attention = {
        "_target_": "models.mixers.attention.Attention",
        "_partial_": True,
        "bias": True,
        "qk_norm": "blocks.0.attn.q_norm.weight" in keys,
        "rope_base": rope_base,
    }
    return {
        "_target_": "models.denoiser.Denoiser",
        "head_dim": head_dim,
        "time_scale": 1.0,
        "mixer": attention,
        "norm": "rms" if "blocks.0.norm1.weight" in keys else "layer",
    }


def name_tensors(name: str, layer: Mapping[str, Any] | Tensor) -> dict[str, Tensor]:
    """Returns a dict from name to tensor for a layer; all names begin with `name`. A mapping holds
    the layer's parts. A matrix is a linear layer with its bias in the first column, and becomes
    `<name>.weight` and `<name>.bias`. A vector becomes one tensor."""
    if isinstance(layer, Mapping):
        tensors: dict[str, Tensor] = {}
        for part, inner in layer.items():
            tensors |= name_tensors(f"{name}.{part}", inner)
        return tensors
    if layer.ndim == 1:
        return {name: layer}
    return {f"{name}.weight": layer[:, 1:].contiguous(), f"{name}.bias": layer[:, 0].contiguous()}


def find_head_dim(keys: Keys, dim: int) -> int:
    """Reads the width of an attention head from the shape of the QK-norm's weight or of the RoPE
    table. If the file has neither, returns the published sizes: 72 in a model of width 1152, 64 in
    all others."""
    for name in ("blocks.0.attn.q_norm.weight", "feat_rope.freqs_cos"):
        if name in keys:
            return keys.remaining[name].shape[-1]
    return 72 if dim == 1152 else 64


def reverse_time(weight: Tensor) -> Tensor:
    """Converts weights (D, 2F) that act on F cosines and F sines of ω(1-t), for F frequencies ω, to
    weights that act on the cosines and sines of ωt; computes in fp64, returns fp32."""
    count = weight.shape[1] // 2
    omega = torch.exp(-math.log(10_000.0) * torch.arange(count, dtype=torch.float64) / count)
    cosines, sines = weight.double().chunk(2, dim=1)
    rotated = (
        cosines * omega.cos() + sines * omega.sin(),
        cosines * omega.sin() - sines * omega.cos(),
    )
    return torch.cat(rotated, dim=1).float()


def convert_block(keys: Keys, name: str, dim: int) -> tuple[dict[str, Any], float, dict[str, Any]]:
    """Converts one transformer block. Returns three values: a dict of the layers ("0" attention,
    "1" MLP), each a dict from name to tensor; the MLP's hidden width divided by the model's width;
    and the MLP's configuration."""
    attention = {
        "qkv": keys.take_linear(f"{name}.attn.qkv", 3 * dim, dim),
        "out_proj": keys.take_linear(f"{name}.attn.proj", dim, dim),
    }
    if f"{name}.attn.q_norm.bias" in keys:
        raise UserError(
            f"{keys.file}: {name} norms its queries by LayerNorm; this version knows RMSNorm there."
        )
    for part in "qk":
        if f"{name}.attn.{part}_norm.weight" in keys:
            width = keys.remaining[f"{name}.attn.{part}_norm.weight"].shape[-1]
            attention[f"{part}_weight"] = keys.take(f"{name}.attn.{part}_norm.weight", width)

    # A block with the tensor w12 has a SwiGLU (LightningDiT), one without it a GELU MLP (SiT).
    if f"{name}.mlp.w12.weight" in keys:
        hidden = keys.read_shape(f"{name}.mlp.w12.weight", 2)[0] // 2
        halves = keys.take_linear(f"{name}.mlp.w12", 2 * hidden, dim).unflatten(0, (2, hidden))
        second = keys.take_linear(f"{name}.mlp.w3", dim, hidden)
        missing = -hidden % MLP_WIDTH_MULTIPLE
        first = F.pad(halves, (0, 0, 0, missing)).flatten(0, 1)
        mlp = {"w13": first, "w2": F.pad(second, (0, missing))}
        node = {"_target_": "models.block.SwiGLU", "_partial_": True, "bias": True}
        hidden += missing
    else:
        hidden = keys.read_shape(f"{name}.mlp.fc1.weight", 2)[0]
        mlp = {
            "fc1": keys.take_linear(f"{name}.mlp.fc1", hidden, dim),
            "fc2": keys.take_linear(f"{name}.mlp.fc2", dim, hidden),
        }
        node = {"_target_": "models.block.GeluMLP", "_partial_": True}
        if hidden % MLP_WIDTH_MULTIPLE:
            raise UserError(
                f"{keys.file}: {name}.mlp has width {hidden}, which is no multiple of "
                f"{MLP_WIDTH_MULTIPLE}."
            )
    return {"0": attention, "1": mlp}, hidden / dim, node


def convert_modulations(keys: Keys, name: str, norms: tuple[str, ...], dim: int) -> list[Tensor]:
    """Returns, for each norm in turn, the linear layers that compute its scale, shift and gate from
    the condition, as matrices (D, 1 + D) with the bias in the first column. The model's last norm
    has no gate."""
    each = 2 if name == "final_layer" else 3
    rows = keys.read_shape(f"{name}.adaLN_modulation.1.weight", 2)[0]
    if rows != each * len(norms) * dim:
        raise UserError(
            f"{keys.file}: {name} has {rows // dim} modulations; this version knows those with "
            "shifts."
        )
    parts = keys.take_linear(f"{name}.adaLN_modulation.1", rows, dim).split(dim)

    layers = []
    for i, norm in enumerate(norms):
        shift, scale, *gate = parts[each * i : each * (i + 1)]
        if f"{name}.{norm}.weight" in keys:
            w = keys.take(f"{name}.{norm}.weight", dim)
            scale = scale * w[:, None]
            scale[:, 0] = scale[:, 0] + w - 1.0
        layers += [scale, shift, *gate]
    return layers


def convert_head(keys: Keys, dim: int, channels: int, patch: int) -> Tensor:
    """Converts the head, the model's last linear layer: changes its sign, orders its rows by
    channel, then row, then column within the patch, and leaves out the rows for a learned sigma."""
    rows = keys.read_shape("final_layer.linear.weight", 2)[0]
    if rows not in (patch**2 * channels, 2 * patch**2 * channels):
        raise UserError(
            f"{keys.file}: final_layer.linear has {rows} rows, and {channels} channels in patches "
            f"of {patch} need {patch**2 * channels}, or twice as many with a learned sigma."
        )
    head = keys.take_linear("final_layer.linear", rows, dim).unflatten(0, (patch, patch, -1))
    return -head[:, :, :channels].movedim(2, 0).flatten(0, 2)
