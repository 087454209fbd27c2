"""The page: one HTML file with everything in it. Whatever a run folder says is escaped, and scripts
are forbidden."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from PIL import Image

from accel.ledger import COLUMNS
from scripts.report.history import (
    HEADS,
    Evaluation,
    History,
    by_protocol,
    differing,
    evaluation_rows,
    text,
)
from scripts.report.plots import TRAINING, Plot, distance_plots, draw
from training.checkpoint.parts import flat
from training.config.compose import compose
from training.config.yaml_text import as_yaml, from_yaml

MAX_GRIDS = 6
GRID_WIDTH = 960
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
CSS = """
:root{color-scheme:light dark;--ink:#1d2126;--soft:#5c636b;--line:#dfe3e8;--back:#f6f7f9;--card:#fff;--warn:#fff1e0;
--link:#1f5fa8} @media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa3ad;--line:#333a42;--back:#14171b;
--card:#1c2026;--warn:#46300f;--link:#86b1e0}}
*{box-sizing:border-box} a{color:var(--link)} .soft,summary{color:var(--soft)} summary{cursor:pointer}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px 48px} nav{display:flex;flex-wrap:wrap;gap:2px 16px}
h1,h3,p{overflow-wrap:anywhere} h1{font-size:26px;line-height:1.2;margin:0 0 4px} h3{font-size:15px;margin:20px 0 8px}
h2{font-size:19px;margin:36px 0 10px;padding-top:10px;border-top:1px solid var(--line)}
p{margin:8px 0;max-width:75ch} .note{background:var(--warn);border-radius:8px;padding:8px 12px;max-width:none}
.two{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr))}
.two>*{min-width:0;align-self:start} img{display:block;max-width:100%;height:auto;margin:0 auto}
figure{margin:0;background:#fff;border:1px solid var(--line);border-radius:8px;padding:8px}
figcaption{font-size:13px;padding:2px 4px;color:#5c636b} pre{margin:0;padding:10px;font-size:13px}
.box{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:5px 10px;border-top:1px solid var(--line)}
tbody th,thead th{font-weight:500;white-space:nowrap} thead th{border-top:0;color:var(--soft)}
td{max-width:44em;overflow-wrap:break-word} .two td{min-width:7em;overflow-wrap:anywhere}
tr.missing>*{background:var(--warn)} @media (max-width:600px){tbody th{white-space:normal} .two td{min-width:5em}}
"""


def page(runs: Sequence[History]) -> str:
    """The HTML of one run, or of two side by side."""
    title = escape(" and ".join(run.name for run in runs))
    sections = {
        "Summary": summary(runs),
        "Training": plots(TRAINING, runs),
        "Distance to the reference": distances(runs),
        "Evaluations": evaluations(runs),
        "Samples": "".join(headline(run.name) * (len(runs) > 1) + grids(run) for run in runs),
        "Ledger": "".join(headline(run.name) * (len(runs) > 1) + ledger(run) for run in runs),
        "Configuration": configuration(runs),
    }
    ids = {name: name.split()[0].lower() for name in sections}
    links = "".join(f'<a href="#{ids[name]}">{name}</a>' for name in sections)
    body = "".join(
        f'<section id="{ids[name]}"><h2>{name}</h2>{html}</section>'
        for name, html in sections.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: fastlatent report</title><style>{CSS}</style></head><body><main>"
        f'<h1>{title}</h1><p class="soft">A report of fastlatent, made by python -m scripts.report.</p>'
        f"<nav>{links}</nav>{body}</main></body></html>\n"
    )


def headline(words: str) -> str:
    return f"<h3>{escape(words)}</h3>"


def sentence(words: str, kind: str = "soft") -> str:
    return f'<p class="{kind}">{escape(words)}</p>' if words else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], missing: Sequence[bool] = ()) -> str:
    """A table in a box that scrolls, "Nothing." without rows; rows of which `missing` is true stand
    out."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = ""
    for (first, *rest), marked in zip_longest(rows, missing):
        cells = "".join(f"<td>{escape(text(cell))}</td>" for cell in rest)
        body += f'<tr{" class=missing" * bool(marked)}><th scope="row">{escape(text(first))}</th>{cells}</tr>'
    box = (
        f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    return box if body else sentence("Nothing.")


def details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def figure(source: str, words: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img src="{source}" alt="{escape(words)}">{below}</figure>'


def summary(runs: Sequence[History]) -> str:
    """Facts and numbers, a column a run; before them what is missing."""
    notes = "".join(
        sentence(f"{run.name}: {problem}", "note") for run in runs for problem in run.problems
    )
    tables = ""
    for head, columns in (
        ("fact", [run.facts() for run in runs]),
        ("number", [run.numbers() for run in runs]),
    ):
        keys = dict.fromkeys(key for column in columns for key in column)
        rows = [(key, *(column.get(key) for column in columns)) for key in keys]
        tables += table([head, *(run.name for run in runs)], rows)
    return f'{notes}<div class="two">{tables}</div>'


def plots(wanted: Sequence[Plot], runs: Sequence[History]) -> str:
    """The plots that there are, and a sentence for each that there is not."""
    drawn = [draw(plot, runs) for plot in wanted]
    figures = "".join(figure(uri, words) for words, uri in drawn if uri)
    return f'<div class="two">{figures}</div>' + sentence(
        " ".join(words for words, uri in drawn if not uri)
    )


def by_protocols(
    members: Sequence[History] | Sequence[Evaluation], show: Callable[[list[Any]], str]
) -> str:
    """What `show` makes of the members of each protocol, and below it the protocol."""
    found = ""
    for shown, kept, apart in by_protocol(members):
        found += (
            sentence(apart, "note")
            + show(shown)
            + details("Protocol", table(("setting", "value"), kept.items()))
        )
    return found


def distances(runs: Sequence[History]) -> str:
    """Distances measured during training; those of two protocols apart."""
    without = [
        f"{run.name}: no distance was measured during training."
        for run in runs
        if not run.distances()
    ]
    return sentence(" ".join(without)) + by_protocols(
        [run for run in runs if run.distances()],
        lambda shown: (
            headline(" and ".join(run.name for run in shown)) + plots(distance_plots(shown), shown)
        ),
    )


def evaluations(runs: Sequence[History]) -> str:
    """Tables of evaluations, one for each protocol."""
    without = [
        f"{r.name}: no evaluation; python -m scripts.evaluate makes one."
        for r in runs
        if not r.evaluations
    ]
    found = by_protocols(
        [e for r in runs for e in r.evaluations], lambda shown: table(HEADS, evaluation_rows(shown))
    )
    return sentence(" ".join(without)) + found


def grids(run: History) -> str:
    """At most MAX_GRIDS grids: the first, the last and evenly between; wide ones shrunk."""
    last = len(run.grids) - 1
    found = ""
    seen = {line["step"]: line.get("samples") for line in run.lines}
    for i in (
        sorted({round(i * last / (MAX_GRIDS - 1)) for i in range(MAX_GRIDS)}) if run.grids else ()
    ):
        step, file = run.grids[i]
        picture = Image.open(file).convert("RGB")
        stream = io.BytesIO()
        picture.thumbnail((GRID_WIDTH, picture.height))
        picture.save(stream, "webp", quality=90)
        source = f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}"
        caption = f"step {text(step)}" + (
            f", {text(seen[step])} samples seen" if seen.get(step) is not None else ""
        )
        found += figure(source, f"Grid of samples, {caption}", caption)
    return (
        f'<div class="two">{found}</div>'
        if found
        else sentence(f"{run.name}: no grids of samples.")
    )


def ledger(run: History) -> str:
    """What was requested, what a step showed, and the evidence."""
    if not run.ledger:
        return sentence(f"{run.name}: no ledger.")
    missing = [row.missing for row in run.ledger]
    told = f"{sum(missing)} of {len(missing)} rows stand out: requested, and not active."
    cells = [(row.key, row.requested, row.active, row.evidence) for row in run.ledger]
    return sentence(told if any(missing) else "All that was requested is active.") + table(
        COLUMNS, cells, missing
    )


def configuration(runs: Sequence[History]) -> str:
    """What differs from the defaults, what differs between two runs, and the whole."""
    found = ""
    defaults = dict(flat(from_yaml(as_yaml(compose([]).source)))) | {"run_dir": None}
    for run in runs:
        found += headline(f"{run.name}: what differs from this version's defaults")
        whole = escape("\n".join(f"{key}: {value}" for key, value in run.config.items()))
        found += table(
            ("key", "default", "this run"), differing(defaults, run.config | {"run_dir": None})
        )
        found += details("The whole configuration", f'<div class="box"><pre>{whole}</pre></div>')
    if len(runs) > 1:
        between = differing(*(run.config | {"run_dir": None} for run in runs))
        found += headline("What differs between the two") + table(
            ("key", *(run.name for run in runs)), between
        )
    return found
