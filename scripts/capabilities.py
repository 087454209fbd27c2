"""What this machine can do, technique by technique, asked of the techniques themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.stack import TECHNIQUES


class Capability(NamedTuple):
    """One value of one runtime key, and why it cannot be had here; None if it can."""

    key: str
    value: bool | str
    reason: str | None

    @property
    def word(self) -> str:
        """The override that asks for it, such as runtime.tf32=true."""
        key = "parallel.mode" if self.key == "parallel" else self.key
        return f"runtime.{key}={str(self.value).lower()}"


def capabilities(device: torch.device) -> list[Capability]:
    """Every technique in every way, in the order of the stack."""
    return [
        Capability(kind.key, value, kind(value, device).unavailable())
        for kind in TECHNIQUES
        for value in dict.fromkeys(way[kind.key] for way in kind.ways())
    ]
