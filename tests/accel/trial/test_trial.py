"""Kernels prove themselves in a separate process before a run launches them; here, operators with
faults."""

import pytest
import torch

from accel.trial import kernels
from accel.trial.kernels import Contest
from accel.trial.parity import ComparingMode
from accel.trial.uses import record_uses
from common import workers
from common.files import read_object
from tests.harness.outcomes import FOUR_STEPS, read_columns
from tests.harness.planted_models import PlantedModel
from tests.harness.proofs import GOOD, make_stack, make_use, plant_findings, prove_scan
from tests.harness.words import slow

pytestmark = pytest.mark.usefixtures("kernels_on_a_cpu")


def test_a_good_kernel_is_chosen_and_remembered(monkeypatch, capfd):
    on, why, _ = prove_scan()
    assert on
    assert "about 27 s: fused_scan; fused_scan, timed …" in capfd.readouterr().err
    # The next run reads the cache.
    monkeypatch.setattr(kernels, "ask_child", None)
    assert prove_scan()[:2] == (on, why)


@pytest.mark.parametrize(
    ("fault", "on", "word"),
    [
        ("wrong", False, "planted[0] has an error of 1e-02, its definition one of"),
        ("crash", False, "the process that tried it ended with signal SIGSEGV"),
        ("hang", False, "the process that tried it did not answer for 2 s in its parity test"),
        slow("slow", False, "ms a block against"),
        ("memory", True, "memory ran out without it"),
    ],
)
def test_what_happens_in_the_trial_decides(fault, on, word, monkeypatch):
    monkeypatch.setenv("PLANT", fault)
    if fault == "hang":
        read = workers.read_found

        def read_impatiently(file):
            state = read(file)
            return state | ({"patience": 2.0} if state.get("doing") == "its parity test" else {})

        monkeypatch.setattr(workers, "read_found", read_impatiently)
    chosen, why, _ = prove_scan()
    assert chosen is on
    assert word in why
    # A crash or a hang may have come from outside, so the next run tries again.
    plant_findings(monkeypatch, GOOD)
    assert prove_scan()[0] is (fault in ("crash", "hang") or on)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("unwritten", "planted[0] is not finite, or has elements that no program wrote"),
        ("changing", "planted[0] differs between two equal calls"),
    ],
)
def test_a_kernel_must_write_all_and_the_same_each_time(fault, sentence, monkeypatch):
    monkeypatch.setenv("PLANT", fault)
    with ComparingMode() as mode:
        torch.ops.fastlatent.planted(torch.randn(5, 16))
    assert [compared.describe_refusal() for compared in mode.comparisons] == [sentence]


def test_a_crash_costs_only_the_key_that_it_came_from(monkeypatch):
    """Keys before it keep their results, and another process tries the keys after it; a process
    that fails in its start costs all that remain."""
    states = iter([{"doing": "its parity test", "trying": "b", "found": {"a": GOOD}}, {}])
    jobs = []

    def end(program, job):
        jobs.append(job["found"])
        return next(states), "ended with signal SIGABRT"

    monkeypatch.setattr(kernels, "ask_child", end)
    found = Contest(make_stack(), {}, [make_use(16)], 8).run_trials(list("abc"), ["b", "c"], {})
    assert "SIGABRT in its parity test" in jobs[1]["b"]["refusal"]
    assert found["a"] == GOOD
    assert found["c"]["refusal"].endswith("SIGABRT in its start")


def test_a_kernel_that_refuses_shapes_is_off_when_the_next_is_tried(monkeypatch):
    monkeypatch.setenv("PLANT", "unfit")
    model = PlantedModel()
    contest = Contest(make_stack(), {}, record_uses(model, model), 8)
    found = contest.run_trials(["fused_scan", "fused_conv"], [], {})
    refusals = [found[key]["refusal"] for key in ("fused_scan", "fused_conv")]
    assert refusals == ["planted", "no operator of ours ran in a block"]


def test_a_model_that_cannot_be_sent_is_a_reason():
    model = PlantedModel()
    for block in model.blocks:
        block.hidden = lambda: None
    on, why, _ = prove_scan(model=model)
    assert not on
    assert "cannot be sent to another process" in why


@pytest.mark.slow
def test_two_processes_of_which_one_has_no_kernels_train_alike(zygote, tmp_path, run_dir):
    words = [*FOUR_STEPS, "runtime.fused_conv=auto", "runtime.fused_scan=false"]
    environment = {"KERNELS_ON_RANK": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert zygote(run_dir, *words, ranks=2, environment=environment) == [0, 0]
    row = read_object(run_dir / "ledger.json")["fused_conv"]
    assert row["active"] is False
    assert "ended with code 1" in row["evidence"]
    assert "in its parity test" in row["evidence"]
    assert len(read_columns(run_dir, "loss")) == 4
    # The next run tries again.
    assert not list((tmp_path / "cache").rglob("kernels/*"))
