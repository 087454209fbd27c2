"""Loads trained models and draws samples of them; a sampling job that was stopped resumes.

from sampling import load_run
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sampling.load import load_run

__all__ = ["load_run"]


def __getattr__(name: str) -> Any:
    """Imports `load_run`, and PyTorch with it, at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sampling import load

    return getattr(load, name)
