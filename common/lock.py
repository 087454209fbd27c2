"""A folder that one process writes to."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from pathlib import Path

from common.errors import UserError

NAME = ".lock"


class Held:
    """A lock file that is open and locked until `close()`, the end of this object, or the end of
    the process."""

    def __init__(self, descriptor: int) -> None:
        self.close = weakref.finalize(self, os.close, descriptor)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def held(folder: Path, refusal: str) -> Held:
    """The folder, which exists, held by this process; ValueError with `refusal` if another one
    holds it.

    A POSIX lock: it works on NFS, forked workers do not inherit it, and a killed process has let it
    go.
    """
    import fcntl  # POSIX only

    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    lock = Held(descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.pread(descriptor, 1000, 0).decode()
            lock.close()
            raise UserError(f"{refusal} {f'It is {holder}.' if holder else ''}".strip()) from error
        print(
            f"warning: {folder} cannot be locked ({error.strerror}); see that nothing else writes "
            "there",
            flush=True,
        )
    else:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return lock
