"""The runner of the benchmarks loses no result, whatever happens to a case, a child or a queue."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import get_context, get_start_method
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.files import ROOT
from scripts.bench import TABLES, runner
from scripts.bench.cases import COMMANDS, plan_job
from scripts.bench.runner import (
    START_SECONDS,
    GpuConfig,
    Runner,
    choose_items,
    open_runner,
    run_queue,
)
from tests.harness import planted_cases as planted
from tests.harness.planted_cases import exhausts, hangs, is_killed, raises, value
from tests.harness.sets import wait_until_dead

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch):
    """Forks children, which then need not import anything again."""
    monkeypatch.setattr(runner, "SPAWN", get_context("fork"))


class PatientChild(runner.Child):
    """Ends a case that hangs after a second, and waits for any other however slow the machine."""

    def measure(self, case, cfg, limit):
        return super().measure(case, cfg, 1.0 if case.measure is hangs else START_SECONDS)


@pytest.fixture
def children(monkeypatch):
    """Process ids of all children from now on; the children are patient."""
    pids = []

    def start(*arguments):
        child = PatientChild(*arguments)
        pids.append(child.process.pid)
        return child

    monkeypatch.setattr(runner, "Child", start)
    return pids


def read_results(folder):
    """Content of each file of results, by name."""
    files = sorted(folder.glob("step_tiny/*.json"))
    return {file.name: json.loads(file.read_text()) for file in files}


def test_faults_lose_no_result_and_are_not_tried_again(tmp_path, children):
    faulty = planted.plan_job(value, raises, value, exhausts, is_killed, hangs, value)
    entries = Runner(tmp_path).run(faulty)
    assert [entry.get("value") or entry.get("error") for entry in entries] == [
        "case 0",
        "TypeError: planted",
        "case 2",
        "out of memory: planted, of 80 GiB",
        "the process was ended by SIGKILL",
        "not done after 1 s",
        "case 6",
    ]
    # After a fault the next case begins in a new process.
    assert len(children) == 5
    for pid in children:
        wait_until_dead(pid)

    before = read_results(tmp_path)
    assert Runner(tmp_path).run(faulty) == entries
    assert read_results(tmp_path) == before
    provenance = {"hardware", "versions", "device", "code", "git", "date", "command", "config"}
    assert next(iter(before.values()))["environment"].keys() == provenance


@pytest.mark.parametrize(("again", "measured"), [("failed", [False, True]), ("all", [True, True])])
def test_again_measures_what_failed_or_all(again, measured, tmp_path):
    faulty = planted.plan_job(value, raises)
    Runner(tmp_path).run(faulty)
    for file in tmp_path.glob("step_tiny/*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"order": "old"}))
    Runner(tmp_path).run(faulty, again)
    assert [result["order"] != "old" for result in read_results(tmp_path).values()] == measured


def test_again_has_two_values(tmp_path):
    with pytest.raises(ValueError, match="again=true: choose all, failed, or leave it out"):
        Runner(tmp_path).run(planted.plan_job(value), "true")


def test_the_limit_counts_from_the_sign_of_life(tmp_path, monkeypatch):
    """The case's limit holds neither for the start of a process nor for the message that it is
    about to measure."""
    limits = []
    receive = runner.Child.receive

    def note_limit(self, limit):
        limits.append(limit)
        return receive(self, limit)

    monkeypatch.setattr(runner.Child, "receive", note_limit)
    Runner(tmp_path, limit=123.0).run(planted.plan_job(value))
    assert limits == [START_SECONDS, START_SECONDS, 123.0]


def test_a_killed_runner_takes_its_child_along_and_is_continued(tmp_path, children):
    """The killed runner's children start as they really do."""
    running = subprocess.Popen(
        [sys.executable, "-m", "tests.harness.planted_cases", str(tmp_path)], cwd=ROOT
    )
    while len(read_results(tmp_path)) < 2:
        assert running.poll() is None
        time.sleep(0.02)
    pids = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.kill()
    running.wait()
    for pid in pids:
        wait_until_dead(int(pid))
    before = read_results(tmp_path)
    entries = Runner(tmp_path).run(planted.plan_job(value, value, hangs, value))
    assert [entry.get("value") for entry in entries] == ["case 0", "case 1", None, "case 3"]
    assert {result["entry"]["workers"] for result in before.values()} == {get_start_method()}
    assert read_results(tmp_path).items() > before.items()


def test_a_case_begins_only_if_it_fits_and_is_kept_only_if_it_had_its_time(tmp_path, monkeypatch):
    """On the test's clock a case takes a second, or all of its time if it hangs."""
    now = [0.0]

    class TimedChild(runner.Child):
        def measure(self, case, cfg, limit):
            hanging = case.measure is hangs
            figures = super().measure(case, cfg, limit if hanging else START_SECONDS)
            now[0] += limit if hanging else 1.0
            return figures

    clock = SimpleNamespace(time=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "Child", TimedChild)
    assert Runner(tmp_path, deadline=300.0).run(planted.plan_job(value, seconds=400.0)) == [None]
    entries = Runner(tmp_path, deadline=2.0).run(planted.plan_job(value, hangs, value))
    assert [entry and entry["value"] for entry in entries] == ["case 0", None, None]
    assert len(read_results(tmp_path)) == 1
    assert now == [2.0]


def test_a_lost_gpu_stops_the_queue(tmp_path, monkeypatch):
    def lose(device):
        raise RuntimeError("CUDA error: the device is lost")

    monkeypatch.setattr(runner, "describe_environment", lose)
    message = r"no process can measure here: the process ended with status 1.*log\.txt"
    with pytest.raises(ValueError, match=message):
        Runner(tmp_path).run(planted.plan_job(value))


def test_a_result_is_of_this_code_machine_and_keys(tmp_path, monkeypatch):
    job = planted.plan_job(value)
    runs = Runner(tmp_path)
    runs.run(job)
    assert runs.find_file(job, job.cases[0]).is_file()
    runs.machine = {**runs.machine, "hardware": "another"}
    assert not runs.find_file(job, job.cases[0]).is_file()
    Runner(tmp_path).run(job._replace(cfg=replace(job.cfg, steps=7)))
    monkeypatch.setattr(runner, "hash_code", lambda: "other code")
    Runner(tmp_path).run(job)
    assert len(read_results(tmp_path)) == 3


def test_a_folder_has_one_bench_at_a_time(tmp_path):
    words = [sys.executable, "-m", "scripts.bench", "gpu", "only=[step]", f"out={tmp_path}"]
    with open_runner(str(tmp_path)):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert "another bench measures into it" in done.stderr


def test_items_are_understood_and_the_first_nine_minutes_tell_most():
    items = choose_items(GpuConfig())
    jobs = {name: plan_job(words[0], words[1:]) for name, words in items.items()}
    for job in jobs.values():
        names = {case.name for case in job.cases}
        assert len(names) == len(job.cases) > 0
    assert {item["words"].split()[0] for item in TABLES["queue"].values()} == set(COMMANDS)
    first = ["doctor", "tests_smoke", "calibration", "ladder_s32", "kernels"]
    assert list(jobs)[:5] == first
    assert sum(case.expected for name in first for case in jobs[name].cases) <= 540.0


def test_the_smoke_test_names_tests_that_there_are():
    names = set(re.findall(r"test_\w+", TABLES["smoke"]))
    sources = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    marked = "".join(source for source in sources if "mark.gpu" in source)
    assert len(names) == 6
    assert all(f"def {name}(" in marked for name in names)


def test_the_queue_says_what_remains(tmp_path, monkeypatch, capsys):
    job = planted.plan_job(value, seconds=90.0)
    monkeypatch.setattr(runner, "plan_job", lambda command, words: job)
    words = [f"out={tmp_path}", "setting=tiny", "only=[step]"]
    run_queue([*words, "budget_minutes=1"])
    remains = "remains: step_tiny, case 0, about 90 s\nabout 2 minutes remain"
    assert remains in capsys.readouterr().out
    run_queue([*words, "budget_minutes=600"])
    assert "nothing remains" in capsys.readouterr().out


@pytest.mark.slow
# The queue itself ends what hangs.
@pytest.mark.timeout(0)
def test_the_tiny_queue_measures_all_of_its_cases(tmp_path, capsys):
    run_queue([f"out={tmp_path}", "setting=tiny", "budget_minutes=600"])
    assert "nothing remains" in capsys.readouterr().out
    results = [json.loads(file.read_text()) for file in tmp_path.glob("*/*.json")]
    names = {result["benchmark"] for result in results}
    assert names == set(choose_items(GpuConfig(setting="tiny")))
    assert not [result["entry"] for result in results if "error" in result["entry"]]
