"""Plots of the metrics of one or two runs, as SVG that is the same whenever it is drawn."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.report.history import History, text

Points = list[tuple[float, float]]
MAX_POINTS = 1500
"""Of a curve; longer ones keep the lowest and the highest point of each stretch."""
SHADES = (("#b9d3ee", "#86b1e0", "#4f8bcb", "#1f5fa8"), ("#fbd0a4", "#f5a35c", "#e57a1f", "#b35309"))
"""Of the first run and of the second, light to dark."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fastlatent",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.edgecolor": "#8a9099",
    "axes.labelcolor": "#3a3f45",
    "xtick.color": "#3a3f45",
    "ytick.color": "#3a3f45",
}


class Plot(NamedTuple):
    """One plot: a curve for each run and each key of metrics.jsonl that `keys` matches."""

    title: str
    unit: str
    keys: str
    scale: float = 1.0
    log: bool = False
    over: str = "samples"


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


class Curve(NamedTuple):
    """One line of a plot."""

    label: str
    points: Points
    shade: str
    dashed: bool


class Drawn(NamedTuple):
    """An image as a data URI, and what it shows in words."""

    uri: str
    alt: str


def draw(plot: Plot, runs: Sequence[History], floors: Sequence[float] = ()) -> Drawn | str:
    """The plot, or a sentence why there is none. `floors` are drawn as horizontal lines."""
    curves = curves_of(plot, runs)
    if not curves:
        return f"{plot.title}: not recorded."
    if all(y == 0.0 for curve in curves for _, y in curve.points if math.isfinite(y)):
        return f"{plot.title}: 0 throughout."
    ends = []
    for label, points, *_ in curves:
        finite = [y for _, y in points if math.isfinite(y)]
        ends.append(f"{label} from {text(finite[0])} to {text(finite[-1])}")
    return Drawn(svg(plot, curves, floors), f"{plot.title} over {plot.over.replace('_', ' ')}: {'; '.join(ends)}")


def curves_of(plot: Plot, runs: Sequence[History]) -> list[Curve]:
    """Those with a finite point."""
    keys = list(dict.fromkeys(k for run in runs for line in run.lines for k in line if re.fullmatch(plot.keys, k)))
    curves = []
    for r, run in enumerate(runs):
        for i, key in enumerate(keys):
            points = [(x, y * plot.scale) for x, y in run.series(key, plot.over)]
            names = [run.name] * (len(runs) > 1) + [label_of(key)] * (len(keys) > 1 or len(runs) == 1)
            shade = SHADES[r][max(round((i + 1) * 4 / len(keys)), 1) - 1]
            if any(math.isfinite(y) for _, y in points):
                curves.append(Curve(printable(": ".join(names)), thinned(points), shade, r > 0))
    return curves


def label_of(key: str) -> str:
    if found := re.fullmatch(r"eval_loss_t([\d.]+)_([\d.]+)", key):
        return f"t {found[1]} to {found[2]}"
    return {"eval_loss": "held-out loss", "loss": "training loss"}.get(key, key.replace("_", " "))


def printable(label: str) -> str:
    """Without what XML cannot hold; a legend leaves out what begins with an underscore."""
    found = "".join(c if c.isprintable() else "?" for c in label)
    return f" {found}" if found.startswith("_") else found


def thinned(points: Points) -> Points:
    """At most MAX_POINTS points, with the extremes."""
    size = -(-2 * len(points) // MAX_POINTS)
    if size <= 2:
        return points
    kept: Points = []
    for start in range(0, len(points), size):
        part = [p for p in points[start : start + size] if math.isfinite(p[1])]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}) if part else [points[start]]
    return kept


def svg(plot: Plot, curves: Sequence[Curve], floors: Sequence[float]) -> str:
    """The plot as a data URI; ValueError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "the report draws with matplotlib, which is not installed: pip install 'fastlatent[report]'."
        ) from None
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.13, 0.15, 0.84, 0.75))
        for label, points, shade, dashed in curves:
            marker = "o" if len(points) <= 30 else ""
            style = "--" if dashed else "-"
            axes.plot(*zip(*points, strict=True), style, label=label, color=shade, marker=marker, markersize=3)
        for floor in floors:
            axes.axhline(floor, color="#5c636b", linestyle=":", label="the reference's floor")
        scale_axes(axes, plot, [y for c in curves for _, y in c.points if math.isfinite(y)])
        axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel(plot.over.replace("train_seconds", "seconds of training"))
        axes.set_ylabel(plot.unit)
        axes.legend(frameon=False, fontsize=8, ncols=1 + (len(curves) > 4))
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()


def scale_axes(axes: Any, plot: Plot, values: Sequence[float]) -> None:
    """Plots with `log` get a logarithmic axis where values span more than a factor of ten; the others start at 0."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

    axes.set_xlim(left=0.0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    lowest, highest = min(values), max(values)
    if plot.log and lowest > 0.0 and highest > 10.0 * lowest:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if highest < 1000.0 * lowest else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif not plot.log:
        axes.set_ylim(bottom=0.0)
