"""However a run ends, it ends soon, and what can be saved is."""

import errno
import json
import os
import pty
import re
import resource
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from common.config.compose import report_user_errors
from common.distributed.exit import StopRequest
from common.distributed.ranks import SINGLE, JointWork, Ranks
from tests.harness.limits import start_fork
from tests.harness.outcomes import list_checkpoints, seal_checkpoint
from tests.harness.sets import edit_json
from tests.harness.zygote import HANG, read_output
from training.failures import explain_failures

PATIENCE = 3.0


def join_work(folder, rank, work):
    """Does the work in the second of two processes, and writes what both get to hear of it."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    joint = JointWork(Ranks(rank, 2, rank), timedelta(seconds=PATIENCE))
    try:
        answer = repr(joint.run_everywhere(lambda: work(joint) if rank else 0))
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    (folder / f"answer-{rank}").write_text(answer)
    os._exit(0)


def advance_slowly(joint):
    for _ in range(int(3 * PATIENCE / 0.5)):
        time.sleep(0.5)
        joint.advance(1)
    return 1


def stop(joint):
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(joint):
    time.sleep(HANG)


def find_no_space(joint):
    raise OSError(errno.ENOSPC, "No space left on device", "file")


TOGETHER = pytest.mark.fault(
    "a disk of one process that hangs or fails in a save", "all processes give up together"
)


@pytest.mark.parametrize(
    ("work", "first", "second"),
    [
        pytest.param(
            advance_slowly,
            "[0, 1]",
            "[0, 1]",
            marks=pytest.mark.fault(
                "a save that takes longer than timeout_minutes and goes on writing",
                "it is waited for",
            ),
        ),
        pytest.param(
            stop,
            "TimeoutError: another process has ended, or has not answered for 3 s",
            None,
            marks=pytest.mark.fault(
                "a process that stops inside a save",
                "the others end within runtime.parallel.timeout_minutes",
            ),
        ),
        pytest.param(
            hang, *["TimeoutError: process 1 has written nothing for 3 s"] * 2, marks=TOGETHER
        ),
        pytest.param(
            find_no_space, *["OSError: No space left on device: file"] * 2, marks=TOGETHER
        ),
    ],
)
def test_processes_wait_for_progress_only(work, first, second, tmp_path):
    """The second process does not end by itself where it has no answer."""
    processes = [start_fork(join_work, tmp_path, rank, work) for rank in range(2)]
    answers = [first, second]
    for process, answer in zip(processes, answers, strict=True):
        process.join(HANG if answer else 0)
        process.kill()
        process.join()
    files = [tmp_path / f"answer-{rank}" for rank in range(2)]
    assert [file.read_text() if file.exists() else None for file in files] == answers


@pytest.mark.fault(
    "SIGHUP: the terminal is closed", "saved; exit code 75; what is printed afterwards hurts nobody"
)
def test_a_terminal_that_is_gone(monkeypatch):
    terminal, descriptor = pty.openpty()
    with os.fdopen(descriptor, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        with report_user_errors(), StopRequest() as request:
            os.close(terminal)
            os.kill(os.getpid(), signal.SIGHUP)
            print("nobody hears it", flush=True)
            assert request.poll()


def open_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


READER = pytest.mark.fault(
    "`train.py … | head`: the reader of stdout goes away", "one warning; the run goes on"
)
DISK = pytest.mark.fault(
    "a full disk behind stdout, or stdout closed", "at most one warning; the run goes on"
)


@pytest.mark.parametrize(
    ("open_stdout", "why"),
    [
        pytest.param(open_without_reader, "Broken pipe", marks=READER, id="gone"),
        pytest.param(
            partial(open, "/dev/full", "w"), "No space left on device", marks=DISK, id="full"
        ),
        pytest.param(lambda: None, None, marks=DISK, id="closed"),
    ],
)
def test_what_nobody_can_read_ends_no_run(open_stdout, why, run, run_dir, monkeypatch, capsys):
    stdout = open_stdout()
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    with report_user_errors():
        run("save_every=2", "log_every=1", "total_samples=64")
    if stdout is not None:
        stdout.close()
    assert list_checkpoints(run_dir) == ["step-6", "step-8"]
    errors = capsys.readouterr().err
    assert errors.count("warning: output cannot be written") == (why is not None)
    assert why is None or why in errors


@pytest.mark.parametrize(("name", "heard"), [("SIGHUP", False), ("SIGINT", True)])
def test_signals_that_the_parent_ignores(name, heard):
    """nohup stays in force; shells start background jobs with SIGINT ignored, and it is heard."""
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), number)
            assert bool(request.poll()) is heard
    finally:
        signal.signal(number, before)


@pytest.mark.fault(
    "metrics.jsonl at a quota on the size of files (EFBIG)",
    "a warning; the run and its saves go on",
)
def test_a_quota(run, run_dir):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = run_dir / "metrics.jsonl"
    file.parent.mkdir()
    values = {f"value-{i}": 1.5 for i in range(100_000)}
    file.write_text(json.dumps({"step": 0} | values) + "\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 1000, hard))
    try:
        with pytest.warns(
            UserWarning,
            match=r"metrics.jsonl cannot be written \(File too large\); the run continues",
        ):
            run("runtime=eager", "log_every=1", "save_every=5", "total_samples=80")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list_checkpoints(run_dir) == ["step-5", "step-10"]


@pytest.mark.fault("a full disk that names no file", "no file or folder is blamed for it")
def test_the_run_folder_is_not_blamed_for_an_error_without_a_name(tmp_path):
    training = SimpleNamespace(state=SimpleNamespace(step=3, samples=24), ranks=SINGLE)
    sentence = r"^step 3: a file cannot be written \(No space left on device\); free space"
    with pytest.raises(ValueError, match=sentence), explain_failures(cast(Any, training), tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "error: this machine ran out of memory; use smaller batches"),
        (
            RuntimeError("can't start new thread"),
            "error: this user may start no more threads or processes; raise",
        ),
        (
            RuntimeError("DataLoader timed out after 1800 seconds"),
            "error: DataLoader timed out after 1800 seco",
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded", "x.npz"),
            "error: x.npz cannot be read or written (Disk quota",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long", "b/" * 2100), "error: the path b/b/"),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/proc/x"),
            "error: TORCHINDUCTOR_CACHE_DIR=/proc/x cannot",
        ),
    ],
)
def test_no_room_anywhere_is_one_sentence(error, sentence, capsys, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/x")
    with pytest.raises(SystemExit) as ending, report_user_errors():
        raise error
    message = capsys.readouterr().err
    assert ending.value.code == 1
    assert message.startswith(sentence)
    assert message.count("\n") == 1


@pytest.mark.fault(
    "counters and values of another type in a checkpoint's state.json", "one sentence"
)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"counters": {"model": 5}}, "does not fit this run: 'step'"),
        (
            {"counters": {"step": "x", "samples": 0, "skipped_steps": 0}},
            "the counter step is x, which is no count",
        ),
        ({"leaves": {"a": 1}}, "is no checkpoint that this version can read"),
    ],
)
def test_a_hostile_state(change, sentence, zygote, finished):
    file = finished / "checkpoints" / "step-12" / "state.json"
    edit_json(file, change)
    seal_checkpoint(file.parent)
    assert zygote(finished, "total_samples=104") == [1]
    assert re.search(f"^error: .*{sentence}", read_output(finished), re.M)
