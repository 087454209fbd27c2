"""Starts and ends child processes and threads, and checks that shared memory has room for the
batches of data workers."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from common.errors import READ_ERRORS, UserError
from common.files import read_object

Result = TypeVar("Result")
SHARED_MEMORY = "/dev/shm"
"""Linux's file system for shared memory; containers often have little of it."""
RESERVED_BYTES = 2**20
"""Bytes of shared memory that are left free for locks and queues."""
EXTRA_BATCHES = 2
"""Batches in shared memory besides those that wait in the queue: one that the reader uses and one
that a worker makes."""

PATIENCE_SECONDS = 120.0
"""Seconds without news after which `ask_child` kills its program as hanging, unless told
otherwise."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
"""Environment variables of launchers such as torchrun, which a child process must not see, because
it is no rank of the run."""


def make_child_environment() -> dict[str, str]:
    """Returns environment variable -> value for a child process: the variables of this process
    except `RANK_VARIABLES`, and PYTHONPATH set to this process's import path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    variables = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return variables | {"PYTHONPATH": path}


def end_with_parent(parent: int) -> None:
    """Starts a thread that kills this process and its children within about a second after the
    parent process, whose id is `parent`, ends, even if the parent is killed. This process must lead
    its own session."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def ask_child(
    program: Sequence[str], job: Mapping[str, Any], patience: float = PATIENCE_SECONDS
) -> tuple[dict[str, Any], str]:
    """Runs a Python program in a process of its own, which may crash or hang: `python <program>
    <folder>`. Returns the JSON object that the program wrote last to found.json in the folder ({}
    if none), and the end of a sentence about how it ended, such as "ended with code 1".

    The program reads `job` from job.json, where the key `parent` has the id of this process for
    `end_with_parent`. It may write found.json several times. The function kills the program if it
    writes nothing for `patience` seconds, or for as many as the key `patience` in found.json says.
    When the function returns, the program and all its children have ended. Its output is kept from
    the terminal; the line of it that names an error, or the last one, becomes a part of the
    sentence.
    """
    with tempfile.TemporaryDirectory(prefix="fastlatent-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "parent": os.getpid()}))
        with (folder / "log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *program, name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=make_child_environment(),
                start_new_session=True,
            )
        try:
            silent_seconds = wait_for_end(process, folder / "found.json", patience)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()

        found = read_found(folder / "found.json")
        if silent_seconds is not None:
            return found, f"did not answer for {silent_seconds:.0f} s"
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        last = next((line for line in reversed(lines) if "Error" in line), "".join(lines[-1:]))
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        return found, f"ended with {end}" + f" ({last.strip()[:200]})" * bool(last)


def wait_for_end(process: subprocess.Popen[bytes], news: Path, patience: float) -> float | None:
    """Waits until a process ends, and returns None; or until the file `news` has not changed for
    `patience` seconds, or as many as the file says, and returns their number."""
    limit = patience
    since = time.monotonic()
    last_stamp = None
    while process.poll() is None:
        time.sleep(0.05)
        stamp = news.stat().st_mtime_ns if news.exists() else None
        if stamp != last_stamp:
            last_stamp = stamp
            since = time.monotonic()
            limit = read_found(news).get("patience") or patience
        if time.monotonic() - since > limit:
            return limit
    return None


def read_found(file: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; returns {} if the file is absent or damaged."""
    with suppress(*READ_ERRORS):
        return read_object(file)
    return {}


def refuse_small_shared_memory(who: str, batches: int, batch_bytes: int, remedy: str) -> None:
    """Raises UserError if this machine's shared memory has no room for `batches` queued batches of
    `batch_bytes` bytes for each training process. `who` and `remedy` are parts of the message.

    Without this check, a worker that finds no room loses its batch, and the process that waits for
    the batch waits forever.
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
    """A pool of `count` daemon threads that read files.

    This class is no ThreadPoolExecutor, because Python waits at exit for the threads of an
    executor, and a read from a server that hangs takes minutes.
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
        """Drops queued tasks and lets each thread end after its running task. If `wait`, waits for
        the threads to end, at most ten seconds for each thread."""
        self.closed.set()
        for _ in self.threads:
            self.tasks.put(None)
        for thread in self.threads:
            # Skip the current thread, because a thread cannot join itself. Python's garbage
            # collector may call `close` in a thread of the pool.
            if wait and thread is not threading.current_thread():
                thread.join(timeout=10.0)


def run_tasks(tasks: queue.SimpleQueue[Any], closed: threading.Event) -> None:
    """Main function of each thread of a pool: takes tasks from the queue and runs them. The thread
    has no reference to the pool, so that Python can free a pool that no other code uses."""
    for future, function, arguments in iter(tasks.get, None):
        if not closed.is_set():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del future, function, arguments  # so that they are freed while the thread waits


class Prefetcher(Iterator[Result]):
    """Yields the items of an iterator, one ahead: while the caller uses an item, a thread of
    `readers` computes the next item."""

    def __init__(self, items: Iterator[Result], readers: Readers) -> None:
        self.items = items
        self.readers = readers
        self.submit()

    def submit(self) -> None:
        self.ahead: Future[Any] = self.readers.submit(next, self.items, None)

    def __next__(self) -> Result:
        return self.get(None)

    def get(self, timeout: float | None) -> Result:
        """Returns the next item. Raises TimeoutError if the item takes longer than `timeout`
        seconds (None: no limit)."""
        item = self.ahead.result(timeout)
        if item is None:
            raise StopIteration
        self.submit()
        return item
