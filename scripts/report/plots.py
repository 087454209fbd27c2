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

Curve = tuple[str, list[tuple[float, float]], str, str]
SHADES = (
    ("#b9d3ee", "#86b1e0", "#4f8bcb", "#1f5fa8"),
    ("#fbd0a4", "#f5a35c", "#e57a1f", "#b35309"),
)
"""Of the first run and of the second, light to dark."""
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
    """One plot: a curve for each run and each key of metrics.jsonl that `keys` matches, and a line
    at `floor`."""

    title: str
    unit: str
    keys: str
    scale: float = 1.0
    log: bool = False
    over: str = "samples"
    floor: float | None = None


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
    """Each distance over samples and over seconds, with the floor that the protocol tells."""
    plots = []
    for key in dict.fromkeys(key for run in runs for key in run.distances()):
        kind, space = key.split("_", 1)
        title = f"{'Fréchet' if kind == 'fd' else 'Kernel'} distance, features {space}"
        floor = runs[0].protocol.get(f"floors.{space}.floor_{kind}")
        floor = floor if is_figure(floor) else None
        plot = Plot(title, kind.upper(), re.escape(key), log=True, floor=floor)
        plots += [plot, plot._replace(over="train_seconds")]
    return plots


def draw(plot: Plot, runs: Sequence[History]) -> tuple[str, str]:
    """What the plot shows, in words; and the image as a data URI, empty where there is nothing to
    see."""
    curves = curves_of(plot, runs)
    finite = [[y for _, y in points if math.isfinite(y)] for _, points, *_ in curves]
    title = f"{plot.title} over {plot.over.replace('_', ' ')}"
    if not any(map(any, finite)):
        return f"{title}: {'0 throughout' if curves else 'not recorded'}.", ""
    ends = [
        f"{label} from {text(ys[0])} to {text(ys[-1])}"
        for (label, *_), ys in zip(curves, finite, strict=True)
    ]
    return f"{title}: {'; '.join(ends)}", svg(plot, curves, [y for ys in finite for y in ys])


def curves_of(plot: Plot, runs: Sequence[History]) -> list[Curve]:
    """The curves that have a finite point."""
    keys = list(
        dict.fromkeys(
            k for run in runs for line in run.lines for k in line if re.fullmatch(plot.keys, k)
        )
    )
    curves: list[Curve] = []
    for run, shades, style in zip(runs, SHADES, ("-", "--"), strict=False):
        for i, key in enumerate(keys):
            points = [(x, y * plot.scale) for x, y in run.series(key, plot.over)]
            if any(math.isfinite(y) for _, y in points):
                names = [run.name] * (len(runs) > 1) + [label_of(key)] * (
                    len(keys) > 1 or len(runs) == 1
                )
                curves.append(
                    (
                        ": ".join(names),
                        points,
                        shades[max(round((i + 1) * 4 / len(keys)), 1) - 1],
                        style,
                    )
                )
    return curves


def label_of(key: str) -> str:
    part = re.sub(r"^eval_loss_t([\d.]+)_([\d.]+)$", r"t \1 to \2", key)
    return {"eval_loss": "held-out loss", "loss": "training loss"}.get(key, part.replace("_", " "))


def svg(plot: Plot, curves: Sequence[Curve], values: Sequence[float]) -> str:
    """The plot as a data URI. With `log`, a span of more than ten is logarithmic; other axes start
    at 0."""
    lowest = min(values)
    highest = max(values)
    stream = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6))
        axes = figure.add_axes((0.13, 0.15, 0.84, 0.75))
        for label, points, shade, style in curves:
            marker = "o" if len(points) <= 30 else ""
            axes.plot(
                *zip(*points, strict=True),
                style,
                label=label,
                color=shade,
                marker=marker,
                markersize=3,
            )
        if plot.floor is not None:
            axes.axhline(plot.floor, color="#5c636b", linestyle=":", label="the reference's floor")
            lowest = min(lowest, plot.floor)  # a kernel distance can be negative
        if plot.log and lowest > 0.0 and highest > 10.0 * lowest:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(
                LogLocator(subs=(1.0, 2.0, 5.0) if highest < 1000.0 * lowest else (1.0,))
            )
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        elif not plot.log:
            axes.set_ylim(bottom=0.0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(
            xlim=(0.0, None),
            xlabel=plot.over.replace("train_seconds", "seconds of training"),
            ylabel=plot.unit,
        )
        axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold")
        axes.legend(frameon=False, fontsize=8, ncols=1 + (len(curves) > 4))
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()
