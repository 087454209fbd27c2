"""The ledger: a row for each technique, with its requested value, the active one, and the
evidence."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass

UNUSED = "unused"
"""Active, but the step held nothing that it applies to."""
UNSEEN = "unseen"
"""Active, where only a kernel could show it and the profiler saw none of the GPU's kernels: on or
off, nobody knows."""
AUTO = "auto"
"""A request that anything fulfils."""
COLUMNS = ("technique", "requested", "active", "evidence")


@dataclass(frozen=True)
class LedgerRow:
    """One technique: the value that the configuration requests, the one that a step showed, and the
    evidence."""

    key: str
    requested: bool | str
    active: bool | str
    evidence: str

    @property
    def missing(self) -> bool:
        """Asked for and shown to be not on, though the step had a use for it."""
        return self.requested not in (False, AUTO) and self.active not in (
            self.requested,
            UNUSED,
            UNSEEN,
        )


def format_value(value: bool | str) -> str:
    """A value as a person reads it."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


class Ledger(list[LedgerRow]):
    """Rows in the order in which the techniques were applied."""

    def as_dict(self) -> dict[str, dict[str, bool | str]]:
        """key -> {requested, active, evidence}, ready for JSON."""
        return {row.key: {k: v for k, v in asdict(row).items() if k != "key"} for row in self}

    @property
    def precision(self) -> str:
        """The dtype in which products really ran, by its short name."""
        return str(next(row.active for row in self if row.key == "precision"))

    def format_line(self) -> str:
        """Says what was seen to be on, as `key=value`, in one line that a search finds in a log."""
        found = {row.key: str(row.active).lower().replace(" ", ",") for row in self}
        dtype = found.pop("precision", "fp32")
        told = {key: found.pop(key) for key in ("compile", "fused_adamw") if key in found}
        told["amp"] = str(dtype not in ("fp32", "false")).lower()
        told["amp_dtype"] = dtype
        words = [f"{key}={value}" for key, value in (told | found).items()]
        return f"Acceleration: {' '.join(words)}"

    def format_table(self, width: int = 118) -> str:
        """A table for the terminal; a row that was asked for and is not on starts with an
        exclamation mark."""
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
