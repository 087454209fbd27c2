"""Reads the captions of a latent set: a table in which each different caption stands once, encoded.

The table is stored in shards of the split "captions", in verified blocks like latents. A block has
`pooled` (n, E), `tokens` (n, T, E), `lengths` (n,), the texts as bytes in UTF-8, `text`, and the
end of each text in these bytes, `ends` (n,). A sample has the numbers of its captions in this
table, filled up with -1. The number -1 also stands for the empty caption, which is in the manifest.

Letters: N samples or captions, B samples of a batch, M captions of a sample, T tokens, E width.
"""

from __future__ import annotations

from collections.abc import Mapping

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

    def __init__(self, source: Source, manifest: Manifest, spec: TextSpec) -> None:
        super().__init__(source, manifest, "captions")
        self.spec = spec
        self.allowed_names = [{"pooled", "tokens", "lengths", "text", "ends"}]

    def check_tensor(self, name: str, tensor: Tensor, samples: int) -> None:
        spec = self.spec
        token_dtype = getattr(torch, spec.dtype)
        expected = {
            "pooled": describe_tensor((samples, spec.width), torch.float16),
            "tokens": describe_tensor((samples, spec.max_tokens, spec.width), token_dtype),
            "lengths": describe_tensor((samples,), torch.int32),
            "text": describe_tensor((len(tensor),), torch.uint8),
            "ends": describe_tensor((samples,), torch.int64),
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


def split_text(block: Mapping[str, Tensor]) -> list[str]:
    """Returns the texts of a block of captions."""
    content = block["text"].numpy().tobytes()
    ends = block["ends"].tolist()
    starts = [0, *ends[:-1]]
    return [content[a:b].decode() for a, b in zip(starts, ends, strict=True)]


def join_text(texts: list[str]) -> dict[str, Tensor]:
    """Returns the tensors that store texts; the inverse of `split_text`."""
    parts = [text.encode() for text in texts]
    ends = torch.tensor([len(part) for part in parts]).cumsum(0)
    return {"text": torch.tensor(list(b"".join(parts)), dtype=torch.uint8), "ends": ends}


class CaptionTable:
    """All captions of a set, encoded, in the memory of one device. Row i is caption i; the last
    row, which the number -1 also names, is the empty caption."""

    def __init__(self, spec: TextSpec, texts: list[str], columns: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.texts = texts
        self.columns = dict(columns)

    @classmethod
    def read(cls, blocks: BlockReader, level: str, device: torch.device) -> CaptionTable:
        """Reads the captions of the set of `blocks`. With the level "pooled" it leaves out the
        tokens, with "tokens" it reads them too. Raises DamagedBlockError if a block differs from
        the manifest."""
        spec = blocks.manifest.text
        assert spec is not None
        reader = CaptionReader(blocks.source, blocks.manifest, spec)
        table = cls.make_blank(spec, level, device)
        columns = table.columns
        texts = []
        for number, place in enumerate(reader.places):
            block = reader.read_verified(number)
            texts += split_text(block)
            target = slice(place.first, place.first + place.block.samples)
            columns["pooled"][target] = block["pooled"].to(device)
            if level == "tokens":
                columns["tokens"][target] = block["tokens"].to(device)
                columns["lengths"][target] = block["lengths"].to(device)

        columns["pooled"][-1] = torch.tensor(spec.empty_pooled)
        columns["numbers"][-1] = -1
        if level == "tokens":
            empty = quantise(torch.tensor(spec.empty_tokens), columns["tokens"].dtype)
            columns["tokens"][-1, : len(empty)] = empty.to(device)
            columns["lengths"][-1] = len(empty)
        table.texts = [*texts, ""]
        return table

    @classmethod
    def make_blank(cls, spec: TextSpec, level: str, device: torch.device) -> CaptionTable:
        """Makes a table of empty captions with the shapes and dtypes of `read`, for forecasts."""
        kept = spec.max_tokens if level == "tokens" else 0
        rows = spec.count + 1
        columns = {
            "pooled": torch.zeros(rows, spec.width, dtype=torch.float16, device=device),
            "tokens": torch.zeros(
                rows, kept, spec.width, dtype=getattr(torch, spec.dtype), device=device
            ),
            "lengths": torch.zeros(rows, dtype=torch.int32, device=device),
            "numbers": torch.arange(rows, device=device),
        }
        return cls(spec, [""] * rows, columns)

    @property
    def device(self) -> torch.device:
        return self.columns["pooled"].device

    @property
    def template(self) -> dict[str, Tensor]:
        """One row of each column, (1, …)."""
        return {name: column[:1] for name, column in self.columns.items()}

    @property
    def row_bytes(self) -> int:
        return sum(column.nbytes for column in self.template.values())

    def gather(self, numbers: Int[Tensor, "B"]) -> EncodedText:
        """Returns the captions of these numbers on the device of `numbers`; that of the table, or
        else the call waits for a copy."""
        text = EncodedText(**self.columns).select(numbers.to(self.device))
        return text.to(numbers.device)

    def gather_rows(self, numbers: Int[Tensor, "B"]) -> UInt8[Tensor, "B bytes"]:
        """Returns the captions of these numbers as bytes, with one caption in each row."""
        return join_rows([column[numbers] for column in self.columns.values()])

    def unpack_rows(self, rows: UInt8[Tensor, "B bytes"]) -> EncodedText:
        """Converts rows of bytes, as `gather_rows` returns them, to captions."""
        return EncodedText(**split_rows(rows, self.template))

    def pick(self, count: int) -> EncodedText:
        """Returns at most `count` captions from all parts of the table."""
        count = min(count, self.spec.count)
        return self.gather(torch.arange(count, device=self.device) * self.spec.count // count)

    def list_texts(self, text: EncodedText) -> list[str]:
        """Returns the texts of captions of this table."""
        return [self.texts[number] for number in text.numbers.tolist()]


def count_caption_bytes(spec: TextSpec | None, level: str) -> int:
    """Counts the bytes of a table of captions, with the empty caption; 0 if there is none."""
    if spec is None or level == "none":
        return 0
    tokens = spec.max_tokens if level == "tokens" else 0
    token_bytes = spec.width * getattr(torch, spec.dtype).itemsize
    return (spec.count + 1) * (2 * spec.width + tokens * token_bytes + 12)


def quantise(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts the vectors of tokens (…, E) to `dtype`. For int8 it scales each vector to at most
    127; no scale is stored, because a model normalises the vectors (`models/text.py`)."""
    if dtype == torch.int8:
        largest = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        vectors = (vectors * (127.0 / largest)).round()
    return vectors.to(dtype)
