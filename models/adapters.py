"""Adapters: small trained modules that are attached to a frozen model, and can be merged into its
weights.

An adapted layer replaces a layer of the model and contains it as `base_layer`, whose weights
training never changes.
Letters: B samples, I inputs and O outputs of a layer, R rank, K classes, D width, H hidden width.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from common.errors import UserError
from models.layers import LabelEmbedding


class Adapted(nn.Module, ABC):
    """Base class of layers with an adapter: such a layer replaces `base_layer` and contains it."""

    base_layer: Any

    @abstractmethod
    def merge(self) -> nn.Module:
        """Adds the adapter to the weights of `base_layer` in place, in fp32, and returns
        `base_layer`."""


class LoraLinear(Adapted):
    """A linear layer to which a trained product of low rank is added: `W x + b + alpha/rank · B A
    x`.

    Hu et al. 2021, https://arxiv.org/abs/2106.09685. A (R, I) starts with random values
    (Kaiming-uniform, as in the library PEFT), and B (O, R) with zeros, so the layer's outputs are
    unchanged at the start. Both are fp32 parameters, whatever the dtype of `base_layer`.
    """

    base_layer: nn.Linear

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scale = alpha / rank
        device = base_layer.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base_layer.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base_layer.out_features, rank, device=device))
        if not self.lora_A.is_meta:
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """The weight of `base_layer`, because other code reads the size of a linear layer from its
        attribute `weight`."""
        return self.base_layer.weight

    def forward(self, x: Float[Tensor, "B L I"]) -> Float[Tensor, "B L O"]:
        return self.base_layer(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        self.base_layer.weight += self.scale * (self.lora_B @ self.lora_A)  # as PEFT rounds it
        return self.base_layer


class PromptedLabels(Adapted):
    """A label embedding that adds a trained vector for each class and for the null label.

    With `hidden` > 0 a small MLP computes the vectors: P-tuning, Liu et al. 2021,
    https://arxiv.org/abs/2103.10385. With and without the MLP, the added vectors start at zero.
    """

    base_layer: LabelEmbedding

    def __init__(self, base_layer: LabelEmbedding, hidden: int = 0) -> None:
        super().__init__()
        self.base_layer = base_layer
        table = base_layer.table.weight
        self.prompt = nn.Parameter(torch.zeros(table.shape, device=table.device))
        self.mlp = None
        if hidden:
            down = nn.Linear(table.shape[1], hidden, device=table.device)
            up = nn.Linear(hidden, table.shape[1], device=table.device)
            self.mlp = nn.Sequential(down, nn.GELU(), up)
            if not table.is_meta:
                nn.init.normal_(self.prompt)
                nn.init.zeros_(up.weight)
                nn.init.zeros_(up.bias)

    def compute_vectors(self) -> Float[Tensor, "K+1 D"]:
        """Computes the vectors that are added to the embeddings of the K classes and of the null
        label, (K + 1, D)."""
        return self.prompt if self.mlp is None else self.mlp(self.prompt)

    def forward(self, y: Int[Tensor, "B"]) -> Float[Tensor, "B D"]:
        return self.base_layer(y) + F.embedding(y, self.compute_vectors())

    @torch.no_grad()
    def merge(self) -> LabelEmbedding:
        self.base_layer.table.weight += self.compute_vectors()
        return self.base_layer


class Adapter(ABC):
    """Base class of the adapters that a configuration can name; a subclass decides which layers get
    an adapter."""

    no_layer_message: str
    """Message of the error that `attach` raises if the model has no layer to adapt."""

    @abstractmethod
    def adapt(self, name: str, layer: nn.Module) -> Adapted | None:
        """Returns the layer called `name` with the adapter on it; None if the layer stays
        unchanged."""


class Lora(Adapter):
    """LoRA on the linear layers whose names match one of `targets`, patterns such as
    `blocks.*.qkv`. The layers named in `rank_pattern` and `alpha_pattern` have their own rank and
    alpha."""

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        targets: list[str] = ["blocks.*"],  # noqa: B006 - never changed
        rank_pattern: dict[str, int] | None = None,
        alpha_pattern: dict[str, float] | None = None,
    ) -> None:
        if rank < 1:
            raise UserError(f"adapter.rank={rank} must be at least 1.")
        if alpha <= 0.0:
            raise UserError(f"adapter.alpha={alpha} must be above 0.")
        self.rank = rank
        self.alpha = alpha
        self.targets = targets
        self.ranks = rank_pattern or {}
        self.alphas = alpha_pattern or {}
        self.no_layer_message = (
            f"adapter.targets={targets} match no linear layer of this model; [blocks.*] are all of "
            "its blocks."
        )

    def adapt(self, name: str, layer: nn.Module) -> Adapted | None:
        if not isinstance(layer, nn.Linear) or not any(
            fnmatchcase(name, pattern) for pattern in self.targets
        ):
            return None
        rank = self.ranks.get(name, self.rank)
        return LoraLinear(layer, rank, self.alphas.get(name, self.alpha))


class Prompt(Adapter):
    """Adds a trained vector for each label to the label's embedding; with `hidden` > 0 an MLP of
    that width computes the vectors."""

    no_layer_message = (
        "adapter=prompt needs a LabelEmbedding, which this model has not; use adapter=lora."
    )

    def __init__(self, hidden: int = 0) -> None:
        if hidden < 0:
            raise UserError(f"adapter.hidden={hidden} must be at least 0 (no MLP).")
        self.hidden = hidden

    def adapt(self, name: str, layer: nn.Module) -> Adapted | None:
        return PromptedLabels(layer, self.hidden) if isinstance(layer, LabelEmbedding) else None


def attach(model: nn.Module, adapter: Adapter, train_labels: bool = False) -> None:
    """Freezes the model and attaches the adapter to the layers that fit it; if `train_labels`, the
    label embedding stays trainable.

    Raises UserError if the model has no layer that the adapter fits.
    """
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, LabelEmbedding):
            module.requires_grad_(train_labels)
    layers = {name: adapter.adapt(name, layer) for name, layer in model.named_modules()}
    adapted = {name: layer for name, layer in layers.items() if layer}
    if not adapted:
        raise UserError(adapter.no_layer_message)
    for name, layer in adapted.items():
        replace_layer(model, name, layer)


def find_adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """Returns a mapping: name of each layer with an adapter -> the layer; {} if the model has no
    adapter."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Adapted)}


def find_trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns a mapping: name -> parameter, of the parameters that training changes and a
    checkpoint stores. These are all parameters; in a model with an adapter only those that require
    gradients."""
    adapted = find_adapted_layers(model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad or not adapted}


def count_passes(model: nn.Module) -> float:
    """Returns the cost of a training step as a multiple of the cost of a forward pass.

    Without an adapter the cost is 3: the backward pass costs twice as much as the forward pass.
    With an adapter the weights are frozen, so the backward pass computes almost only gradients of
    activations, and only from the last block back to the first block with a trained parameter. The
    result assumes that all blocks cost the same.
    """
    if not find_adapted_layers(model):
        return 3.0
    matches = [re.match(r"blocks\.(\d+)\.", name) for name in find_trained_parameters(model)]
    first_block = min(int(match[1]) if match else 0 for match in matches)
    return 2.0 - first_block / len(cast("Any", model).blocks)


def merge_adapter(model: nn.Module) -> None:
    """Merges the adapter into the model's weights: the model then computes the same outputs up to
    rounding, and is as fast as without an adapter."""
    for name, layer in find_adapted_layers(model).items():
        replace_layer(model, name, layer.merge())


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replaces the submodule called `name`, a path with dots such as blocks.0.qkv, by `layer`."""
    parent, _, child = name.rpartition(".")
    cast("Any", model.get_submodule(parent)).register_module(child, layer)
