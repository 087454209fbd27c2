"""Text as a condition: maps encoded captions to the width of a denoiser.

Letters: B samples, T tokens of a caption, E width of the text encoder, D width of the denoiser, K
heads, P head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from common.condition import EncodedText
from common.errors import UserError
from models.layers import init_linear, init_narrow

Conditioning = Literal["class", "text", "class_and_text"]
"""Names what a denoiser is conditioned on, beside the time."""


class TextEmbedding(nn.Module):
    """Embeds captions: one linear map takes the pooled vector to a vector that is added where the
    label embedding is, and, if `with_tokens`, another one takes the tokens' vectors to tokens for
    attention. Both first normalise the encoder's vectors, whose scale differs from encoder to
    encoder: tokens to an RMS of 1, pooled vectors to a norm of 1, so that the map learns at about
    the pace of a label embedding: with an RMS of 1 its output became 40 times as large as that of
    labels, and drowned the time. From pooled vectors the mean over the captions is subtracted
    before, because their common part is large (Mu & Viswanath 2018,
    https://arxiv.org/abs/1702.01417).

    `text` describes the captions: a `TextSpec` of data/spec.py as a dict. The mean and the empty
    caption are buffers, which files of weights do not contain.
    """

    mean: Tensor
    empty_pooled: Tensor
    empty_tokens: Tensor

    def __init__(self, dim: int, text: Mapping[str, Any], with_tokens: bool) -> None:
        super().__init__()
        width = text["width"]
        self.text = text
        self.count = text["max_tokens"] if with_tokens else 0
        """T, or 0 without tokens. All captions are padded to this length, so that shapes never
        change."""
        self.pooled = nn.Linear(width, dim)
        self.empty_length = len(text["empty_tokens"][: self.count])
        self.tokens = nn.Linear(width, dim) if with_tokens else None
        self.init_buffers()

    def init_weights(self) -> None:
        for layer in filter(None, (self.pooled, self.tokens)):
            init_narrow(layer)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Makes the buffers of the mean and the empty caption, where they were before, and always
        in fp32: 16 bits would hide part of what distinguishes captions."""
        device = getattr(self, "mean", torch.empty(0)).device
        padding = [[0.0] * self.text["width"]] * (self.count - self.empty_length)
        buffers = {
            "mean": self.text["mean"],
            "empty_pooled": self.text["empty_pooled"],
            "empty_tokens": self.text["empty_tokens"][: self.count] + padding,
        }
        for name, values in buffers.items():
            value = torch.tensor(values, dtype=torch.float32, device=device)
            self.register_buffer(name, value, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> TextEmbedding:
        super()._apply(fn, recurse)
        self.init_buffers()
        return self

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of one forward pass of one sample."""
        return 2 * self.pooled.weight.numel() * (1 + self.count)

    def forward(self, text: EncodedText | None, dropped: Bool[Tensor, "B"]) -> list[Tensor]:
        """Returns the vector of each caption (B, D) and, with tokens, these (B, T, D) and a mask
        (B, T) that is false on padding. The empty caption replaces the caption of a sample whose
        `dropped` is true, and all captions if `text` is None."""
        if text is None:
            # Drop all captions, of whatever values.
            text = EncodedText(self.empty_pooled, self.empty_tokens, dropped, dropped)
            dropped = torch.ones_like(dropped)
        everywhere = dropped.unsqueeze(1)
        pooled = torch.where(everywhere, self.empty_pooled, text.pooled.float())
        vector = self.pooled(F.normalize(pooled - self.mean, dim=1))
        if self.tokens is None:
            return [vector]

        tokens = torch.where(everywhere.unsqueeze(2), self.empty_tokens, text.tokens.float())
        lengths = torch.where(dropped, self.empty_length, text.lengths)
        mask = torch.arange(self.count, device=lengths.device) < lengths.unsqueeze(1)
        return [vector, self.tokens(F.rms_norm(tokens, tokens.shape[-1:], eps=1e-6)), mask]


class TextKeys(nn.Module):
    """Maps the tokens of captions to the keys, normalised by RMSNorm, and the values of a layer of
    attention with K heads of size P."""

    def __init__(self, dim: int, head_dim: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.kv = nn.Linear(dim, 2 * dim, bias=bias)
        self.k_weight = nn.Parameter(torch.empty(head_dim))

    def init_weights(self) -> None:
        init_linear(self.kv)
        nn.init.ones_(self.k_weight)

    def forward(
        self, text: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B K T P"], Float[Tensor, "B K T P"]]:
        k, v = self.kv(text).unflatten(-1, (2, -1, len(self.k_weight))).permute(2, 0, 3, 1, 4)
        return F.rms_norm(k.float(), self.k_weight.shape, self.k_weight, self.eps), v


def build_text_embedding(
    conditioning: str, with_tokens: bool, text: Mapping[str, Any] | None, dim: int
) -> TextEmbedding | None:
    """Builds the embedding of captions that a denoiser needs; None if it is conditioned on classes
    only. Raises UserError if the latent set has no captions, or stores no tokens."""
    if conditioning == "class":
        if with_tokens:
            raise UserError("model.text_tokens=true needs model.conditioning=text; set both.")
        return None
    if text is None:
        raise UserError(
            f"model.conditioning={conditioning} needs a latent set with captions, and this one has "
            "none; make it by `python precompute_latents.py … text_encoder=wordllama`."
        )
    if with_tokens and not text["max_tokens"]:
        raise UserError(
            "model.text_tokens=true, but the latent set stores no tokens of its captions; encode "
            "it with text_tokens=64, or set model.text_tokens=false."
        )
    return TextEmbedding(dim, text, with_tokens)
