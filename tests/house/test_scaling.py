"""The table of docs/scaling.md, computed from the formulas that stand above it."""

from math import ceil, inf, log2

from common.config.compose import compose
from common.files import ROOT
from training.inputs import foresee_latents
from training.weights.pretrained import build_on_meta

MACHINE, NETWORK = 370e9, 50e9  # bytes a second and GPU, within a machine of eight and beyond it
GPUS = (8, 64, 256, 1024, 4096)
HOP, FAR_HOP = 1e-6, 5e-6  # seconds
WORDS = ["model=ssd_mlp_xl", "data=synthetic", "data.height=32", "data.width=32"]
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


def test_the_table_of_several_gpus_is_that_of_its_formulas():
    cfg = compose(WORDS).cfg
    model = build_on_meta(cfg.model, foresee_latents(cfg, inf)[0])
    size = 4.0 * sum(p.numel() for p in model.parameters())
    page = (ROOT / "docs/scaling.md").read_text()
    for way, samples in (("ddp", 8), ("hsdp", 8), ("fsdp", 32), ("fsdp", 8)):
        shares = [find_share(way, gpus, samples, size, model.depth + 1) for gpus in GPUS]
        row = f"| `{way}` | {samples} | {' | '.join(f'{share:.0%}' for share in shares)} |"
        assert row in page, row
