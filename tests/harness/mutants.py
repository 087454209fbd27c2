"""Mutants of good inputs, drawn by hypothesis."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load, save

from tests.harness.payloads import DEEP, as_json, read_header, with_header

Draw = Callable[[st.SearchStrategy], Any]
EDGES = (
    *(-1, 2**31, 2**63, 10**400, 1e-320),
    *("", "../x", "\x1b[31m", "\ud800"),
    [1] * 1000,
    DEEP,
)
VALUES = st.sampled_from(EDGES) | st.none() | st.booleans() | st.floats() | st.text()
TENSOR_CHANGES = [
    torch.Tensor.double,
    torch.Tensor.neg,
    torch.Tensor.flatten,
    lambda t: t * torch.nan,
    lambda t: t[1:],
]


def list_paths(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every value in a JSON tree, without its root."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*above, key)
        yield from list_paths(tree[key], (*above, key))


def mutate_tree(draw: Draw, good: Any) -> Any:
    """A copy of a JSON tree with one to three changes, each depth as likely as any other."""
    tree = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(list_paths(tree))
        depth = draw(st.integers(1, max(map(len, paths))))
        *above, key = draw(st.sampled_from([path for path in paths if len(path) == depth]))
        parent = reduce(getitem, above, tree)
        kind = draw(st.sampled_from(("value", "near", "copy", "delete")))
        if kind == "delete":
            del parent[key]
        elif kind == "copy":
            parent[key] = copy.deepcopy(reduce(getitem, draw(st.sampled_from(paths)), tree))
        elif kind == "near" and isinstance(parent[key], int | float):
            parent[key] += draw(st.sampled_from((1, -1, 512, 2**62, 0.5)))
        else:
            parent[key] = draw(VALUES)
    return tree


def mutate_bytes(draw: Draw, content: bytes) -> bytes:
    """Inserts, overwrites, deletes or cuts bytes, mostly near the start, where headers are."""
    near = draw(st.sampled_from((16, 600, len(content))))
    start = draw(st.integers(0, min(near, len(content))))
    removed = draw(st.sampled_from((0, 8, len(content))))
    return content[:start] + draw(st.binary(max_size=64)) + content[start + removed :]


def mutate_safetensors(draw: Draw, payload: bytes) -> bytes:
    """Changes bytes, the header, or a tensor."""
    kind = draw(st.sampled_from(("bytes", "header", "tensor")))
    if kind == "bytes":
        return mutate_bytes(draw, payload)
    if kind == "header":
        return with_header(payload, mutate_tree(draw, read_header(payload)))
    tensors = load(payload)
    name = draw(st.sampled_from(sorted(tensors)))
    tensors[name] = draw(st.sampled_from(TENSOR_CHANGES))(tensors[name]).contiguous()
    return save(tensors, read_header(payload).get("__metadata__"))


def mutate_file(draw: Draw, file: Path) -> None:
    """Changes a file by its form: safetensors, JSON, or bytes."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        content = mutate_safetensors(draw, content)
    elif file.suffix == ".json" and draw(st.booleans()):
        content = as_json(mutate_tree(draw, json.loads(content)))
    else:
        content = mutate_bytes(draw, content)
    file.write_bytes(content)
