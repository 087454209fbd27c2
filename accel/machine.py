"""Answers techniques that ask what a machine has, so that a GPU that is not here can be pretended.

Only `Technique.find_obstacle` asks here: what a technique then does, and what it observes, is never
pretended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

Capability = tuple[int, int]


class Pretended(NamedTuple):
    """A GPU that is not here."""

    capability: Capability
    needs: list[str]
    """Names of all that techniques asked of its machine beside the GPU, such as a package."""


PRETENDED: ContextVar[Pretended | None] = ContextVar("pretended", default=None)


@contextmanager
def pretend_gpu(capability: Capability) -> Iterator[list[str]]:
    """Has techniques answer for a GPU of this compute capability; yields what they need beside it,
    which is taken as given."""
    pretended = Pretended(capability, [])
    token = PRETENDED.set(pretended)
    try:
        yield pretended.needs
    finally:
        PRETENDED.reset(token)


def capability_of(device: torch.device) -> Capability:
    """The compute capability of a GPU."""
    pretended = PRETENDED.get()
    return pretended.capability if pretended else torch.cuda.get_device_capability(device)


def is_available(need: str, found: bool) -> bool:
    """Returns `found`, whether this machine has what a technique needs beside the GPU. A pretended
    machine is taken to have it, and the need is noted."""
    pretended = PRETENDED.get()
    if not pretended:
        return found
    pretended.needs.append(need)
    return True
