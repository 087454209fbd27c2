"""Finds what the machine has (compute capability, packages), and can pretend that it has a GPU
which it lacks.

Only `Technique.find_obstacle` calls this module, so pretending changes which techniques are
available, never what they do or observe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

Capability = tuple[int, int]


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
