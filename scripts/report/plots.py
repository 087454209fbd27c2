"""Plots of the metrics of one or two runs, as SVG that is the same whenever it is drawn."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from common.text import is_figure
from scripts.report.history import History, text

RUNS = (
    ("-", ("#b9d3ee", "#86b1e0", "#4f8bcb", "#1f5fa8")),
    ("--", ("#fbd0a4", "#f5a35c", "#e57a1f", "#b35309")),
)
"""The line of the first run and of the second, and its shades, light to dark."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fastlatent",
    "path.simplify_threshold": 0.5,  # pixels; a curve of 100,000 points takes 65 kB
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), "#3a3f45"),
}


class Plot(NamedTuple):
    """One plot: a curve for each run and each key of metrics.jsonl that `keys` matches.

    `scale` multiplies the values. With `log`, a span of more than ten is logarithmic; other axes
    start at 0.
    """

    title: str
    unit: str
    keys: str
    scale: float = 1.0
    log: bool = False
    over: str = "samples"
    floor: float | None = None
    """Where a line is drawn."""


class Curve(NamedTuple):
    """The points of one key of one run, of which one is finite, and how they look."""

    label: str
    points: list[tuple[float, float]]
    line: str
    color: str

    @property
    def values(self) -> list[float]:
        """The finite values."""
        return [y for _, y in self.points if math.isfinite(y)]


TRAINING = (
    Plot("Loss", "loss", "loss|eval_loss", log=True),
    Plot("Held-out loss by time t", "held-out loss", r"eval_loss_t[\d.]+_[\d.]+", log=True),
    Plot("Gradient norm", "norm before clipping", "grad_norm", log=True),
    Plot("Learning rate", "learning rate", "lr"),
    Plot("Throughput", "samples/s", "samples_per_s"),
    Plot("Waiting for data", "% of the time", "data_wait", 100.0),
    Plot("GPU memory", "GiB reserved at most", "memory_reserved_peak", 2.0**-30),
    Plot("Skipped steps", "steps since the line before", "skipped|backed_off"),
)


def distance_plots(runs: Sequence[History]) -> list[Plot]:
    """Plots each distance over samples and over seconds, with the floor that the protocol tells."""
    plots = []
    for key in dict.fromkeys(key for run in runs for key in run.distances):
        kind, space = key.split("_", 1)
        title = f"{'Fréchet' if kind == 'fd' else 'Kernel'} distance, features {space}"
        floor = runs[0].protocol.get(f"floors.{space}.floor_{kind}")
        floor = floor if is_figure(floor) else None
        plot = Plot(title, kind.upper(), re.escape(key), log=True, floor=floor)
        plots += [plot, plot._replace(over="train_seconds")]
    return plots


def drawn(plots: Sequence[Plot], runs: Sequence[History]) -> list[tuple[str, str]]:
    """Draws several plots."""
    return [draw(plot, runs) for plot in plots]


def draw(plot: Plot, runs: Sequence[History]) -> tuple[str, str]:
    """Returns what the plot shows, in words, and the image as a data URI.

    The URI is empty where there is nothing to see.
    """
    curves = curves_of(plot, runs)
    title = f"{plot.title} over {plot.over.replace('_', ' ')}"
    if not any(any(curve.values) for curve in curves):
        return f"{title}: {'0 throughout' if curves else 'not recorded'}.", ""
    ends = [f"{c.label} from {text(c.values[0])} to {text(c.values[-1])}" for c in curves]
    return f"{title}: {'; '.join(ends)}", svg(plot, curves)


def curves_of(plot: Plot, runs: Sequence[History]) -> list[Curve]:
    """Returns the curves that have a finite point."""
    logged = dict.fromkeys(key for run in runs for line in run.lines for key in line)
    keys = [key for key in logged if re.fullmatch(plot.keys, key)]
    curves = []
    for run, (line, shades) in zip(runs, RUNS, strict=False):
        for i, key in enumerate(keys, start=1):
            points = [(x, y * plot.scale) for x, y in run.series(key, plot.over)]
            names = [run.name] * (len(runs) > 1)
            names += [label_of(key)] * (len(keys) > 1 or len(runs) == 1)
            shade = shades[max(round(i * len(shades) / len(keys)), 1) - 1]
            curve = Curve(": ".join(names), points, line, shade)
            if curve.values:
                curves.append(curve)
    return curves


def label_of(key: str) -> str:
    part = re.sub(r"^eval_loss_t([\d.]+)_([\d.]+)$", r"t \1 to \2", key)
    return {"eval_loss": "held-out loss", "loss": "training loss"}.get(key, part.replace("_", " "))


def svg(plot: Plot, curves: Sequence[Curve]) -> str:
    """Draws the plot as a data URI."""
    values = [y for curve in curves for y in curve.values]
    highest = max(values)
    stream = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6))
        axes = figure.add_axes((0.13, 0.15, 0.84, 0.75))
        for label, points, line, color in curves:
            look = {"marker": "o" if len(points) <= 30 else "", "markersize": 3}
            axes.plot(*zip(*points, strict=True), line, label=label, color=color, **look)
        if plot.floor is not None:
            axes.axhline(plot.floor, color="#5c636b", linestyle=":", label="the reference's floor")
            values.append(plot.floor)

        lowest = min(values)  # a kernel distance can be negative
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
        axes.legend(frameon=False, fontsize=8, ncols=1 + (len(curves) > 4))
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()
