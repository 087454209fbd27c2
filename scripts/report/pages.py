"""Renders the two pages of a report: HTML with plots, and a model card in Markdown.

The templates are page.html and card.md. Run folders are not trusted: the pages escape all their
content. Equal runs give equal SVG plots.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from accel.ledger import COLUMNS
from common.clock import format_shares
from common.config.compose import compose, parse_yaml, to_yaml
from common.text import is_figure
from common.trees import flatten
from sampling.draw import SAMPLER_KEYS
from scripts.report import history
from scripts.report.history import History, format_cell

MAX_GRIDS = 6
GRID_WIDTH = 960
MARKUP_ESCAPES = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|"})
FOLDER = Path(__file__).parent


def fill_template(template: str, format_content: Callable[[Any], Any], **content: Any) -> str:
    """Fills a template of this folder with `content`. `format_content` formats each inserted value;
    then the value is escaped."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else format_content(value),
    )
    environment.filters |= {"astuple": astuple, "quote": shlex.quote}
    return environment.get_template(template).render(
        content, history=history, format_shares=format_shares
    )


def render_page(run: History) -> str:
    """Returns the HTML page of a run."""
    return fill_template(
        "page.html",
        format_cell,
        run=run,
        defaults=flatten(parse_yaml(to_yaml(compose([]).source))),
        training=TRAINING_PLOTS,
        distances=list_distance_plots(run),
        draw=draw_plots,
        columns=COLUMNS,
        grids=encode_grids(run),
    )


def encode_grids(run: History) -> Iterator[tuple[str, str]]:
    """Yields (image as a data URI, its title) of at most MAX_GRIDS sample grids, evenly spread from
    the first to the last."""
    last = len(run.grids) - 1
    samples = {line["step"]: line.get("samples") for line in run.lines}
    for place in sorted({round(i * last / (MAX_GRIDS - 1)) for i in range(MAX_GRIDS)}):
        step, file = run.grids[place]
        picture = Image.open(file).convert("RGB")
        # Shrink only pictures that are wider than GRID_WIDTH.
        picture.thumbnail((GRID_WIDTH, picture.height))
        stream = io.BytesIO()
        picture.save(stream, "webp", quality=90)
        seen = samples.get(step)
        suffix = "" if seen is None else f", {format_cell(seen)} samples seen"
        yield make_data_uri("webp", stream), f"step {format_cell(step)}{suffix}"


def make_data_uri(kind: str, stream: io.BytesIO) -> str:
    """Returns a data URI that contains the image; `kind` is its MIME type without "image/"."""
    return f"data:image/{kind};base64,{b64encode(stream.getvalue()).decode()}"


def render_card(run: History | None, code: str = "", name: str = "") -> str:
    """Returns a model card, which begins with the front matter of the Hugging Face hub. `code` is
    Python that draws samples from an exported folder; if it is "", the card shows a command that
    samples from the run's weights file. Without a run, the card has only its `name` and `code`."""
    return fill_template(
        "card.md",
        escape_markdown,
        run=run,
        name=run.name if run else name,
        code=Markup(code),
        keys=SAMPLER_KEYS,
    )


def escape_markdown(value: Any) -> Markup:
    """Returns a value as one line of Markdown, escaped so that it shows as plain text, also in a
    cell of a table."""
    line = escape(" ".join(format_cell(value).split()), quote=False)
    return Markup(line.translate(MARKUP_ESCAPES))


class Plot(NamedTuple):
    """A plot with a curve for each key of metrics.jsonl that matches `keys`. `scale`
    is a factor by which the plot multiplies the values. With `log` the vertical axis is logarithmic
    if the values span more than a factor of ten; without `log` it starts at 0."""

    title: str
    unit: str
    keys: str
    scale: float = 1.0
    log: bool = False
    over: str = "samples"
    floor: float | None = None
    """Value at which the plot draws a horizontal line; None: no line."""


class Curve(NamedTuple):
    """Points of one key, at least one of them finite."""

    label: str
    points: list[tuple[float, float]]
    values: list[float]
    """Finite y values."""


TRAINING_PLOTS = [Plot(**row) for row in parse_yaml((FOLDER / "plots.yaml").read_text())]


def list_distance_plots(run: History) -> list[Plot]:
    """Lists two plots for each distance, over samples and over seconds of training, each with a
    horizontal line at the floor, the distance between the two halves of the reference."""
    plots = []
    for key in run.distances:
        kind, space = key.split("_", 1)
        title = f"{'Fréchet' if kind == 'fd' else 'Kernel'} distance, features {space}"
        floor = run.protocol.get(f"floors.{space}.floor_{kind}")
        floor = floor if is_figure(floor) else None
        plot = Plot(title, kind.upper(), re.escape(key), log=True, floor=floor)
        plots += [plot, plot._replace(over="train_seconds")]
    return plots


def draw_plots(plots: Sequence[Plot], run: History) -> list[tuple[str, str]]:
    """Returns for each plot (a text that describes it, the image as a data URI); the image is "" if
    there is nothing to draw."""
    drawn = []
    for plot in plots:
        curves = collect_curves(plot, run)
        title = f"{plot.title} over {plot.over.replace('_', ' ')}"
        if any(any(curve.values) for curve in curves):
            ends = [
                f"{c.label} from {format_cell(c.values[0])} to {format_cell(c.values[-1])}"
                for c in curves
            ]
            drawn.append((f"{title}: {'; '.join(ends)}", draw_svg(plot, curves)))
        else:
            drawn.append((f"{title}: {'0 throughout' if curves else 'not recorded'}.", ""))
    return drawn


def collect_curves(plot: Plot, run: History) -> list[Curve]:
    """Returns the curves of a plot that have at least one finite point."""
    curves = []
    for key in run.latest:
        if not re.fullmatch(plot.keys, key):
            continue
        points = [(x, y * plot.scale) for x, y in run.list_points(key, plot.over)]
        values = [y for _, y in points if math.isfinite(y)]
        label = re.sub(r"^eval_loss_t([\d.]+)_([\d.]+)$", r"t \1 to \2", key).replace("_", " ")
        label = {"eval_loss": "held-out loss", "loss": "training loss"}.get(key, label)
        if values:
            curves.append(Curve(label, points, values))
    return curves


def draw_svg(plot: Plot, curves: Sequence[Curve]) -> str:
    """Draws the plot and returns it as a data URI of an SVG image."""
    # Import matplotlib only here, because a model card is rendered without it.
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator

    values = [y for curve in curves for y in curve.values]
    highest = max(values)
    stream = io.BytesIO()
    with rc_context(fname=FOLDER / "plots.mplstyle"):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for i, curve in enumerate(curves, start=1):
            xs, ys = zip(*curve.points, strict=True)
            marker = "o" if len(xs) <= 30 else ""
            color = colormaps["Blues"](0.25 + 0.65 * i / len(curves))
            axes.plot(xs, ys, color=color, marker=marker, markersize=3, label=curve.label)
        if plot.floor is not None:
            axes.axhline(plot.floor, color="#5c636b", linestyle=":", label="the reference's floor")
            values.append(plot.floor)

        # Use a logarithmic axis only if all values are positive; a kernel distance can be negative.
        lowest = min(values)
        if plot.log and lowest > 0.0 and highest > 10.0 * lowest:
            axes.set_yscale("log")
            subs = (1.0, 2.0, 5.0) if highest < 1000.0 * lowest else (1.0,)
            axes.yaxis.set_major_locator(LogLocator(subs=subs))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        elif not plot.log:
            axes.set_ylim(bottom=0.0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        over = plot.over.replace("train_seconds", "seconds of training")
        axes.set(xlim=(0.0, None), xlabel=over, ylabel=plot.unit)
        axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold")
        # The title names a single curve.
        if len(axes.lines) > 1:
            figure.legend(loc="outside right center", frameon=False, fontsize=8)
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return make_data_uri("svg+xml", stream)
