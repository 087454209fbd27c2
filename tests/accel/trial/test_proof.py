"""A run decides about kernels from the findings of trials, and remembers its choice."""

from __future__ import annotations

import json
import shutil
from unittest.mock import patch

import pytest
from torch import nn

from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.fused_kernels import FusedKernel
from accel.trial import proof
from accel.trial.choice import choose_kernels
from accel.trial.proof import judge, merge_findings
from common.config.compose import compose
from common.files import ROOT
from scripts import doctor
from tests.harness.planted_models import PlantedModel
from tests.harness.proofs import GOOD, REFUSED, make_stack, plant_findings, prove_scan
from tests.harness.refusals import expect_refusal
from tests.harness.steps import EAGER
from tests.harness.words import CPU, TINY_MODEL, TINY_RUN
from train import train
from training.assemble import Training

pytestmark = pytest.mark.usefixtures("kernels_on_a_cpu")
SCAN = ["fused_scan"]


@pytest.fixture
def trials(monkeypatch):
    """The keys, and the timed keys, of each trial; every kernel is right and fast."""
    calls = []

    def find_all_good(question, uses, keys, timed, known):
        calls.append((keys, timed))
        parity = {name: GOOD[name] for name in ("refusal", "error", "definition_error")}
        return {key: dict(GOOD if key in timed else parity) for key in keys}

    monkeypatch.setattr(proof, "run_trials", find_all_good)
    return calls


# Questions and decisions.


@pytest.mark.parametrize(("value", "deterministic"), [(True, False), ("auto", True)])
def test_true_and_deterministic_skip_the_time_and_never_the_parity(value, deterministic, trials):
    on, why, _ = prove_scan(value, deterministic=deterministic)
    assert on
    assert why == "error 3e-03 (definition 4e-03)"
    assert trials == [(SCAN, [])]


def test_a_model_without_the_operator_asks_nothing(trials):
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(1, 1)])
    assert choose_kernels(make_stack(), model, lambda: None, 8) == {}
    assert trials == []


def test_findings_are_those_of_every_file_of_kernels(monkeypatch, tmp_path):
    shutil.copytree(ROOT / "accel", tmp_path / "accel")
    monkeypatch.setattr(proof, "ROOT", tmp_path)
    question = proof.Question({}, {}, 8, CPU)
    facts = [proof.collect_facts(question, [])["kernels"]]
    for file in (tmp_path / "accel" / "kernels").rglob("*.py"):
        file.write_bytes(file.read_bytes() + b"#")
        facts.append(proof.collect_facts(question, [])["kernels"])
    assert len(set(facts)) == len(facts) > 30


def test_nothing_is_launched_that_was_not_proved():
    model = PlantedModel()
    make_stack(True).on_model(model)
    assert not any(block.fused_scan for block in model.blocks)


def test_on_unavailable_error_accepts_a_measured_off_and_no_failed_parity(monkeypatch):
    plant_findings(monkeypatch, GOOD | {"times": {"on": 2.0, "off": 1.0}})
    assert not prove_scan(on_unavailable="error")[0]
    plant_findings(monkeypatch, REFUSED)
    with expect_refusal(r"fused_scan=true \(ssd\[0\] is not finite"):
        prove_scan(True, runtime={"residual_in_fp32": False}, on_unavailable="error")


def test_auto_where_there_is_no_gpu_is_off_and_no_error(monkeypatch):
    monkeypatch.setattr(FusedKernel, "find_obstacle", lambda self: "There is no GPU.")
    assert not make_stack(on_unavailable="error").values["fused_scan"]
    with expect_refusal("fused_scan=True"):
        make_stack(True, on_unavailable="error")


@pytest.mark.parametrize(
    ("on", "off", "chosen", "word"),
    [
        (0.41, 2.9, True, "0.41 ms a block against 2.9 ms, keeps 1.9 of 15 MB a sample"),
        # Ties go to the kernel.
        (1.03, 1.0, True, "1.03 ms"),
        (1.04, 1.0, False, "1.04 ms"),
        (0.41, None, True, "memory ran out without it"),
        (None, None, True, "memory ran out with it and without it"),
    ],
)
def test_a_kernel_is_chosen_unless_it_is_slower_by_three_per_cent(on, off, chosen, word):
    verdict = judge(GOOD | {"times": {"on": on, "off": off}}, timed=True)
    assert verdict.on is chosen
    assert word in verdict.why


def test_a_captured_run_goes_by_the_times_without_launches(trials, monkeypatch):
    """One trial serves both kinds of run: launches cost time only in a run that is not captured."""
    assert prove_scan()[0]
    monkeypatch.setattr(CudaGraph, "find_obstacle", lambda self: None)
    on, why, _ = prove_scan(runtime={"cuda_graph": True})
    assert not on
    assert "0.4 ms a block against 0.3 ms" in why
    assert len(trials) == 1


def test_parity_alone_is_shared_by_runs_that_differ_in_time_only(trials):
    prove_scan(True)
    prove_scan(True, runtime={"gradient_checkpointing": True, "cuda_graph": True}, samples=16)
    assert len(trials) == 1
    prove_scan(True, runtime={"residual_in_fp32": False})
    assert len(trials) == 2
    prove_scan("auto")
    prove_scan("auto", runtime={"gradient_checkpointing": True})
    assert len(trials) == 4


def test_a_trial_does_not_repeat_what_is_known(monkeypatch):
    """A later rung of the ladder asks for one kernel more."""
    known = []
    monkeypatch.setattr(
        proof, "run_trials", lambda *args: known.append(args[-1]) or {"fused_scan": GOOD}
    )
    monkeypatch.setattr(proof, "find_unanswered", lambda *_: True)
    for _ in range(2):
        prove_scan(True)
    assert known == [{}, {"fused_scan": GOOD}]


def test_ranks_that_disagree_come_to_one_answer():
    """Parity by AND, times by MAX."""
    slow = GOOD | {"times": {"on": 3.0, "off": 2.0}, "error": 5e-3}
    both = merge_findings([{"a": GOOD}, {"a": slow}])["a"]
    assert both["times"] == {"on": 3.0, "off": 2.9}
    assert both["error"] == 5e-3
    assert not judge(merge_findings([{"a": GOOD}, {"a": REFUSED}])["a"], timed=True).on


def test_a_cache_counts_only_if_all_ranks_have_the_same_facts(monkeypatch, trials):
    prove_scan()
    monkeypatch.setattr(proof, "gather_objects", lambda item: [item, item])
    prove_scan()
    assert len(trials) == 1

    def gather_other_gpu(item):
        if not isinstance(item, tuple):
            return [item, item]
        facts, *rest = item
        return [item, (facts | {"gpu": "another"}, *rest)]

    monkeypatch.setattr(proof, "gather_objects", gather_other_gpu)
    prove_scan()
    assert len(trials) == 2


# What the cache and the run folder remember.


def write_choice(folder, choice):
    folder.mkdir(exist_ok=True)
    (folder / proof.KERNELS_FILE).write_text(json.dumps(choice))
    return folder


def test_on_another_machine_a_resumed_run_proves_its_choice_again(tmp_path, trials, monkeypatch):
    _, _, choice = prove_scan()
    choice["facts"]["driver"] = "another"
    folder = write_choice(tmp_path / "run", choice)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert prove_scan(folder=folder)[0]
    # The second trial is of parity alone.
    assert trials == [(SCAN, SCAN), (SCAN, [])]
    plant_findings(monkeypatch, REFUSED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a third"))
    assert not prove_scan(folder=folder)[0]


def test_a_resumed_run_tries_a_kernel_that_it_asks_for_anew(tmp_path, trials, monkeypatch):
    _, _, choice = prove_scan(True)
    folder = write_choice(tmp_path / "run", choice | {"found": {"fused_conv": GOOD}})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert prove_scan(True, folder=folder)[0]
    assert len(trials) == 2


@pytest.mark.parametrize("how", ["batch", "precision", "damaged"])
def test_a_stale_cache_is_not_believed(how, trials, monkeypatch, tmp_path):
    prove_scan()
    if how == "precision":
        monkeypatch.setitem(EAGER, "precision", "bf16")
        monkeypatch.setattr("accel.techniques.precision.Precision.find_obstacle", lambda self: None)
    elif how == "damaged":
        file = next((tmp_path / "cache").rglob("*.json"))
        file.write_text(file.read_text()[:40])
    prove_scan(samples=16 if how == "batch" else 8)
    assert len(trials) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(trials, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert prove_scan()[0]


def test_a_run_keeps_its_choice_before_it_warms_up(trials, tmp_path):
    folder = tmp_path / "run"
    words = ["runtime=eager", "runtime.fused_scan=auto", f"run_dir={folder}", *TINY_RUN]
    stop = patch.object(Training, "warm_up", side_effect=ZeroDivisionError)
    with stop, pytest.raises(ZeroDivisionError):
        train(compose(words))
    choice = json.loads((folder / proof.KERNELS_FILE).read_text())
    assert choice["chosen"] == {"fused_scan": True}
    write_choice(folder, choice | {"chosen": {"fused_scan": False}})
    row = train(compose(words))["ledger"]["fused_scan"]
    assert row["evidence"].startswith("this run has chosen before: error 3e-03")
    assert len(trials) == 1


def test_the_doctor_tries_kernels_without_a_run(trials, capsys):
    words = [*TINY_MODEL, "runtime=eager", "runtime.fused_scan=auto"]
    assert doctor.main(["--json", "--kernels", *words]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["kernels"]}
    assert rows["runtime.fused_scan"]["on"]
    assert "0.41 ms a block against 2.9 ms" in rows["runtime.fused_scan"]["why"]
    assert not rows["runtime.fused_conv"]["on"]
    assert trials == [(SCAN, SCAN)]
