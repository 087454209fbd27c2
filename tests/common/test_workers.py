"""Child processes and threads: they end when they should, and their end is described."""

import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from common import workers
from common.files import write_atomically
from common.workers import (
    Prefetcher,
    Readers,
    ask_child,
    end_with_parent,
    refuse_small_shared_memory,
)
from tests.harness.limits import start_fork
from tests.harness.refusals import expect_refusal
from tests.harness.sets import wait_until_dead
from tests.harness.zygote import HANG

LEAVE_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.exit(3)
"""


def test_a_command_takes_its_children_along():
    _, end = ask_child(["-c", LEAVE_CHILD], {})
    assert end.startswith("ended with code 3 (")
    wait_until_dead(int(end.rpartition("(")[2].rstrip(")")))


def test_a_process_ends_with_its_parent(tmp_path):
    """The parent is killed, so it cannot end the process itself."""
    file = tmp_path / "child"

    def live_with(parent):
        os.setsid()
        end_with_parent(parent)
        write_atomically(file, str(os.getpid()))
        time.sleep(HANG)

    def start_and_wait():
        start_fork(live_with, os.getpid())
        time.sleep(HANG)

    parent = start_fork(start_and_wait)
    while not file.exists():
        time.sleep(0.01)
    parent.kill()
    wait_until_dead(int(file.read_text()))
    parent.join()


def test_a_child_imports_what_its_parent_does_and_is_no_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    environment = workers.make_child_environment()
    assert "RANK" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == os.getcwd()


START = "import sys; from pathlib import Path; folder = Path(sys.argv[1]);"
ANSWER = f"{START} (folder / 'found.json').write_text"


@pytest.mark.parametrize(
    ("code", "found", "end"),
    [
        (f"{ANSWER}((folder / 'job.json').read_text())", 1, "ended with code 0"),
        ("print('no'); raise SystemExit(4)", None, "ended with code 4 (no)"),
        (
            "raise ZeroDivisionError('why\\nmore')",
            None,
            "ended with code 1 (ZeroDivisionError: why)",
        ),
        ("import os; os.kill(os.getpid(), 9)", None, "ended with signal SIGKILL"),
        ("import time; time.sleep(600)", None, "did not answer for 1 s"),
        (
            # News give a new limit.
            f"""{ANSWER}('{{"question": 2, "patience": 0.5}}'); import time; time.sleep(600)""",
            2,
            "did not answer for 0 s",
        ),
    ],
)
def test_a_child_answers_or_its_end_is_described(code, found, end):
    patience = 1.0 if found is None and "sleep" in code else HANG
    answer, ended = ask_child(["-c", code], {"question": 1}, patience)
    assert (answer.get("question"), ended) == (found, end)


def test_shared_memory_must_hold_the_batches_of_all_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=9 * 2**20))
    refuse_small_shared_memory("workers", 6, 2**20, "use none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with expect_refusal(r"workers need 17.0 MiB of .*, which has 9.0 MiB free; .*, or use none"):
        refuse_small_shared_memory("workers", 6, 2**20, "use none")


def test_readers_answer_with_results_and_errors_and_drop_what_waits_at_their_end():
    readers = Readers(1, "reader")
    assert readers.submit(divmod, 7, 2).result(HANG) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        readers.submit(divmod, 1, 0).result(HANG)
    release = threading.Event()
    running = threading.Event()
    first = readers.submit(lambda: running.set() or release.wait(HANG))
    waiting = readers.submit(divmod, 1, 1)
    running.wait(HANG)
    readers.close()
    release.set()
    assert first.result(HANG)
    readers.close(wait=True)
    assert not waiting.done()
    assert not any(thread.is_alive() for thread in readers.threads)


def test_a_prefetcher_is_one_item_ahead_and_says_when_one_is_late():
    ahead = threading.Event()
    release = threading.Event()

    def make_items():
        yield 1
        ahead.set()
        release.wait(HANG)
        yield 2

    readers = Readers(1, "reader")
    items = Prefetcher(make_items(), readers)
    assert next(items) == 1
    assert ahead.wait(HANG)
    with pytest.raises(TimeoutError):
        items.get(0.01)
    release.set()
    assert list(items) == [2]
    readers.close(wait=True)
