"""What this machine can do, technique by technique, asked of the techniques themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.stack import TECHNIQUES


def override(key: str, value: bool | str) -> str:
    """The override that sets a runtime key, such as runtime.tf32=true."""
    kinds = {kind.key: kind for kind in TECHNIQUES}
    return kinds[key].override(value) if key in kinds else f"runtime.{key}={str(value).lower()}"


class Capability(NamedTuple):
    """One value of one runtime key, and why it cannot be had here; None if it can."""

    key: str
    value: bool | str
    reason: str | None

    @property
    def word(self) -> str:
        """The override that asks for it, such as runtime.tf32=true."""
        return override(self.key, self.value)


def capabilities(device: torch.device) -> list[Capability]:
    """Returns every technique in every way, in the order of the stack."""
    return [
        Capability(kind.key, value, kind(value, device).unavailable())
        for kind in TECHNIQUES
        for value in dict.fromkeys(way[kind.key] for way in kind.ways())
    ]
