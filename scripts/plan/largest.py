"""Finds the largest model that fits a GPU, for each way to save memory.

    python -m scripts.plan largest model=dit_b data=synthetic hardware=h100 batch_size=64
    python -m scripts.plan largest model=dit_b data=synthetic gpus=64 \\
        ways="[runtime=fast,runtime=lowmem runtime.parallel.mode=fsdp]"

Each row is a way to save memory: overrides that the command adds to yours, and that win over yours.
The model gets more blocks (model.depth) until one more no longer fits. In every way each GPU has
the whole batch_size of the configuration; the ways that shard the model run on `gpus` GPUs. Bytes
are counted as for any plan. The column × is the number of parameters divided by that of the first
row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.config.compose import read_config
from common.config.schema import Positive, refuse_values
from common.environment import Card, find_card
from common.errors import UserError
from common.memory import GIB
from common.text import format_table, shorten_error
from scripts.plan.changes import find_largest
from scripts.plan.memory import Forecast, forecast
from scripts.plan.question import make_question
from training.weights.first_weights import compose_pretrained

WAYS: list[str] = read_config(Path(__file__).with_name("ways.yaml"))["ways"]
HEADS = ("largest", "parameters", "×", "GPUs", "GiB a GPU", "GiB of state on the host", "way")
MAX_DEPTH = 4096
"""Largest number of blocks that the search tries."""
DEPTH_KEYS = ("attention_every", "internal_block", "align_block")
"""Keys of model and objective that name a block, so that the model has at least as many."""


@dataclass(frozen=True)
class LargestConfig:
    """Keys of the command `largest`; any other argument is an override of the training
    configuration."""

    hardware: str = "h100"
    """Name of a GPU model."""
    gpus: Positive = 8
    """Number of GPUs in the ways that shard the model; all other ways have one GPU."""
    ways: list[str] = field(default_factory=lambda: WAYS)
    """Overrides that save memory, each tried by itself; words of one way stand in one entry."""


def forecast_largest(cfg: LargestConfig, words: list[str], way: str, card: Card) -> Forecast:
    """Returns the forecast of the run with the most blocks that fits the memory of the GPU model
    `card`. `words` are the command's configuration overrides, to which `way` adds more."""
    train = compose_pretrained([*words, *way.split()]).cfg
    gpus = cfg.gpus if train.runtime.parallel.mode in ("fsdp", "hsdp") else 1
    train = replace(train, batch_size=train.batch_size * gpus)
    question = make_question(train, card.memory, gpus)

    def forecast_depth(depth: int) -> Forecast:
        model = train.model | {"depth": depth}
        return forecast(replace(question, cfg=replace(train, model=model)))

    named = [(train.model | train.objective).get(key) or 1 for key in DEPTH_KEYS]
    depth = find_largest(
        lambda depth: forecast_depth(depth).needs.total,
        card.memory,
        train.model["depth"],
        max(named),
        MAX_DEPTH,
    )
    if depth < max(named):
        raise UserError(f"model.depth={max(named)} does not fit.")
    return forecast_depth(depth)


def compare_ways(cfg: LargestConfig, words: list[str]) -> str:
    """Returns a table with a row for each way to save memory. UserError if the model does not have
    the key `depth`, or if `words` are no valid overrides."""
    refuse_values(cfg)
    card = find_card(cfg.hardware)
    model = compose_pretrained(words).cfg.model
    if "depth" not in model:
        raise UserError(f"{model['_target_']} has no depth that could grow; choose another model.")

    # If this model or machine does not support a way to save memory, the row of that way shows the
    # reason, and the command continues with the next way.
    began = time.monotonic()
    first = None
    rows: list[tuple[object, ...]] = [HEADS]
    for way in cfg.ways:
        try:
            plan = forecast_largest(cfg, words, way, card)
        except (ValueError, ImportError) as error:
            rows.append((*[None] * 6, f"{way}: {shorten_error(error)}"))
            continue
        first = first or plan
        row = (
            f"depth={plan.network.model.depth}",
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
