"""Counts what a forward pass keeps for its backward pass, and lets a technique move it elsewhere
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

MIN_MOVED_BYTES = 2**20
"""Bytes below which a tensor is not worth a copy of its own to the host."""


@dataclass
class SavedCounter:
    """Counts what forward passes of `module` keep for their backward passes."""

    module: nn.Module
    given: Mapping[int, int]
    """Address -> bytes of storages of which only so many count."""
    storages: dict[int, int] = field(default_factory=dict)
    """Address -> bytes, of storages that belong to no parameter and no buffer."""
    left: dict[int, int] = field(default_factory=dict)
    """The part of `storages` that autograd holds as they are; the others have a copy in host
    memory."""
    large_left: dict[int, int] = field(default_factory=dict)
    """The part of `left` in which a tensor has `LEAST_MOVED` bytes or more, and would be worth a
    move."""
    cached: set[str] = field(default_factory=set)
    """Operations whose results lie in a cache of selective checkpointing."""
    own: set[int] = field(default_factory=set)
    """Addresses of parameters and buffers."""

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())

    def note(self, tensor: Tensor, packed: Any) -> None:
        """Counts a tensor that is kept, and `packed` in its place."""
        if not self.own:  # only now: sharded ones have been gathered
            own = (*self.module.parameters(), *self.module.buffers())
            self.own.update(tensor.untyped_storage()._cdata for tensor in own)
        storage = tensor.untyped_storage()
        if storage._cdata in self.own:
            return
        self.storages[storage._cdata] = size = self.given.get(storage._cdata) or storage.nbytes()
        leaves = [leaf for leaf in tree_leaves(packed) if isinstance(leaf, Tensor)]
        if any(leaf.untyped_storage()._cdata == storage._cdata for leaf in leaves):
            self.left[storage._cdata] = size
            if min(tensor.nbytes, size) >= MIN_MOVED_BYTES:
                self.large_left[storage._cdata] = size


# The hooks on tensors that a forward pass saves. PyTorch calls the innermost pair only, so `pack`
# is in all of them: a technique may move what is saved, and any number of counters may look on.
MOVES: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = []
COUNTERS: list[SavedCounter] = []
CACHES: list[list[Any]] = []
"""A list for each counter. Selective checkpointing adds its caches to the last; no hook sees their
content."""


def pack(tensor: Tensor) -> Any:
    # Detached, for an op that keeps its own output would hold itself, and a graph that nobody runs
    # would stay.
    packed = MOVES[-1][0](tensor) if MOVES else tensor.detach()
    for counter in COUNTERS:
        counter.note(tensor, packed)
    return packed


@contextmanager
def move_saved(
    pack_one: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Keeps `pack_one(tensor)` in the place of each tensor saved inside; the backward pass gets
    `unpack` of that."""
    MOVES.append((pack_one, unpack))
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        MOVES.pop()


@contextmanager
def count_saved(
    module: nn.Module, given: Mapping[int, int] = MappingProxyType({})
) -> Iterator[SavedCounter]:
    """Counts what forward passes of `module` inside keep; complete when the context has been left.

    Of storages whose addresses are `given`, only so many bytes count.
    """
    kept = SavedCounter(module, given)
    caches: list[Any] = []
    CACHES.append(caches)
    COUNTERS.append(kept)
    unpack = MOVES[-1][1] if MOVES else lambda packed: packed
    try:
        with saved_tensors_hooks(pack, unpack):
            yield kept
    finally:
        COUNTERS.pop()
        CACHES.pop()
    for cache in caches:
        for op, results in cache.items():
            for tensor in [leaf.val for leaf in tree_leaves(results) if hasattr(leaf, "val")]:
                kept.note(tensor, tensor)
                kept.cached.add(op.name())
