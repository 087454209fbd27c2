"""Processes and threads that work for this process: how they start and end, and the shared memory
in which they hand over batches."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from common.errors import UserError

Result = TypeVar("Result")
SHARED_MEMORY = "/dev/shm"
"""Where Linux keeps shared memory; containers often have little of it."""
RESERVED_BYTES = 2**20
"""Bytes there for locks and queues."""
EXTRA_BATCHES = 2
"""Batches that the workers make beside those that wait: one is in use, and one is begun."""


def make_child_environment(without: Collection[str] = ()) -> dict[str, str]:
    """Variables for a child: this process's, but for those `without`, and its import path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    own = {name: value for name, value in os.environ.items() if name not in without}
    return own | {"PYTHONPATH": path}


def run_to_end(
    command: Sequence[str],
    seconds: float | None = None,
    output: IO[bytes] | None = None,
    without: Collection[str] = (),
) -> int | None:
    """Runs a command to its end, in a session of its own; returns its exit code, or None if it took
    longer than `seconds`. Whatever it started has ended too. `output` takes what it says,
    `without` names variables that it does not get."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env=make_child_environment(without),
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session of its own, and all that it started; waits for it, and
    closes its stdin."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):  # what it was told last was never read
            process.stdin.close()


def end_with_parent(parent: int) -> None:
    """Ends this process, which leads a session of its own, and those that it started, within a
    second after `parent`, however that ends."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


def run_watched(command: list[str], news: Path, log: Path, patience: Callable[[], float]) -> str:
    """Runs a command that writes to the file `news` as it gets on, and returns how it ended, as the
    end of a sentence. It is killed after `patience()` seconds without news."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=make_child_environment(),
        )
    limit = patience()
    since = time.monotonic()
    seen = None
    try:
        while process.poll() is None:
            time.sleep(0.05)
            stamp = news.stat().st_mtime_ns if news.exists() else None
            if stamp != seen:
                seen = stamp
                since = time.monotonic()
                limit = patience()
            if time.monotonic() - since > limit:
                return f"did not answer for {limit:.0f} s"
    finally:
        process.kill()
        code = process.wait()

    lines = log.read_text(errors="replace").strip().splitlines()
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    return f"ended with {name}" + (f" ({lines[-1].strip()})" if lines else "")


def refuse_small_shared_memory(who: str, batches: int, batch_bytes: int, remedy: str) -> None:
    """ValueError if there is no room for `batches` of `batch_bytes` that wait, in each process of
    this machine.

    A worker that finds no room drops its batch, and its reader would wait for that without end.
    """
    if not os.path.isdir(SHARED_MEMORY):
        return
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = RESERVED_BYTES + processes * (batches + EXTRA_BATCHES) * batch_bytes
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise UserError(
            f"{who} need {needed / 2**20:.1f} MiB of {SHARED_MEMORY}, which has "
            f"{free / 2**20:.1f} MiB free; give the container more "
            f"(docker run --shm-size=1g), or {remedy}."
        )


class Readers:
    """A pool of `count` daemon threads.

    Not a ThreadPoolExecutor: Python waits for its threads at exit, and a read from a server that
    hangs takes minutes.
    """

    def __init__(self, count: int, name: str) -> None:
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed = threading.Event()
        self.threads = [
            threading.Thread(
                target=run_tasks, args=(self.tasks, self.closed), name=f"{name}-{i}", daemon=True
            )
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        future: Future[Result] = Future()
        self.tasks.put((future, function, arguments))
        return future

    def close(self, wait: bool = False) -> None:
        """Drops queued tasks; with `wait` it lets running ones end, for ten seconds a thread at
        most."""
        self.closed.set()
        for _ in self.threads:
            self.tasks.put(None)
        for thread in self.threads:
            # Python may collect the owner of a pool in a thread of the pool.
            if wait and thread is not threading.current_thread():
                thread.join(timeout=10.0)


def run_tasks(tasks: queue.SimpleQueue[Any], closed: threading.Event) -> None:
    """What a thread does. It holds no reference to the pool, so a forgotten pool is collected."""
    for future, function, arguments in iter(tasks.get, None):
        if not closed.is_set():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del future, function, arguments  # while a thread waits, it keeps no owner alive


class Prefetcher(Iterator[Result]):
    """Takes the items of an iterator in a thread of `readers`, one ahead, from this moment on."""

    def __init__(self, items: Iterator[Result], readers: Readers) -> None:
        self.items = items
        self.readers = readers
        self.submit()

    def submit(self) -> None:
        self.ahead: Future[Any] = self.readers.submit(next, self.items, None)

    def __next__(self) -> Result:
        return self.get(None)

    def get(self, timeout: float | None) -> Result:
        """The next item; TimeoutError if it takes longer than `timeout` seconds."""
        item = self.ahead.result(timeout)
        if item is None:
            raise StopIteration
        self.submit()
        return item
