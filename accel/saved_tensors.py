"""Counts the tensors that a forward pass saves for its backward pass, and lets a technique keep
these tensors elsewhere, such as in host memory, until the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from accel.sharding import find_storages

MIN_MOVED_BYTES = 2**20
"""Size in bytes below which a saved tensor stays on the device, because copying so small a tensor
to the host costs more time than the memory is worth."""


@dataclass
class SavedCounter:
    """Counts the storages that forward passes of `module` save for their backward passes."""

    module: nn.Module
    counted_bytes: Mapping[int, int]
    """Address of a storage -> bytes to count for the storage, only for storages of which a part
    counts; all other storages count whole."""
    storages: dict[int, int] = field(default_factory=dict)
    """Address of a saved storage -> its bytes; without storages of parameters and buffers."""
    unmoved: dict[int, int] = field(default_factory=dict)
    """Subset of `storages` that autograd keeps on the device; the storages that are not in it were
    copied elsewhere, such as to host memory."""
    large_unmoved: dict[int, int] = field(default_factory=dict)
    """Subset of `unmoved` whose saved tensors have `MIN_MOVED_BYTES` or more, and so are large
    enough to move to the host."""
    caches: list[Any] = field(default_factory=list)
    """Caches of selective checkpointing that were made while this counter was the innermost open
    one. Selective checkpointing adds them here, because hooks on saved tensors do not see their
    content."""
    cached_ops: set[str] = field(default_factory=set)
    """Names of operations whose results a cache of selective checkpointing holds."""
    module_storages: set[int] = field(default_factory=set)
    """Addresses of the storages of `module`'s parameters and buffers, which are not counted as
    saved."""

    def note(self, tensor: Tensor, packed: Any) -> None:
        """Counts the storage of a saved tensor; `packed` is the object that autograd stores in
        place of the tensor."""
        # Look up the parameters' storages here, not in the constructor: FSDP2 gathers sharded
        # parameters only when the module runs.
        if not self.module_storages:
            self.module_storages = find_storages(self.module)
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


# The contexts `move_saved` and `count_saved` that are open now. PyTorch calls only the innermost
# hooks on saved tensors, so every context installs the same hook `pack`: it calls the pack function
# that the innermost `move_saved` put into `MOVES`, then reports the tensor to every counter.
MOVES: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = []
COUNTERS: list[SavedCounter] = []


def pack(tensor: Tensor) -> Any:
    """The pack hook of `saved_tensors_hooks`: returns the object that autograd stores in place of
    `tensor`, and reports both to every open `count_saved` context."""
    # Detach the tensor: an op that saves its own output otherwise forms a reference cycle, and its
    # graph is never freed.
    packed = MOVES[-1][0](tensor) if MOVES else tensor.detach()
    for counter in COUNTERS:
        counter.note(tensor, packed)
    return packed


@contextmanager
def move_saved(
    pack_one: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Inside the context, autograd stores `pack_one(tensor)` in place of each saved tensor, and the
    backward pass calls `unpack` with that object to get the tensor."""
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

    `counted_bytes`: address of a storage -> bytes to count for it, for storages of which only a
    part is saved, such as one that a view uses in part.
    """
    counter = SavedCounter(module, counted_bytes)
    COUNTERS.append(counter)
    unpack = MOVES[-1][1] if MOVES else lambda packed: packed
    try:
        with saved_tensors_hooks(pack, unpack):
            yield counter
    finally:
        COUNTERS.pop()
    for cache in counter.caches:
        for op, results in cache.items():
            for tensor in [leaf.val for leaf in tree_leaves(results) if hasattr(leaf, "val")]:
                counter.note(tensor, tensor)
                counter.cached_ops.add(op.name())
