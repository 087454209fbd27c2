"""The ledger: a row for each technique, with the requested value, the active value and the
evidence."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass

UNUSED = "unused"
"""Active value of a technique if the step contained nothing to which it applies."""
UNSEEN = "unseen"
"""Active value of a technique whose only evidence is a GPU kernel, if the profiler recorded no
kernels at all: it is then unknown whether the technique was on."""
AUTO = "auto"
"""A requested value that leaves the choice to the technique, so every active value fulfils it."""
COLUMNS = ("technique", "requested", "active", "evidence")


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
        """Formats the active values as `key=value`, in one line. The line starts with
        "Acceleration:", so that a search finds it in a log."""
        values = {row.key: str(row.active).lower().replace(" ", ",") for row in self}
        dtype = values.pop("precision", "fp32")
        first = {key: values.pop(key) for key in ("compile", "fused_adamw") if key in values}
        first["amp"] = str(dtype not in ("fp32", "false")).lower()
        first["amp_dtype"] = dtype
        words = [f"{key}={value}" for key, value in (first | values).items()]
        return f"Acceleration: {' '.join(words)}"

    def format_table(self, width: int = 118) -> str:
        """Formats a table for the terminal; a row that is `missing` starts with an exclamation
        mark."""
        cells = [COLUMNS] + [
            (
                ("! " if r.missing else "  ") + r.key,
                format_value(r.requested),
                format_value(r.active),
                r.evidence,
            )
            for r in self
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        indent = sum(widths) + 6
        lines = []
        for row in cells:
            head = "  ".join(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True))
            body = textwrap.wrap(row[3], max(width - indent, 30)) or [""]
            lines += [f"{head}  {body[0]}"] + [" " * indent + line for line in body[1:]]
        return "\n".join(line.rstrip() for line in lines)
