"""Seconds of collectives, and what of them computing cannot hide; docs/scaling.md has formulas and
sources."""

from __future__ import annotations

import warnings
from collections import Counter
from math import ceil, log2
from typing import Any

from training.hardware import Card

GPUS_A_MACHINE = 8
BUCKET = 25 * 2**20
"""runtime.parallel.bucket_cap_mb."""
HOP = 1e-6
MACHINE_HOP = 5e-6
"""Seconds from GPU to GPU in a machine, and from machine to machine: of the order of NCCL's own
tables."""


def bandwidth(gpus: int, card: Card) -> float:
    """Across machines each GPU has a network card of its own, and rings go through all of them at
    once."""
    return card.intra if gpus <= GPUS_A_MACHINE else min(card.intra, GPUS_A_MACHINE * card.inter)


def gather(size: float, gpus: int, card: Card) -> float:
    """Seconds of an all-gather, or reduce-scatter, of `size` bytes in all: a ring, n-1 hops."""
    if gpus == 1:
        return 0.0
    machines = ceil(gpus / GPUS_A_MACHINE)
    hops = (gpus - machines) * HOP + (machines - 1) * MACHINE_HOP
    return (gpus - 1) / gpus * size / bandwidth(gpus, card) + hops


def all_reduce(size: float, gpus: int, rate: float, buckets: int = 1) -> float:
    """Seconds: every byte passes twice; a tree, 2 log2 n hops a bucket."""
    if gpus == 1:
        return 0.0
    return 2 * (gpus - 1) / gpus * size / rate + buckets * 2 * ceil(log2(gpus)) * MACHINE_HOP


def exposed(
    way: str,
    gpus: int,
    compute: float,
    parameters: int,
    gradient_bytes: int,
    card: Card,
    calls: int,
) -> float:
    """Seconds of communication in a step of `compute` seconds that nothing hides.

    `way` is ddp, fsdp or hsdp; `calls` are the reduce-scatters of a step with fsdp: one a block,
    and the root's. `gradient_bytes`, of one parameter, are 0 in a micro-batch after which more are
    accumulated.
    """
    if gpus == 1 or (way == "ddp" and not gradient_bytes):
        return 0.0
    forward = compute / 3
    backward = 2 * compute / 3
    size = 4.0 * parameters
    gradients = float(gradient_bytes * parameters)
    if way == "ddp":
        buckets = ceil(gradients / BUCKET)
        reduction = all_reduce(gradients, gpus, bandwidth(gpus, card), buckets)
        last = reduction / buckets  # has nothing left to hide behind
        return max(0.0, reduction - last - backward) + last
    shards = gpus if way == "fsdp" else min(gpus, GPUS_A_MACHINE)
    one = gather(size / calls, shards, card)  # a pass gathers as often as it reduces
    reduction = calls * gather(gradients / calls, shards, card) if gradients else 0.0
    # then each part with those of its like, all network cards at once
    if way == "hsdp" and gradients:
        reduction += all_reduce(gradients / shards, gpus // shards, card.inter, calls)
    return one + max(0.0, calls * one - forward) + max(0.0, calls * one + reduction - backward)


def collectives(depth: int, gpus: int) -> Counter[str]:
    """The collectives of one step with fsdp: a model of this depth, tiny, sharded over pretended
    GPUs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from models.denoiser import Denoiser
    from models.mixers.convolution import Convolution

    image: dict[str, Any] = {"channels": 1, "height": 4, "width": 4, "num_classes": 2}
    model = Denoiser(**image, depth=depth, dim=32, head_dim=16, patch_size=2, mixer=Convolution)
    # nothing is really sent
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    try:
        with CommDebugMode() as seen, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of FSDP2 on the block's views, which nobody writes to
            mesh = dist.init_device_mesh("cpu", (gpus,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
            model(
                torch.zeros(1, 1, 4, 4), torch.zeros(1), torch.zeros(1, dtype=torch.long)
            ).sum().backward()
    finally:
        dist.destroy_process_group()
    kinds = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "allreduce"}
    counts = seen.get_comm_counts().items()
    return Counter(
        {kind: sum(n for op, n in counts if part in str(op)) for kind, part in kinds.items()}
    )
