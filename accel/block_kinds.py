"""The kinds of blocks that a model has, each with the shapes of what its blocks get."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from accel.technique import blocks_of


class Use(NamedTuple):
    """Blocks of one kind: one of them, how many there are, and what they get."""

    block: nn.Module
    blocks: int
    inputs: list[Any]
    """(shape, stride, dtype) of each."""
    kind: str


def recorded(model: nn.Module, forward: Callable[[], object]) -> list[Use] | str:
    """The blocks of a model by kind, with the shapes, strides and dtypes of what they get; or why
    they have none."""
    inputs: dict[nn.Module, Any] = {}
    hooks = [block.register_forward_pre_hook(inputs.__setitem__) for block in blocks_of(model)]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()

    uses: dict[str, Use] = {}
    for block, got in inputs.items():
        if not all(isinstance(t, Tensor) and t.is_floating_point() and len(t) == 2 for t in got):
            return (
                "it cannot be tried, for a block takes something else than tensors of floating "
                "point by sample"
            )
        metas = [
            [list(t.shape), list(t.stride()), str(t.dtype).removeprefix("torch.")] for t in got
        ]
        kind = described(block, metas)
        uses[kind] = Use(block, uses[kind].blocks + 1 if kind in uses else 1, metas, kind)
    return list(uses.values())


def described(block: nn.Module, metas: list[Any]) -> str:
    """What makes two blocks of one kind: their modules, tensors, grids and inputs."""
    modules = []
    for module in block.modules():
        grids = {name: value for name, value in vars(module).items() if isinstance(value, tuple)}
        modules.append([f"{type(module).__module__}.{type(module).__qualname__}", grids])
    tensors = [[name, list(t.shape), str(t.dtype)] for name, t in block.state_dict().items()]
    return hashlib.sha256(json.dumps([modules, tensors, metas], default=str).encode()).hexdigest()
