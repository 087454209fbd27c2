"""Reads the captions of a latent set, and packs their texts.

Their table (data/caption_table.py) is stored in shards of the split "captions", in verified blocks
like latents. A block has `pooled` (n, E), `tokens` (n, T, E), `lengths` (n,) and `text`, a JSON
list of the texts as bytes. The manifest has the empty caption too, because models need it.

Letters: n captions of a block, T tokens, E width.
"""

from __future__ import annotations

import json

import torch
from jaxtyping import UInt8
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from data.blocks import BlockReader, DamagedBlockError, describe_tensor
from data.caption_table import CaptionTable
from data.manifest import Manifest
from data.source import Source
from data.spec import TextSpec


class CaptionBlockReader(BlockReader):
    """Reads the blocks of the captions, and checks them as those of latents are checked. A damaged
    block is always an error, because no other captions can replace it."""

    remedy = "run precompute_latents.py again to rebuild it"

    def __init__(self, source: Source, manifest: Manifest, spec: TextSpec) -> None:
        super().__init__(source, manifest, "captions")
        self.spec = spec
        self.allowed_names = [{"pooled", "tokens", "lengths", "text"}]

    def check_tensor(self, name: str, tensor: Tensor, samples: int) -> None:
        spec = self.spec
        token_dtype = spec.torch_dtype
        expected = {
            "pooled": describe_tensor((samples, spec.width), torch.float16),
            "tokens": describe_tensor((samples, spec.max_tokens, spec.width), token_dtype),
            "lengths": describe_tensor((samples,), torch.int32),
            "text": describe_tensor((tensor.numel(),), torch.uint8),
        }[name]
        actual = describe_tensor(tensor.shape, tensor.dtype)
        if actual != expected:
            raise DamagedBlockError(f"holds {name} {actual}, the manifest says {expected}")
        if name == "lengths" and not 0 <= tensor.min() <= tensor.max() <= spec.max_tokens:
            raise DamagedBlockError(f"holds captions of more than {spec.max_tokens} tokens")
        if name == "pooled" and not (tensor.isfinite() & (tensor != 0)).any(1).all():
            raise DamagedBlockError("holds a caption whose vector is zero or not finite")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DamagedBlockError(f"holds {name} that are not finite")


def join_text(texts: list[str]) -> UInt8[Tensor, "bytes"]:
    """Returns texts as bytes, the JSON list of a block."""
    return torch.tensor(list(json.dumps(texts).encode()), dtype=torch.uint8)


def read_captions(
    blocks: BlockReader, level: str, device: torch.device | str = "cpu"
) -> CaptionTable | None:
    """Reads the captions of the set of `blocks`; returns None if `level` (see `LoaderArgs`) is
    "none" or the set has no captions. Raises DamagedBlockError if a block differs from the
    manifest."""
    spec = blocks.manifest.text
    if spec is None or level == "none":
        return None
    reader = CaptionBlockReader(blocks.source, blocks.manifest, spec)
    table = CaptionTable(spec, level, device)
    names = ("pooled", "tokens", "lengths") if level == "tokens" else ("pooled",)
    for number, place in enumerate(reader.places):
        block = reader.read_verified(number)
        rows = slice(place.first, place.first + place.block.samples)

        # The program that wrote the set may have hashed wrong texts.
        try:
            texts = TypeAdapter(list[str]).validate_json(block["text"].numpy().tobytes())
        except ValidationError:
            texts = []
        if len(texts) != place.block.samples:
            raise DamagedBlockError(
                f"{reader.source}/{place} holds text that is no JSON list of its captions; "
                f"{reader.remedy}."
            )
        table.texts[rows] = texts
        for name in names:
            table.columns._asdict()[name][rows] = block[name]
    return table
