"""Computes products of large layers in 8 bits, for `precision=fp8`: torchao's float8 training,
inside bf16 autocast.

It converts the `nn.Linear` layers in the model's blocks with at least 1,024 inputs and more than
1,024 outputs, both multiples of 16, as 8-bit products require. It does not convert embeddings, the
time conditioning and the final layer, because these are outside the blocks. Weights stay fp32
parameters under their own names; each pass computes scales on the device.

The limits come from torchao's own filters (`_auto_filter_for_recipe`, by its measurements on H100).
For "tensorwise" torchao leaves out layers with at most 1,024 outputs unless they have more than
4,096 inputs; for "rowwise" also layers with at most 2,048 outputs or 1,024 inputs; for
"rowwise_with_gw_hp" it has no filter. The benefit for our models is not measured, and this file has
not run on a GPU yet: the tests run the same code on a CPU, which emulates the products.
References: https://github.com/pytorch/ao/tree/main/torchao/float8 and Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accel.evidence import EIGHT_BIT, REGION_PREFIX, BlockEvidence, Evidence
from accel.machine import capability_of, is_installed
from accel.technique import blocks_of
from common.libraries import silence_libraries

MIN_FEATURES = 1024
"""Smallest number of input features of a layer that computes in 8 bits. The layer's number of
output features must be greater than this number."""
SIZE_MULTIPLE = 16
"""Number of which an 8-bit product on a GPU requires multiples: the layer's numbers of input and
output features, and the number of tokens."""
BACKWARD_PRODUCTS = {"tensorwise": 2, "rowwise": 2, "rowwise_with_gw_hp": 1}
"""Value of `fp8_recipe` -> number of 8-bit products in a layer's backward pass; the last recipe
computes the weight's gradient in bf16."""


def find_obstacle(device: torch.device) -> str | None:
    """Returns a sentence that says why `device` cannot compute 8-bit products; None if it can."""
    instead = "use runtime.precision=bf16"
    if device.type != "cuda":
        return (
            f"fp8 needs the 8-bit tensor cores of an NVIDIA GPU; this run is on {device.type}; "
            f"{instead}."
        )
    if capability_of(device) < (8, 9):
        return f"fp8 needs compute capability 8.9 or newer; {instead} on this GPU."
    if not is_installed("torchao"):
        return f"fp8 needs torchao; pip install torchao, or {instead}."
    return None


def is_large(layer: nn.Module) -> bool:
    """Returns whether to convert a layer: only an `nn.Linear` that is large enough for products in
    8 bits. A subclass of `nn.Linear` is not converted, because it may compute in another way."""
    if type(layer) is not nn.Linear:
        return False
    sizes = (layer.in_features, layer.out_features)
    return (
        sizes[0] >= MIN_FEATURES
        and sizes[1] > MIN_FEATURES
        and not any(size % SIZE_MULTIPLE for size in sizes)
    )


def cast_input(_layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
    """Hook before a layer's forward pass: casts the input to autocast's dtype, because torchao's
    layer does this itself only on a GPU. If autocast is off, returns None, which leaves the input
    as it is."""
    kind = inputs[0].device.type
    if not torch.is_autocast_enabled(kind):
        return None
    return (inputs[0].to(torch.get_autocast_dtype(kind)),)


class Float8Layers:
    """The layers of a model that compute in 8 bits; the constructor converts them."""

    def __init__(self, model: nn.Module, recipe: str) -> None:
        self.recipe = recipe
        # An encoder has no attribute `blocks`, so none of its layers is converted.
        blocks = list(blocks_of(model)) if hasattr(model, "blocks") else []
        chosen = [[m for m in block.modules() if is_large(m)] for block in blocks]
        self.large = [len(layers) for layers in chosen]
        """For each block the number of layers that are large enough to compute in 8 bits, whether
        or not torchao converted them."""
        self.count = sum(isinstance(m, nn.Linear) for block in blocks for m in block.modules())
        if any(chosen):
            ids = {id(m) for layers in chosen for m in layers}
            self.convert_layers(blocks_of(model), ids, getattr(model, "tokens", 1))

    def convert_layers(self, blocks: nn.ModuleList, chosen: set[int], tokens: int) -> None:
        """Converts the layers of `blocks` whose ids are in `chosen`; `tokens` is the number of
        tokens of a sample."""
        with silence_libraries():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config: Any = Float8LinearConfig.from_recipe_name(self.recipe)
            # The product for a weight's gradient sums over the tokens of a micro-batch, whose
            # number must be a multiple of 16 too. So let torchao pad the tokens, if a sample's
            # number of tokens is not a multiple of 16.
            config = replace(config, pad_inner_dim=tokens % SIZE_MULTIPLE != 0)
            before = set(blocks.modules())
            convert_to_float8_training(
                blocks, module_filter_fn=lambda m, name: id(m) in chosen, config=config
            )
        for layer in set(blocks.modules()) - before:
            layer.register_forward_pre_hook(cast_input)

    def observe(self, evidence: Evidence) -> tuple[bool, str]:
        """Returns whether every large layer ran all its products in 8 bits, forward and backward,
        and a note for the ledger that shows the counts.

        Under checkpointing the recomputation repeats a block's forward products, but compiled code
        does not repeat the last one: its result is the block's output, which the backward pass does
        not need.
        """
        ran = evidence.count_dtypes([EIGHT_BIT]).total()
        wanted = 0
        repeated = 0
        converted = 0
        for layers, calls in zip(self.large, evidence.blocks, strict=False):
            converted += min([layers, *(call.ops[EIGHT_BIT] for call in calls)]) if calls else 0
            wanted += sum(layers * self.count_products(call) for call in calls)
            repeated += sum(call.trains and call.recomputes for call in calls) * bool(layers)
        compiled = any(op.startswith(REGION_PREFIX) for op in evidence.ops)
        complete = ran == wanted or (compiled and ran == wanted - repeated)
        note = f"{ran} of {evidence.products.total()} products in fp8 ({self.recipe})"
        note += "" if complete else f", {wanted} meant to be"
        note += f"; {converted} of {sum(self.large)} large layers ran forward in fp8"
        note += " (in an uncompiled step)" * evidence.blocks_uncompiled
        return complete and converted == sum(self.large), note

    def count_products(self, call: BlockEvidence) -> int:
        """Counts the 8-bit products that one layer should compute for one call of its block: one in
        the forward pass; if the call trains, also those of the backward pass, and one more if the
        block is recomputed."""
        return 1 + (BACKWARD_PRODUCTS[self.recipe] + call.recomputes if call.trains else 0)
