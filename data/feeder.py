"""A thread that brings batches to the device ahead of their use, so that the training loop waits for neither."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

DEPTH = 2
"""Batches that wait on the device."""


class Feeder:
    """Runs `batches`, which yields dicts of tensors on the device, in a thread and on a stream of its own.

    `get()` gives the next one, ready to be used on the current stream. An exception of the thread is raised there.
    """

    def __init__(self, batches: Callable[[], Iterator[dict[str, Tensor]]], device: torch.device) -> None:
        self.device = device
        self.ready: queue.Queue[Any] = queue.Queue(DEPTH)
        self.stopping = threading.Event()
        self.thread = threading.Thread(
            target=feed, args=(batches, device, self.ready, self.stopping), name="feeder", daemon=True
        )
        self.thread.start()
        self.stop = weakref.finalize(self, stop, self.ready, self.stopping, self.thread)

    def get(self) -> dict[str, Tensor]:
        item = self.ready.get()
        if isinstance(item, BaseException):
            self.ready.put(item)  # for whoever asks again
            raise item
        tensors, copied = item
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in tensors.values():
                tensor.record_stream(current)  # its memory is not given away while the current stream needs it
        return tensors


def feed(
    batches: Callable[[], Iterator[dict[str, Tensor]]],
    device: torch.device,
    ready: queue.Queue[Any],
    stopping: threading.Event,
) -> None:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    item: Any = None
    try:
        with torch.cuda.stream(stream):  # nothing where there is no stream
            for tensors in batches():
                item = tensors, None if stream is None else stream.record_event()
                if not put(ready, item, stopping):
                    return
    except BaseException as error:
        put(ready, error, stopping)


def put(ready: queue.Queue[Any], item: Any, stopping: threading.Event) -> bool:
    """Whether the item was taken in; False once the feeder is being stopped."""
    while not stopping.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def stop(ready: queue.Queue[Any], stopping: threading.Event, thread: threading.Thread) -> None:
    """Ends the thread; also when the process ends."""
    stopping.set()
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)
