"""Configurations as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from common.errors import UserError


def as_yaml(node: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(node))


def from_yaml(text: str) -> Any:
    """Plain containers, with interpolations as they are written."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def read_config(file: Path) -> dict[str, Any]:
    """The same from a file; ValueError if it holds no configuration, OSError if it cannot be
    read."""
    try:
        found = from_yaml(file.read_text())
    except (OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read as YAML ({' '.join(str(error).split())[:300]}); restore it."
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no configuration; restore it.")
    return found
