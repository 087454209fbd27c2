"""Plans a run before it costs anything.

    python -m scripts.plan scale model=ssd_mlp_xl data=synthetic
    python -m scripts.plan scale model=mamba_b data=synthetic gpus=[1,8,64,1024] batch_per_gpu=64 hardware=a100
    python -m scripts.plan memory experiment=small_card data=synthetic data.channels=4 data.height=32 data.width=32

`scale` predicts step time and memory of each way to use N GPUs, and where each stops paying. It is arithmetic on
counted work, not a measurement: docs/scaling.md has the formulas and the sources of the constants. `memory` counts the
bytes that a step takes of one card, and what each measure against too little memory saves (scripts/plan_memory.py).
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from math import ceil, log2
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts.bench.settings import own_and_others
from training.config.compose import compose, one_sentence

if TYPE_CHECKING:
    from models.denoiser import Denoiser

GPUS_A_MACHINE = 8
BUCKET = 25 * 2**20
"""runtime.parallel.bucket_cap_mb."""
PAYS = 0.8
"""A way to scale pays as long as N GPUs do at least this share of N times the work of one."""


class Hardware(NamedTuple):
    """One kind of GPU and its network. Bandwidths are bytes a second per GPU in one direction, as collectives reach."""

    peak: float
    """Dense 16-bit FLOP/s: training/metrics.py."""
    memory: float
    intra: float
    inter: float


# Bandwidths: for Hopper the table in torch/_inductor/comm_analysis.py (PyTorch 2.13). For A100 its data sheet's NVLink,
# 300 GB/s a direction, at the share of 450 that Hopper reaches (370), and InfiniBand of 200 Gb/s.
HARDWARE = {
    "h200": Hardware(989e12, 141e9, 370e9, 50e9),
    "h100": Hardware(989e12, 80e9, 370e9, 50e9),
    "a100": Hardware(312e12, 80e9, 247e9, 25e9),
}
HOP, MACHINE_HOP = 1e-6, 5e-6
"""Seconds from GPU to GPU in a machine, and from machine to machine: of the order of NCCL's own tables."""


@dataclass(frozen=True)
class ScaleConfig:
    """What to predict; any other word is an override of the training configuration."""

    gpus: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 64, 256, 1024])
    batch_per_gpu: int = 32
    hardware: str = "h200"
    mfu: float = 0.4
    """Model FLOPs utilisation of one GPU: take it from a run (metrics.jsonl), or from `bench step`."""
    gradient_bytes: int = 4
    """2 with runtime.parallel.reduce_dtype=bf16."""


class Model(NamedTuple):
    """What a model asks of a machine."""

    parameters: int
    block_parameters: int
    """Of the largest block."""
    depth: int
    flops: float
    """Of a training step of one sample."""
    activations: float
    """Bytes kept for the backward pass of one sample."""


class Forecast(NamedTuple):
    """One way on N GPUs."""

    way: str
    gpus: int
    seconds: float
    memory: float
    efficiency: float


def bandwidth(gpus: int, hw: Hardware) -> float:
    """Across machines each GPU has a network card of its own, and rings go through all of them at once."""
    return hw.intra if gpus <= GPUS_A_MACHINE else min(hw.intra, GPUS_A_MACHINE * hw.inter)


def gather(size: float, gpus: int, hw: Hardware) -> float:
    """Seconds of an all-gather, or reduce-scatter, of `size` bytes in all: a ring, n-1 hops."""
    if gpus == 1:
        return 0.0
    machines = ceil(gpus / GPUS_A_MACHINE)
    hops = (gpus - machines) * HOP + (machines - 1) * MACHINE_HOP
    return (gpus - 1) / gpus * size / bandwidth(gpus, hw) + hops


def all_reduce(size: float, gpus: int, rate: float, buckets: int = 1) -> float:
    """Seconds: every byte passes twice; a tree, 2 log2 n hops a bucket."""
    if gpus == 1:
        return 0.0
    return 2 * (gpus - 1) / gpus * size / rate + buckets * 2 * ceil(log2(gpus)) * MACHINE_HOP


def forecast(way: str, gpus: int, model: Model, cfg: ScaleConfig, hw: Hardware, counts: Counter[str]) -> Forecast:
    """Communication hides behind computing as far as that is long enough; what is left over is added."""
    compute = model.flops * cfg.batch_per_gpu / (hw.peak * cfg.mfu)
    forward, backward = compute / 3, 2 * compute / 3
    size, shards = 4.0 * model.parameters, 1
    gradients = float(cfg.gradient_bytes * model.parameters)
    if way == "ddp":
        buckets = ceil(gradients / BUCKET)
        reduction = all_reduce(gradients, gpus, bandwidth(gpus, hw), buckets)
        last = reduction / buckets  # has nothing left to hide behind
        exposed = max(0.0, reduction - last - backward) + last
    else:
        shards = gpus if way == "fsdp" else min(gpus, GPUS_A_MACHINE)
        calls = counts["reduce_scatter"]  # one a block, and the root's; a pass gathers as often
        one = gather(size / calls, shards, hw)
        reduction = calls * gather(gradients / calls, shards, hw)
        if way == "hsdp":  # then each part with those of its like, all network cards at once
            reduction += all_reduce(gradients / shards, gpus // shards, hw.inter, calls)
        exposed = one + max(0.0, calls * one - forward) + max(0.0, calls * one + reduction - backward)
    state = 20.0 * model.parameters / shards  # parameters, gradients, two moments and the average, fp32
    whole = 0.0 if way == "ddp" else 8.0 * model.block_parameters  # the block at work and the next one
    memory = state + whole + model.activations * cfg.batch_per_gpu
    seconds = compute + exposed
    return Forecast(way, gpus, seconds, memory, compute / seconds)


def described(words: list[str]) -> Model:
    """Counts the model's parameters and FLOPs, and measures on one sample what a block keeps for backward."""
    import torch

    from training.components import build_loader
    from training.pretrained import build_model, build_on_meta

    cfg = compose(words).cfg
    device = torch.device("cpu")
    loader = build_loader(cfg.data, cfg.seed, 1, device)
    spec = loader.spec
    model = build_on_meta(cfg.model, spec)
    kept = [saved_bytes(build_model(cfg.model | {"depth": depth}, spec, device), next(loader)) for depth in (1, 2)]
    block = kept[1] - kept[0]
    return Model(
        sum(p.numel() for p in model.parameters()),
        max(sum(p.numel() for p in b.parameters()) for b in model.blocks),
        model.depth,
        3.0 * model.flops_per_sample(),
        kept[0] + block * (model.depth - 1),
    )


def saved_bytes(model: Denoiser, batch: Any) -> int:
    """Bytes that the forward pass of one sample in bf16 keeps, parameters left out."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.amp.autocast("cpu", torch.bfloat16):
        kept = model(batch.latents, torch.rand(1), batch.labels)
    del kept
    return sum(seen.values())


def collectives(depth: int, gpus: int) -> Counter[str]:
    """The collectives of one step with fsdp: a model of this depth, tiny, sharded over pretended GPUs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from models.denoiser import Denoiser
    from models.mixers.convolution import Convolution

    image: dict[str, int] = {"channels": 1, "height": 4, "width": 4, "num_classes": 2}
    model = Denoiser(**image, depth=depth, dim=32, head_dim=16, patch_size=2, mixer=Convolution)
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())  # nothing is really sent
    try:
        with CommDebugMode() as seen, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of FSDP2 on the block's views, which nobody writes to
            mesh = dist.init_device_mesh("cpu", (gpus,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)
            model(torch.zeros(1, 1, 4, 4), torch.zeros(1), torch.zeros(1, dtype=torch.long)).sum().backward()
    finally:
        dist.destroy_process_group()
    kinds = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "allreduce"}
    counts = seen.get_comm_counts().items()
    return Counter({kind: sum(n for op, n in counts if part in str(op)) for kind, part in kinds.items()})


def scale(cfg: ScaleConfig, words: list[str]) -> str:
    from scripts.bench.report import table

    if cfg.hardware not in HARDWARE:
        raise ValueError(f"hardware={cfg.hardware} is not known; choose one of {', '.join(HARDWARE)}.")
    if not cfg.gpus or min(cfg.gpus) < 1 or cfg.batch_per_gpu < 1 or not 0.0 < cfg.mfu <= 1.0:
        least = f"gpus={cfg.gpus} and batch_per_gpu={cfg.batch_per_gpu} must be at least 1"
        raise ValueError(f"{least}, mfu={cfg.mfu} above 0 and at most 1.")
    hw, model, counted_at = HARDWARE[cfg.hardware], described(words), max(2, *cfg.gpus)
    counts = collectives(model.depth, counted_at)
    found = [
        forecast(way, gpus, model, cfg, hw, counts)
        for way in ("ddp", "fsdp", "hsdp")
        for gpus in cfg.gpus
        if way != "hsdp" or (gpus > GPUS_A_MACHINE and gpus % GPUS_A_MACHINE == 0)
    ]
    rows: list[tuple[object, ...]] = [("way", "GPUs", "ms/step", "samples/s", "of ideal", "GiB a GPU", "")]
    for way, gpus, seconds, memory, efficiency in found:
        rate = cfg.batch_per_gpu * gpus / seconds
        shown = f"{1e3 * seconds:.1f}", f"{rate:.0f}", f"{efficiency:.0%}", f"{memory / 2**30:.1f}"
        rows.append((way, gpus, *shown, "" if memory < 0.9 * hw.memory else "does not fit"))
    lines = [
        f"{model.parameters / 1e6:.0f} M parameters, {model.flops / 1e9:.0f} GFLOP and "
        f"{model.activations / 2**20:.0f} MiB of activations a sample and step (no checkpointing)",
        f"assumed: {cfg.hardware}, MFU {cfg.mfu:.0%} on one GPU, {cfg.batch_per_gpu} samples a GPU, "
        f"{GPUS_A_MACHINE} GPUs a machine; counted at {counted_at} GPUs with fsdp: {dict(counts)}",
        "",
        table(rows),
        "",
        *(verdict(way, [f for f in found if f.way == way], hw) for way in ("ddp", "fsdp", "hsdp")),
    ]
    return "\n".join(lines)


def verdict(way: str, found: list[Forecast], hw: Hardware) -> str:
    good = [f.gpus for f in found if f.efficiency >= PAYS and f.memory < 0.9 * hw.memory]
    bad = [f.gpus for f in found if f.efficiency < PAYS]
    if not good:
        return f"{way}: does not pay, or does not fit, at any of these sizes"
    stops = f"; at {min(g for g in bad if g > good[0])} it is below {PAYS:.0%}" if any(g > good[0] for g in bad) else ""
    return f"{way}: pays up to {max(good)} GPUs of those asked for{stops}"


def main(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return
    if words[0] == "memory":
        from scripts import plan_memory

        print(plan_memory.report(*own_and_others(plan_memory.MemoryConfig, words[1:], plan_memory.__doc__ or "")))
    elif words[0] == "scale":
        print(scale(*own_and_others(ScaleConfig, words[1:], __doc__ or "")))
    else:
        raise ValueError(f"plan {words[0]}: there is no such command; choose scale or memory.")


if __name__ == "__main__":
    with one_sentence():
        main(sys.argv[1:])
