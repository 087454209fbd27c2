"""Explains two kinds of errors to the user, each in one sentence: mistakes of the user, and
failures because the machine runs out of memory, disk or threads."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors that reading a file of a run raises if the file is absent, damaged or holds values of
other types."""
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Environment variables that hold the paths of the folders in which PyTorch and Triton cache
compiled kernels."""


class UserError(ValueError):
    """A mistake of the user. The message is one sentence that names the key or file, its value and
    how to fix it.

    Commands print this sentence without a traceback and exit with status 1.
    """


def describe_first_fault(error: ValidationError, kind: str) -> str:
    """Describes the first fault of a JSON file that should be a `kind`, such as "manifest". Returns
    the end of a sentence that begins with the file's name, e.g. "lacks count"."""
    faults = {".".join(map(str, fault["loc"])): fault for fault in error.errors(include_url=False)}
    missing = [field for field, fault in faults.items() if fault["type"] == "missing"]
    if missing:
        return f"lacks {', '.join(missing[:8])}"

    field, fault = next(iter(faults.items()))
    if fault["type"] == "json_invalid":
        return f"is not valid JSON ({fault['msg'].removeprefix('Invalid JSON: ')})"
    problem = fault["msg"].removeprefix("Input ")
    return f"is no {kind}: {field or 'it'} {problem}, and is {json.dumps(fault['input'])[:60]}"


def is_out_of_memory(error: Exception) -> bool:
    """Says whether the error means that Python or PyTorch could not allocate memory on the host or
    a GPU."""
    by_pytorch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or by_pytorch


def describe_machine_fault(error: Exception) -> str | None:
    """Returns a sentence for the user if the machine ran out of memory, disk or threads, or a path
    is too long; otherwise None."""
    text = str(error)
    if is_out_of_memory(error):
        return (
            "this machine ran out of memory; use smaller batches, fewer workers, less data at a "
            "time, or a smaller model."
        )
    if isinstance(error, BlockingIOError) or "can't start new thread" in text:
        return (
            "this user may start no more threads or processes; raise the limit (ulimit -u), or "
            "use fewer workers."
        )
    if text.startswith(("DataLoader timed out", "DataLoader worker")):
        first = text.splitlines()[0].rstrip(".")
        return (
            f"{first}; run the same command again to continue, with fewer num_workers if memory "
            "or /dev/shm ran out."
        )
    if not isinstance(error, OSError):
        return None

    for name in CACHE_VARIABLES:
        folder = os.environ.get(name)
        if folder and text.endswith(f"'{folder}'"):
            return (
                f"{name}={folder} cannot be created or used ({error.strerror}); set it to another "
                "folder."
            )
    if error.errno == errno.ENAMETOOLONG:
        return f"the path {str(error.filename)[:60]}… is too long; use a shorter one."
    if error.errno in DISK_ERRNOS:
        file = error.filename or "a file"
        return f"{file} cannot be read or written ({error.strerror}); free space or mend the disk."
    return None
