"""The network that a training step runs: a denoiser and the heads that only training needs.

Letters: B samples, C channels, H W latent height and width.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from common.condition import Condition
from common.errors import UserError
from models.adapters import count_passes
from models.denoiser import Denoiser


class ModelWithHeads(nn.Module):
    """Owns a denoiser and auxiliary heads on its blocks. Techniques compile, wrap and shard this
    module. Averages and files of weights have the denoiser alone, because sampling needs no
    heads."""

    def __init__(self, model: Denoiser) -> None:
        super().__init__()
        self.model = model
        self.aux_heads = nn.ModuleDict()
        self.taps: dict[str, int] = {}
        """Name of a head -> number of the block, from 1, after which it reads the stream."""
        if isinstance(model, Denoiser) and model.internal_block:
            self.tap("internal", model.internal_block, "model.internal_block")

    def tap(self, name: str, block: int, key: str) -> None:
        """Lets the head `name` read the stream after block number `block`, from 1. Raises
        UserError, with `key` in its message, for a model whose forward pass is not Denoiser's.

        An auxiliary head is the entry `name` of `aux_heads`. It gets the stream as fp32 (B, L, D),
        with the tokens in raster order, and the embedding (B, D) of time and condition; it returns
        patches (B, L, E), which `forward` joins to the shape of the latents.
        """
        kind = type(self.model)
        if kind.forward is not Denoiser.forward:
            raise UserError(
                f"{key} needs the forward pass of models.denoiser.Denoiser, and {kind.__name__} "
                "has its own; set it to 0."
            )
        self.taps[name] = block

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.blocks

    @property
    def tokens(self) -> int:
        return self.model.tokens

    def forward(
        self,
        x: Float[Tensor, "B C H W"],
        t: Float[Tensor, "B"],
        y: Int[Tensor, "B"] | Condition,
        **options: Any,
    ) -> tuple[Float[Tensor, "B C H W"], dict[str, Float[Tensor, "B C H W"]]]:
        """Returns the model's velocity, with the arguments of its `forward`, and in training mode
        the outputs of all heads by name: of "internal" a velocity."""
        model = self.model
        if not self.training or not self.taps:
            return model(x, t, y, **options), {}
        taps = [*self.taps.values()]
        velocity, streams, embedded = model.run_blocks(x, t, y, taps, **options)
        outputs = {}
        for name, block in self.taps.items():
            if name == "internal":
                outputs[name] = model.estimate_velocity(streams[block], embedded, x, t)
            else:
                patches = self.aux_heads[name](streams[block], embedded)
                outputs[name] = model.unpatchify(patches)
        return velocity, outputs

    def list_unclipped(self) -> list[nn.Parameter]:
        """See `Denoiser.list_unclipped`; none for a model without an internal head."""
        return self.model.list_unclipped() if "internal" in self.taps else []

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters that get no weight decay: those of the model, and the
        vectors of heads."""
        heads = self.aux_heads.named_parameters("aux_heads")
        names = {f"model.{name}" for name in self.model.no_weight_decay()}
        return names | {name for name, parameter in heads if parameter.ndim < 2}

    def count_train_flops(self) -> float:
        """Counts the FLOPs of a sample in a training step, forward and backward; see
        `Denoiser.flops_per_sample`."""
        heads: list[Any] = [*self.aux_heads.values()]
        total = self.model.flops_per_sample() + sum(head.flops(self.tokens) for head in heads)
        return count_passes(self.model) * total
