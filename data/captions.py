"""Reads the captions of a latent set: a table in which each different caption stands once, encoded.

The table is stored in shards of the split "captions", in verified blocks like latents. A block has
`pooled` (n, E), `tokens` (n, T, E), `lengths` (n,) and `text`, a JSON list of the texts as bytes. A
sample has the numbers of its captions in this table, filled up with -1, which names the last one,
the empty caption. The manifest has the empty caption too, because models need it.

Letters: N samples or captions, B samples of a batch, M captions of a sample, T tokens, E width.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from common.encoded_text import EncodedText
from data.blocks import BlockReader, DamagedBlockError, describe_tensor, join_rows, split_rows
from data.loader import TextSpec
from data.manifest import Manifest
from data.source import Source


class CaptionReader(BlockReader):
    """Reads the blocks of the captions, and checks them as those of latents are checked. A damaged
    block is always an error, because no other captions can replace it."""

    remedy = "run precompute_latents.py again to rebuild it"

    def __init__(self, source: Source, manifest: Manifest, spec: TextSpec) -> None:
        super().__init__(source, manifest, "captions")
        self.spec = spec
        self.allowed_names = [{"pooled", "tokens", "lengths", "text"}]

    def check_tensor(self, name: str, tensor: Tensor, samples: int) -> None:
        spec = self.spec
        token_dtype = getattr(torch, spec.dtype)
        expected = {
            "pooled": describe_tensor((samples, spec.width), torch.float16),
            "tokens": describe_tensor((samples, spec.max_tokens, spec.width), token_dtype),
            "lengths": describe_tensor((samples,), torch.int32),
            "text": describe_tensor((len(tensor),), torch.uint8),
        }[name]
        actual = describe_tensor(tensor.shape, tensor.dtype)
        if actual != expected:
            raise DamagedBlockError(f"holds {name} {actual}, the manifest says {expected}")
        if name == "lengths" and not 0 <= int(tensor.min()) <= int(tensor.max()) <= spec.max_tokens:
            raise DamagedBlockError(f"holds captions of more than {spec.max_tokens} tokens")
        if name == "pooled" and not bool((tensor.isfinite() & (tensor != 0)).any(1).all()):
            raise DamagedBlockError("holds a caption whose vector is zero or not finite")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DamagedBlockError(f"holds {name} that are not finite")


def split_text(content: Tensor) -> list[str]:
    """Returns the texts of a block of captions."""
    return json.loads(content.numpy().tobytes())


def join_text(texts: list[str]) -> UInt8[Tensor, "bytes"]:
    """Returns texts as bytes; the inverse of `split_text`."""
    return torch.tensor(list(json.dumps(texts).encode()), dtype=torch.uint8)


class CaptionTable:
    """All captions of a set, encoded, in the memory of one device. Row i is caption i; the last
    row, which the number -1 also names, is the empty caption."""

    def __init__(self, spec: TextSpec, level: str, device: torch.device) -> None:
        """Makes a table of zeros with the shapes and dtypes that `level` needs (see
        `LoaderArgs`)."""
        kept = spec.max_tokens if level == "tokens" else 0
        dtype = getattr(torch, spec.dtype)
        self.spec = spec
        self.device = device
        self.texts = [""] * spec.count
        self.columns = EncodedText(
            torch.zeros(spec.count, spec.width, dtype=torch.float16, device=device),
            torch.zeros(spec.count, kept, spec.width, dtype=dtype, device=device),
            torch.zeros(spec.count, dtype=torch.int32, device=device),
            torch.arange(spec.count, device=device),
        )

    @classmethod
    def read(cls, blocks: BlockReader, level: str, device: torch.device) -> CaptionTable:
        """Reads the captions of the set of `blocks`. Raises DamagedBlockError if a block differs
        from the manifest."""
        spec = blocks.manifest.text
        assert spec is not None
        reader = CaptionReader(blocks.source, blocks.manifest, spec)
        table = cls(spec, level, device)
        names = ("pooled", "tokens", "lengths") if level == "tokens" else ("pooled",)
        for number, place in enumerate(reader.places):
            block = reader.read_verified(number)
            rows = slice(place.first, place.first + place.block.samples)
            table.texts[rows] = split_text(block["text"])
            for name in names:
                getattr(table.columns, name)[rows] = block[name].to(device)
        return table

    @property
    def template(self) -> EncodedText:
        """The first row of each column."""
        return self.columns.select(slice(1))

    @property
    def row_bytes(self) -> int:
        return sum(row.nbytes for row in self.template)

    def gather(self, numbers: Int[Tensor, "B"]) -> EncodedText:
        """Returns the captions of these numbers, on the device of `numbers`; if that is not the
        table's, the call waits for a copy."""
        return self.columns.select(numbers.to(self.device)).to(numbers.device)

    def gather_rows(self, numbers: Int[Tensor, "B"]) -> UInt8[Tensor, "B bytes"]:
        """Returns the captions of these numbers as bytes, with one caption in each row."""
        return join_rows(list(self.columns.select(numbers)))

    def unpack_rows(self, rows: UInt8[Tensor, "B bytes"]) -> EncodedText:
        """Converts rows of bytes, as `gather_rows` returns them, to captions."""
        return EncodedText(**split_rows(rows, self.template._asdict()))


def make_blank_table(
    spec: TextSpec | None, level: str, device: torch.device
) -> CaptionTable | None:
    """Makes a table of one caption of zeros, with the shapes and dtypes of the set's captions, for
    forecasts; None if `level` is "none" or the set has no captions."""
    if spec is None or level == "none":
        return None
    return CaptionTable(replace(spec, count=1), level, device)


def count_caption_bytes(spec: TextSpec | None, level: str) -> int:
    """Counts the bytes of a table of captions; 0 if there is none."""
    one = make_blank_table(spec, level, torch.device("meta"))
    return spec.count * one.row_bytes if spec and one else 0


def quantise(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts the vectors of tokens (…, E) to `dtype`. For int8 it scales each vector to at most
    127; no scale is stored, because a model normalises the vectors (`models/text.py`)."""
    if dtype == torch.int8:
        vectors = vectors.float()  # 1e-30 is 0 in fp16
        largest = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        vectors = (vectors * (127.0 / largest)).round()
    return vectors.to(dtype)
