"""What this machine can do, technique by technique, asked of the techniques themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from accel.stack import TECHNIQUES
from accel.techniques import float8


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
    """Every technique in every way, in the order of the stack."""
    return [
        Capability(kind.key, value, kind(value, device).unavailable())
        for kind in TECHNIQUES
        for value in dict.fromkeys(way[kind.key] for way in kind.ways())
    ]


ON_A_GPU = ("precision", "offload_optimizer", "offload_activations")
"""Keys whose losses and bytes a CPU shows as well as the GPU that they are meant for."""


def pretended(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` with the techniques of `ON_A_GPU` to be had on any machine; what it times there says
    nothing."""

    def run_pretending() -> Any:
        kinds: list[Any] = [kind for kind in TECHNIQUES if kind.key in ON_A_GPU]
        own = {kind: kind.unavailable for kind in kinds}
        # layers of the small models that a CPU trains
        least = float8.LEAST
        float8.LEAST = float8.MULTIPLE
        try:
            for kind in kinds:
                kind.unavailable = lambda self: None
            return run()
        finally:
            for kind, method in own.items():
                kind.unavailable = method
            float8.LEAST = least

    return run_pretending
