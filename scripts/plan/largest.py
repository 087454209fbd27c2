"""`python -m scripts.plan largest`: the largest model that fits a card, by each way to save memory.

    python -m scripts.plan largest model=dit_b data=synthetic hardware=h100 batch_size=64
    python -m scripts.plan largest model=dit_b data=synthetic of=dim gpus=64 \\
        ways="[runtime=fast,runtime=lowmem runtime.parallel.mode=fsdp]"

Each row is a way: overrides that it adds to yours, and that win over them. `of=depth` grows the
number of blocks, `of=dim` the width, in steps of model.head_dim, until one more no longer fits. All
ways have your batch on each GPU; those that shard run on `gpus`. Bytes are counted as for any plan,
× is over the parameters of the first row. On a GPU: not measured yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.errors import UserError
from common.text import shorten_error
from scripts.commands import format_table
from scripts.plan.memory import Forecast, forecast, make_question
from scripts.plan.scale import find_card
from training.config.schema import Positive, refuse_values
from training.environment import GIB, Card
from training.weights.adapter_base import compose_pretrained

SHARDED = "runtime=lowmem runtime.parallel.mode=fsdp"
WAYS = (
    "runtime=eager",
    "runtime=fast",
    "runtime=lowmem runtime.checkpoint_policy=selective",
    "runtime=lowmem",
    "runtime=lowmem optim=adamw_8bit",
    "runtime=lowmem optim=adamw_8bit runtime.weights=bf16",
    "runtime=lowmem runtime.offload_optimizer=true",
    "runtime=lowmem runtime.offload_optimizer=true runtime.offload_activations=true",
    "runtime=fast runtime.parallel.mode=fsdp",
    SHARDED,
    f"{SHARDED} runtime.offload_activations=true",
    f"{SHARDED} runtime.offload_activations=true runtime.parallel.cpu_offload=true",
)
HEADS = ("largest", "parameters", "×", "GPUs", "GiB a GPU", "GiB of state on the host", "way")
MAX_SIZE = 4096
"""Blocks, or steps of the width, beyond which nothing is looked for."""


@dataclass(frozen=True)
class LargestConfig:
    """What to look for; any other word is an override of the training configuration."""

    of: str = "depth"
    """Or dim."""
    hardware: str = "h100"
    gpus: Positive = 8
    """That share a step, in the ways that shard."""
    ways: list[str] = field(default_factory=lambda: list(WAYS))


def find_largest(at: Callable[[int], Forecast], memory: float, start: int, power: int) -> int:
    """The largest n from 1 to `MOST` for which the forecast `at(n)` takes at most `memory` bytes; 0
    if 1 does not fit.

    Bytes are nearly a straight line over n ** power, so the next n is where the line through the
    latest two reaches the memory, and few forecasts are needed.
    """
    points: list[tuple[int, float]] = []
    n = 1
    while True:
        points.append((n, at(n).needs.total))
        fits = max((tried for tried, size in points if size <= memory), default=0)
        beyond = min((tried for tried, size in points if size > memory), default=MAX_SIZE + 1)
        if beyond - fits == 1:
            return fits
        n = find_crossing(points[-2:], memory, power) if len(points) > 1 else start
        n = min(max(n, fits + 1), beyond - 1)


def find_crossing(points: list[tuple[int, float]], memory: float, power: int) -> int:
    """Where the line through two points, over n ** power, reaches the memory; `MOST` if it does not
    rise."""
    (before, less), (latest, size) = points
    rise = (size - less) / (latest**power - before**power)
    if rise <= 0:
        return MAX_SIZE
    return int(max(0.0, latest**power + (memory - size) / rise) ** (1 / power))


def forecast_largest(
    cfg: LargestConfig, words: list[str], way: str, card: Card
) -> tuple[int, Forecast]:
    """The largest value of the key that grows, and its forecast."""
    train = compose_pretrained([*words, *way.split()]).cfg
    sharded = train.runtime.parallel.mode.value in ("fsdp", "hsdp")
    gpus = cfg.gpus if sharded else 1
    train = replace(train, batch_size=train.batch_size * gpus)
    question = make_question(train, card.memory, gpus)
    wider = cfg.of == "dim"
    step = train.model["head_dim"] if wider else 1

    # What was counted of the blocks is counted once, so a deeper model costs little.
    like = forecast(question) if wider else None
    found: dict[int, Forecast] = {}

    def at(n: int) -> Forecast:
        model = train.model | {cfg.of: n * step}
        found[n] = forecast(replace(question, cfg=replace(train, model=model)), like)
        return found[n]

    n = find_largest(at, card.memory, train.model[cfg.of] // step, power=2 if wider else 1)
    if n == 0:
        raise UserError(f"{cfg.of}={step} does not fit.")
    return n * step, found[n]


def compare_ways(cfg: LargestConfig, words: list[str]) -> str:
    """The table of all ways; ValueError for a model that has no such key, and where `words` are no
    run."""
    refuse_values(cfg)
    card = find_card(cfg.hardware)
    model = compose_pretrained(words).cfg.model
    if cfg.of not in ("depth", "dim") or not {cfg.of, "head_dim"} <= model.keys():
        raise UserError(
            f"of={cfg.of} must be depth or dim, and the model of this run must have that key and "
            "head_dim; choose another."
        )

    # A way that cannot be had costs its own row alone.
    began = time.monotonic()
    first = None
    rows: list[tuple[object, ...]] = [HEADS]
    for way in cfg.ways:
        try:
            size, found = forecast_largest(cfg, words, way, card)
        except (ValueError, ImportError) as error:
            rows.append((*[None] * 6, f"{way}: {shorten_error(error)}"))
            continue
        first = first or found
        row = (
            f"{cfg.of}={size}",
            f"{found.parameters / 1e6:.0f} M",
            f"{found.parameters / first.parameters:.1f}",
            found.question.gpus,
            f"{found.needs.total / GIB:.1f}",
            f"{found.lasting['on_host'] / GIB:.1f}",
            way,
        )
        rows.append(row)

    return (
        f"{format_table(rows)}\n\n{cfg.hardware}, {card.memory / GIB:.0f} GiB; counted in "
        f"{time.monotonic() - began:.0f} s. Activations that lie on the host are not counted. On a "
        "GPU: not measured yet."
    )
