"""Finds the parameters that are multiplied in fp32, whatever operation computes the product.

The name of an operation does not tell: einsum makes a bmm of a weight, and attention one of two
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.profiler import PRODUCTS


class WideWeightProducts(TorchDispatchMode):
    """Inside, notes in `found` the names of matrices of `model` that are multiplied in fp32.

    What an operation makes of weights alone, such as a cast or another shape, is those weights. The
    parameters of a sharded model are gathered into other storages, and are not recognised.
    """

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: set[str] = set()
        # A weak reference, so that no other tensor gets the address of a storage that is gone.
        self.names = {reference_to(p): name for name, p in model.named_parameters() if p.ndim >= 2}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = plain_tensors((args, kwargs))
        named = [self.names.get(reference_to(tensor)) for tensor in given]
        if str(func).startswith(AS_PRODUCTS):
            wide = all(tensor.dtype is torch.float32 for tensor in plain_tensors(made))
            self.found |= {name for name in named if name and wide}
        elif named and None not in named:
            self.names |= {reference_to(tensor): str(named[0]) for tensor in plain_tensors(made)}
        return made


AS_PRODUCTS = tuple(f"{name.replace('::', '.')}." for name in PRODUCTS)
"""How PyTorch calls products where they are dispatched: aten.mm.default."""


def reference_to(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def plain_tensors(tree: Any) -> list[Tensor]:
    """The tensors in a tree that are no subclass: others may have no storage."""
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in (Tensor, nn.Parameter)]
