"""Tables of text, and parts of pages that a command makes anew."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import UserError


def put_between(text: str, start: str, end: str, content: str, page: str) -> str:
    """Returns the text of `page` with `content` between its marks; ValueError if a mark is gone."""
    if start not in text or end not in text:
        raise UserError(
            f"{page} has lost the lines {start.strip()} and {end}; put them around the table."
        )
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def table(rows: Sequence[Sequence[object]]) -> str:
    """Aligns rows as columns, the first row being the heads; columns of numbers to the right."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def aligned(cell: str, i: int) -> str:
        leads = (row[i].lstrip("+-×").replace("–", "0")[:1] for row in cells[1:])
        if i > 0 and all(lead.isdigit() for lead in leads):
            return cell.rjust(widths[i])
        return cell.ljust(widths[i])

    lines = ("  ".join(aligned(cell, i) for i, cell in enumerate(row)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)
