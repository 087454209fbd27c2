"""Finds what the machine has (compute capability, packages), can pretend that it has a GPU which it
lacks, and times work on the GPU that it has.

Only `Technique.find_obstacle` asks what the machine has, so pretending changes which techniques are
available, never what they do or observe.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

Capability = tuple[int, int]
HEAD_START_CYCLES = 30_000_000
"""Clock cycles that the GPU sleeps before work whose time is measured without launches: about 15 ms
on an H100."""


class Pretended(NamedTuple):
    """A GPU that this machine lacks, but that techniques take for present inside `pretend_gpu`."""

    capability: Capability
    needs: list[str]
    """Names that techniques have passed to `is_available`, mostly of packages: what a real machine
    needs besides the GPU."""


PRETENDED: ContextVar[Pretended | None] = ContextVar("pretended", default=None)


@contextmanager
def pretend_gpu(capability: Capability) -> Iterator[list[str]]:
    """Inside the context, `Technique.find_obstacle` works as if the machine had a GPU of this
    compute capability and every package that a technique needs. Yields a list to which
    `is_available` adds the names of these packages."""
    pretended = Pretended(capability, [])
    token = PRETENDED.set(pretended)
    try:
        yield pretended.needs
    finally:
        PRETENDED.reset(token)


def capability_of(device: torch.device) -> Capability:
    """Returns the compute capability of a GPU, e.g. (9, 0); inside `pretend_gpu` that of the
    pretended GPU."""
    pretended = PRETENDED.get()
    return pretended.capability if pretended else torch.cuda.get_device_capability(device)


def is_available(need: str, present: bool) -> bool:
    """Returns `present`, which says whether this machine has `need`, for example a package. Inside
    `pretend_gpu` returns True instead, and adds `need` to the list of needs."""
    pretended = PRETENDED.get()
    if not pretended:
        return present
    pretended.needs.append(need)
    return True


def is_installed(module: str) -> bool:
    """Returns whether the Python module called `module` is installed (see `is_available`); imports
    the package that contains it."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    return is_available(module, spec is not None)


def time_on_gpu(run: Callable[[], object], head_start: bool = True) -> float:
    """Measures the milliseconds of `run` on the GPU, between two CUDA events. With `head_start` the
    GPU sleeps first while the host queues all kernels, so that the time contains no launches, as in
    the replay of a CUDA graph."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if head_start:
        torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
