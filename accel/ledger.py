"""The ledger: a row for each technique, with the requested value, the active value and the
evidence."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass

from common.text import LINE_WIDTH, format_table

UNUSED = "unused"
"""Active value of a technique if the step contained nothing to which it applies."""
UNSEEN = "unseen"
"""Active value of a technique whose only evidence is a GPU kernel, if the profiler recorded no
kernels at all: it is then unknown whether the technique was on."""
AUTO = "auto"
"""A requested value that leaves the choice to the technique, so every active value fulfils it."""
COLUMNS = ("technique", "requested", "active", "evidence")
NO_GPU = "this run is on cpu"
"""Words in the evidence of each technique that needs a GPU, on a machine without one."""


@dataclass(frozen=True)
class LedgerRow:
    """One technique: the value that the configuration requests, the value that a step showed, and
    the evidence."""

    key: str
    requested: bool | str
    active: bool | str
    evidence: str

    @property
    def missing(self) -> bool:
        """Whether the technique was requested and is not on. False if the step contained nothing to
        which the technique applies (`UNUSED`), or if the profiler cannot show whether it was on
        (`UNSEEN`)."""
        return self.requested not in (False, AUTO) and self.active not in (
            self.requested,
            UNUSED,
            UNSEEN,
        )

    @property
    def on_or_missing(self) -> bool:
        """Whether the technique is on, or is `missing`."""
        return self.missing or self.active not in (False, UNUSED, "none")

    @property
    def needs_gpu(self) -> bool:
        """Whether the technique is off because this machine has no GPU."""
        return NO_GPU in self.evidence


def format_value(value: bool | str) -> str:
    """Formats a value for people: "on" and "off" instead of True and False."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


class Ledger(list[LedgerRow]):
    """The rows of all techniques, in the order in which the stack applies the techniques."""

    def as_dict(self) -> dict[str, dict[str, bool | str]]:
        """Returns a dict that JSON can hold: key of a technique -> {requested, active,
        evidence}."""
        return {row.key: {k: v for k, v in asdict(row).items() if k != "key"} for row in self}

    @property
    def precision(self) -> str:
        """Short name of the dtype in which matrix products really ran, such as "bf16"; "mixed" for
        several."""
        return str(next(row.active for row in self if row.key == "precision"))

    def format_line(self) -> str:
        """Formats the active values as `key=value`, in one line, without techniques that are
        neither on nor requested. The line starts with "Acceleration:", so that a search finds it
        in a log."""
        values = {row.key: str(row.active).lower().replace(" ", ",") for row in self}
        dtype = values.pop("precision", "fp32")
        first = {key: values.pop(key) for key in ("compile", "fused_adamw") if key in values}
        first["amp"] = str(dtype not in ("fp32", "false")).lower()
        first["amp_dtype"] = dtype
        silent = {row.key for row in self if not row.on_or_missing}
        others = {key: value for key, value in values.items() if key not in silent}
        words = [f"{key}={value}" for key, value in (first | others).items()]
        return f"Acceleration: {' '.join(words)}"

    def format_table(self, length: str = "full") -> str:
        """Formats a table for the terminal; a row that is `missing` starts with an exclamation
        mark. With the length "short", techniques that are off, and those that need a GPU on a
        machine without one, share one line."""
        shown = [
            row for row in self if length == "full" or (row.on_or_missing and not row.needs_gpu)
        ]
        cells: list[tuple[str, ...]] = [COLUMNS]
        for row in shown:
            mark = "! " if row.missing else "  "
            values = (format_value(row.requested), format_value(row.active))
            cells.append((mark + row.key, *values, row.evidence))
        table = format_table(cells, LINE_WIDTH)

        rest = [row for row in self if row not in shown]
        if not rest:
            return table
        wanted = [row.key for row in rest if row.needs_gpu and row.requested]
        off = [row.key for row in rest if row.key not in wanted]
        line = f"  off: {', '.join(off)}" + f"; without a GPU: {', '.join(wanted)}" * bool(wanted)
        line += " (ledger=full says why)"
        return f"{table}\n{textwrap.fill(line, LINE_WIDTH, subsequent_indent='  ')}"
