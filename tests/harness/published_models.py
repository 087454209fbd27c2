"""SiT, REPA and LightningDiT, written plainly as in their papers, to compare imported weights with.

x = t·z + (1-t)·ε, the model returns the velocity z - ε. Keys are those of the published
checkpoints. Ma et al. 2024, https://arxiv.org/abs/2401.08740; Yao et al. 2025,
https://arxiv.org/abs/2501.01423.

REPA trains a SiT on x = (1-t)·z + t·ε with the velocity ε - z: `interpolant` and `model_target` in
loss.py, `forward` and `projectors` (which change no velocity) in models/sit.py, args and 0.18215 in
train.py of sihyun-yu/REPA at 67f71450. In ldm/ of End2End-Diffusion/iREPA at 99ad4ac2, the same
velocity; its projector is a `projection_layer`, its args have a `projection_layer_type`, and its
train.py takes (latents - latents_bias) * latents_scale from a file.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.import_weights import WeightsConfig, import_weights

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model, and which paper's it is."""

    lightning: bool
    dim: int = 24
    heads: int = 2
    depth: int = 2
    channels: int = 3
    patch: int = 2
    rows: int = 3
    classes: int = 5
    sigma: bool = False
    qk_norm: bool = False
    repa: bool = False

    @property
    def hidden(self):
        return int(2 / 3 * 4 * self.dim) if self.lightning else 4 * self.dim


SHAPES = {
    "sit": Shape(lightning=False),
    "sit with sigma": Shape(lightning=False, sigma=True),
    "repa": Shape(lightning=False, repa=True),
    "lightningdit": Shape(lightning=True),
    "lightningdit with qk-norm": Shape(lightning=True, qk_norm=True, patch=1, channels=4, dim=40),
}


def draw_weights(shape, seed=0):
    """Every tensor of the checkpoint, none of them zero."""
    D = shape.dim
    P = shape.patch
    C = shape.channels
    values = P * P * C * (2 if shape.sigma else 1)
    sizes = {
        "x_embedder.proj.weight": (D, C, P, P),
        "x_embedder.proj.bias": (D,),
        "pos_embed": (1, shape.rows**2, D),
        "y_embedder.embedding_table.weight": (shape.classes + 1, D),
    }
    linears = {
        "t_embedder.mlp.0": (D, 256),
        "t_embedder.mlp.2": (D, D),
        "final_layer.adaLN_modulation.1": (2 * D, D),
        "final_layer.linear": (values, D),
    }
    norms = ["final_layer.norm_final"]

    hidden = shape.hidden
    expand, contract = ("w12", "w3") if shape.lightning else ("fc1", "fc2")
    for i in range(shape.depth):
        block = f"blocks.{i}"
        linears |= {
            f"{block}.attn.qkv": (3 * D, D),
            f"{block}.attn.proj": (D, D),
            f"{block}.adaLN_modulation.1": (6 * D, D),
            f"{block}.mlp.{expand}": (2 * hidden if shape.lightning else hidden, D),
            f"{block}.mlp.{contract}": (D, hidden),
        }
        norms += [f"{block}.norm1", f"{block}.norm2"]
        if shape.qk_norm:
            sizes |= {f"{block}.attn.{part}_norm.weight": (D // shape.heads,) for part in "qk"}

    if shape.repa:
        linears["projectors.0.0"] = (7, D)
    for name, size in linears.items():
        sizes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
    if shape.lightning:
        sizes |= {f"{name}.weight": (D,) for name in norms}

    # norms are near one, as in trained weights
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(size, generator=generator) * 0.15 for name, size in sizes.items()}
    for name in weights:
        if "norm" in name:
            weights[name] += 1.0
    if shape.lightning:
        cos, sin = rotations(shape)
        weights |= {"feat_rope.freqs_cos": cos, "feat_rope.freqs_sin": sin}
    return weights


def rotations(shape):
    """Angle of each token and channel of a head: position along rows, then along columns, over
    10000^(2j/half)."""
    half = shape.dim // shape.heads // 2
    rows = torch.arange(shape.rows)
    periods = 10000 ** (torch.arange(half).double() // 2 * 2 / half)
    angles = (torch.cartesian_prod(rows, rows).unsqueeze(2) / periods).flatten(1).float()
    return angles.cos(), angles.sin()


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(w, name, x):
    """RMSNorm where it has a weight, otherwise LayerNorm without one."""
    if f"{name}.weight" in w:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()


def attention(w, name, x, shape):
    B, L, D = x.shape
    q, k, v = linear(w, f"{name}.qkv", x).view(B, L, 3, shape.heads, -1).permute(2, 0, 3, 1, 4)
    if shape.qk_norm:
        q = norm(w, f"{name}.q_norm", q)
        k = norm(w, f"{name}.k_norm", k)
    if shape.lightning:
        cos = w["feat_rope.freqs_cos"]
        sin = w["feat_rope.freqs_sin"]

        def rotate(x):
            pairs = x.view(*x.shape[:-1], -1, 2)
            return x * cos + torch.stack((-pairs[..., 1], pairs[..., 0]), -1).view_as(x) * sin

        q = rotate(q)
        k = rotate(k)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return linear(w, f"{name}.proj", (weights @ v).transpose(1, 2).reshape(B, L, D))


def mlp(w, name, x):
    if f"{name}.w12.weight" in w:
        gate, value = linear(w, f"{name}.w12", x).chunk(2, -1)
        return linear(w, f"{name}.w3", F.silu(gate) * value)
    return linear(w, f"{name}.fc2", F.gelu(linear(w, f"{name}.fc1", x), approximate="tanh"))


def velocity(w, shape, x, t, y):
    """z - ε of latents x (B, C, H, W) at times t (B,), where 1 is the image."""
    P = shape.patch
    rows = shape.rows
    patches = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=P)
    tokens = patches.flatten(2).transpose(1, 2) + w["pos_embed"]
    angles = t[:, None] / 10000 ** (torch.arange(128) / 128)
    sinusoids = torch.cat((angles.cos(), angles.sin()), 1)
    time = linear(w, "t_embedder.mlp.2", F.silu(linear(w, "t_embedder.mlp.0", sinusoids)))
    # the condition of all blocks
    c = F.silu(time + w["y_embedder.embedding_table.weight"][y])
    for i in range(shape.depth):
        modulation = linear(w, f"blocks.{i}.adaLN_modulation.1", c)[:, None].chunk(6, -1)
        shift, scale, gate = modulation[:3]
        h = norm(w, f"blocks.{i}.norm1", tokens) * (1 + scale) + shift
        tokens = tokens + gate * attention(w, f"blocks.{i}.attn", h, shape)
        shift, scale, gate = modulation[3:]
        h = norm(w, f"blocks.{i}.norm2", tokens) * (1 + scale) + shift
        tokens = tokens + gate * mlp(w, f"blocks.{i}.mlp", h)
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", c)[:, None].chunk(2, -1)

    # of 2·C channels with sigma, the first C are the velocity
    h = norm(w, "final_layer.norm_final", tokens) * (1 + scale) + shift
    out = linear(w, "final_layer.linear", h)
    out = out.view(len(x), rows, rows, P, P, -1)[..., : shape.channels]
    return out.permute(0, 5, 1, 3, 2, 4).reshape(len(x), shape.channels, rows * P, rows * P)


def import_published(folder, content, vae, shape, **changes):
    """Saves a checkpoint and imports it; returns the imported file."""
    torch.save(content, folder / "published.pt")
    settings = {
        "kind": "lightningdit" if shape.lightning else "repa" if shape.repa else "sit",
        "encoder": str(vae),
        "head_dim": shape.dim // shape.heads,
        "source": str(folder / "published.pt"),
        "out": str(folder / "ours.safetensors"),
    }
    if shape.lightning:
        mean = torch.arange(shape.channels).view(1, -1, 1, 1) / 4
        torch.save({"mean": mean, "std": torch.full(mean.shape, 2.0)}, folder / "latents_stats.pt")
        settings["statistics"] = str(folder / "latents_stats.pt")
    return import_weights(WeightsConfig(**settings | changes))
