"""The runner of the benchmarks loses no result, whatever happens to a case, a child or a queue."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import get_context, get_start_method
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.files import ROOT, read_object, write_json
from scripts.bench import TABLES, publish, queue, runner
from scripts.bench.cases import COMMANDS
from scripts.bench.queue import GpuConfig, plan_jobs, run_queue
from scripts.bench.runner import START_SECONDS, Runner, open_runner
from tests.harness import planted_cases as planted
from tests.harness.planted_cases import exhausts, hangs, is_killed, raises, value
from tests.harness.refusals import expect_refusal
from tests.harness.sets import wait_until_dead

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch):
    """Forks children, which then need not import anything again."""
    monkeypatch.setattr(runner, "SPAWN", get_context("fork"))


def run_all(job, folder, **more):
    """Measures the cases of a job that need it; returns the figures of each, None without any."""
    folder.mkdir(exist_ok=True)
    runs = Runner(folder, **more)
    runs.run([(job, case) for case in job.cases], None)
    runs.close()
    results = [runs.find_result(job, case) for case in job.cases]
    runs.close()
    return [result and result["entry"] for result in results]


def read_results(folder):
    """Content of each file of results, by name."""
    return {file.name: read_object(file) for file in folder.glob("step_tiny/*.json")}


@pytest.mark.slow
def test_faults_lose_no_result_and_are_not_tried_again(tmp_path, monkeypatch):
    """A case that hangs ends after a second, any other has its time however slow the machine."""
    children = []

    class PatientChild(runner.Child):
        def measure(self, case, cfg, limit):
            children.append(self.process.pid)
            return super().measure(case, cfg, 1.0 if case.measure is hangs else START_SECONDS)

    monkeypatch.setattr(runner, "Child", PatientChild)
    faulty = planted.plan_job(value, raises, value, exhausts, is_killed, hangs, value)
    entries = run_all(faulty, tmp_path)
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
    assert len({*children}) == 5
    for pid in children:
        wait_until_dead(pid)

    before = read_results(tmp_path)
    assert run_all(faulty, tmp_path) == entries
    assert read_results(tmp_path) == before
    provenance = "hardware versions words baseline keys code device git date seconds command"
    assert next(iter(before.values()))["environment"].keys() == {*provenance.split()}


@pytest.mark.slow
def test_the_workers_of_a_measured_loader_start_as_in_train(tmp_path, monkeypatch):
    """The child starts as it really does."""
    monkeypatch.setattr(runner, "SPAWN", get_context("spawn"))
    (entry,) = run_all(planted.plan_job(value), tmp_path)
    assert entry["workers"] == get_start_method()


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
    assert run_all(planted.plan_job(value, seconds=400.0), tmp_path, deadline=300.0) == [None]
    entries = run_all(planted.plan_job(value, hangs, value), tmp_path, deadline=2.0)
    assert [entry and entry["value"] for entry in entries] == ["case 0", None, None]
    assert len(read_results(tmp_path)) == 1
    assert now == [2.0]


def test_a_lost_gpu_stops_the_queue(tmp_path, monkeypatch):
    def lose(device):
        raise RuntimeError("CUDA error: the device is lost")

    monkeypatch.setattr(runner, "describe_environment", lose)
    message = r"no process can measure here: RuntimeError: CUDA error: the device is lost.*log\.txt"
    with expect_refusal(message):
        run_all(planted.plan_job(value), tmp_path)


def test_a_result_is_of_this_machine_and_keys_and_says_its_code(tmp_path, monkeypatch):
    job = planted.plan_job(value)
    other = job._replace(cfg=replace(job.cfg, steps=7))
    run_all(job, tmp_path)
    (result,) = read_results(tmp_path).values()
    runs = Runner(tmp_path, machine=result["environment"])
    assert runs.find_result(job, job.cases[0])
    assert not runs.find_result(other, job.cases[0])
    runs.machine = {**runs.machine, "hardware": "another"}
    assert not runs.find_result(job, job.cases[0])
    # Other code measures again, and replaces the result.
    monkeypatch.setattr(runner, "hash_code", lambda words: "other code")
    run_all(job, tmp_path)
    (result,) = read_results(tmp_path).values()
    assert result["environment"]["code"] == "other code"


def test_the_order_is_by_need(tmp_path, monkeypatch):
    """Never measured, failed with other code, of other code and the oldest first; what failed with
    this code waits for `again`."""
    job = planted.plan_job(*[value] * 6)
    monkeypatch.setattr(runner, "hash_code", lambda words: "new")
    runs = Runner(tmp_path, machine={"hardware": "a CPU", "versions": {}})
    for number, case in enumerate(job.cases[1:], 1):
        entry = {"error": "planted"} if number in (2, 4) else {}
        environment = {"code": "old" if number < 4 else "new", "date": f"2026-11-2{9 - number}"}
        file = runs.find_file(job, case)
        file.parent.mkdir(exist_ok=True)
        write_json(file, {"entry": entry, "environment": environment})
    tasks = [(job, case) for case in job.cases]
    for again, expected in ((None, "0231"), ("failed", "04231"), ("all", "042315")):
        assert [case.name[-1] for _, case in runs.order(tasks, again)] == list(expected), again
    with expect_refusal("again=true: choose all, failed, or leave it out"):
        runs.run(tasks, "true")


def test_a_folder_has_one_bench_at_a_time(tmp_path):
    refused = expect_refusal("another bench measures into it")
    with open_runner(str(tmp_path)), get_context("fork").Pool(1) as pool, refused:
        pool.apply(run_queue, [[f"out={tmp_path}", "only=[step]"]])


def test_items_are_understood_and_the_first_nine_minutes_tell_most():
    jobs = {job.cfg.name: job for job in plan_jobs(GpuConfig())}
    for job in jobs.values():
        assert len({case.name for case in job.cases}) == len(job.cases) > 0
        assert job.seconds > 0
    assert {item["words"].split()[0] for item in TABLES["queue"].values()} == set(COMMANDS)
    first = ["doctor", "tests_smoke", "kernels", "mixers_b256"]
    assert list(jobs)[:4] == first
    assert sum(jobs[name].seconds * len(jobs[name].cases) for name in first) <= 540.0


def test_the_smoke_test_names_tests_that_there_are():
    names = set(re.findall(r"test_\w+", TABLES["smoke"]))
    sources = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    marked = "".join(source for source in sources if "mark.gpu" in source)
    assert len(names) == 6
    assert all(f"def {name}(" in marked for name in names)


def test_the_queue_says_what_remains_and_sends_home_what_it_has(tmp_path, monkeypatch, capsys):
    job = planted.plan_job(value, value)
    monkeypatch.setattr(queue, "plan_job", lambda command, words: job)
    words = [f"out={tmp_path / 'out'}", "setting=tiny", "only=[step]"]
    run_queue([*words, "seconds=20"])
    assert "remains: step_tiny, case 0, about 30 s\n" in capsys.readouterr().out

    # A stranger's machine measured the first case, and published it.
    archive = tmp_path / "new" / "results.tar.gz"
    run_all(job._replace(cases=job.cases[:1]), tmp_path / "elsewhere", pack=archive)
    monkeypatch.setattr(queue, "DOCS", tmp_path)
    with publish.open_results(archive) as folder:
        (page,) = publish.collect_pages(folder, tmp_path)
    publish.write_figures(page, tmp_path)
    capsys.readouterr()
    run_queue([*words, "seconds=600"])
    printed = capsys.readouterr().out
    assert "step_tiny, case 1: measured" in printed
    assert "case 0: measured" not in printed
    assert "nothing remains" in printed
    assert len(read_results(tmp_path / "out")) == 1


@pytest.mark.parametrize("kept", [0, 30, 400])
def test_an_archive_is_whole_or_refused(kept, tmp_path):
    archive = tmp_path / "x.tar.gz"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.txt").write_text("".join(map(str, range(1000))))
    runner.pack_results(tmp_path / "out", archive)
    archive.write_bytes(archive.read_bytes()[:kept])
    with expect_refusal(r"x\.tar\.gz is no archive of results"):
        publish.publish([archive], tmp_path)


@pytest.mark.slow
def test_a_killed_queue_goes_on_in_another_clone_two_commits_later(tmp_path):
    """The killed runner takes its child along. The archive brings each result back whole, and
    neither commit touches code of these cases."""
    archive = tmp_path / "results.tar.gz"
    bench = [sys.executable, "-m", "scripts.bench"]
    gpu = [*bench, "gpu", "setting=tiny", "only=[kernels]", "seconds=3600"]
    running = subprocess.Popen([*gpu, f"out={tmp_path / 'out'}", f"pack={archive}"], cwd=ROOT)
    while len(list(tmp_path.glob("out/kernels_tiny/*.json"))) < 4:
        assert running.poll() is None
        time.sleep(0.05)
    pids = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.kill()
    running.wait()
    for pid in pids:
        wait_until_dead(int(pid))
    with publish.open_results(archive) as folder:
        kept = {read_object(f)["entry"]["name"] for f in folder.glob("*/*.json")}
    assert len(kept) >= 3

    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    for file, line in (("encoding/tars.py", "# A comment.\n"), ("README.md", "\n")):
        (clone / file).write_text((clone / file).read_text() + line)
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, "commit", "-qam", "x"], cwd=clone, check=True)
    done = subprocess.run([*bench, "publish", archive], cwd=clone, capture_output=True, text=True)
    assert "/kernels_tiny.json" in done.stdout
    for expected in (": measured", "nothing remains"):
        again = subprocess.run(gpu, cwd=clone, capture_output=True, text=True).stdout
        assert expected in again
        assert not [name for name in kept if f"kernels_tiny, {name}: measured" in again]
    assert ": measured" not in again


@pytest.mark.slow
# There are more workers than cores.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
# The queue itself ends what hangs.
@pytest.mark.timeout(0)
def test_the_tiny_queue_measures_all_of_its_cases(tmp_path, capsys):
    run_queue([f"out={tmp_path}", "setting=tiny", "seconds=36000"])
    assert "nothing remains" in capsys.readouterr().out
    results = [read_object(file) for file in tmp_path.glob("*/*.json")]
    names = {result["benchmark"] for result in results}
    assert names == {job.cfg.name for job in plan_jobs(GpuConfig(setting="tiny"))}
    assert not [result["entry"] for result in results if "error" in result["entry"]]
