"""The held-out split of a set that is read from its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from data.blocks import BlockReader, Skips
from data.loader import Batch
from data.readers import Readers


def held_out_batches(
    blocks: BlockReader, batch_size: int, device: torch.device, normalise: Callable[[Tensor], Tensor], skips: Skips
) -> Iterator[Batch]:
    """The split once, in order, without augmentation; the next blocks are read meanwhile."""
    count, start = len(blocks.places), 0
    rest: list[dict[str, Tensor]] = []
    readers = Readers(1, "held-out")
    try:
        ahead = [readers.submit(blocks.read, number) for number in range(min(2, count))]
        for number in range(count):
            parts = [*rest, ahead.pop(0).result()]
            last = number + 1 == count
            if number + 2 < count:
                ahead.append(readers.submit(blocks.read, number + 2))
            joined = {name: torch.cat([part[name] for part in parts]) for name in ("latents", "labels")}
            while len(joined["labels"]) >= batch_size or (last and len(joined["labels"])):
                latents, labels = (joined[name][:batch_size].to(device) for name in ("latents", "labels"))
                joined = {name: tensor[batch_size:] for name, tensor in joined.items()}
                ids = torch.arange(start, start + len(labels), device=device)
                start += len(labels)
                yield Batch(normalise(latents), labels, ids, ids)
            rest = [joined]
    finally:
        readers.close()
        skips.say(blocks.take_reports())
