"""Softmax attention over all tokens of the grid or within windows of it, with axial rotary position
embedding.

Letters: B samples, L tokens, T tokens of a text, D width, K heads, P head dim.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from accel.kernels.attention.attend import attend
from accel.kernels.attention.qk_rope import fused_qk_rope, qk_rope
from common.errors import UserError
from models.layers import Layer, Ranges, axial_angles, count_heads, cut_rows, init_linear
from models.shape import Grid
from models.text import TextKeys


def axial_rotations(grid: Grid, head_dim: int, base: float = 100.0) -> Float[Tensor, "2 L P"]:
    """Returns the cosines and sines of 2-D RoPE, stacked (2, L, P): a token's row gives the angles
    for the first half of a head's channels, its column those for the second half.

    Su et al. 2021, https://arxiv.org/abs/2104.09864; axial form as in EVA-02,
    https://arxiv.org/abs/2303.11331.
    """
    angles = torch.cat(axial_angles(grid, head_dim // 4, base), dim=1)  # (L, P / 2)
    angles = angles.repeat_interleave(2, dim=1)
    return torch.stack((angles.cos(), angles.sin())).float()


def split_into_windows(side: int, window: int, offset: int) -> list[int]:
    """Cuts a side of the grid into windows, and returns the length of each in tokens: `window -
    offset` for the first, the remainder for the last, `window` for all others."""
    edges = [0, *range(window - offset, side, window), side]
    return [end - start for start, end in pairwise(edges)]


class Attention(Layer):
    """Multi-head self-attention through `scaled_dot_product_attention`.

    `qk_norm` puts a learned RMSNorm on queries and keys: it prevents divergence in 16-bit training
    of large models, at some cost in quality at equal steps (LightningDiT issue 68). `rope_base`
    null: no rotary embedding. If `bias`, both linear layers have a bias. `rope_base` and `bias`
    exist for weights that were trained elsewhere. `window` null: each token attends to all tokens;
    an integer: only to its window of `window` × `window` tokens. Odd layers shift their windows by
    `shift` tokens up and left (null: half a window), so that information crosses the edges of
    windows. Unlike in Swin (Liu et al. 2021, https://arxiv.org/abs/2103.14030) nothing wraps
    around: windows at the edges are smaller.

    If `text_tokens` is T > 0, each token also attends to the T tokens of its sample's text, as
    in PRX (https://huggingface.co/blog/Photoroom/prx-part1): these have their own map to keys and
    values, their own RMSNorm of keys and no rotation, and the image does not change them.
    """

    rotations: Tensor | None
    windows: Int[Tensor, "L"] | None
    """Index of each token's window, int32; None if `window` is null."""
    fused_rope: bool

    def __init__(
        self,
        dim: int,
        head_dim: int,
        grid: Grid,
        qk_norm: bool = True,
        eps: float = 1e-6,
        *,
        bias: bool = False,
        rope_base: float | None = 100.0,
        window: int | None = None,
        shift: int | None = None,
        layer: int = 0,
        text_tokens: int = 0,
    ) -> None:
        super().__init__()
        if window is not None and not 2 <= window < max(grid):
            raise UserError(
                f"model.mixer.window={window} must be at least 2 and below {max(grid)}, the longer "
                "side of the grid of tokens; null attends to all of them."
            )
        if shift is not None and not 0 <= shift < (window or 0):
            raise UserError(
                f"model.mixer.shift={shift} must be at least 0 and below model.mixer.window="
                f"{window}; null moves the windows of odd layers by half of that."
            )
        self.heads = count_heads(dim, head_dim, name="dim")
        self.rope_base = rope_base
        if rope_base is not None and head_dim % 4:
            raise UserError(f"model.head_dim={head_dim} must be a multiple of 4 for 2-D RoPE.")
        self.head_dim = head_dim
        self.grid = grid
        self.eps = eps
        self.attention_backend = "auto"
        # `runtime.fused_rope` switches its kernel on in each layer that has this attribute, so set
        # the attribute only if the layer has a q/k norm or a rotation to compute.
        if qk_norm or rope_base is not None:
            self.fused_rope = False
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.q_weight = nn.Parameter(torch.empty(head_dim)) if qk_norm else None
        self.k_weight = nn.Parameter(torch.empty(head_dim)) if qk_norm else None
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.text_tokens = text_tokens
        self.text = TextKeys(dim, head_dim, eps, bias) if text_tokens else None
        angles = None if rope_base is None else torch.empty(2, grid[0] * grid[1], head_dim)
        self.register_buffer("rotations", angles, persistent=False)

        # Lengths of this layer's windows, along rows and along columns; without windows the whole
        # grid is one window.
        self.spans = [[side] for side in grid]
        if window is not None:
            odd_shift = window // 2 if shift is None else shift
            offset = odd_shift if layer % 2 else 0
            self.spans = [split_into_windows(side, window, offset) for side in grid]
        numbers = None if window is None else torch.empty(grid[0] * grid[1], dtype=torch.int32)
        self.register_buffer("windows", numbers, persistent=False)

    def init_weights(self) -> None:
        for layer in (self.qkv, self.out_proj):
            init_linear(layer)
        if self.text is not None:
            self.text.init_weights()
        if self.q_weight is not None and self.k_weight is not None:
            nn.init.ones_(self.q_weight)
            nn.init.ones_(self.k_weight)
        self.init_buffers()

    def init_buffers(self) -> None:
        if self.rotations is not None and self.rope_base is not None:
            self.rotations.copy_(axial_rotations(self.grid, self.head_dim, self.rope_base))
        if self.windows is not None:
            rows, columns = (
                torch.arange(len(spans)).repeat_interleave(torch.tensor(spans))
                for spans in self.spans
            )
            self.windows.copy_((rows[:, None] * len(self.spans[1]) + columns).flatten())

    def forward(
        self,
        h: Float[Tensor, "B L D"],
        text: Float[Tensor, "B T D"] | None = None,
        text_mask: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        qkv = self.qkv(h).unflatten(-1, (3, self.heads, self.head_dim))
        if self.q_weight is None and self.rotations is None:
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
        else:
            norm_and_rotate = fused_qk_rope if self.fused_rope else qk_rope
            q, k, v = norm_and_rotate(qkv, self.q_weight, self.k_weight, self.rotations, self.eps)
        if self.text is not None and text is not None:
            text_k, text_v = self.text(text)
            k = torch.cat((text_k.to(k.dtype), k), dim=2)
            v = torch.cat((text_v.to(v.dtype), v), dim=2)
        y = attend(q, k, v, self.attention_backend, self.windows, text_mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def list_matrices(self) -> dict[Tensor, Ranges]:
        width = self.heads * self.head_dim
        matrices = {self.qkv.weight: cut_rows(width, width, width)}
        if self.text is not None:
            matrices[self.text.kv.weight] = cut_rows(width, width)
        return super().list_matrices() | matrices

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of one forward pass of one sample of `tokens` tokens, where scores
        between different windows do not count."""
        rows, columns = (sum(span * span for span in spans) for spans in self.spans)
        scores = rows * columns + tokens * self.text_tokens
        weights = tokens * (self.qkv.weight.numel() + self.out_proj.weight.numel())
        if self.text is not None:
            weights += self.text_tokens * self.text.kv.weight.numel()
        return 2 * weights + 4 * scores * self.heads * self.head_dim
