"""However a run ends, it ends soon, and what can be saved is."""

from __future__ import annotations

import errno
import json
import os
import pty
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, cast

import pytest
import torch
import torch.distributed as dist

from common.files import hash_file
from tests.harness.zygote import HANG, Start, read_output
from training.checkpoint.load import list_complete
from training.config.compose import report_user_errors
from training.distributed.exit import StopRequest
from training.distributed.ranks import JointWork, Ranks
from training.failures import explain_failures

PATIENCE = 3.0
Work = Callable[[JointWork, int], Callable[[], object]]


def told_by_two(folder: Path, work: Work) -> Iterator[str]:
    """What `Together.run_everywhere` of `work` came to in each of two processes; "" for one that did not
    end by itself."""

    def child(rank: int) -> None:
        ranks = Ranks(rank, 2, rank)
        store = dist.FileStore(str(folder / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        together = JointWork(ranks, timedelta(seconds=PATIENCE))
        try:
            told = repr(together.run_everywhere(work(together, rank)))
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        (folder / f"told-{rank}").write_text(told)
        os._exit(0)

    pids = []
    for rank in range(2):
        with warnings.catch_warnings():
            # of forking beside threads; they hold nothing of ours
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            try:
                child(rank)
            finally:
                os._exit(1)
        pids.append(pid)
    deadline = time.monotonic() + HANG
    running = set(pids)
    while running and time.monotonic() < deadline:
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        if running == {pids[1]} and (folder / "told-0").exists():
            break  # the second one is stopped
        time.sleep(0.05)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for rank in range(2):
        file = folder / f"told-{rank}"
        yield file.read_text() if file.exists() else ""


def slow(together: JointWork, rank: int) -> Callable[[], object]:
    def work() -> int:
        for _ in range(int(3 * PATIENCE / 0.5) if rank else 1):
            time.sleep(0.5)
            together.advance(1)
        return rank

    return work


def stopped(together: JointWork, rank: int) -> Callable[[], object]:
    return (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if rank else (lambda: 0)


def stuck(together: JointWork, rank: int) -> Callable[[], object]:
    return (lambda: time.sleep(HANG)) if rank else (lambda: 0)


def full(together: JointWork, rank: int) -> Callable[[], object]:
    def work() -> int:
        if rank:
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        return 0

    return work


def broken(together: JointWork, rank: int) -> Callable[[], object]:
    def work() -> int:
        if rank:
            raise KeyError("x")
        return 0

    return work


@pytest.mark.fault(
    "a process that stops inside a save", "the others end within runtime.parallel.timeout_minutes"
)
@pytest.mark.fault(
    "a disk of one process that hangs or fails in a save", "all processes give up together"
)
@pytest.mark.fault(
    "a save that takes longer than timeout_minutes and goes on writing", "it is waited for"
)
@pytest.mark.parametrize(
    ("work", "first", "second"),
    [
        (slow, "[0, 1]", "[0, 1]"),
        (stopped, "TimeoutError: another process has ended, or has not answered for 3 s", ""),
        (stuck, *["TimeoutError: process 1 has written nothing for 3 s"] * 2),
        (full, *["OSError: No space left on device: file"] * 2),
        (broken, *["KeyError: 'x'"] * 2),
    ],
    ids=["slow", "stopped", "stuck", "full", "broken"],
)
def test_processes_wait_for_progress_only(work: Work, first: str, second: str, tmp_path: Path):
    assert list(told_by_two(tmp_path, work)) == [first, second]


@pytest.mark.fault(
    "a disk that hangs in a save of one process", "given up after runtime.parallel.timeout_minutes"
)
def test_one_process_waits_for_progress_only():
    together = JointWork(Ranks(), timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match=r"process 0 has written nothing for 0 s"):
        together.run_everywhere(stuck(together, 1))


@pytest.mark.fault(
    "SIGHUP: the terminal is closed", "saved; exit code 75; what is printed afterwards hurts nobody"
)
def test_a_terminal_that_is_gone(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        with report_user_errors(), StopRequest(Ranks()) as stop:
            os.close(ours)
            os.kill(os.getpid(), signal.SIGHUP)
            print("nobody hears it", flush=True)
            assert stop.poll()


def gone_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk() -> TextIO:
    return open("/dev/full", "w")  # the test closes it


READER = pytest.mark.fault(
    "`train.py … | head`: the reader of stdout goes away", "one warning; the run goes on"
)
DISK = pytest.mark.fault(
    "a full disk behind stdout, or stdout closed", "at most one warning; the run goes on"
)


@pytest.mark.parametrize(
    ("open_stdout", "why"),
    [
        pytest.param(gone_reader, "Broken pipe", marks=READER, id="gone"),
        pytest.param(full_disk, "No space left on device", marks=DISK, id="full"),
        pytest.param(lambda: None, None, marks=DISK, id="closed"),
    ],
)
def test_what_nobody_can_read_ends_no_run(
    open_stdout: Callable[[], TextIO | None],
    why: str | None,
    run: Callable[..., dict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    stdout = open_stdout()
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    with report_user_errors():
        run("save_every=2", "log_every=1", "total_samples=64")
    if stdout is not None:
        stdout.close()
    assert (tmp_path / "run" / "summary.json").exists()
    assert [folder.name for folder in list_complete(tmp_path / "run" / "checkpoints")] == [
        "step-6",
        "step-8",
    ]
    warned = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("warning: what is printed")
    ]
    assert len(warned) == (why is not None)
    assert all(f"({why}); the command continues" in line for line in warned)


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(Ranks()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.poll()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_background_job_of_a_script_hears_an_interrupt():
    """Shells start those with SIGINT and SIGQUIT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest(Ranks()) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.poll()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.fault(
    "metrics.jsonl at a quota on the size of files (EFBIG)",
    "a warning; the run and its saves go on",
)
def test_a_quota(run: Callable[..., dict], tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "run").mkdir()
    lines = [
        json.dumps({"step": 0, **{f"value-{i}": 1.5 for i in range(20_000)}}) for _ in range(6)
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    limit = (tmp_path / "run" / "metrics.jsonl").stat().st_size + 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.warns(
            UserWarning,
            match=r"metrics.jsonl cannot be written \(File too large\); the run goes on",
        ):
            assert (
                run("runtime=eager", "log_every=1", "save_every=5", "total_samples=80")["steps"]
                == 10
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [folder.name for folder in list_complete(tmp_path / "run" / "checkpoints")] == [
        "step-5",
        "step-10",
    ]


@pytest.mark.fault("a full disk that names no file", "no file or folder is blamed for it")
def test_the_run_folder_is_not_blamed_for_an_error_without_a_name(tmp_path: Path):
    training = SimpleNamespace(state=SimpleNamespace(step=3, samples=24))
    sentence = r"^step 3: a file cannot be written \(No space left on device\); free space"
    with pytest.raises(ValueError, match=sentence), explain_failures(cast(Any, training), tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "error: this machine ran out of memory; use smaller batches"),
        (torch.OutOfMemoryError("CUDA out of memory"), "error: this machine ran out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "error: the memory of this machine",
        ),
        (
            RuntimeError("can't start new thread"),
            "error: this user may start no more threads or processes; raise",
        ),
        (
            RuntimeError("DataLoader timed out after 1800 seconds"),
            "error: DataLoader timed out after 1800 seco",
        ),
        (
            RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. "),
            "error: DataLoader worker (pid 3)",
        ),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            "error: this user may start no more",
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
def test_no_room_anywhere_is_one_sentence(
    error: Exception, sentence: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/x")
    with pytest.raises(SystemExit) as ending, report_user_errors():
        raise error
    told = capsys.readouterr().err
    assert ending.value.code == 1
    assert told.startswith(sentence)
    assert told.count("\n") == 1


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
        ({"leaves": {"a": 1}}, "is no checkpoint of this version of ours"),
        *(
            pytest.param(change, sentence, marks=pytest.mark.slow)
            for change, sentence in (
                ({"counters": []}, "does not fit this run: "),
                ({"world_size": 10**9}, "is no checkpoint of this version of ours"),
                ({"settings": 5}, "is no checkpoint of this version of ours"),
                ({"model": None}, "is no checkpoint of this version of ours"),
                ({"window": {"steps": None}}, "does not fit this run: "),
            )
        ),
    ],
)
def test_a_hostile_state(
    change: dict, sentence: str, zygote: Start, run_whole: Callable[..., Path], tmp_path: Path
):
    folder = tmp_path / "run"
    shutil.copytree(run_whole(), folder)
    last = list_complete(folder / "checkpoints")[-1]
    state, manifest = (
        json.loads((last / f"{name}.json").read_text()) for name in ("state", "manifest")
    )
    (last / "state.json").write_text(json.dumps(state | change))
    file = last / "state.json"
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": hash_file(file)}
    (last / "manifest.json").write_text(json.dumps(manifest))
    assert zygote(folder, "total_samples=104") == [1]
    (line,) = [line for line in read_output(folder).splitlines() if line.startswith("error: ")]
    assert sentence in line
