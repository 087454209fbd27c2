"""Kernels prove themselves in a process of their own before a run launches them; here, operators
with faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import proof, trial
from accel.parity import ComparingMode
from accel.proof import Question, judge, merge_findings
from accel.stack import AccelerationStack
from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.fused_kernels import FusedKernel
from scripts import doctor
from tests.harness.outcomes import FOUR_STEPS, read_columns
from tests.harness.planted_models import PlantedModel
from tests.harness.steps import EAGER, tiny_training
from tests.harness.words import CPU, TINY_RUN
from training.config.compose import compose

GOOD = {
    "refusal": None,
    "error": 3e-3,
    "definition_error": 4e-3,
    "times": {"on": 0.41, "off": 2.9},
    "replayed": {"on": 0.4, "off": 0.3},
    "kept_mb": {"on": 1.9, "off": 15.0},
}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """A cache of its own, and keys that can be had on a CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(FusedKernel, "unavailable", lambda self: None)


@pytest.fixture
def trials(monkeypatch):
    """The keys, and the timed ones, of each trial; what they find is as good as can be."""
    asked = []

    def tried(question, uses, keys, timed):
        asked.append((keys, timed))
        return {
            key: dict(GOOD) if key in timed else {k: GOOD[k] for k in list(GOOD)[:3]}
            for key in keys
        }

    monkeypatch.setattr(proof, "run_trials", tried)
    return asked


def stack_with(value="auto", runtime=None, **more) -> AccelerationStack:
    return AccelerationStack(EAGER | {"fused_scan": value} | (runtime or {}), CPU, **more)


def proved(value="auto", folder=None, samples=8, model=None, **more):
    """The value of the key, why, and what the run folder keeps, after a trial of the planted
    model."""
    stack = stack_with(value, **more)
    model = model or PlantedModel()
    kept = stack.prove_kernels(model, model, samples, folder)
    stack.on_model(model)
    assert all(block.fused_scan is stack.values["fused_scan"] for block in model.blocks)
    found = next(t for t in stack.techniques if t.key == "fused_scan").proof
    return found.on, found.why, kept


# In a process of its own.


def test_a_good_kernel_is_chosen_and_remembered(monkeypatch, capfd):
    on, why, kept = proved()
    assert on
    assert all(word in why for word in ("error", "definition", "ms a block against", "MB a sample"))
    assert kept["chosen"] == {"fused_scan": True}
    assert capfd.readouterr().err.count("Trying fused_scan") == 1
    monkeypatch.setattr(proof, "run_trials", None)  # the next run asks the cache
    assert proved()[:2] == (on, why)


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("wrong", "planted[0] has an error of 1e-02, its definition one of"),
        ("nan", "planted[0] is not finite"),
        ("unwritten", "planted[0] is not finite, or has elements that no program wrote"),
        ("changing", "planted[0] differs between two equal calls"),
    ],
)
def test_a_kernel_that_is_not_its_definition_is_refused(fault, word, monkeypatch):
    monkeypatch.setenv("PLANT", fault)
    comparing = ComparingMode()
    block = PlantedModel().blocks[0]
    trial.switch(block, "fused_scan", True)
    inputs = [
        torch.randn(shape, requires_grad=True)
        for shape in ((4, 5, 16), (4, 16), (4, 5, 16), (4, 3, 16))
    ]
    with comparing:
        trial.run_both_passes(block, tuple(inputs), torch.autocast("cpu", enabled=False))
    first, second = comparing.comparisons
    assert word in first.refusal()
    assert second.output == "planted_backward[0]"
    assert second.refusal() is None


@pytest.mark.parametrize(
    ("fault", "on", "word"),
    [
        ("wrong", False, "has an error of 1e-02"),
        ("crash", False, "the process that tried it ended with signal SIGSEGV"),
        ("hang", False, "the process that tried it did not answer for 2 s in its parity test"),
        ("slow", False, "ms a block against"),
        ("memory", True, "memory ran out without it"),
    ],
)
def test_what_happens_in_the_trial_decides(fault, on, word, monkeypatch):
    monkeypatch.setenv("PLANT", fault)
    if fault == "hang":
        read = proof.read_findings

        def impatient(file: Path) -> dict:
            state = read(file)
            return state | ({"patience": 2.0} if state.get("doing") == "its parity test" else {})

        monkeypatch.setattr(proof, "read_findings", impatient)
    chosen, why, _ = proved()
    assert chosen is on
    assert word in why
    monkeypatch.setattr(proof, "run_trials", lambda *a: {"fused_scan": dict(GOOD)})
    passing = fault in ("crash", "hang")  # may have come from outside: the next run tries again
    assert proved()[0] is (True if passing else on)


def test_a_crash_costs_only_the_key_that_it_came_from(monkeypatch):
    """Keys before it keep their results, and another process tries the keys after it."""
    starts = iter(
        [
            (
                {"doing": "its parity test", "key": "b", "found": {"a": dict(GOOD)}},
                "ended with signal SIGABRT",
            ),
            (
                {
                    "doing": "nothing more",
                    "key": None,
                    "found": {"a": GOOD, "b": proof.make_failure("x"), "c": GOOD},
                },
                "ended",
            ),
        ]
    )
    jobs = []

    def attended(folder):
        jobs.append(json.loads((folder / "job.json").read_text())["found"])
        return next(starts)

    monkeypatch.setattr(proof, "watch_trial", attended)
    question = Question({key: "auto" for key in "abc"}, {}, 8, CPU)
    found = proof.run_trials(question, [], list("abc"), list("abc"))
    assert jobs[0] == {}
    assert (
        jobs[1]["b"]["refusal"]
        == "the process that tried it ended with signal SIGABRT in its parity test"
    )
    assert found["c"] == GOOD


def test_a_device_that_admits_no_second_process_is_a_reason(monkeypatch):
    monkeypatch.setattr(
        proof, "watch_trial", lambda folder: ({}, "ended with code 1 (CUDA error: device busy)")
    )
    on, why, _ = proved()
    assert not on
    assert (
        why == "the process that tried it ended with code 1 (CUDA error: device busy) in its start"
    )


def test_a_model_that_cannot_be_sent_is_a_reason():
    model = PlantedModel()
    for block in model.blocks:
        block.hidden = lambda: None
    on, why, _ = proved(model=model)
    assert not on
    assert "cannot be sent to another process" in why


# Questions and decisions.


def test_true_skips_the_time_and_never_the_parity(trials):
    assert proved(True)[:2] == (True, "error 3e-03 (definition 4e-03)")
    assert trials == [(["fused_scan"], [])]


def test_deterministic_decides_by_parity_alone(trials):
    assert proved(deterministic=True)[0]
    assert trials == [(["fused_scan"], [])]


def test_a_model_without_the_operator_asks_nothing(trials):
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(1, 1)])
    assert stack_with().prove_kernels(model, lambda: None, 8) == {}
    assert trials == []


def test_nothing_is_launched_that_was_not_proved():
    stack = stack_with(True)
    model = PlantedModel()
    stack.on_model(model)
    assert not any(block.fused_scan for block in model.blocks)


def test_on_unavailable_error_accepts_a_measured_off_and_no_failed_parity(monkeypatch):
    slow = GOOD | {"times": {"on": 2.0, "off": 1.0}}
    monkeypatch.setattr(proof, "run_trials", lambda *a: {"fused_scan": slow})
    assert not proved(on_unavailable="error")[0]
    monkeypatch.setattr(
        proof, "run_trials", lambda *a: {"fused_scan": GOOD | {"refusal": "ssd[0] is not finite"}}
    )
    with pytest.raises(ValueError, match=r"fused_scan=true \(ssd\[0\] is not finite"):
        proved(True, samples=9, on_unavailable="error")
    assert proved(True, samples=9)[:2] == (False, "ssd[0] is not finite")


def test_auto_where_there_is_no_gpu_is_off_and_no_error(monkeypatch, trials):
    monkeypatch.setattr(
        FusedKernel, "unavailable", lambda self: "The Triton kernels need an NVIDIA GPU."
    )
    assert not stack_with(on_unavailable="error").values["fused_scan"]
    with pytest.raises(ValueError, match="fused_scan=True"):
        stack_with(True, on_unavailable="error")


@pytest.mark.parametrize(
    ("on", "off", "chosen", "word"),
    [
        (0.41, 2.9, True, "0.41 ms a block against 2.9 ms, keeps 1.9 of 15 MB a sample"),
        (1.03, 1.0, True, "1.03 ms"),  # ties go to the kernel
        (1.04, 1.0, False, "1.04 ms"),
        (0.41, None, True, "memory ran out without it"),
        (None, 1.0, False, "memory ran out with it"),
        (None, None, True, "memory ran out with it and without it"),
    ],
)
def test_a_kernel_is_chosen_unless_it_is_slower_by_three_per_cent(on, off, chosen, word):
    found = judge(GOOD | {"times": {"on": on, "off": off}}, timed=True)
    assert found.on is chosen
    assert found.why.startswith("error 3e-03 (definition 4e-03), ")
    assert word in found.why


def test_a_captured_run_goes_by_the_times_without_launches(trials, monkeypatch):
    """One trial serves both kinds of run: what is launched kernel by kernel gains from fewer of
    them."""
    assert proved()[0]
    assert "0.41 ms a block against 2.9 ms" in proved()[1]
    monkeypatch.setattr(CudaGraph, "unavailable", lambda self: None)
    runtime = {"cuda_graph": True}
    on, why, _ = proved(runtime=runtime)
    assert (on, "0.4 ms a block against 0.3 ms" in why) == (False, True)
    assert len(trials) == 1


def test_parity_alone_is_shared_by_runs_that_differ_in_time_only(trials):
    proved(True)
    proved(True, runtime={"gradient_checkpointing": True, "cuda_graph": True})
    assert len(trials) == 1
    proved(True, runtime={"residual_in_fp32": False})
    assert len(trials) == 2
    proved("auto")
    proved("auto", runtime={"gradient_checkpointing": True})
    assert len(trials) == 4


def test_ranks_that_disagree_come_to_one_answer(monkeypatch):
    """Parity by AND, times by MAX."""
    slow = GOOD | {"times": {"on": 3.0, "off": 2.0}, "error": 5e-3}
    both = merge_findings([{"a": GOOD}, {"a": slow}])["a"]
    assert both["times"] == {"on": 3.0, "off": 2.9}
    assert both["error"] == 5e-3
    refused = GOOD | {"refusal": "ssd[0] is not finite"}
    assert not judge(merge_findings([{"a": GOOD}, {"a": refused}])["a"], timed=True).on
    out_of_memory = GOOD | {"times": {"on": 0.4, "off": None}}
    assert merge_findings([{"a": GOOD}, {"a": out_of_memory}])["a"]["times"]["off"] is None


def test_a_cache_counts_only_if_all_ranks_have_the_same_facts(monkeypatch, trials):
    proved()
    monkeypatch.setattr(proof, "gather_objects", lambda item: [item, item])
    proved()
    assert len(trials) == 1

    def with_another(item):
        return (
            [item, (item[0] | {"gpu": "another"}, *item[1:])]
            if isinstance(item, tuple)
            else [item] * 2
        )

    monkeypatch.setattr(proof, "gather_objects", with_another)
    proved()
    assert len(trials) == 2


# What is remembered.


def resumed(folder: Path, kept: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / proof.KERNELS_FILE).write_text(json.dumps(kept))


def test_a_resumed_run_keeps_its_choice(tmp_path, trials, monkeypatch):
    _, _, kept = proved()
    slow = GOOD | {"times": {"on": 9.0, "off": 1.0}}
    found = {"facts": kept["facts"], "chosen": {"fused_scan": False}, "found": {"fused_scan": slow}}
    resumed(tmp_path / "run", found)
    on, why, again = proved(folder=tmp_path / "run")
    assert not on  # whatever the cache says
    assert why.startswith("this run has chosen before: ")
    assert again["chosen"] == {"fused_scan": False}
    assert len(trials) == 1


def test_on_another_machine_a_resumed_run_proves_its_choice_again(tmp_path, trials, monkeypatch):
    _, _, kept = proved()
    kept["facts"]["driver"] = "another"
    resumed(tmp_path / "run", kept)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert proved(folder=tmp_path / "run")[0]
    # parity, and no times
    assert trials == [(["fused_scan"], ["fused_scan"]), (["fused_scan"], [])]
    monkeypatch.setattr(
        proof, "run_trials", lambda *a: {"fused_scan": GOOD | {"refusal": "ssd[0] is not finite"}}
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a third"))
    assert not proved(folder=tmp_path / "run")[0]
    kept["chosen"]["fused_scan"] = False
    resumed(tmp_path / "run", kept)
    assert not proved(folder=tmp_path / "run")[0]


@pytest.mark.parametrize("how", ["batch", "precision", "kernels", "damaged"])
def test_a_stale_cache_is_not_believed(how, trials, monkeypatch, tmp_path):
    proved()
    more: dict = {}
    if how == "batch":
        more["samples"] = 16
    elif how == "precision":
        monkeypatch.setitem(EAGER, "precision", "bf16")
        monkeypatch.setattr("accel.techniques.precision.Precision.unavailable", lambda self: None)
    elif how == "kernels":
        monkeypatch.setattr(Path, "read_bytes", lambda self: b"another source")
    else:
        file = next((tmp_path / "cache").rglob("*.json"))
        file.write_text(file.read_text()[:40])
    proved(**more)
    assert len(trials) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(trials, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert proved()[0]


def test_a_run_keeps_its_choice_before_it_warms_up(trials, tmp_path, monkeypatch):
    import train
    from training.assemble import Training

    class StoppedError(Exception):
        pass

    def warm_up(self):
        raise StoppedError

    words = ["runtime=eager", "runtime.fused_scan=auto", f"run_dir={tmp_path / 'run'}", *TINY_RUN]
    with monkeypatch.context() as patched:
        patched.setattr(Training, "warm_up", warm_up)
        with pytest.raises(StoppedError):
            train.train(compose(words))
    file = tmp_path / "run" / proof.KERNELS_FILE
    kept = json.loads(file.read_text())
    assert kept["chosen"] == {"fused_scan": True}
    file.write_text(json.dumps(kept | {"chosen": {"fused_scan": False}}))
    row = train.train(compose(words))["ledger"]["fused_scan"]
    assert row["active"] is False
    assert row["evidence"].startswith("this run has chosen before: error 3e-03")
    assert len(trials) == 1


def test_the_ledger_tells_why(trials):
    training = tiny_training(fused_scan="auto", fused_conv=True)
    ledger = {row.key: row for row in training.warm_up()}
    assert ledger["fused_scan"].requested == "auto"
    assert (
        "0.41 ms a block against 2.9 ms, keeps 1.9 of 15 MB a sample"
        in ledger["fused_scan"].evidence
    )
    assert ledger["fused_conv"].evidence.startswith("error 3e-03 (definition 4e-03)")


def test_the_doctor_tries_kernels_without_a_run(trials, capsys):
    words = [
        "model.dim=32",
        "model.depth=1",
        "model.head_dim=16",
        "model.mixer.state_dim=16",
        "runtime=eager",
    ]
    words += ["runtime.fused_scan=auto", "batch_size=32", "accumulation_steps=2"]
    assert doctor.main(["--json", "--kernels", *words]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["kernels"]}
    assert rows["runtime.fused_scan"]["on"]
    assert "0.41 ms a block against 2.9 ms" in rows["runtime.fused_scan"]["why"]
    assert not rows["runtime.fused_conv"]["on"]
    assert trials == [(["fused_scan"], ["fused_scan"])]
    with pytest.raises(SystemExit):
        doctor.main(["--kernels", "runtime.fused_scan=maybe"])


@pytest.mark.slow
def test_two_processes_of_which_one_has_no_kernels_train_alike(zygote, tmp_path):
    words = [*FOUR_STEPS, "runtime.fused_conv=auto", "runtime.fused_scan=false"]
    environment = {"KERNELS_ON_RANK": "0", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert zygote(tmp_path / "run", *words, ranks=2, environment=environment) == [0, 0]
    row = json.loads((tmp_path / "run" / "ledger.json").read_text())["fused_conv"]
    assert row["active"] is False
    assert "its parity test failed" in row["evidence"]
    assert len(read_columns(tmp_path / "run", "loss")) == 4
    assert not list((tmp_path / "cache").rglob("kernels/*"))  # the next run tries again


def test_only_three_values_are_taken():
    with pytest.raises(ValueError, match=r"runtime.fused_scan=maybe must be false, true or auto"):
        compose(["runtime.fused_scan=maybe"])
    assert compose(["runtime=fast"]).cfg.runtime.fused_scan == "auto"
    assert compose(["runtime.fused_scan=true"]).cfg.runtime.fused_scan is True
