"""Shared memory, in which worker processes hand over batches; containers often have little of
it."""

from __future__ import annotations

import os
import shutil

from common.errors import UserError

FOLDER = "/dev/shm"
"""Where Linux keeps it."""
SLACK = 2**20
"""Bytes there for locks and queues."""
UNUSED = 2
"""Batches that the workers make beside those that wait: one is in use, and one is begun."""


def refuse_small_shared_memory(who: str, batches: int, batch_bytes: int, remedy: str) -> None:
    """ValueError if there is no room for `batches` of `batch_bytes` that wait, in each process of
    this machine.

    A worker that finds no room drops its batch, and its reader would wait for that without end.
    """
    if not os.path.isdir(FOLDER):
        return
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = SLACK + processes * (batches + UNUSED) * batch_bytes
    free = shutil.disk_usage(FOLDER).free
    if free < needed:
        raise UserError(
            f"{who} need {needed / 2**20:.1f} MiB of {FOLDER}, which has {free / 2**20:.1f} MiB "
            f"free; give the container more (docker run --shm-size=1g), or {remedy}."
        )
