"""Counts the bytes of live tensors, on devices whose allocator does not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that operations inside its `with` block make, and `peak`,
    their largest number so far. Temporary memory within an operation does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.on_host = False
        """While true, new tensors lie in host memory, so their bytes do not count."""
        self.tracked: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def track(self, tensors: Iterable[Any]) -> None:
        """Adds the bytes of these tensors' storages to `live` until PyTorch frees them."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue  # such as the mesh of a sharded tensor
            if is_traceable_wrapper_subclass(tensor):
                self.track(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.tracked:
                size = 0 if self.on_host else storage.nbytes()
                self.tracked.add(storage._cdata)
                self.live += size
                weakref.finalize(storage, self.forget, storage._cdata, size).atexit = False
        self.peak = max(self.peak, self.live)

    def forget(self, address: int, size: int) -> None:
        """Subtracts from `live` the bytes of a storage that PyTorch has freed."""
        self.tracked.remove(address)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if "_." not in str(func):  # such as aten.add_.Tensor, which changes a tensor in place
            self.track(tree_leaves(outputs))
        return outputs


def measure_peak(device: torch.device, run: Callable[[], object]) -> int:
    """Returns the largest number of bytes of tensors that live at once while `run` runs, beyond
    those that live before."""
    if device.type != "cuda":
        with LiveBytes() as count:
            run()
        return count.peak
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before
