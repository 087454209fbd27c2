"""Words of commands that have keys of their own beside a training's overrides."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar, cast

from training.config.compose import from_words

Keys = TypeVar("Keys")


def own_and_others(schema: type[Keys], words: list[str], help_text: str) -> tuple[Keys, list[str]]:
    """Reads the words that set a key of `schema`, and returns the others, which are overrides."""
    own = {field.name for field in fields(cast(Any, schema))}
    others = [word for word in words if "=" in word and word.partition("=")[0] not in own]
    return from_words(schema, [word for word in words if word not in others], help_text), others
