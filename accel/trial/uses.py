"""Finds the kinds of blocks of a model, and what they get, so that a trial needs one block of each
kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from accel.technique import blocks_of


class Use(NamedTuple):
    """Blocks of a model that are equal in structure: `block` is one of them, `blocks` their number,
    `kind` the hash of their modules and of the shapes of parameters and inputs."""

    block: nn.Module
    blocks: int
    inputs: list[Any]
    """(shape, strides, dtype) of each input of `block`, from a run on two samples."""
    options: dict[str, Any]
    """Keyword arguments of `block`, which are no tensors."""
    kind: str


def record_uses(model: nn.Module, forward: Callable[[], object]) -> list[Use] | str:
    """Runs the model once by `forward()`. Returns one entry for each kind of block, with shapes,
    strides and dtypes of the block's inputs; if the blocks cannot be tried, a sentence that says
    why."""
    calls: list[Any] = []
    hooks = [
        block.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
        for block in blocks_of(model)
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()

    uses: dict[str, Use] = {}
    for block, tensors, options in calls:
        if not all(
            isinstance(t, Tensor) and t.is_floating_point() and len(t) == 2 for t in tensors
        ):
            return (
                "it cannot be tried: a block has an input that is no floating-point tensor with "
                "one row a sample"
            )
        metas = [[list(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")] for t in tensors]
        kind = hash_kind(block, [*metas, options])
        number = uses[kind].blocks + 1 if kind in uses else 1
        uses[kind] = Use(block, number, metas, options, kind)
    return list(uses.values())


def hash_kind(block: nn.Module, metas: list[Any]) -> str:
    """Hashes the classes of a block's modules, the modules' attributes that are tuples or booleans,
    the names, shapes and dtypes of the block's tensors, and what it gets: shapes, strides and
    dtypes of its inputs, and options (`metas`). A trial tries only one of the blocks with the same
    hash."""
    modules = []
    for module in block.modules():
        plain = {k: value for k, value in vars(module).items() if isinstance(value, tuple | bool)}
        modules.append([f"{type(module).__module__}.{type(module).__qualname__}", plain])
    tensors = [[name, list(t.shape), str(t.dtype)] for name, t in block.state_dict().items()]
    return hashlib.sha256(json.dumps([modules, tensors, metas], default=str).encode()).hexdigest()


def name_times(key: str) -> str:
    """Returns the name of the finding about the times of a kernel."""
    return f"{key}, timed"
