"""Answers what the machine has (compute capability, packages), and can pretend a GPU that the
machine lacks.

Only `Technique.find_obstacle` asks this module, so pretending changes which techniques count as
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
    """A GPU that this machine lacks, pretended inside `pretend_gpu`."""

    capability: Capability
    needs: list[str]
    """Names of the other things that techniques have asked for, such as a package."""


PRETENDED: ContextVar[Pretended | None] = ContextVar("pretended", default=None)


@contextmanager
def pretend_gpu(capability: Capability) -> Iterator[list[str]]:
    """Inside the context, techniques say what they could do on a GPU of this compute capability;
    yields a list that collects what else they need, such as packages.

    Everything that they need counts as available.
    """
    pretended = Pretended(capability, [])
    token = PRETENDED.set(pretended)
    try:
        yield pretended.needs
    finally:
        PRETENDED.reset(token)


def capability_of(device: torch.device) -> Capability:
    """Returns the compute capability of a GPU, e.g. (9, 0)."""
    pretended = PRETENDED.get()
    return pretended.capability if pretended else torch.cuda.get_device_capability(device)


def is_available(need: str, present: bool) -> bool:
    """Returns `present`: whether this machine has `need`, such as a package. Inside `pretend_gpu`
    adds `need` to the list of needs, and returns True."""
    pretended = PRETENDED.get()
    if not pretended:
        return present
    pretended.needs.append(need)
    return True
