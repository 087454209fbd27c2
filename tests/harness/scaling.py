"""The formulas above the table of docs/scaling.md."""

from math import ceil, log2

MACHINE, NETWORK = 370e9, 50e9  # bytes a second and GPU, within a machine of eight and beyond it
GPUS = (8, 64, 256, 1024, 4096)
HOP, FAR_HOP = 1e-6, 5e-6  # seconds
SAMPLE_SECONDS = 0.1514 / 64  # of ssd_mlp_xl on an H100: docs/benchmarks/h100.md


def time_gather(size, gpus):
    machines = ceil(gpus / 8)
    rate = MACHINE if machines == 1 else min(MACHINE, 8 * NETWORK)
    hops = (gpus - machines) * HOP + (machines - 1) * FAR_HOP
    return (gpus - 1) / gpus * size / rate + hops


def time_all_reduce(size, gpus, rate):
    return 2 * (gpus - 1) / gpus * size / rate + 2 * ceil(log2(gpus)) * FAR_HOP


def find_share(way, gpus, samples, size, parts):
    """The share of a step's seconds that computes; `samples` are those of a GPU."""
    seconds = samples * SAMPLE_SECONDS
    shards = {"ddp": 1, "hsdp": 8}.get(way, gpus)
    gathers = parts * time_gather(size / parts, shards)
    reduction = gathers
    if way == "hsdp":
        reduction += parts * time_all_reduce(size / parts / 8, gpus // 8, NETWORK)
    elif way == "ddp":
        reduction = parts * time_all_reduce(size / parts, gpus, min(MACHINE, 8 * NETWORK))

    # Computing hides what it can of the gathers, and behind the forward pass of the reductions.
    forward = max(seconds / 3, gathers)
    backward = max(2 * seconds / 3, gathers * (way != "ddp") + reduction)
    return seconds / (forward + backward)
