"""The two pages of a report: HTML of one run or of two, and a model card in Markdown.

Their texts are in page.html and card.md. Run folders are not trusted: whatever stands in them is
escaped.
"""

from __future__ import annotations

import base64
import io
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from accel.ledger import COLUMNS
from sampling.draw import SAMPLER
from scripts.report import history
from scripts.report.history import History, text
from training.checkpoint.files import flat
from training.config.compose import as_yaml, compose, from_yaml

MAX_GRIDS = 6
GRID_WIDTH = 960
MARKUP = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|"})


def filled(template: str, shown: Callable[[Any], Any], **content: Any) -> str:
    """Fills a template of this folder; `shown` makes text of what it puts in, which is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else shown(value),
    )
    environment.filters["astuple"] = astuple
    return environment.get_template(template).render(content)


def page(runs: Sequence[History]) -> str:
    """Returns the HTML of one run, or of two side by side."""
    from scripts.report import plots  # the card needs no matplotlib

    defaults = dict(flat(from_yaml(as_yaml(compose([]).source))))
    return filled(
        "page.html",
        text,
        runs=runs,
        facts=[run.facts() for run in runs],
        numbers=[run.numbers() for run in runs],
        defaults=defaults,
        history=history,
        plots=plots,
        columns=COLUMNS,
        grids=grids,
    )


def grids(run: History) -> Iterator[tuple[str, str]]:
    """Yields picture and caption of at most MAX_GRIDS grids: the first, the last, some between."""
    last = len(run.grids) - 1
    samples = {line["step"]: line.get("samples") for line in run.lines}
    for place in sorted({round(i * last / (MAX_GRIDS - 1)) for i in range(MAX_GRIDS)}):
        step, file = run.grids[place]
        picture = Image.open(file).convert("RGB")
        picture.thumbnail((GRID_WIDTH, picture.height))  # wide ones are shrunk
        stream = io.BytesIO()
        picture.save(stream, "webp", quality=90)
        seen = samples.get(step)
        told = "" if seen is None else f", {text(seen)} samples seen"
        caption = f"step {text(step)}{told}"
        yield f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}", caption


def card(run: History, how: str = "") -> str:
    """Returns the model card of a run, which begins with the front matter of the Hugging Face hub.

    `how` to sample stands there instead of a command with its weights file.
    """
    given = [key for key in SAMPLER if f"sampling.{key}" in run.config]
    words = [f"{key}={run.config[f'sampling.{key}']}" for key in given]
    command = ["python", "-m", "scripts.sample", "weights=ema.safetensors", *words]
    model = run.environment.get("choices.model", "model")
    objective = run.config["objective._target_"].rpartition(".")[2]
    tags = ["fastlatent", "latent-generative-model", model, objective]
    return filled(
        "card.md",
        plain,
        run=run,
        model=model,
        objective=objective,
        tags=Markup(json.dumps(tags)),
        how=Markup(how or f"    {shlex.join([*command, 'out=samples/mine'])}"),
        history=history,
    )


def plain(value: Any) -> Markup:
    """Returns a value as one line of Markdown that is neither markup nor the end of a cell."""
    line = escape(" ".join(text(value).split()), quote=False)
    return Markup(line.translate(MARKUP))
