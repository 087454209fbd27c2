"""The queue of `bench gpu`: nothing that was measured is lost, whatever happens to a row, a process
or the queue."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from math import inf
from pathlib import Path

import pytest
from scripts.bench.gpu import ITEMS, GpuConfig, Queue, chosen
from scripts.bench.rows import Results, expected, is_measured
from scripts.bench.settings import parse
from scripts.bench.tests import SMOKE

from common.files import ROOT
from scripts.bench import gpu
from scripts.bench.__main__ import BENCHMARKS, benchmark_of
from tests.helpers import until_dead

ROWS = 8
LIMIT = 6.0
"""Seconds of a row. Those that do not hang end at once."""
PLANTED = f"""
import os, signal, time
import torch
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig

FAULTS = dict(word.split("=") for word in os.environ.get("PLANTED_FAULTS", "").split(",") if word)

def measure(i):
    fault = FAULTS.get(str(i))
    if fault == "raise":
        raise TypeError("planted")
    if fault == "memory":
        raise torch.OutOfMemoryError("planted, of 80 GiB")
    if fault == "hang":
        time.sleep(1000)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return {{"value": i, "speed": 1.0}}

def plan(cfg, overrides, device):
    seconds = [400.0 if FAULTS.get(str(i)) == "long" else 0.1 for i in range({ROWS})]
    return [Row(f"row {{i}}", lambda i=i: measure(i), s) for i, s in enumerate(seconds)]

slow = os.path.join(os.path.dirname(__file__), "slow")
if os.path.exists(slow):
    os.remove(slow)
    time.sleep({LIMIT + 1.0})
BENCHMARKS = {{"step": Benchmark(BenchConfig, plan, lambda entries: [str(len(entries))], "planted")}}
__file__ = {str(ROOT / "scripts" / "bench" / "step.py")!r}
"""
"""A benchmark of quick rows in the place of `step`, with a fault in some of them; a file `slow`
makes a start slow."""
FINDER = """
import importlib.util, sys
class Planted:
    def find_spec(self, name, path=None, target=None):
        if name == "scripts.bench.step":
            return importlib.util.spec_from_file_location(name, {file!r})
sys.meta_path.insert(0, Planted())
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch):
    """`planted({row: fault})`: processes that start from here on measure the planted rows."""
    place = tmp_path / "planted"
    place.mkdir()
    (place / "planted_step.py").write_text(PLANTED)
    (place / "sitecustomize.py").write_text(FINDER.format(file=str(place / "planted_step.py")))
    monkeypatch.setenv("PYTHONPATH", str(place))

    def plant(faults: dict[int, str]) -> None:
        monkeypatch.setenv(
            "PLANTED_FAULTS", ",".join(f"{row}={fault}" for row, fault in faults.items())
        )

    plant({})
    return plant


def start(folder: Path, **keys) -> None:
    """Runs the queue on the one planted item."""
    cfg = GpuConfig(out=str(folder), setting="tiny", only=["step"], **keys)
    Queue(cfg).all(chosen(cfg))


def entries(folder: Path) -> dict[str, dict]:
    return {entry["name"]: entry for entry in Results(folder).of("step_tiny")}


def restarted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second start measures nothing."""
    Results(folder).compact()  # as each start does
    before = (folder / "rows.jsonl").read_bytes()
    start(folder, limit_s=LIMIT)
    assert (folder / "rows.jsonl").read_bytes() == before
    assert "nothing remains" in capsys.readouterr().out


def test_faults_at_random_rows_lose_no_finished_row(tmp_path, planted, capsys):
    draw = random.Random(0)
    at = dict(zip(draw.sample(range(ROWS), 4), ("raise", "memory", "hang", "kill"), strict=True))
    planted(at)
    start(tmp_path, limit_s=LIMIT)
    found = entries(tmp_path)
    assert list(found) == [f"row {i}" for i in range(ROWS)]
    said = {fault: found[f"row {row}"]["error"] for row, fault in at.items()}
    assert said["raise"] == "TypeError: planted"
    assert said["memory"] == "out of memory: planted, of 80 GiB"
    assert said["hang"].startswith("not done after ")
    assert said["kill"] == "the process was ended by SIGKILL"
    assert [found[f"row {i}"]["value"] for i in range(ROWS) if i not in at] == [
        i for i in range(ROWS) if i not in at
    ]
    restarted(tmp_path, capsys)


def test_a_start_that_takes_longer_than_a_row_may_costs_no_row_its_time(tmp_path, planted, capsys):
    """A row that hangs is tried twice, the second time as the first of its process, and then never
    again."""
    planted({2: "hang"})
    (tmp_path / "planted" / "slow").touch()
    start(tmp_path, limit_s=LIMIT)
    tried = [line for line in Results(tmp_path).lines() if line["entry"]["name"] == "row 2"]
    assert [(line["limit"], line["first"]) for line in tried] == [(LIMIT, False), (LIMIT, True)]
    assert [entry.get("value") for entry in entries(tmp_path).values()] == [
        0,
        1,
        None,
        *range(3, ROWS),
    ]
    restarted(tmp_path, capsys)


def test_a_killed_queue_takes_its_processes_along_and_is_continued(tmp_path, planted):
    planted({3: "hang"})
    words = [
        sys.executable,
        "-m",
        "scripts.bench",
        "gpu",
        "setting=tiny",
        "only=[step]",
        f"out={tmp_path}",
    ]
    queue = subprocess.Popen(words, cwd=ROOT)
    while len(entries(tmp_path)) < 3:
        assert queue.poll() is None
        time.sleep(0.02)
    (measuring,) = Path(f"/proc/{queue.pid}/task/{queue.pid}/children").read_text().split()
    with pytest.raises(ValueError, match="another queue measures into it"):
        gpu.main(words[4:])
    queue.send_signal(signal.SIGKILL)
    queue.wait()
    until_dead(int(measuring))
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert len(entries(tmp_path)) == 3
    planted({})
    # as a power cut would leave it
    (tmp_path / "rows.jsonl").write_bytes(before + b'{"benchmark": "step_ti')
    start(tmp_path)
    after = (tmp_path / "rows.jsonl").read_bytes()
    assert after.startswith(before)
    assert [e["value"] for e in entries(tmp_path).values()] == list(range(ROWS))
    assert len(after.splitlines()) == ROWS


def test_a_row_begins_only_if_it_fits_the_budget(tmp_path, planted, capsys):
    planted({1: "long", 4: "long"})
    start(tmp_path, budget_minutes=6.0)
    assert len(entries(tmp_path)) == ROWS - 2
    assert (
        "remains: step_tiny, 2 rows, about 13.3 min: row 1, row 4\nabout 13 minutes remain"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_the_budget_ends_a_row_that_takes_longer_than_expected(tmp_path, planted):
    planted({2: "hang"})
    start(tmp_path, budget_minutes=1.5)
    found = entries(tmp_path)
    assert list(found) == ["row 0", "row 1", "row 2"]
    assert "not done" in found["row 2"]["error"]
    planted({})
    start(tmp_path)
    assert [e["value"] for e in entries(tmp_path).values()] == list(range(ROWS))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"only": ["laddr"]},
            r"only=\[laddr\]: there is no such item; choose some of doctor, tests_smoke",
        ),
        ({"setting": "s32"}, "setting=s32: the queue has setting=tiny"),
        ({"setting": "tiny", "only": ["ladder_b256"]}, "no such item"),
    ],
)
def test_mistakes_are_told_before_anything_starts(keys, message):
    with pytest.raises(ValueError, match=message):
        chosen(GpuConfig(**keys))


def test_items_are_named_once_and_their_words_are_understood():
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    assert [item.name for item in ITEMS[:4]] == [
        "doctor",
        "tests_smoke",
        "tests_rest",
        "calibration",
    ]
    for item in (*ITEMS, *chosen(GpuConfig(setting="tiny", only=["mixers", "claims"]))):
        assert item.words[0] in BENCHMARKS
        cfg, _ = parse(
            benchmark_of(item.words[0]).config,
            item.words[0],
            [*item.words[1:], f"name={item.name}"],
            "",
        )
        assert cfg.name == item.name


@pytest.mark.parametrize("pattern", SMOKE)
def test_the_smoke_test_names_tests_that_there_are(pattern):
    sources = (file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    name = pattern.partition("\\[")[0]
    assert any(f"def {name}" in source for source in sources if "mark.gpu" in source)


def test_rows_are_measured_anew_when_what_is_measured_changes():
    run = {
        "code": "a",
        "hardware": "h",
        "versions": {"torch": "1"},
        "keys": {"steps": 2},
        "overrides": ["seed=0"],
    }
    line = {"run": run, "seconds": 3.0, "entry": {"name": "x", "speed": 1.0}}
    failed = line | {"entry": {"name": "x", "error": "e"}}
    assert is_measured(line, run, inf)
    assert not is_measured(None, run, inf)
    assert is_measured(failed, run, inf)
    assert not is_measured(failed, run, inf, failed_too=False)
    for limit, first, ended in ((9.0, True, True), (9.0, False, False), (8.9, True, False)):
        assert is_measured(failed | {"limit": limit, "first": first}, run, 9.0) is ended
    for key, other in {
        "code": "b",
        "hardware": "g",
        "versions": {},
        "keys": {"steps": 3},
        "overrides": [],
    }.items():
        assert not is_measured(line, run | {key: other}, inf)
    assert expected(5.0, None, inf) == 5.0
    assert expected(5.0, line, inf) == 3.0
    assert expected(50.0, line, inf) == 12.5  # what rows share, the first one pays
    assert expected(5.0, failed, inf) == 5.0  # how soon it failed says nothing
    assert expected(5.0, failed | {"limit": 8.0}, inf) == 10.0
    assert expected(5.0, failed | {"limit": 8.0}, 9.0) == 9.0  # for then it is ended


def test_a_damaged_line_is_told(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"{}\n{broken\n{}\n")
    with pytest.raises(ValueError, match="line 2: this is no JSON"):
        Results(tmp_path).lines()


def test_a_process_that_ends_after_keeping_its_row_has_not_lost_it(tmp_path):
    results = Results(tmp_path)
    run = {"hardware": "h"}
    results.note("x", run=run, seconds={"a": 1.0, "b": 1.0}, at="a", began=7.0, labels={"fit": "f"})
    results.add(
        {
            "benchmark": "x",
            "order": 0,
            "seconds": 1.0,
            "time": 7.0,
            "entry": {"name": "a"},
            "run": run,
        }
    )
    assert results.fail("x", "killed") is None
    assert results.of("x") == [{"name": "a"}]
    results.note("x", at="b", began=8.0)
    assert results.fail("x", "killed") == "b: killed"
    assert results.of("x")[1] == {"name": "b", "fit": "f", "error": "killed"}
    assert results.fail("x", "killed") is None


@pytest.mark.slow
@pytest.mark.timeout(0)  # the queue ends what hangs
def test_the_tiny_queue_measures_all_of_its_rows(tmp_path):
    Queue(GpuConfig(out=str(tmp_path), setting="tiny", budget_minutes=600.0)).all(
        chosen(GpuConfig(setting="tiny"))
    )
    lines = Results(tmp_path).lines()
    assert {line["benchmark"] for line in lines} == {
        item.name for item in chosen(GpuConfig(setting="tiny"))
    }
    assert not [line["entry"] for line in lines if "error" in line["entry"]]
    assert len(list(tmp_path.iterdir())) <= 6
    assert all(file.stat().st_size < 4 * 2**20 for file in tmp_path.iterdir())
