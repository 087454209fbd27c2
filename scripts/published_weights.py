"""Converts published weights of SiT, REPA and LightningDiT to weights of our models/denoiser.py.

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
- zeros pad the hidden width of an MLP to a multiple of 32.

REPA and iREPA train a SiT on (1-t)·z + t·ε with ε - z, which is our v: their time and head stay as
they are. The projectors, by which they compare features with those of an encoder, are left out.

Sources: https://github.com/willisma/SiT (Ma et al. 2024, https://arxiv.org/abs/2401.08740),
https://github.com/hustvl/LightningDiT (Yao et al. 2025, https://arxiv.org/abs/2501.01423),
https://github.com/sihyun-yu/REPA (Yu et al. 2024, https://arxiv.org/abs/2410.06940),
https://github.com/End2End-Diffusion/iREPA (Singh et al. 2025, https://arxiv.org/abs/2512.10794).
Letters: D width, C channels, P patch size, L tokens, K classes.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from encoding.foreign import is_dense, read_content
from models.layers import FREQUENCIES
from models.mixers.attention import axial_rotations

ROPE_BASE = 10_000.0
MLP_WIDTH_MULTIPLE = 32
"""models/denoiser.py rounds the hidden width of an MLP to a multiple of this number, so the
converted width must be such a multiple too."""
DIT_NAME = re.compile(r"(?<![A-Za-z])DiT[-_]", re.IGNORECASE)


class Published(NamedTuple):
    """A published model, converted to this project's denoiser (models/denoiser.py)."""

    node: dict[str, Any]
    """Configuration of the denoiser."""
    tensors: dict[str, Tensor]
    channels: int
    side: int
    """Height and width of the latents."""
    classes: int


def read_checkpoint(file: Path, weights: str) -> Keys:
    """Reads the tensors of a .safetensors or .pt file, without the prefixes of data parallelism and
    torch.compile; a .pt may also hold an `argparse.Namespace` under the name `args`.

    From a training checkpoint it takes the tensors under the name `weights`: "ema" (the averaged
    ones) or "model". Raises UserError if a value is no tensor, or if the file is a checkpoint of
    DiT.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = read_content(file, "its content")
    args = content.get("args")
    args = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    for name in (file.name, str(args.get("model"))):
        if DIT_NAME.search(name):
            raise UserError(
                f"{file} is a checkpoint of {name[:40]}: DiT predicts the noise on another "
                "schedule, which is no velocity, and this sampler has no use for it; SiT and "
                "LightningDiT are read. If it is none of DiT's, give the file another name."
            )
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
    tensors = {
        name.replace("_orig_mod.", "").removeprefix("module."): value
        for name, value in content.items()
    }
    return Keys(file, tensors, args)


class Keys(dict[str, Tensor]):
    """A file's tensors by their published names; `take` removes a tensor, so what remains is not
    converted yet. `args` are the arguments of the training, empty if the file has none."""

    def __init__(self, file: Path, tensors: Mapping[str, Tensor], args: dict[str, Any]) -> None:
        super().__init__(tensors)
        self.file = file
        self.args = args

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"{self.file} has no {name}, which SiT and LightningDiT have; is it one of them?"
        )

    def take(self, name: str, *shape: int) -> Tensor:
        """Removes the tensor `name` and returns it in fp32. Raises UserError if the tensor is
        absent or does not have this shape, in which -1 stands for any size."""
        tensor = self[name].float()
        del self[name]
        if not all(wanted in (-1, size) for wanted, size in zip_longest(shape, tensor.shape)):
            raise UserError(
                f"{self.file}: {name} has shape {tuple(tensor.shape)}, and the rest of the model "
                f"asks for {shape}, where -1 is any size."
            )
        return tensor

    def take_linear(self, name: str, rows: int, columns: int) -> Tensor:
        """Removes weight and bias of a linear layer, and returns both as one matrix (rows, 1 +
        columns) with the bias in the first column, so that one operation reorders or scales
        both."""
        weight = self.take(f"{name}.weight", rows, columns)
        return torch.cat([self.take(f"{name}.bias", len(weight))[:, None], weight], dim=1)


def convert_published(keys: Keys, head_dim: int | None, is_reversed: bool) -> Published:
    """Converts a published model to our denoiser, and empties `keys`.

    `head_dim` is the width of an attention head (None: `make_node` finds it). `is_reversed` says
    that the model's time is 1 for the image. Raises UserError if a tensor is missing or unknown, or
    does not fit the shapes of the others.
    """
    for name in [name for name in keys if name.startswith("projectors.")]:
        del keys[name]
    patches = keys.take("x_embedder.proj.weight", -1, -1, -1, -1)
    dim, channels, patch, width = patches.shape
    positions = keys.take("pos_embed", 1, -1, dim)
    rows = math.isqrt(positions.shape[1])
    if width != patch or rows * rows != positions.shape[1]:
        raise UserError(
            f"{keys.file} has patches of {patch} × {width}, and pos_embed has {positions.shape[1]} "
            "tokens, which are no squares."
        )
    labels = keys.take("y_embedder.embedding_table.weight", -1, dim)
    node = make_node(keys, dim, patch, rows, head_dim)

    # Collect the layers by our names: vectors, and linear layers as `take_linear` returns them.
    time = keys.take_linear("t_embedder.mlp.0", dim, 2 * FREQUENCIES)
    layers = {
        "time_embed.fc1": time,
        "time_embed.fc2": keys.take_linear("t_embedder.mlp.2", dim, dim),
        "patch_embed.bias": keys.take("x_embedder.proj.bias", dim),
    }
    modulation = []
    while f"blocks.{node['depth']}.attn.qkv.weight" in keys:
        name = f"blocks.{node['depth']}"
        layers |= convert_block(keys, name, dim)
        modulation += convert_modulations(keys, name, ("norm1", "norm2"), dim)
        node["depth"] += 1
    modulation += convert_modulations(keys, "final_layer", ("norm_final",), dim)
    layers["modulation"] = torch.cat(modulation)
    layers["head"] = convert_head(keys, dim, channels, patch)
    if is_reversed:
        time[:, 1:] = reverse_time(time[:, 1:])
        layers["head"] = -layers["head"]

    converted = {
        "patch_embed.weight": patches.flatten(1),
        "pos_embed": positions,
        "label_embed.table.weight": labels,
    }
    for name, layer in layers.items():
        if layer.ndim == 1:
            converted[name] = layer
        else:
            converted[f"{name}.weight"] = layer[:, 1:].contiguous()
            converted[f"{name}.bias"] = layer[:, 0].contiguous()
    # Our model has no place for a tensor that remains.
    if keys:
        first, *others = keys
        more = f", and {len(others)} more" if others else ""
        raise UserError(f"{keys.file} has {first}{more}, which this version does not know.")
    return Published(node, converted, channels, rows * patch, len(labels) - 1)


def make_node(keys: Keys, dim: int, patch: int, rows: int, head_dim: int | None) -> dict[str, Any]:
    """Returns the denoiser's configuration, with depth 0. `rows` is the number of patches along one
    side of the latents, `head_dim` the width of an attention head; None reads it from the shape of
    the QK-norm's weight or of the RoPE table. If the file has neither, it is that of the published
    sizes: 72 in a model of width 1152, 64 in all others."""
    for name in ("blocks.0.attn.q_norm.weight", "feat_rope.freqs_cos"):
        if name in keys:
            head_dim = head_dim or keys[name].shape[-1]
    head_dim = head_dim or (72 if dim == 1152 else 64)

    # If the model has a rotary embedding, its cosines and sines must be those that our attention
    # computes from `ROPE_BASE`.
    rope_base = None
    if "feat_rope.freqs_cos" in keys:
        rope_base = ROPE_BASE
        rotations = [
            keys.take(f"feat_rope.freqs_{part}", rows * rows, head_dim) for part in ("cos", "sin")
        ]
        if head_dim % 4 or not torch.allclose(
            torch.stack(rotations),
            axial_rotations((rows, rows), head_dim, rope_base),
            rtol=0.0,
            atol=1e-4,
        ):
            raise UserError(
                f"{keys.file}: feat_rope turns otherwise than LightningDiT's, which this version "
                "reads."
            )

    # A model with the tensors w12 has a SwiGLU (LightningDiT), one without them a GELU MLP (SiT).
    mlp: dict[str, Any] = {"_target_": "models.block.GeluMLP", "_partial_": True}
    last = "blocks.0.mlp.fc2.weight"
    if "blocks.0.mlp.w12.weight" in keys:
        mlp = {"_target_": "models.block.SwiGLU", "_partial_": True, "bias": True}
        last = "blocks.0.mlp.w3.weight"
    hidden = keys[last].shape[-1]
    return {
        "dim": dim,
        "depth": 0,
        "patch_size": patch,
        "_target_": "models.denoiser.Denoiser",
        "head_dim": head_dim,
        "time_scale": 1.0,
        "mixer": {
            "_target_": "models.mixers.attention.Attention",
            "_partial_": True,
            "bias": True,
            "qk_norm": "blocks.0.attn.q_norm.weight" in keys,
            "rope_base": rope_base,
        },
        "norm": "rms" if "blocks.0.norm1.weight" in keys else "layer",
        "mlp_ratio": (hidden + -hidden % MLP_WIDTH_MULTIPLE) / dim,
        "mlp": mlp,
    }


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


def convert_block(keys: Keys, name: str, dim: int) -> dict[str, Tensor]:
    """Converts attention and MLP of one transformer block, and returns them by our names."""
    ours = f"{name}.layers"
    layers = {
        f"{ours}.0.qkv": keys.take_linear(f"{name}.attn.qkv", 3 * dim, dim),
        f"{ours}.0.out_proj": keys.take_linear(f"{name}.attn.proj", dim, dim),
    }
    if f"{name}.attn.q_norm.bias" in keys:
        raise UserError(
            f"{keys.file}: {name} norms its queries by LayerNorm; this version knows RMSNorm there."
        )
    for part in "qk":
        if f"{name}.attn.{part}_norm.weight" in keys:
            layers[f"{ours}.0.{part}_weight"] = keys.take(f"{name}.attn.{part}_norm.weight", -1)

    # Name both layers of the MLP, theirs -> ours. The first one of a SwiGLU has two halves, for the
    # gate and the values.
    is_gated = f"{name}.mlp.w12.weight" in keys
    names = {"w12": "w13", "w3": "w2"} if is_gated else {"fc1": "fc1", "fc2": "fc2"}
    first, second = names
    halves = 2 if is_gated else 1
    contract = keys.take_linear(f"{name}.mlp.{second}", dim, -1)
    hidden = contract.shape[1] - 1
    missing = -hidden % MLP_WIDTH_MULTIPLE
    expand = keys.take_linear(f"{name}.mlp.{first}", halves * hidden, dim)
    expand = F.pad(expand.unflatten(0, (halves, hidden)), (0, 0, 0, missing))
    layers[f"{ours}.1.{names[first]}"] = expand.flatten(0, 1)
    layers[f"{ours}.1.{names[second]}"] = F.pad(contract, (0, missing))
    return layers


def convert_modulations(keys: Keys, name: str, norms: tuple[str, ...], dim: int) -> list[Tensor]:
    """Returns, for each norm in turn, the linear layers that compute its scale, shift and gate from
    the condition, as matrices (D, 1 + D) with the bias in the first column. The model's last norm
    has no gate."""
    each = 2 if name == "final_layer" else 3
    linear = keys.take_linear(f"{name}.adaLN_modulation.1", -1, dim)
    if len(linear) != each * len(norms) * dim:
        raise UserError(
            f"{keys.file}: {name} has {len(linear) // dim} modulations; this version knows those "
            "with shifts."
        )

    layers = []
    parts = linear.unflatten(0, (len(norms), each, dim))
    for norm, (shift, scale, *gate) in zip(norms, parts, strict=True):
        if f"{name}.{norm}.weight" in keys:
            w = keys.take(f"{name}.{norm}.weight", dim)
            scale = scale * w[:, None]
            scale[:, 0] = scale[:, 0] + w - 1.0
        layers += [scale, shift, *gate]
    return layers


def convert_head(keys: Keys, dim: int, channels: int, patch: int) -> Tensor:
    """Converts the head, the model's last linear layer: orders its rows by channel, then row,
    then column within the patch, and leaves out the rows for a learned sigma."""
    head = keys.take_linear("final_layer.linear", -1, dim)
    values = patch**2 * channels
    if len(head) not in (values, 2 * values):
        raise UserError(
            f"{keys.file}: final_layer.linear has {len(head)} rows, and {channels} channels in "
            f"patches of {patch} need {values}, or twice as many with a learned sigma."
        )
    head = head.unflatten(0, (patch, patch, -1))
    return head[:, :, :channels].movedim(2, 0).flatten(0, 2)
