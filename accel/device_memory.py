"""Counts the memory that work takes on a device, also one whose allocator does not count, and
compares it with the memory that is there."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from common.memory import Need, Room, find_room, refuse_excess

WORKER_BYTES = 40 * 2**20
"""Bytes of a process that reads data ahead, beyond those that it shares with its parent (20 MiB for
tars of 256 samples) and the batches that wait; measured with PyTorch 2.14 on Linux."""


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


def find_device_room(device: torch.device) -> Room:
    """Finds the memory of a device that this process may take (see `find_room`)."""
    if device.type != "cuda":
        names = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")  # of torchrun and srun
        return find_room(int(next(filter(None, map(os.environ.get, names)), 1)))
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return Room(free, "free memory of the GPU", torch.cuda.memory_allocated(device), False)


def count_each(device: torch.device, run: Callable[[int], object]) -> tuple[float, float]:
    """Counts the bytes that `run(samples)` takes at its peak, by running it with two and with three
    samples, eagerly. Returns those that any number of samples takes, and those of each sample."""
    devices = [device] if device.type == "cuda" else []
    with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices):
        two, three = (measure_peak(device, partial(run, samples)) for samples in (2, 3))
    each = max(0.0, three - two)
    return max(0.0, two - 2 * each), each


def refuse_large_batch(
    batch_size: int, device: torch.device, run: Callable[[int], object], ahead: float = 0.0
) -> None:
    """Raises a UserError if a batch of a command surely needs more memory than is there, and prints
    a warning if it may. `run(n)` does the work of n samples; `ahead` is the number of bytes that
    other processes take, which prepare samples."""
    room = find_device_room(device)
    always, each = count_each(device, run)
    refuse_excess(
        f"batch_size={batch_size}: a batch",
        Need({"read ahead": ahead, "any batch": always}, each, batch_size),
        room,
        lambda fitting: f"batch_size={fitting} fits" if fitting else "no batch fits",
    )
