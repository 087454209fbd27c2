"""Follows a step through PyTorch's dispatcher: the bytes that live, and the operations, at each of
its places."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Place = tuple[str, int | None]
"""A phase of the step and the block at work; None: none is."""


class Op(NamedTuple):
    """An operation as the device would run it."""

    flops: int
    """Of matrix products; 0 for anything else."""
    bytes: int
    """Read and written."""
    bits: int
    """Of an element of a product's second factor."""
    fused: bool
    """In a compiled block, and no product: Inductor makes one kernel of several."""


class Peak(NamedTuple):
    """The most bytes that live at a place, and those of gradients among them."""

    live: float
    gradients: float


class Tracker(TorchDispatchMode):
    """Counts live tensor storage and the operations of what runs inside, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.gradients = 0
        self.place: Place = ("forward", None)
        self.peaks: dict[Place, Peak] = {}
        self.ops: Counter[Op] = Counter()
        self.in_compiled = False
        self.having_gradients: set[int] = set()
        self.known: dict[int, Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def know(self, tensors: Iterable[Any], on_host: bool = False) -> None:
        """Counts tensors as live until they are freed; those in the host's memory as nothing."""
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):
                self.know(
                    (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]), on_host
                )
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                size = 0 if on_host else storage.nbytes()
                self.known[storage._cdata] = weakref.ref(
                    storage, self.forgetter(storage._cdata, size)
                )
                self.live += size
        if self.live > self.peaks.get(self.place, Peak(-1, 0)).live:
            self.peaks[self.place] = Peak(self.live, self.gradients)

    def forgetter(self, address: int, size: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            del self.known[address]
            self.live -= size

        return forget

    def at(self, phase: str, block: int | None = None) -> None:
        """What runs from now on runs there."""
        self.place = (phase, block)
        self.know(())

    def note_gradient(self, parameter: Tensor) -> None:
        """A hook that PyTorch calls when a gradient has been accumulated."""
        assert parameter.grad is not None
        if id(parameter) not in self.having_gradients:  # later micro-batches add to it
            self.having_gradients.add(id(parameter))
            self.gradients += parameter.grad.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = (
            [leaf for leaf in tree_leaves(t) if isinstance(leaf, Tensor)]
            for t in ((args, kwargs), found)
        )
        self.know(made)
        own = {t.untyped_storage()._cdata for t in given}
        moves = func._schema.is_mutable or any(t.untyped_storage()._cdata not in own for t in made)
        if moves and not func._schema.name.startswith("aten::empty"):
            formula = flop_registry.get(func._overloadpacket)
            out = made[0] if len(made) == 1 else tuple(made)
            flops = formula(*args, **(kwargs or {}), out_val=out) if formula else 0
            bits = 8 * given[1].element_size() if formula else 0
            size = sum({id(t): t.nbytes for t in (*given, *made)}.values())
            self.ops[Op(flops, size, bits, self.in_compiled and not formula)] += 1
        return found


class Placed(nn.Module):
    """Stands in for a block and tells the tracker when its passes begin."""

    def __init__(self, block: nn.Module, index: int, tracker: Tracker, compiled: bool) -> None:
        super().__init__()
        self.block = block
        self.index = index
        self.tracker = tracker
        self.compiled = compiled

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.block, name)  # switches that the model reads

    def begins(self, phase: str) -> None:
        self.tracker.at(phase, self.index)
        self.tracker.in_compiled = self.compiled

    def ends(self, phase: str) -> None:
        self.tracker.at(phase)
        self.tracker.in_compiled = False

    def forward(self, *inputs: Tensor) -> Any:
        self.begins("forward")
        if self.index == 0 and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self.ends("embedding"))
        outputs = self.block(*inputs)
        self.ends("forward")
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.begins("backward"))
        return outputs
