"""The denoiser as a model of diffusers; `scripts.export` copies it, with all that it needs, into
the folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from models.block import Norm
from models.denoiser import Denoiser

LAYERS: dict[str, type[nn.Module]] = {}
"""By name, the classes that `mixer` and `mlp` may name; the export writes those of the model."""


class FastlatentTransformer(Denoiser, ModelMixin, ConfigMixin):
    """The velocity ε - z of x = (1-t)·z + t·ε, from latents x (B, C, H, W), times t (B,) and labels
    y (B,).

    t = 1 is noise; y is int64, and `num_classes` is the label of no class. `mixer` and `mlp` say
    the class of a layer, as "name", and its arguments. `latents` is for the pipeline: statistics,
    names of classes, how samples were drawn.
    """

    @register_to_config
    def __init__(
        self,
        *,
        channels: int,
        height: int,
        width: int,
        num_classes: int,
        dim: int,
        depth: int,
        head_dim: int,
        patch_size: int,
        mixer: dict[str, Any],
        mlp_ratio: float = 0.0,
        drop_path: float = 0.0,
        eps: float = 1e-6,
        mlp: dict[str, Any] | None = None,
        norm: Norm = "rms",
        time_scale: float = 1000.0,
        latents: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            channels=channels,
            height=height,
            width=width,
            num_classes=num_classes,
            dim=dim,
            depth=depth,
            head_dim=head_dim,
            patch_size=patch_size,
            mixer=layer(mixer),
            mlp_ratio=mlp_ratio,
            drop_path=drop_path,
            eps=eps,
            norm=norm,
            time_scale=time_scale,
            **({"mlp": layer(mlp)} if mlp else {}),
        )
        with torch.no_grad():
            self.init_buffers()  # which no file holds

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor, drop_uniforms: Tensor | None = None
    ) -> Tensor:
        """The velocity. Weights in 16 bits compute products in that type, and all else in fp32; it
        is fp32 then."""
        if self.dtype == torch.float32:
            return super().forward(x, t, y, drop_uniforms)
        with torch.autocast(x.device.type, self.dtype):
            return super().forward(x.float(), t, y, drop_uniforms).float()


def layer(node: dict[str, Any]) -> Callable[..., nn.Module]:
    """What builds a layer: the class called "name", with the other values as arguments."""
    return partial(
        LAYERS[node["name"]], **{key: value for key, value in node.items() if key != "name"}
    )
