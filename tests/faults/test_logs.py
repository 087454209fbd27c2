"""Logs are only logs: no run depends on them, and every line can be read."""

import shutil
import time

import pytest

from common.output import Progress
from scripts.report.history import History
from tests.harness.outcomes import list_checkpoints, read_lines, read_outcome
from tests.harness.words import slow
from tests.harness.zygote import read_output
from training.records.metrics import MetricsFile, read_metrics

DAMAGES = {
    "a line without its end": lambda text: text[:-9],
    "bytes that are no UTF-8": lambda text: text.replace(b"loss", b"lo\xff\xfe", 1),
    "a line of another run between two": lambda text: text.replace(
        b'{"step": 6', b'{"step": 3, "lo{"step": 6', 1
    ),
    "values of another type": lambda text: (
        b'[1]\n{"step": "x"}\n{"loss": 1}\n' + text + b'{"step": 1, "loss": [0]}\n'
    ),
    "nesting without end": lambda text: b"[" * 100_000 + b"\n" + text,
    "nothing": lambda text: b"",
}
NORMAL = ("a line without its end", "nothing")
"""What a kill may leave; other damage is set aside."""


@pytest.mark.fault(
    "a damaged metrics.jsonl", "a warning; the checkpoint is resumed from, to the same bits"
)
@pytest.mark.parametrize("kind", [slow(kind) if i > 1 else kind for i, kind in enumerate(DAMAGES)])
def test_a_damaged_log_stops_no_run(kind, zygote, run_whole, run_dir):
    folder = shutil.copytree(run_whole("total_samples=64"), run_dir)
    log = folder / "metrics.jsonl"
    log.write_bytes(DAMAGES[kind](log.read_bytes()))
    History(folder)
    assert zygote(folder) == [0], read_output(folder)
    assert read_outcome(folder).state == read_outcome(run_whole()).state
    assert read_metrics(log)[1] == 0
    assert (folder / "metrics.jsonl.damaged").exists() == (kind not in NORMAL)


def test_a_log_that_is_a_folder_stops_no_run(run, run_dir):
    (run_dir / "metrics.jsonl").mkdir(parents=True)
    with pytest.warns(UserWarning, match="1 lines cannot be read"):
        assert run()["steps"] == 2


@pytest.mark.fault(
    "a loss that is not finite", "every line of metrics.jsonl is strict JSON, and counts it"
)
def test_every_line_is_strict_json(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    metrics.append({"step": 2, "loss": 1.5})
    assert read_lines(tmp_path) == [
        {"step": 1, "loss": None, "grad_norm": None, "mfu": None, "not_finite": 2},
        {"step": 2, "loss": 1.5},
    ]


@pytest.mark.fault(
    "the command of a finished run again",
    "it says so and touches nothing; more samples continue it",
)
def test_a_finished_run_is_left_alone(zygote, finished):
    before = read_files(finished)
    assert zygote(finished, "optim.lr=0.5") == [0]
    assert zygote(finished, "model.depth=3") == [1]
    assert zygote(finished, "resume=never") == [1]
    assert read_files(finished) == before
    output = read_output(finished)
    assert f"{finished} holds a finished run, of 96 samples; there is nothing to do" in output
    assert "optim.lr was" in output
    assert "holds a finished run of another model: depth was 2, is 3" in output
    assert zygote(finished, "total_samples=112") == [0]
    assert list_checkpoints(finished)[-1] == "step-14"


def read_files(folder):
    """Contents and times of all files."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def test_the_time_left_is_said_in_plain_lines(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    bar = Progress(1000, "samples")
    now[0] += 10
    bar.advance(1)
    assert "2:46:30 left" in capsys.readouterr().out
