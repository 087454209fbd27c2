"""Threads that read ahead, so that training waits neither for the disk nor for a copy to the
device."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from data.blocks import BlockReader, add_skipped
from data.loader import Batch

Result = TypeVar("Result")
DEPTH = 2
"""Batches that a `Feeder` keeps ready on the device."""


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

    def close(self) -> None:
        """Drop queued tasks; do not wait for running ones."""
        self.closed.set()
        for _ in self.threads:
            self.tasks.put(None)

    def join(self) -> None:
        """After `close`: wait for what is running, ten seconds a thread at most."""
        for thread in self.threads:
            wait_for(thread)


def work(tasks: queue.SimpleQueue[Any], closed: threading.Event) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        if closed.is_set() or not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)


def held_out_batches(
    blocks: BlockReader,
    batch_size: int,
    device: torch.device,
    normalise: Callable[[Tensor], Tensor],
    skipped: dict[str, int],
) -> Iterator[Batch]:
    """Yields the held-out split once, in order and without augmentation, while a thread reads the
    next blocks.

    Adds the blocks that others stand in for to `skipped`.
    """
    names = ("latents", "labels", "ids")
    count = len(blocks.places)
    start = 0
    rest: dict[str, Tensor] = {}
    readers = Readers(1, "held-out")
    try:
        ahead = [readers.submit(blocks.read, number) for number in range(min(2, count))]
        for number in range(count):
            tensors = ahead.pop(0).result()
            if number + 2 < count:
                ahead.append(readers.submit(blocks.read, number + 2))
            rest = {
                name: torch.cat([rest[name], tensors[name]]) if rest else tensors[name]
                for name in names
            }
            while len(rest["labels"]) >= (1 if number + 1 == count else batch_size):
                latents, labels, ids = (rest[name][:batch_size].to(device) for name in names)
                rest = {name: tensor[batch_size:] for name, tensor in rest.items()}
                position = torch.arange(start, start + len(labels), device=device)
                start += len(labels)
                yield Batch(normalise(latents), labels, ids, position)
    finally:
        readers.close()
        add_skipped(skipped, blocks.take_reports())


class Feeder:
    """Runs `batches`, which yields dicts of tensors on the device, in a thread and on a CUDA stream
    of its own.

    `get(timeout)` returns the next one, ready for use on the current CUDA stream, and raises what
    the thread raised, or queue.Empty if that takes longer than `timeout` seconds.
    """

    def __init__(
        self, batches: Callable[[], Iterator[dict[str, Tensor]]], device: torch.device
    ) -> None:
        self.device = device
        self.ready: queue.Queue[Any] = queue.Queue(DEPTH)
        self.stopping = threading.Event()
        self.thread = threading.Thread(
            target=feed,
            args=(batches, device, self.ready, self.stopping),
            name="feeder",
            daemon=True,
        )
        self.thread.start()
        self.stop = weakref.finalize(self, stop, self.stopping, self.thread)

    def get(self, timeout: float) -> dict[str, Tensor]:
        item = self.ready.get(timeout=timeout)
        if isinstance(item, BaseException):
            self.ready.put(item)  # the next caller gets it too
            raise item
        tensors, copied = item
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in tensors.values():
                # the allocator keeps the memory while the current CUDA stream needs it
                tensor.record_stream(current)
        return tensors


def feed(
    batches: Callable[[], Iterator[dict[str, Tensor]]],
    device: torch.device,
    ready: queue.Queue[Any],
    stopping: threading.Event,
) -> None:
    """The thread's work. It holds no reference to the feeder, so that a forgotten feeder is
    collected and stops."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    try:
        with torch.cuda.stream(stream):  # does nothing on a CPU
            for tensors in batches():
                copied = None if stream is None else stream.record_event()
                if not put(ready, (tensors, copied), stopping):
                    return
    except BaseException as error:
        put(ready, error, stopping)


def put(ready: queue.Queue[Any], item: Any, stopping: threading.Event) -> bool:
    """Waits for room in the queue; False if the feeder stops first."""
    while not stopping.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def stop(stopping: threading.Event, thread: threading.Thread) -> None:
    """Ends the thread; `weakref.finalize` calls this when the process ends, too."""
    stopping.set()
    wait_for(thread)


def wait_for(thread: threading.Thread) -> None:
    """Waits ten seconds at most; not at all in `thread` itself, where Python may collect the owner
    that it served."""
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)
