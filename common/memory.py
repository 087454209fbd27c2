"""Finds how much memory Linux leaves to a process, and refuses work that needs more: Linux ends a
process that takes too much, and the process cannot say why.

Control groups: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html.
SLURM's variables: https://slurm.schedmd.com/sbatch.html.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from common.errors import UserError

GIB = 2**30
LIMITS = {
    "memory.max": "memory.current",
    "memory.high": "memory.current",
    "memory.limit_in_bytes": "memory.usage_in_bytes",
}
"""File of a control group with a limit, of version 2 or 1 -> the file with what the group uses."""
CACHED_FILES = re.compile(r"^(?:total_)?(?:in)?active_file (\d+)$", re.MULTILINE)
"""Matches the bytes of cached files in memory.stat, which Linux frees when memory is short."""
SLURM_LIMITS = (
    ("SLURM_MEM_PER_NODE",),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
"""Variables whose product is a limit in MiB."""
MMAP_THRESHOLD = -3
"""glibc's number (malloc.h) of the size from which a block has pages of its own."""
TIGHT_SHARE = 0.4
"""Share of the memory that is there, above which freed memory is given back at once."""
WARNED_SHARE = 0.85
REFUSED_SHARE = 1.1
"""Shares of the memory that is there, above which a need is warned of and refused: it is known to
about a tenth."""


class Room(NamedTuple):
    """The memory that a process may take."""

    size: float
    """Bytes, with those that the process holds already."""
    limit: str
    """Name of the limit, such as MemAvailable."""
    held: float = 0.0
    """Bytes that the process holds already."""
    on_host: bool = True


class Need(NamedTuple):
    """The memory that a process needs beyond what it holds already."""

    parts: Mapping[str, float]
    """Part -> bytes that do not depend on the number of samples."""
    each: float
    """Bytes of a sample."""
    samples: int
    unsure: Mapping[str, float] = MappingProxyType({})
    """Part -> bytes that may never be needed at once with the others."""
    doubt: str = ""
    """Why samples may need less than `each`, for a sentence; "" if they do not."""


def count_host_bytes() -> int:
    """Returns the size of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_text(file: Path) -> str:
    """Returns the content of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def read_kib(file: Path, name: str) -> float:
    """Returns the bytes of a line such as "MemAvailable: 123 kB" of a file; infinity without it."""
    match = re.search(rf"^{name}:\s+(\d+) kB", read_text(file), re.MULTILINE)
    return 1024.0 * int(match[1]) if match else math.inf


def list_limits(root: Path, held: float) -> Iterator[Room]:
    """Yields the bytes that are free by each limit: of the machine, of each control group around
    this process, and of SLURM, whose job may hold more than the `held` bytes of its processes."""
    yield Room(read_kib(root / "proc/meminfo", "MemAvailable"), "MemAvailable")
    yield Room(count_host_bytes() - held, "the machine's")

    # In a container the path of the group may be that of the host; its own group then is the root.
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / controllers
        for folder in (top / path[1:], *(top / path[1:]).parents):
            cached = sum(map(int, CACHED_FILES.findall(read_text(folder / "memory.stat"))))
            for name, used_name in LIMITS.items():
                limit = read_text(folder / name).strip()
                if limit.isdecimal():
                    used = int(read_text(folder / used_name) or 0)
                    yield Room(int(limit) - max(0, used - cached), str(folder / name))

    for names in SLURM_LIMITS:
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdecimal() and int(value) for value in values):
            yield Room(2**20 * math.prod(map(int, values)) - held, names[0])


def find_room(processes: int = 1, root: Path = Path("/")) -> Room:
    """Finds the host memory that this process may take if it shares the machine with others like
    itself, `processes` in all."""
    held = read_kib(root / "proc/self/status", "VmRSS")
    held = held if held < math.inf else 0.0  # a system without /proc
    free = min(list_limits(root, processes * held))
    return Room(max(0.0, free.size) / processes + held, free.limit, held)


def give_back_freed_memory() -> None:
    """Lets glibc give freed blocks of a MiB or more back to Linux at once. By default it keeps
    blocks of up to 32 MiB for later ones, which fit badly: a process then holds up to 2.3 times the
    bytes that live. The price is that Linux clears each block anew (docs/LOG.md has figures)."""
    with suppress(AttributeError, OSError):
        glibc = ctypes.CDLL(None)
        glibc.mallopt(MMAP_THRESHOLD, 2**20)
        glibc.malloc_trim(0)


def refuse_excess(setting: str, need: Need, room: Room, advise: Callable[[int], str]) -> None:
    """Raises a UserError if a process surely needs more than `room`, and prints a warning if it may
    need more. `setting` begins the sentence; `advise(n)` is the advice if n samples fit."""
    samples = need.each * need.samples
    sure = room.held + sum(need.parts.values())
    always = sure + sum(need.unsure.values())
    needed = always + samples
    if needed > TIGHT_SHARE * room.size and room.on_host:
        give_back_freed_memory()
    if needed <= WARNED_SHARE * room.size:
        return

    table = {"held now": room.held, **need.parts, **need.unsure, f"{need.samples} samples": samples}
    rows = ", ".join(f"{name} {size / GIB:.3g}" for name, size in table.items() if size)
    fitting = max(0.0, WARNED_SHARE * room.size - always) / max(1.0, need.each)
    sentence = (
        f"{setting} needs about {needed / GIB:.3g} GiB{need.doubt}, of {room.size / GIB:.3g} that "
        f"are there ({room.limit}): {rows}; {advise(int(fitting))}."
    )
    if (sure if need.doubt else sure + samples) > REFUSED_SHARE * room.size:
        raise UserError(sentence)
    print(f"warning: {sentence}", flush=True)
