"""Threads that read ahead and never keep a process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Readers:
    """`count` daemon threads. Not a ThreadPoolExecutor: that one is waited for when the process ends, and a read from a
    server that hangs can take minutes."""

    def __init__(self, count: int, name: str) -> None:
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed = threading.Event()
        self.threads = [
            threading.Thread(target=work, args=(self.waiting, self.closed), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        future: Future[Result] = Future()
        self.waiting.put((future, function, arguments))
        return future

    def close(self) -> None:
        """What has not begun never will; what has is not waited for."""
        self.closed.set()
        for _ in self.threads:
            self.waiting.put(None)


def work(waiting: queue.SimpleQueue[Any], closed: threading.Event) -> None:
    while (task := waiting.get()) is not None:
        future, function, arguments = task
        if closed.is_set() or not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
