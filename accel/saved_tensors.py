"""Counts the tensors that a forward pass saves for its backward pass, and lets a technique keep
them elsewhere until the backward pass."""

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
"""Bytes below which a tensor stays on the device: a copy to the host is not worth it."""


@dataclass
class SavedCounter:
    """Counts the storages that forward passes of `module` save for their backward passes."""

    module: nn.Module
    counted_bytes: Mapping[int, int]
    """Address of a storage -> bytes to count for it, for storages of which only a part counts."""
    storages: dict[int, int] = field(default_factory=dict)
    """Address of a saved storage -> its bytes; without storages of parameters and buffers."""
    unmoved: dict[int, int] = field(default_factory=dict)
    """Subset of `storages` that autograd keeps on the device; of all other storages it keeps a copy
    in host memory."""
    large_unmoved: dict[int, int] = field(default_factory=dict)
    """Subset of `unmoved` whose saved tensors have `MIN_MOVED_BYTES` or more, and so are large
    enough to move to the host."""
    cached_ops: set[str] = field(default_factory=set)
    """Names of operations whose results a cache of selective checkpointing holds."""
    module_storages: set[int] = field(default_factory=set)
    """Addresses of the storages of `module`'s parameters and buffers, which do not count."""

    @property
    def bytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(self.storages.values())

    def note(self, tensor: Tensor, packed: Any) -> None:
        """Counts a saved tensor; `packed` is the object that autograd keeps in its place."""
        # Look up the parameters' storages here, not in the constructor: FSDP2 gathers sharded
        # parameters only when the module runs.
        if not self.module_storages:
            tensors = (*self.module.parameters(), *self.module.buffers())
            self.module_storages.update(t.untyped_storage()._cdata for t in tensors)
        storage = tensor.untyped_storage()
        if storage._cdata in self.module_storages:
            return

        size = self.counted_bytes.get(storage._cdata) or storage.nbytes()
        self.storages[storage._cdata] = size
        leaves = [leaf for leaf in tree_leaves(packed) if isinstance(leaf, Tensor)]
        if any(leaf.untyped_storage()._cdata == storage._cdata for leaf in leaves):
            self.unmoved[storage._cdata] = size
            if min(tensor.nbytes, size) >= MIN_MOVED_BYTES:
                self.large_unmoved[storage._cdata] = size


# These lists hold the contexts (`move_saved`, `count_saved`) that are open now. PyTorch calls only
# the innermost pair of hooks on saved tensors, so all contexts install the same `pack`, which lets
# the last technique in `MOVES` move a tensor and then informs every counter.
MOVES: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = []
COUNTERS: list[SavedCounter] = []
CACHES: list[list[Any]] = []
"""A list of caches for each counter. Selective checkpointing adds its caches to the last list,
because no hook sees their content."""


def pack(tensor: Tensor) -> Any:
    """Hook on saved tensors: returns the object that autograd keeps in place of `tensor`, and
    informs all counters."""
    # Detach, or an op that saves its output forms a reference cycle and its graph is never freed.
    packed = MOVES[-1][0](tensor) if MOVES else tensor.detach()
    for counter in COUNTERS:
        counter.note(tensor, packed)
    return packed


@contextmanager
def move_saved(
    pack_one: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Inside the context, autograd saves `pack_one(tensor)` in place of each tensor, and the
    backward pass gets `unpack` of that object."""
    MOVES.append((pack_one, unpack))
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        MOVES.pop()


@contextmanager
def count_saved(
    module: nn.Module, counted_bytes: Mapping[int, int] = MappingProxyType({})
) -> Iterator[SavedCounter]:
    """Counts the tensors that forward passes of `module` save inside the context; the count is
    complete when the context ends.

    `counted_bytes` maps the address of a storage of which only a part counts to the bytes of that
    part.
    """
    counter = SavedCounter(module, counted_bytes)
    caches: list[Any] = []
    CACHES.append(caches)
    COUNTERS.append(counter)
    unpack = MOVES[-1][1] if MOVES else lambda packed: packed
    try:
        with saved_tensors_hooks(pack, unpack):
            yield counter
    finally:
        COUNTERS.pop()
        CACHES.pop()
    for cache in caches:
        for op, results in cache.items():
            for tensor in [leaf.val for leaf in tree_leaves(results) if hasattr(leaf, "val")]:
                counter.note(tensor, tensor)
                counter.cached_ops.add(op.name())
