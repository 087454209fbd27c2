"""Finds the largest model that fits a GPU, for each way to save memory.

    python -m scripts.plan largest model=dit_b data=synthetic hardware=h100 batch_size=64
    python -m scripts.plan largest model=dit_b data=synthetic of=dim gpus=64 \\
        ways="[runtime=fast,runtime=lowmem runtime.parallel.mode=fsdp]"

Each row is a way to save memory: overrides that the command adds to yours, and that win over yours.
`of=depth` grows the number of blocks, `of=dim` the width, in steps of model.head_dim, until the
next step no longer fits. In every way each GPU has the whole batch_size of the configuration; the
ways that shard the model run on `gpus` GPUs. Bytes are counted as for any plan. The column × is the
number of parameters divided by that of the first row. No figure has been checked on a GPU yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.config.schema import Positive, refuse_values
from common.environment import Card, find_card
from common.errors import UserError
from common.memory import GIB
from common.text import shorten_error
from scripts.commands import format_table
from scripts.plan.memory import Forecast, forecast, make_question
from training.weights.first_weights import compose_pretrained

SHARDED_WORDS = "runtime=lowmem runtime.parallel.mode=fsdp"
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
    SHARDED_WORDS,
    f"{SHARDED_WORDS} runtime.offload_activations=true",
    f"{SHARDED_WORDS} runtime.offload_activations=true runtime.parallel.cpu_offload=true",
)
HEADS = ("largest", "parameters", "×", "GPUs", "GiB a GPU", "GiB of state on the host", "way")
MAX_SIZE = 4096
"""Largest size that the search tries: number of blocks, or width in steps of model.head_dim."""


@dataclass(frozen=True)
class LargestConfig:
    """Keys of the command `largest`; any other argument is an override of the training
    configuration."""

    of: str = "depth"
    """Key of the model that grows: depth (number of blocks) or dim (width)."""
    hardware: str = "h100"
    gpus: Positive = 8
    """Number of GPUs in the ways that shard the model; all other ways have one GPU."""
    ways: list[str] = field(default_factory=lambda: list(WAYS))


def find_largest(
    forecast_size: Callable[[int], Forecast], memory: float, start: int, power: int
) -> int:
    """Finds the largest n from 1 to `MAX_SIZE` for which `forecast_size(n)` needs at most `memory`
    bytes; 0 if n = 1 does not fit. `start` is the second n to try, after 1.

    Bytes are nearly linear in n ** power. The next n to try is the one at which a line through the
    latest two points reaches `memory` bytes, so the search needs few forecasts.
    """
    points: list[tuple[int, float]] = []
    n = 1
    while True:
        points.append((n, forecast_size(n).needs.total))
        largest = max((tried for tried, size in points if size <= memory), default=0)
        too_large = min((tried for tried, size in points if size > memory), default=MAX_SIZE + 1)
        if too_large - largest == 1:
            return largest
        n = find_crossing(points[-2:], memory, power) if len(points) > 1 else start
        n = min(max(n, largest + 1), too_large - 1)


def find_crossing(points: list[tuple[int, float]], memory: float, power: int) -> int:
    """Draws a line through the two points (n ** power, bytes), and returns the n at which the line
    reaches `memory` bytes; `MAX_SIZE` if the line does not rise."""
    (n_before, size_before), (n, size) = points
    slope = (size - size_before) / (n**power - n_before**power)
    if slope <= 0:
        return MAX_SIZE
    return int(max(0.0, n**power + (memory - size) / slope) ** (1 / power))


def forecast_largest(
    cfg: LargestConfig, words: list[str], way: str, card: Card
) -> tuple[int, Forecast]:
    """Returns the largest value of the key `cfg.of` with which the run fits the memory of the GPU
    model `card`, and the forecast of that run. `words` are the command's configuration overrides,
    to which `way` adds more."""
    train = compose_pretrained([*words, *way.split()]).cfg
    sharded = train.runtime.parallel.mode.value in ("fsdp", "hsdp")
    gpus = cfg.gpus if sharded else 1
    train = replace(train, batch_size=train.batch_size * gpus)
    question = make_question(train, card.memory, gpus)
    wider = cfg.of == "dim"
    step = train.model["head_dim"] if wider else 1

    # Models that differ only in depth share the counts that were made with few blocks. Models of
    # different width share no counts, so scale the bytes of their updates from the forecast `like`
    # of the given width.
    like = forecast(question) if wider else None
    forecasts: dict[int, Forecast] = {}

    def forecast_size(n: int) -> Forecast:
        model = train.model | {cfg.of: n * step}
        forecasts[n] = forecast(replace(question, cfg=replace(train, model=model)), like)
        return forecasts[n]

    n = find_largest(
        forecast_size, card.memory, train.model[cfg.of] // step, power=2 if wider else 1
    )
    if n == 0:
        raise UserError(f"{cfg.of}={step} does not fit.")
    return n * step, forecasts[n]


def compare_ways(cfg: LargestConfig, words: list[str]) -> str:
    """Returns a table with a row for each way to save memory. ValueError if the model does not have
    the key `cfg.of`, or if `words` are no valid overrides."""
    refuse_values(cfg)
    card = find_card(cfg.hardware)
    model = compose_pretrained(words).cfg.model
    if cfg.of not in ("depth", "dim") or not {cfg.of, "head_dim"} <= model.keys():
        raise UserError(
            f"of={cfg.of} must be depth or dim, and the model of this run must have that key and "
            "head_dim; choose another."
        )

    # If this model or machine does not support a way to save memory, the row of that way shows the
    # reason, and the command continues with the next way.
    began = time.monotonic()
    first = None
    rows: list[tuple[object, ...]] = [HEADS]
    for way in cfg.ways:
        try:
            size, plan = forecast_largest(cfg, words, way, card)
        except (ValueError, ImportError) as error:
            rows.append((*[None] * 6, f"{way}: {shorten_error(error)}"))
            continue
        first = first or plan
        row = (
            f"{cfg.of}={size}",
            f"{plan.parameters / 1e6:.0f} M",
            f"{plan.parameters / first.parameters:.1f}",
            plan.question.gpus,
            f"{plan.needs.total / GIB:.1f}",
            f"{plan.lasting['on_host'] / GIB:.1f}",
            way,
        )
        rows.append(row)

    return (
        f"{format_table(rows)}\n\n{cfg.hardware}, {card.memory / GIB:.0f} GiB; counted in "
        f"{time.monotonic() - began:.0f} s. Activations on the host are not counted. On a GPU: "
        "not measured yet."
    )
