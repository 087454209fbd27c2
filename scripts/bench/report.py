"""How results are shown: tables, bar charts, and parts of pages that are made anew."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from scripts.timing import NO_DIFFERENCE, difference


def put_between(text: str, start: str, end: str, content: str, page: str) -> str:
    """The text of `page` with what lies between its marks made anew; ValueError if a mark is
    gone."""
    if start not in text or end not in text:
        raise UserError(
            f"{page} has lost the lines {start.strip()} and {end}; put them around the table."
        )
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned columns, the first row being the heads; columns of numbers to the right."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def aligned(cell: str, i: int) -> str:
        number = i > 0 and all(
            row[i].lstrip("+-×").replace("–", "0")[:1].isdigit() for row in cells[1:]
        )
        return cell.rjust(widths[i]) if number else cell.ljust(widths[i])

    return "\n".join(
        "  ".join(aligned(cell, i) for i, cell in enumerate(row)).rstrip() for row in cells
    )


class Cell(string.Formatter):
    """Format strings in which None becomes a dash, and a field such as {memory:GiB} bytes in
    GiB."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "–"
        return f"{value / 2**30:.2f}" if format_spec == "GiB" else format(value, format_spec)


def entries_table(columns: Mapping[str, str], entries: Sequence[dict[str, Any]]) -> str:
    """A row for each entry: its name, a cell for each column, and its `remark`.

    An entry without figures says why in `reason` or `error`, and its cells are dashes. `columns`
    maps heads to format strings with an entry's keys.
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


def with_difference(entries: Sequence[dict[str, Any]], ratio: str) -> list[dict[str, Any]]:
    """The entries, remarking "no difference" where the quartiles of a ratio straddle 1 and nothing
    else is remarked."""
    same = [e.get(ratio) is not None and difference(e, ratio) == NO_DIFFERENCE for e in entries]
    return [
        e | {"remark": e.get("remark") or NO_DIFFERENCE} if s else e
        for e, s in zip(entries, same, strict=True)
    ]


def fits(entries: Sequence[dict[str, Any]]) -> list[str]:
    """What had to be shrunk to fit, each sentence once."""
    return list(dict.fromkeys(entry["fit"] for entry in entries if "fit" in entry))


class Bar(NamedTuple):
    """One bar of a chart."""

    label: str
    length: float
    note: str


def bar_chart(file: Path, title: str, bars: Sequence[Bar]) -> None:
    """Draws horizontal bars as a PNG."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(20)
    line = 34
    left = 430
    width = 1400
    image = Image.new("RGB", (width, line * (len(bars) + 2)), "white")
    draw = ImageDraw.Draw(image)
    draw.text((16, 14), title, fill="black", font=font)
    longest = max(bar.length for bar in bars)
    notes = max(draw.textlength(bar.note, font=font) for bar in bars) + 24
    for i, (label, length, note) in enumerate(bars):
        top = line * (i + 1) + 18
        end = left + int((width - left - notes) * length / longest)
        draw.text(
            (left - 12 - draw.textlength(label, font=font), top), label, fill="black", font=font
        )
        draw.rectangle((left, top + 2, max(end, left + 2), top + line - 10), fill="#3b76af")
        draw.text((end + 10, top), note, fill="black", font=font)
    image.save(file)
