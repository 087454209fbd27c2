"""A run decides about kernels from the findings of trials, and remembers its choice."""

from __future__ import annotations

import json
import shutil
from unittest.mock import patch

import pytest
from torch import nn

from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.fused_kernels import FusedKernel
from accel.trial import contest, kernels
from accel.trial.kernels import Contest, choose_kernels, judge, merge_findings
from common.config.compose import compose
from common.files import ROOT, read_object, write_json
from scripts import doctor
from tests.harness.planted_models import PlantedModel
from tests.harness.proofs import FAST, GOOD, REFUSED, make_stack, plant_findings, prove_scan
from tests.harness.refusals import expect_refusal
from tests.harness.words import CPU, TINY_MODEL, TINY_RUN
from train import train
from training.assemble import Training

pytestmark = pytest.mark.usefixtures("kernels_on_a_cpu")
SCAN = ["fused_scan"]


@pytest.fixture
def trials(monkeypatch):
    """The keys, and the timed keys, of each trial; every kernel is right and fast."""
    calls = []

    def find_all_good(contest, keys, timed, known):
        good = dict.fromkeys(keys, GOOD) | {f"{key}, timed": FAST for key in timed}
        if good.keys() - known.keys():
            calls.append((keys, timed))
        return good | known

    monkeypatch.setattr(Contest, "run_trials", find_all_good)
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


def test_findings_are_those_of_every_file_of_kernels(tmp_path):
    shutil.copytree(ROOT / "accel" / "kernels", tmp_path / "kernels")
    hashes = {contest.describe_machine(CPU, [tmp_path])["code"]}
    files = list(tmp_path.rglob("*.py"))
    for file in files:
        file.write_bytes(file.read_bytes() + b"#")
        hashes.add(contest.describe_machine(CPU, [tmp_path])["code"])
    assert len(hashes) == len(files) + 1


def test_nothing_is_launched_that_was_not_proved():
    model = PlantedModel()
    make_stack(True).on_model(model)
    assert not any(block.fused_scan for block in model.blocks)


def test_on_unavailable_error_accepts_a_measured_off_and_no_failed_parity(monkeypatch):
    plant_findings(monkeypatch, GOOD, FAST | {"on_ms": 4.0})
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
        (0.41, 2.9, True, "0.41 ms a block against 2.9 ms (7.07 ×)"),
        # Ties go to the kernel.
        (1.03, 1.0, True, "1.03 ms"),
        (1.04, 1.0, False, "1.04 ms"),
        (0.41, None, True, "memory ran out without it"),
        (None, None, True, "memory ran out with it and without it"),
    ],
)
def test_a_kernel_is_chosen_unless_it_is_slower_by_three_per_cent(on, off, chosen, word):
    verdict = judge(GOOD, FAST | {"on_ms": on, "off_ms": off})
    assert verdict.on is chosen
    assert word in verdict.why


def test_a_trial_repeats_only_what_other_switches_can_change(trials, monkeypatch):
    """Parity is tested once; times go by the batch, the capture and whatever makes a block
    slower."""
    prove_scan(True)
    prove_scan(True, runtime={"gradient_checkpointing": True, "cuda_graph": True}, samples=16)
    assert trials == [(SCAN, [])]
    prove_scan("auto")
    prove_scan("auto", runtime={"gradient_checkpointing": True})
    monkeypatch.setattr(CudaGraph, "find_obstacle", lambda self: None)
    prove_scan("auto", runtime={"cuda_graph": True})
    prove_scan("auto", samples=16)
    assert len(trials) == 5
    prove_scan(True, runtime={"residual_in_fp32": False})
    assert len(trials) == 6


def test_ranks_that_disagree_come_to_one_answer():
    """Parity by AND, errors and times by MAX."""
    fine = {"a": GOOD, "a, timed": FAST}
    slow = {"a": GOOD | {"error": 5e-3}, "a, timed": FAST | {"on_ms": 3.0, "off_ms": None}}
    both = merge_findings([fine, slow])
    assert both["a, timed"] == {"refusal": None, "on_ms": 3.0, "off_ms": None}
    assert both["a"]["error"] == 5e-3
    assert not judge(merge_findings([fine, {"a": REFUSED}])["a"], FAST).on


def test_a_cache_counts_only_if_all_ranks_have_the_same_facts(monkeypatch, trials):
    prove_scan()
    monkeypatch.setattr(contest, "gather_objects", lambda item: [item, item])
    prove_scan()
    assert len(trials) == 1

    monkeypatch.setattr(
        contest,
        "gather_objects",
        lambda item: [item, ({}, {}) if isinstance(item, tuple) else item],
    )
    prove_scan()
    assert len(trials) == 2


# What the cache and the run folder remember.


def write_choice(folder, choice):
    folder.mkdir(exist_ok=True)
    write_json(folder / kernels.KERNELS_FILE, choice)
    return folder


def test_on_another_machine_a_resumed_run_proves_its_choice_again(tmp_path, trials, monkeypatch):
    _, _, choice = prove_scan()
    for finding in choice["found"].values():
        finding["facts"]["device"] = "another"
    folder = write_choice(tmp_path / "run", choice)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert prove_scan(folder=folder)[0]
    # The second trial is of parity alone.
    assert trials == [(SCAN, SCAN), (SCAN, [])]
    plant_findings(monkeypatch, REFUSED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a third"))
    assert not prove_scan(folder=folder)[0]


def test_a_damaged_cache_is_not_believed(trials, tmp_path):
    prove_scan()
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text(file.read_text()[:40])
    prove_scan()
    assert len(trials) == 2


def test_a_run_keeps_its_choice_before_it_warms_up(trials, run_dir):
    words = ["runtime=eager", "runtime.fused_scan=auto", f"run_dir={run_dir}", *TINY_RUN]
    stop = patch.object(Training, "warm_up", side_effect=ZeroDivisionError)
    with stop, pytest.raises(ZeroDivisionError):
        train(compose(words))
    choice = read_object(run_dir / kernels.KERNELS_FILE)
    assert choice["chosen"] == {"fused_scan": True}
    write_choice(run_dir, choice | {"chosen": {"fused_scan": False}})
    row = train(compose(words))["ledger"]["fused_scan"]
    assert row["evidence"].startswith("this run has chosen so before")
    assert len(trials) == 1


def test_the_doctor_tries_kernels_without_a_run(trials, capsys):
    words = [*TINY_MODEL, "runtime=eager", "runtime.fused_scan=auto"]
    doctor.diagnose(doctor.DoctorConfig(kernels=True, json=True), words)
    notes = {row["words"]: row["note"] for row in json.loads(capsys.readouterr().out)["kernels"]}
    assert "0.41 ms a block against 2.9 ms" in notes["fused_scan=true"]
    assert "fused_conv=false" in notes
    assert trials == [(SCAN, SCAN)]
