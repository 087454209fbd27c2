"""The captions of a latent set in memory, encoded: a table in which each different caption stands
once.

A sample has the numbers of its captions in this table, filled up with -1, which names the last one,
the empty caption.

Letters: B samples of a batch, E width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from common.condition import EncodedText
from data.rows import Rows, split_rows
from data.spec import TextSpec


class CaptionTable:
    """All captions of a set, encoded, in the memory of one device. Row i is caption i; the last
    row, which the number -1 also names, is the empty caption."""

    def __init__(self, spec: TextSpec, level: str, device: torch.device | str) -> None:
        """Makes a table of zeros with the shapes and dtypes that `level` needs (see
        `LoaderArgs`)."""
        kept = spec.max_tokens if level == "tokens" else 0
        dtype = spec.torch_dtype
        self.spec = spec
        self.texts = [""] * spec.count
        self.columns = EncodedText(
            torch.zeros(spec.count, spec.width, dtype=torch.float16, device=device),
            torch.zeros(spec.count, kept, spec.width, dtype=dtype, device=device),
            torch.zeros(spec.count, dtype=torch.int32, device=device),
            torch.arange(spec.count, device=device),
        )

    @property
    def template(self) -> EncodedText:
        """The first row of each column."""
        return EncodedText(*(column[:1] for column in self.columns))

    @property
    def row_bytes(self) -> int:
        return sum(row.nbytes for row in self.template)

    def unpack_rows(self, rows: Rows) -> EncodedText:
        """Converts rows of bytes, to which `join_rows` joined columns of captions, to captions."""
        return EncodedText(**split_rows(rows, self.template._asdict()))


def make_blank_table(
    spec: TextSpec | None, level: str, device: torch.device | str
) -> CaptionTable | None:
    """Makes a table of one caption of zeros, with the shapes and dtypes of the set's captions, for
    forecasts; None if `level` is "none" or the set has no captions."""
    if spec is None or level == "none":
        return None
    return CaptionTable(replace(spec, count=1), level, device)


def count_caption_bytes(spec: TextSpec | None, level: str) -> int:
    """Counts the bytes of a table of captions; 0 if there is none."""
    one = make_blank_table(spec, level, "meta")
    return spec.count * one.row_bytes if spec and one else 0


def quantise(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts the vectors of tokens (…, E) to `dtype`. For int8 it scales each vector to at most
    127; no scale is stored, because a model normalises the vectors (`models/text.py`)."""
    if dtype == torch.int8:
        vectors = vectors.float()  # 1e-30 is 0 in fp16
        largest = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        vectors = (vectors * (127.0 / largest)).round()
    return vectors.to(dtype)
