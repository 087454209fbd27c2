"""The conditions of the samples of a batch, which are a label each, and an encoded text each if the
model reads text; and the interface of the text encoders.

Letters: B samples or texts, T tokens of a text, E width of the text encoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from common.errors import UserError


class EncodedText(NamedTuple):
    """Encoded texts. Tokens after the first `lengths` of a text are padding, which a reader must
    mask. Tokens may be integers: only the direction of a token's vector has a meaning."""

    pooled: Float[Tensor, "B E"]
    """One vector for each text."""
    tokens: Float[Tensor, "B T E"]
    """One vector for each token; T is 0 if only pooled vectors are known."""
    lengths: Int[Tensor, "B"]
    """Number of tokens of each text, at most T."""
    numbers: Int[Tensor, "B"]
    """Place of each text in the table or list from which it comes; the last place of a table is the
    empty text's."""

    def select(self, rows: Tensor) -> EncodedText:
        """Returns the texts at the indices `rows`, on their device; if the texts lie on another
        one, the call waits for a copy."""
        here = rows.to(self.lengths.device)
        return EncodedText(*(part[here].to(rows.device) for part in self))


class Condition(NamedTuple):
    """Labels, and texts or None, of the samples of a batch."""

    labels: Int[Tensor, "B"]
    text: EncodedText | None = None

    @property
    def y(self) -> Tensor | Condition:
        """The argument `y` of a denoiser: the labels alone if there are no texts, so that a model
        of classes needs to know nothing else."""
        return self.labels if self.text is None else self

    @property
    def numbers(self) -> Int[Tensor, "B"]:
        """Place of each sample's text in the table or list from which it comes; without texts, of
        its class."""
        return self.labels if self.text is None else self.text.numbers

    def repeat(self, times: int) -> Condition:
        """Returns the conditions of the whole batch `times` times, one after the other."""
        text = self.text and EncodedText(*(torch.cat([part] * times) for part in self.text))
        return Condition(torch.cat([self.labels] * times), text)

    def drop(self, dropped: Bool[Tensor, "B"], null_label: int) -> Condition:
        """Returns the conditions with the null label where `dropped` is true. A denoiser replaces
        the text of a sample with the null label by the empty one."""
        return self._replace(labels=torch.where(dropped, null_label, self.labels))


class TextEncoder(nn.Module, ABC):
    """The interface of text encoders. A subclass tokenizes, and computes a vector for each
    token."""

    width: int
    """E, the number of values of a vector."""
    weights_sha256: str
    """Hash of the weights and the tokenizer: with another hash, prompts have other vectors."""
    max_length: int
    """Largest number of tokens of a text that the encoder reads; of a longer text the rest does not
    count."""
    revision: str | None = None
    """Commit of the Hugging Face repository from which the weights come; None for a local
    folder."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str], whole: bool = False) -> list[list[int]]:
        """Returns the numbers of each text's tokens, at least one for each text, also for "", and
        at most `max_length`; all of them if `whole`, to count them."""

    @abstractmethod
    def compute_vectors(self, numbers: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps token numbers (B, T), where `mask` (B, T) is false on padding, to the vectors of the
        tokens (B, T, E), and to a vector for each text (B, E), or None: then `encode` takes the
        mean of the tokens' vectors."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens of each text, also of those that the encoder cuts."""
        starts = range(0, len(texts), 4096)
        return [len(row) for i in starts for row in self.tokenize(texts[i : i + 4096], whole=True)]

    def encode(self, texts: Sequence[str], max_tokens: int, batch_size: int = 64) -> EncodedText:
        """Encodes texts, `batch_size` at a time. Pooled vectors are of the first `max_length`
        tokens of a text; of the tokens' vectors each text has the first `max_tokens`, padded with
        zeros to as many. The vectors are fp16, as latent sets store them. Raises UserError for
        values that fp16 cannot hold."""
        starts = range(0, len(texts), batch_size)
        batches = [self.encode_batch(texts[i : i + batch_size], max_tokens) for i in starts]
        pooled, tokens, lengths = (torch.cat(parts) for parts in zip(*batches, strict=True))
        finite = pooled.isfinite().all(1) & tokens.isfinite().all(2).all(1)
        if not finite.all():
            raise UserError(
                f"the text {texts[int(finite.long().argmin())]!r} has vectors that are too large "
                "for float16; take another text_encoder."
            )
        return EncodedText(pooled, tokens, lengths, torch.arange(len(texts), device=pooled.device))

    @torch.no_grad()
    def encode_batch(self, texts: Sequence[str], max_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Encodes a batch; returns pooled vectors, tokens and lengths (see `EncodedText`)."""
        device = next(self.parameters()).device
        numbers = self.tokenize(texts)
        lengths = torch.tensor([len(row) for row in numbers], device=device)
        rows = [torch.tensor(row, device=device) for row in numbers]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(padded.shape[1], device=device) < lengths[:, None]

        tokens, pooled = self.compute_vectors(padded, mask)
        tokens = tokens.float().masked_fill(~mask.unsqueeze(2), 0.0)  # a product could give -0.0
        if pooled is None:
            pooled = tokens.sum(1) / lengths.unsqueeze(1)
        # A negative padding cuts.
        tokens = nn.functional.pad(tokens, (0, 0, 0, max_tokens - tokens.shape[1]))
        return pooled.half(), tokens.half(), lengths.clamp(max=max_tokens)
