"""Threads that read ahead, and the shared memory in which worker processes hand over batches."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from common.errors import UserError

Result = TypeVar("Result")
FOLDER = "/dev/shm"
"""Where Linux keeps shared memory; containers often have little of it."""
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
                target=work, args=(self.tasks, self.closed), name=f"{name}-{i}", daemon=True
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


def work(tasks: queue.SimpleQueue[Any], closed: threading.Event) -> None:
    """What a thread does. It holds no reference to the pool, so a forgotten pool is collected."""
    for future, function, arguments in iter(tasks.get, None):
        if not closed.is_set():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del future, function, arguments  # while a thread waits, it keeps no owner alive


class Ahead(Iterator[Result]):
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
