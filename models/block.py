"""The block: one or two layers, whose outputs, called branches, are added to a residual stream that
stays fp32.

Letters: B samples, L tokens, T tokens of a text, D width, M modulations: scale, shift and gate
for each layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from accel.kernels.add_norm.operator import add_norm, fused_add_norm
from accel.kernels.swiglu.operator import fused_swiglu, silu_product
from common.errors import UserError
from models.layers import Layer, Ranges, cut_rows
from models.shape import Grid, Shape

Norm = Literal["rms", "layer"]
CONTEXT = ("grid", "text", "text_mask")
"""Arguments of `Block.forward` that go to the layers whose `forward` takes them."""


class SwiGLU(Layer):
    """Computes `w2(silu(w1 x)·w3 x)` (Shazeer 2020, https://arxiv.org/abs/2002.05202); the layer
    `w13` computes w1 x and w3 x in one product.

    If `bias`, both linear layers have a bias, as in LightningDiT's weights.
    """

    def __init__(self, dim: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.fused_swiglu = False
        self.w13 = nn.Linear(dim, 2 * hidden, bias=bias)
        self.w2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, h: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        joined = self.w13(h)
        return self.w2(
            fused_swiglu(joined) if self.fused_swiglu else silu_product(*joined.chunk(2, dim=-1))
        )

    def list_matrices(self) -> dict[Tensor, Ranges]:
        hidden = self.w2.weight.shape[1]
        return super().list_matrices() | {self.w13.weight: cut_rows(hidden, hidden)}


class GeluMLP(Layer):
    """Computes `fc2(gelu(fc1 x))` with biases, and GELU approximated by tanh (Hendrycks & Gimpel
    2016), as in SiT's weights."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, h: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        return self.fc2(F.gelu(self.fc1(h), approximate="tanh"))


class Block(nn.Module):
    """Maps (branch, gate, residual, cond) to the next (branch, gate, residual).

    The residual stream is `residual + gate·branch`. A block first adds the incoming branch, which
    the layer *before* the block computed, in the same operation that also normalises the sum
    (`add_norm`). The block returns the branch of its own last layer and that branch's gate; the
    next block, or the final norm, adds the branch. `cond` (B, M, D) holds scale, shift and gate of
    each layer. The residual that the block returns is never normalised: if the gates in `cond` are
    0, the block leaves the stream unchanged.

    A layer with an attribute `order` (L,) gets the tokens in that order: `order[m]` is the index of
    the layer's m-th token. The norm before the layer permutes the tokens, and the sum after the
    layer permutes the branch back, both inside `add_norm`. `arriving` is the order of the tokens in
    the incoming branch; None: the order of the stream. A layer whose `forward` has the parameter
    `grid`, `text` or `text_mask` gets that argument of the block.

    `norm` is "rms", or "layer" for weights that were trained with LayerNorm.
    """

    def __init__(
        self, layers: list[nn.Module], eps: float, arriving: Int[Tensor, "L"] | None, norm: Norm
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.eps = eps
        self.orders = [arriving, *(getattr(layer, "order", None) for layer in layers)]
        # Store the inverse orders as buffers: torch.compile treats integers in attributes as
        # constants, and recompiles for each block whose integers differ.
        for i, order in enumerate(self.orders):
            rows = None if order is None else torch.empty(len(order), dtype=torch.int32)
            self.register_buffer(f"rows_{i}", rows, persistent=False)
        # Layers take what their `forward` names, beside the tokens.
        known = [inspect.signature(layer.forward).parameters for layer in layers]
        self.takes = [[name for name in CONTEXT if name in names] for names in known]
        self.reads_text = any("text" in names for names in self.takes)
        self.residual_in_fp32 = True
        self.centred = norm == "layer"
        self.fused_add_norm = False

    def forward(
        self,
        branch: Float[Tensor, "B L D"],
        gate: Float[Tensor, "B D"],
        residual: Float[Tensor, "B L D"],
        cond: Float[Tensor, "B M D"],
        text: Float[Tensor, "B T D"] | None = None,
        text_mask: Bool[Tensor, "B T"] | None = None,
        *,
        grid: Grid,
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B D"], Float[Tensor, "B L D"]]:
        context = {"grid": grid, "text": text, "text_mask": text_mask}
        vectors = cond.unbind(1)
        for i, layer in enumerate(self.layers):
            scale, shift, next_gate = vectors[3 * i : 3 * i + 3]
            rows = getattr(self, f"rows_{i + 1}")
            h, residual = self.normalise(branch, gate, residual, scale, shift, i, h_rows=rows)
            branch = layer(h, **{name: context[name] for name in self.takes[i]})
            gate = next_gate
        return branch, gate, residual

    def normalise(
        self,
        branch: Tensor,
        gate: Tensor,
        residual: Tensor,
        scale: Tensor,
        shift: Tensor,
        layers: int,
        h_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Adds a branch to the stream and norms the sum (`add_norm`) with this block's settings;
        `layers` is the number of this block's layers that have already run."""
        normalise = fused_add_norm if self.fused_add_norm else add_norm
        return normalise(
            branch,
            gate,
            residual,
            scale,
            shift,
            centred=self.centred,
            eps=self.eps,
            residual_in_fp32=self.residual_in_fp32,
            branch_rows=getattr(self, f"rows_{layers}"),
            h_rows=h_rows,
        )

    def read_stream(
        self,
        branch: Float[Tensor, "B L D"],
        gate: Float[Tensor, "B D"],
        residual: Float[Tensor, "B L D"],
    ) -> Float[Tensor, "B L D"]:
        """Computes the residual stream after this block, `residual + gate·branch`, in fp32 with the
        tokens in raster order, from what `forward` returned."""
        rows = getattr(self, f"rows_{len(self.layers)}")
        if rows is not None:
            branch = branch.index_select(1, rows)
        return residual.float() + gate.float().unsqueeze(1) * branch.float()

    def init_weights(self) -> None:
        for layer in self.layers:
            layer.init_weights()  # pyright: ignore[reportCallIssue]
        self.init_buffers()

    def init_buffers(self) -> None:
        for i, order in enumerate(self.orders):
            if order is not None:
                getattr(self, f"rows_{i}").copy_(order.argsort())

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of one forward pass of one sample of `tokens` tokens."""
        return sum(layer.flops(tokens) for layer in self.layers)  # pyright: ignore[reportCallIssue]


def build_blocks(
    shape: Shape,
    mixer: Callable[..., nn.Module],
    attention: Callable[..., nn.Module] | None,
    text_tokens: int,
    mlp: Callable[..., nn.Module],
    eps: float,
    norm: Norm,
) -> nn.ModuleList:
    """Builds the blocks of a denoiser: the mixer of every `attention_every`-th one by `attention`,
    all others by `mixer`; with 0 all by `mixer`. An MLP follows unless `shape.hidden` is 0.

    A mixer's argument `layer` is the number of earlier blocks of the same kind. So scans take rows
    and columns in turn, and attention shifts its windows, as if the other kind were not there.
    Only attention takes `text_tokens`, the number of tokens of a text; UserError if it is above
    0 and no layer's `forward` has the parameter `text`, or if `attention_every` is above 0 without
    `attention`.
    """
    every = shape.attention_every
    if attention is None and every:
        raise UserError(
            f"model.attention_every={every} needs model.attention; choose "
            "model=hybrid_<size>, mamba_<size> or ssd_mlp_<size>, or 0."
        )

    # A block returns the output of its last layer in the token order of that layer (`leaving`;
    # None: the order of the residual stream). The next block adds this output to the residual
    # stream, so it needs `leaving` to permute the tokens back.
    blocks = nn.ModuleList()
    leaving = None
    reads_text = False
    for number in range(shape.depth):
        kind = mixer
        layer = number
        if attention is not None and every:
            earlier = number // every
            has_attention = (number + 1) % every == 0
            kind = attention if has_attention else mixer
            layer = earlier if has_attention else number - earlier
        known = inspect.signature(kind).parameters
        options = {"layer": layer, "text_tokens": text_tokens}
        options = {name: value for name, value in options.items() if name in known}
        layers = [kind(dim=shape.dim, head_dim=shape.head_dim, grid=shape.grid, **options)]
        if shape.hidden:
            layers.append(mlp(dim=shape.dim, hidden=shape.hidden))
        block = Block(layers, eps, leaving, norm)
        blocks.append(block)
        reads_text = reads_text or block.reads_text
        leaving = block.orders[-1]

    if text_tokens and not reads_text:
        raise UserError(
            "model.text_tokens=true needs layers whose forward takes `text`, such as attention, "
            "and this model has none; choose model=dit_<size> or hybrid_<size>, or set "
            "model.text_tokens=false."
        )
    return blocks
