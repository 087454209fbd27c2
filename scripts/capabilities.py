"""What this machine can do, technique by technique, asked of the techniques themselves."""

from __future__ import annotations

import typing
from enum import Enum
from typing import NamedTuple

import torch

from accel.stack import TECHNIQUES
from accel.technique import Technique
from training.config.schema import ParallelMode, RuntimeConfig


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


def values_of(technique: type[Technique]) -> list[bool | str]:
    """The values of a technique's key that switch it on."""
    kind = ParallelMode if technique.key == "parallel" else typing.get_type_hints(RuntimeConfig)[technique.key]
    values = [member.value for member in kind] if issubclass(kind, Enum) else [True]
    return [value for value in values if value not in (technique.off, "auto")]


def capabilities(device: torch.device) -> list[Capability]:
    """Every technique in every way, in the order of the stack."""
    return [
        Capability(kind.key, value, kind(value, device).unavailable())
        for kind in TECHNIQUES
        for value in values_of(kind)
    ]
