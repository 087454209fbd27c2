"""What a benchmark leaves behind: a table on the terminal, JSON with the environment, a bar chart."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.manifest import write_atomically
from scripts.bench.settings import BenchConfig
from training.environment import describe_environment


def publish(cfg: BenchConfig, overrides: list[str], device: torch.device, found: dict[str, Any], *tables: str) -> Path:
    """Prints the tables and writes what was `found` as JSON, with the command's keys, the environment and the date.

    A page with what a reader needs lies beside the JSON. Both are fit for docs/benchmarks: hardware, versions, state of
    the code, the command, and the tables as printed.
    """
    print("", *tables, sep="\n")
    keys = asdict(cfg)
    path = Path(keys.pop("out")).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(device)
    environment |= {"device": device.type, "date": time.strftime("%Y-%m-%d")}
    content = {"environment": environment} | keys | {"overrides": overrides} | found
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in ("python", "torch", "triton"))
    git = environment["git"]
    code = "unknown" if git is None else git["commit"][:10] + (", with changes" if git["uncommitted_changes"] else "")
    words = [word for word in environment["argv"][1:] if not word.startswith("out=")]
    lines = [
        f"# {path.stem.replace('_', ' ')}",
        "",
        f"{environment['hardware']}; {versions}; {environment['date']}; code {code}.",
        "",
        f"    python -m scripts.bench {' '.join(words)}",
        "",
        *("".join(f"    {line}\n" for line in text.splitlines()) for text in tables),
        f"Every figure: [{path.name}]({path.name}).",
    ]
    write_atomically(path.with_suffix(".md"), "\n".join(lines) + "\n")
    print(f"\n{path}", flush=True)
    return path


def put_between(text: str, start: str, end: str, content: str, page: str) -> str:
    """The text of `page` with what lies between its marks made anew; ValueError if a mark is gone."""
    if start not in text or end not in text:
        raise ValueError(f"{page} has lost the lines {start.strip()} and {end}; put them around the table.")
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned columns, the first row being the heads; columns of numbers to the right."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def aligned(cell: str, i: int) -> str:
        number = i > 0 and all(row[i].lstrip("+-×").replace("–", "0")[:1].isdigit() for row in cells[1:])
        return cell.rjust(widths[i]) if number else cell.ljust(widths[i])

    return "\n".join("  ".join(aligned(cell, i) for i, cell in enumerate(row)).rstrip() for row in cells)


class Cell(string.Formatter):
    """Format strings in which None becomes a dash, and a field such as {memory:GiB} bytes in GiB."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "–"
        return f"{value / 2**30:.2f}" if format_spec == "GiB" else format(value, format_spec)


def entries_table(columns: Mapping[str, str], entries: Sequence[dict[str, Any]]) -> str:
    """A row for each entry: its name, a cell for each column, and its `remark`.

    An entry without figures says why in `reason` or `error`, and its cells are dashes. `columns` maps heads to format
    strings with an entry's keys.
    """

    def cell(text: str, entry: dict[str, Any]) -> str | None:
        try:
            return Cell().vformat(text, (), entry)
        except KeyError:
            if not entry.keys() & {"reason", "error"}:
                raise
            return None

    rows: list[Sequence[object]] = [("", *columns, "")]
    for e in entries:
        remark = e.get("reason") or e.get("error") or e.get("remark") or ""
        rows.append((e["name"], *(cell(text, e) for text in columns.values()), remark))
    return table(rows)


class Bar(NamedTuple):
    """One bar of a chart; a pale one was measured without what its label says."""

    label: str
    length: float
    note: str
    pale: bool = False


def bar_chart(results: Path, title: str, device: torch.device, bars: Sequence[Bar]) -> None:
    """Draws horizontal bars as a PNG beside the results, and prints where; the title names the hardware too."""
    from PIL import Image, ImageDraw, ImageFont

    font, line, left, width = ImageFont.load_default(20), 34, 430, 1400
    image = Image.new("RGB", (width, line * (len(bars) + 2)), "white")
    draw = ImageDraw.Draw(image)
    draw.text((16, 14), f"{title}; {describe_environment(device)['hardware']}", fill="black", font=font)
    longest = max(bar.length for bar in bars)
    notes = max(draw.textlength(bar.note, font=font) for bar in bars) + 24
    for i, (label, length, note, pale) in enumerate(bars):
        top = line * (i + 1) + 18
        end = left + int((width - left - notes) * length / longest)
        draw.text((left - 12 - draw.textlength(label, font=font), top), label, fill="black", font=font)
        draw.rectangle((left, top + 2, max(end, left + 2), top + line - 10), fill="#c4d3e0" if pale else "#3b76af")
        draw.text((end + 10, top), note, fill="black", font=font)
    image.save(results.with_suffix(".png"))
    print(results.with_suffix(".png"))
