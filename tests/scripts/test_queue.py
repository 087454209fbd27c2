"""The runner of the benchmarks: nothing is lost, whatever happens to a case, a child or a queue."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from multiprocessing import get_context, get_start_method
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.files import ROOT
from scripts.bench import TABLES, runner
from scripts.bench.cases import COMMANDS, Job, plan_job
from scripts.bench.runner import (
    START_SECONDS,
    GpuConfig,
    Runner,
    choose_items,
    hash_code,
    open_runner,
    run_queue,
)
from tests.harness import planted_cases as planted
from tests.harness.planted_cases import exhausts, hangs, is_killed, raises, value
from tests.harness.sets import until_dead

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch):
    """Children need not import again what is imported here."""
    monkeypatch.setattr(runner, "SPAWN", get_context("fork"))


class Patient(runner.Child):
    """Ends what hangs after a second, and lets all else take its time: no machine is too slow."""

    started: list[int | None]

    def __init__(self, *given):
        super().__init__(*given)
        self.started.append(self.process.pid)

    def measure(self, case, cfg, limit):
        return super().measure(case, cfg, 1.0 if case.measure is hangs else START_SECONDS)


@pytest.fixture
def started(monkeypatch):
    """The processes of all children from now on, which are patient."""
    monkeypatch.setattr(Patient, "started", [], raising=False)
    monkeypatch.setattr(runner, "Child", Patient)
    return Patient.started


def results(folder: Path) -> dict[str, dict]:
    """File -> what it holds."""
    return {
        file.name: json.loads(file.read_text()) for file in sorted(folder.glob("step_tiny/*.json"))
    }


def test_faults_lose_no_result_and_are_not_tried_again(tmp_path, started):
    faulty = planted.job(value, raises, value, exhausts, is_killed, hangs, value)
    found = Runner(tmp_path).run(faulty)
    assert [entry.get("value") for entry in found] == [0, None, 2, None, None, None, 6]
    assert [entry["error"] for entry in found if "error" in entry] == [
        "TypeError: planted",
        "out of memory: planted, of 80 GiB",
        "the process was ended by SIGKILL",
        "not done after 1 s",
    ]
    assert len(started) == 5  # after a fault the next one begins in a new process
    for pid in started:
        until_dead(pid)

    before = results(tmp_path)
    assert Runner(tmp_path).run(faulty) == found
    assert results(tmp_path) == before
    kept = next(iter(before.values()))
    told = {"hardware", "versions", "device", "code", "git", "date", "command", "config"}
    assert kept["environment"].keys() == told
    assert (kept["benchmark"], kept["order"], kept["entry"]["n"]) == ("step_tiny", 0, 1)


def test_again_measures_what_failed_or_all(tmp_path):
    faulty = planted.job(value, raises)
    Runner(tmp_path).run(faulty)
    before = results(tmp_path)
    for again, anew in (("failed", [False, True]), ("all", [True, True])):
        for file in tmp_path.glob("step_tiny/*.json"):
            file.write_text(json.dumps(before[file.name] | {"order": "old"}))
        Runner(tmp_path).run(faulty, again)
        assert [found["order"] != "old" for found in results(tmp_path).values()] == anew
    with pytest.raises(ValueError, match="again=true: choose all, failed, or leave it out"):
        Runner(tmp_path).run(faulty, "true")


def test_the_limit_counts_from_the_sign_of_life(tmp_path, monkeypatch):
    """A process that starts, and one that is about to measure, have a limit that is not the
    case's."""
    limits = []
    receive = runner.Child.receive

    def noting(self, limit):
        limits.append(limit)
        return receive(self, limit)

    monkeypatch.setattr(runner.Child, "receive", noting)
    assert Runner(tmp_path, limit=123.0).run(planted.job(value))[0]["value"] == 0
    assert limits == [START_SECONDS, START_SECONDS, 123.0]


def test_a_killed_runner_takes_its_child_along_and_is_continued(tmp_path, started):
    """With children as they really start."""
    running = subprocess.Popen(
        [sys.executable, "-m", "tests.harness.planted_cases", str(tmp_path)], cwd=ROOT
    )
    while len(results(tmp_path)) < 2:
        assert running.poll() is None
        time.sleep(0.02)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.kill()
    running.wait()
    for child in children:
        until_dead(int(child))
    before = results(tmp_path)
    assert len(before) == 2
    found = Runner(tmp_path).run(planted.job(value, value, hangs, value))
    assert [entry.get("value") for entry in found] == [0, 1, None, 3]
    assert {entry["entry"]["workers"] for entry in before.values()} == {get_start_method()}
    assert results(tmp_path).items() > before.items()


def test_a_case_begins_only_if_it_fits_and_is_kept_only_if_it_had_its_time(tmp_path, monkeypatch):
    """By a clock on which a case takes a second, or all of its time if it hangs."""
    now = [0.0]

    class Timed(runner.Child):
        def measure(self, case, cfg, limit):
            found = super().measure(case, cfg, limit if case.measure is hangs else START_SECONDS)
            now[0] += limit if case.measure is hangs else 1.0
            return found

    clock = SimpleNamespace(time=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "Child", Timed)
    long = planted.job(value, seconds=400.0)
    assert Runner(tmp_path, deadline=300.0).run(long) == [None]
    found = Runner(tmp_path, deadline=2.0).run(planted.job(value, hangs, value))
    assert [entry and entry["value"] for entry in found] == [0, None, None]
    assert len(results(tmp_path)) == 1
    assert now == [2.0]


def test_a_lost_gpu_stops_the_queue(tmp_path, monkeypatch):
    def lost(device: torch.device):
        raise RuntimeError("CUDA error: the device is lost")

    monkeypatch.setattr(runner, "describe_environment", lost)
    with pytest.raises(
        ValueError, match=r"no process can measure here: the process ended with status 1.*log\.txt"
    ):
        Runner(tmp_path).run(planted.job(value))


def test_a_result_is_of_this_code_machine_and_keys(tmp_path, monkeypatch):
    runs = Runner(tmp_path)
    runs.run(planted.job(value))
    assert len(results(tmp_path)) == 1
    runs.machine = {**runs.machine, "hardware": "another"}
    assert not runs.find_file(planted.job(value), planted.job(value).cases[0]).is_file()
    other = planted.job(value)
    other = other._replace(cfg=other.cfg.__class__(setting="tiny", name="step_tiny", steps=7))
    monkeypatch.setattr(runner, "hash_code", lambda: "other code")
    for changed in (planted.job(value), other):
        Runner(tmp_path).run(changed)
    assert len(results(tmp_path)) == 3
    assert len(hash_code()) == 16


def test_a_folder_has_one_bench_at_a_time(tmp_path):
    words = [sys.executable, "-m", "scripts.bench", "gpu", "only=[step]", f"out={tmp_path}"]
    with open_runner(str(tmp_path)):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert "another bench measures into it" in done.stderr


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"only": ["laddr"]},
            r"only=\[laddr\]: there is no such item; choose some of doctor, tests_smoke",
        ),
        ({"setting": "s32"}, "setting=s32: the queue has setting=tiny"),
    ],
)
def test_mistakes_are_told_before_anything_starts(keys, message):
    with pytest.raises(ValueError, match=message):
        choose_items(GpuConfig(**keys))


def test_items_are_understood_and_the_first_nine_minutes_tell_most():
    published: dict[str, Job] = {}
    for items in (choose_items(GpuConfig()), choose_items(GpuConfig(setting="tiny"))):
        planned = {
            name: plan_job(words[0], [*words[1:], f"name={name}"]) for name, words in items.items()
        }
        published = published or planned
        assert all(one.cfg.name == name and one.cases for name, one in planned.items())
        assert all(
            len({case.name for case in one.cases}) == len(one.cases) for one in planned.values()
        )
    assert {
        words.split()[0] for words in (item["words"] for item in TABLES["queue"].values())
    } == set(COMMANDS)
    assert list(choose_items(GpuConfig(only=["ladder", "step"]))) == [
        "ladder_s32",
        "ladder_s256",
        "step",
        "ladder_s32x512",
        "ladder_b256",
    ]
    first = ["doctor", "tests_smoke", "calibration", "ladder_s32", "kernels"]
    assert list(published)[:5] == first
    needed = {name: sum(case.expected for case in published[name].cases) for name in first}
    assert sum(needed.values()) <= 540.0


def test_the_smoke_test_names_tests_that_there_are():
    names = {word for word in TABLES["smoke"].replace("(", " ").split() if word.startswith("test_")}
    sources = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    marked = [source for source in sources if "mark.gpu" in source]
    assert len(names) == 6
    assert all(any(f"def {name}(" in source for source in marked) for name in names)


def test_the_queue_says_what_remains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "job", lambda command, words: planted.job(value, seconds=90.0))
    words = [f"out={tmp_path}", "setting=tiny", "only=[step]"]
    run_queue([*words, "budget_minutes=1"])
    assert (
        "remains: step_tiny, case 0, about 90 s\nabout 2 minutes remain" in capsys.readouterr().out
    )
    run_queue([*words, "budget_minutes=600"])
    assert "nothing remains" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(0)  # the queue ends what hangs
def test_the_tiny_queue_measures_all_of_its_cases(tmp_path, capsys):
    run_queue([f"out={tmp_path}", "setting=tiny", "budget_minutes=600"])
    assert "nothing remains" in capsys.readouterr().out
    found = [json.loads(file.read_text()) for file in tmp_path.glob("*/*.json")]
    assert {one["benchmark"] for one in found} == set(choose_items(GpuConfig(setting="tiny")))
    assert not [one["entry"] for one in found if "error" in one["entry"]]
