"""Loads trained models and draws samples from them. A sampling job that was stopped can resume
where it stopped.

from sampling import load_run
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sampling.load import load_run

__all__ = ["load_run"]


def __getattr__(name: str) -> Any:
    """Imports `load_run`, and with it PyTorch, only when the name is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sampling.load import load_run

    return load_run
