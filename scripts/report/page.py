"""The page: one HTML file with everything in it. Whatever a run folder says is escaped, and scripts are forbidden."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from accel.ledger import COLUMNS, shown
from scripts.report.history import History, differing, from_defaults, number, text
from scripts.report.plots import TRAINING, Drawn, Plot, draw
from scripts.report.quality import HEADS, Group, by_protocol, distance_keys, distance_plots, evaluation_rows
from training.checkpoint.parts import flat

MAX_GRIDS, GRID_WIDTH = 6, 960
CSS = """
:root{color-scheme:light dark;--ink:#1d2126;--soft:#5c636b;--line:#dfe3e8;--back:#f6f7f9;--card:#fff;--warn:#fff1e0;
--accent:#1f5fa8}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa3ad;--line:#333a42;--back:#14171b;--card:#1c2026;
--warn:#46300f;--accent:#86b1e0}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:19px;margin:36px 0 10px;padding-top:10px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:20px 0 8px;overflow-wrap:anywhere}
p{margin:8px 0;max-width:75ch;overflow-wrap:anywhere}
.soft,figcaption{color:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:2px 16px}
a{color:var(--accent)}
.two{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr))}
.two>*{min-width:0;align-self:start}
figure{margin:0;background:#fff;border:1px solid var(--line);border-radius:8px;padding:8px;color:#1d2126}
figcaption{font-size:13px;padding:2px 4px;color:#5c636b}
img{display:block;max-width:100%;height:auto;margin:0 auto}
.box{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:5px 10px;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--soft);font-weight:600;white-space:nowrap}
tbody th{font-weight:500;white-space:nowrap}
td{max-width:44em;overflow-wrap:break-word}
.two td{min-width:7em;overflow-wrap:anywhere}
@media (max-width:600px){tbody th{white-space:normal}.two td{min-width:5em}}
tr.missing>*{background:var(--warn)}
.note{background:var(--warn);border-radius:8px;padding:8px 12px;max-width:none}
pre{margin:0;padding:10px;font-size:13px;overflow-x:auto}
summary{cursor:pointer;color:var(--soft)}
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(runs: Sequence[History]) -> str:
    """The HTML of one run, or of two side by side."""
    title = " and ".join(run.name for run in runs)
    sections = {
        "Summary": summary(runs),
        "Training": plots([(plot, []) for plot in TRAINING], runs),
        "Distance to the reference": distances(runs),
        "Evaluations": evaluations(runs),
        "Samples": "".join(grids(run, len(runs) > 1) for run in runs),
        "Ledger": "".join(ledger(run, len(runs) > 1) for run in runs),
        "Configuration": configuration(runs),
    }
    ids = {name: name.split()[0].lower() for name in sections}
    links = "".join(f'<a href="#{ids[name]}">{name}</a>' for name in sections)
    body = "".join(
        f'<section id="{ids[name]}"><h2>{name}</h2>{content}</section>' for name, content in sections.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: fastlatent report</title><style>{CSS}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="soft">A report of fastlatent, made by python -m scripts.report.</p>'
        f"<nav>{links}</nav>{body}</main></body></html>\n"
    )


def sentence(words: str, kind: str = "soft") -> str:
    return f'<p class="{kind}">{escape(words)}</p>'


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], missing: Sequence[bool] = ()) -> str:
    """A table in a box that scrolls; rows of which `missing` is true stand out."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = ""
    for i, (first, *rest) in enumerate(rows):
        cells = "".join(f"<td>{escape(text(cell))}</td>" for cell in rest)
        mark = ' class="missing"' if i < len(missing) and missing[i] else ""
        body += f'<tr{mark}><th scope="row">{escape(text(first))}</th>{cells}</tr>'
    return f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def summary(runs: Sequence[History]) -> str:
    """Facts and numbers, a column a run; before them what could not be read."""
    names = [run.name for run in runs]
    notes = "".join(sentence(f"{run.name}: {problem}", "note") for run in runs for problem in run.problems)
    tables = ""
    for head, columns in (("fact", [run.facts() for run in runs]), ("number", [run.numbers() for run in runs])):
        keys = [
            key for key in dict.fromkeys(k for c in columns for k in c) if any(c.get(key) is not None for c in columns)
        ]
        rows = [(key, *(column.get(key) for column in columns)) for key in keys]
        tables += table([head, *names], rows) if rows else sentence("No step was logged, so there are no numbers.")
    return f'{notes}<div class="two">{tables}</div>'


def figure(source: str, alt: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img src="{source}" alt="{escape(alt)}">{below}</figure>'


def plots(wanted: Sequence[tuple[Plot, list[float]]], runs: Sequence[History]) -> str:
    """The plots that there are, with their floors, and a sentence for each that there is not."""
    found = "".join(
        sentence(f"{run.name}: there are no logged steps (metrics.jsonl).") for run in runs if not run.lines
    )
    if not any(run.lines for run in runs):
        return found
    drawn = [draw(plot, runs, floors) for plot, floors in wanted]
    figures = "".join(figure(d.uri, d.alt) for d in drawn if isinstance(d, Drawn))
    return f'{found}<div class="two">{figures}</div>' + "".join(sentence(d) for d in drawn if isinstance(d, str))


def distances(runs: Sequence[History]) -> str:
    """Distances measured during training; those of two protocols apart."""
    measured = [run for run in runs if distance_keys([run])]
    found = "".join(
        sentence(f"{run.name}: no distance was measured during training.") for run in runs if run not in measured
    )
    for group in by_protocol(measured):
        wanted = distance_plots(group.members)
        found += heading(group, [run.name for run in group.members] if len(runs) > 1 else [])
        found += plots(wanted, group.members)
        for run in group.members:
            if not any(run.series(key, "train_seconds") for key in distance_keys([run])):
                found += sentence(f"{run.name} is not drawn over seconds: its metrics.jsonl has no train_seconds.")
        found += protocol(group)
    return found


def heading(group: Group, names: Sequence[str]) -> str:
    """Who is shown, and why apart from the others."""
    head = f"<h3>{escape(' and '.join(names))}</h3>" if names else ""
    why = f"Another protocol; not to be compared with the figures above: {group.apart}."
    return head + (sentence(why, "note") if group.apart else "")


def protocol(group: Group) -> str:
    return (
        details("Protocol", table(("setting", "value"), group.protocol.items()))
        if group.protocol
        else sentence("The protocol is not recorded.")
    )


def evaluations(runs: Sequence[History]) -> str:
    """Tables of evaluations, one for each protocol."""
    found = "".join(
        sentence(f"{run.name}: no evaluation; python -m scripts.evaluate makes one.")
        for run in runs
        if not run.evaluations
    )
    for group in by_protocol([e for run in runs for e in run.evaluations]):
        found += heading(group, []) + table(HEADS, evaluation_rows(group.members)) + protocol(group)
    return found


def grids(run: History, named: bool) -> str:
    """At most MAX_GRIDS grids: the first, the last and evenly between."""
    head = f"<h3>{escape(run.name)}</h3>" if named else ""
    if not run.grids:
        return head + sentence(f"{run.name}: no grids of samples.")
    count = min(len(run.grids), MAX_GRIDS)
    chosen = [run.grids[round(i * (len(run.grids) - 1) / max(count - 1, 1))] for i in range(count)]
    seen = {number(line.get("step")): line.get("samples") for line in run.lines}
    found = ""
    for step, file in chosen:
        samples = f", {text(seen[step])} samples seen" if step in seen else ""
        found += grid(file, f"step {text(step)}{samples}")
    return f'{head}<div class="two">{found}</div>'


def grid(file: Path, caption: str) -> str:
    """A grid, shrunk to GRID_WIDTH pixels; a sentence for a file that is no image."""
    from PIL import Image

    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return sentence(f"{file.name} cannot be shown ({error}).")
    if picture.width > GRID_WIDTH:
        picture = picture.resize((GRID_WIDTH, max(1, picture.height * GRID_WIDTH // picture.width)))
    encoded = []
    for kind in ("png", "jpeg"):  # pixel art is smaller as the one, photographs as the other
        stream = io.BytesIO()
        picture.save(stream, kind, optimize=True)
        encoded.append((len(stream.getvalue()), kind, stream.getvalue()))
    _, kind, content = min(encoded)
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return figure(source, f"Grid of samples, {caption}", caption)


def ledger(run: History, named: bool) -> str:
    """What was requested, what a step showed, and the evidence."""
    head = f"<h3>{escape(run.name)}</h3>" if named else ""
    rows = run.ledger_rows()
    if not rows:
        return head + sentence(f"{run.name}: no ledger.")
    cells = [(row.key, shown(row.requested), shown(row.active), row.evidence) for row in rows]
    missing = [row.missing for row in rows]
    found = sum(missing)
    told = (
        f"{found} of {len(rows)} rows stand out: requested, and not active."
        if found
        else "All that was requested is active."
    )
    return head + sentence(told) + table(COLUMNS, cells, missing)


def configuration(runs: Sequence[History]) -> str:
    """What differs from the defaults, what differs between two runs, and the whole."""
    found = ""
    for run in runs:
        changed = from_defaults(run.config) if run.config else {}
        rows = [(key, *values) for key, values in changed.items()]
        found += f"<h3>{escape(run.name)}: what differs from this version's defaults</h3>"
        found += table(("key", "default", "this run"), rows) if rows else sentence("Nothing.")
    if len(runs) > 1:
        between = [(key, *values) for key, values in differing(*(run.config for run in runs)).items()]
        found += "<h3>What differs between the two</h3>"
        found += table(("key", *(run.name for run in runs)), between) if between else sentence("Nothing.")
    for run in runs:
        whole = "\n".join(f"{key}: {value}" for key, value in flat(run.config))
        found += details(f"{run.name}: the whole configuration", f'<div class="box"><pre>{escape(whole)}</pre></div>')
    return found
