"""Dotted names of the values in nested mappings and lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted name -> value for every value in nested mappings that is not itself a
    mapping."""
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Turns a mapping with names `key.entry` into nested dicts: key -> entry -> leaf."""
    tree: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        key, _, entry = name.partition(".")
        tree.setdefault(key, {})[entry] = leaf
    return tree


def list_nodes(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every entry of nested mappings and lists; an entry that is
    itself a mapping or list is yielded before its entries. The key of a list entry is its index."""
    entries = dict(enumerate(node)) if isinstance(node, list) else node
    if isinstance(entries, dict):
        for name, value in entries.items():
            yield f"{prefix}{name}", value
            yield from list_nodes(value, f"{prefix}{name}.")
