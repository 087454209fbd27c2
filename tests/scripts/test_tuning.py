"""runtime=auto chooses the fastest candidate, refuses wrong or broken ones, and keeps to the budget
and the memory."""

import json
import time
from dataclasses import asdict, replace

import pytest

from accel.trial.contest import make_ledger_row
from common.config.compose import compose
from common.distributed.ranks import SINGLE
from common.files import read_object, write_json
from scripts.plan import tune as tuner
from scripts.plan.__main__ import main
from scripts.plan.memory import forecast
from scripts.plan.question import Question
from tests.harness.refusals import expect_refusal
from tests.harness.words import CPU, TINY_RUN, TINY_SYNTHETIC
from train import train
from training.inputs import foresee_latents
from training.preflight import tune

pytestmark = pytest.mark.usefixtures("empty_cache")
PLANTED = [
    "extensions=[tests]",
    *TINY_SYNTHETIC,
    "model._target_=tests.harness.planted_tuning.Planted",
    "batch_size=16",
    "runtime=auto",
]
HALVES = {"accumulation_steps": 2}


def make_search(cfg, seconds=3600.0):
    spec, resident = foresee_latents(cfg, 1e9)
    question = {"cfg": asdict(cfg), "spec": spec.as_dict(), "resident": resident}
    deadline = time.monotonic() + seconds
    return tuner.Search(question | {"device": "cpu", "processes": 1, "deadline": deadline})


def try_only(monkeypatch, *steps):
    """The tuner tries these numbers of micro-batches and nothing else, in this process."""
    candidates = [{"accumulation_steps": n} for n in steps]
    monkeypatch.setattr(tuner.Search, "list_ways", lambda _: [])
    monkeypatch.setattr(tuner, "list_micro_batches", lambda _: candidates)
    monkeypatch.setattr(tune, "measure_apart", lambda job: tuner.Search(job).run())


def save_choice(folder, changes):
    choice = {"words": tuner.describe_changes(changes), "changes": changes, "tried": []}
    write_json(folder / tune.TUNING_FILE, choice)
    return folder / tune.TUNING_FILE


@pytest.mark.slow
def test_the_fastest_that_is_right_is_chosen_and_remembered(monkeypatch):
    """A whole batch is slow, halves are quick, quarters wrong, and eighths exhaust the memory."""
    monkeypatch.setenv("PLANT", "slow:16,wrong:4,memory:2")
    try_only(monkeypatch, 2, 4, 8)
    cfg = compose(PLANTED).cfg
    tuned, choice = tune.tune_config(cfg, CPU, SINGLE)
    assert tuned.accumulation_steps == 2
    assert not tuned.runtime.tune
    rows = {row["words"]: row for row in choice["tried"]}
    assert rows["as given"]["step_ms"] > 150
    assert "× as fast as the best before" in rows["accumulation_steps=2"]["note"]
    assert "more than 1e-03 apart" in rows["accumulation_steps=4"]["note"]
    assert rows["accumulation_steps=8"]["note"] == "memory ran out"
    row = make_ledger_row([choice])
    assert (row.active, row.missing) == ("accumulation_steps=2", False)
    assert "accumulation_steps=8: memory ran out" in row.evidence

    monkeypatch.setattr(tune, "measure_apart", None)
    assert tune.tune_config(cfg, CPU, SINGLE)[1] == json.loads(json.dumps(choice))


def test_the_choice_of_a_run_is_kept_where_it_fits(tmp_path):
    cfg = compose(PLANTED).cfg
    file = save_choice(tmp_path, {"accumulation_steps": 8})
    assert tune.read_choice(tmp_path, cfg, CPU, 2) is not None
    assert tune.read_choice(tmp_path, cfg, CPU, 4) is None
    for changes in ({"no_such_key": True}, {"compile": "x"}, {"accumulation_steps": 3}):
        save_choice(tmp_path, changes)
        assert tune.read_choice(tmp_path, cfg, CPU, 1) is None
    for content in ("{", "[]"):
        file.write_text(content)
        assert tune.read_choice(tmp_path, cfg, CPU, 1) is None

    # other code makes a choice invalid
    job = make_search(cfg).job
    other = job | {"cfg": job["cfg"] | {"extensions": []}}
    assert tune.collect_facts(job, CPU)["code"] != tune.collect_facts(other, CPU)["code"]


ACTOR = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
steps = json.loads((folder / "job.json").read_text())["cfg"]["accumulation_steps"]
role = {1: "slow", 2: "hangs", 4: "crashes", 8: "other norms", 16: "quick"}[steps]
if role == "hangs": time.sleep(3600)
if role == "crashes": os.kill(os.getpid(), signal.SIGSEGV)
seconds = [1.0 if role == "quick" else 2.0] * 3
norms = [2.2 if role == "other norms" else 2.0]
result = {"losses": [1.0], "norms": norms, "tolerance": 1e-3, "refusal": None, "seconds": seconds}
(folder / "found.json").write_text(json.dumps(result))
"""


def test_a_candidate_that_hangs_crashes_or_computes_something_else_costs_itself(
    monkeypatch, tmp_path
):
    """The tuner tries the next ones; the rows of those after the budget say so."""
    (tmp_path / "actor.py").write_text(ACTOR)
    try_only(monkeypatch, 2, 4, 8, 16)
    monkeypatch.setattr(tuner, "TUNER_PROGRAM", [str(tmp_path / "actor.py")])
    monkeypatch.setattr(tuner, "CANDIDATE_SHARE", 0.1)
    monkeypatch.setattr(tuner.Search, "find_fitting", lambda _: {})
    cfg = compose(PLANTED).cfg
    choice = make_search(cfg, seconds=20.0).run()
    assert choice["words"] == "accumulation_steps=16"
    notes = {row["words"]: row["note"] for row in choice["tried"]}
    assert notes["as given"] == "2000 ms"
    assert notes["accumulation_steps=2"] == "its process did not answer for 2 s"
    assert "its process ended with signal SIGSEGV" in notes["accumulation_steps=4"]
    assert "its norms are 2.2 instead of 2" in notes["accumulation_steps=8"]
    assert notes["accumulation_steps=16"] == "1000 ms, 2 × as fast as the best before"
    late = make_search(cfg, seconds=-1.0).run()
    assert {row["note"] for row in late["tried"]} == {tuner.TOO_LATE}


def test_memory_demands_micro_batches_before_checkpoints(monkeypatch):
    """The tuner takes the first that fits by its forecast; where nothing fits it fails before it
    tries anything."""
    sizes = ["model.depth=6", "batch_size=16", "data.height=16", "data.width=16"]
    cfg = compose([*TINY_SYNTHETIC, "runtime=auto", *sizes]).cfg
    search = make_search(cfg)
    assert search.reserved == 2.2 * 64 * 256
    spec = foresee_latents(cfg, 1e9)[0]
    recomputed = {"gradient_checkpointing": True, "checkpoint_policy": "blocks"}
    for changes in ({}, HALVES, recomputed | HALVES):
        changed = tune.apply_changes(cfg, changes)
        needs = forecast(Question(changed, spec, 1, search.reserved, gpu=False)).needs.total
        limit = 1.001 * needs / tuner.USABLE_MEMORY
        monkeypatch.setattr(tuner, "memory_of", lambda _, limit=limit: limit)
        assert search.find_fitting() == changes
    monkeypatch.setattr(tuner, "memory_of", lambda _: 1e5)
    with expect_refusal(r"a step needs .* GiB at least, of 9.31e-05; use a smaller model"):
        make_search(replace(cfg, batch_size=1)).find_fitting()


REFUSES = (
    "import sys; from pathlib import Path;"
    "(Path(sys.argv[1]) / 'found.json').write_text('{\"refusal\": \"too large\"}')"
)


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (REFUSES, r"^too large$"),
        ("raise SystemExit(3)", r"the process that measures steps ended with code 3"),
    ],
)
def test_the_run_says_why_its_tuner_failed(program, sentence, monkeypatch):
    monkeypatch.setattr(tune, "TUNER_PROGRAM", ["-c", program])
    with expect_refusal(sentence):
        tune.tune_config(compose(PLANTED).cfg, CPU, SINGLE)


def test_candidates_go_with_the_rest_of_the_configuration(monkeypatch):
    """The tuner leaves out techniques that are not available, contradict another key, or are on
    already."""
    cfg = compose([*TINY_SYNTHETIC, "runtime=auto"]).cfg
    assert not tune.is_available(cfg, {"cuda_graph": True}, CPU, 1)
    six = replace(cfg, batch_size=6)
    assert not tune.is_available(six, {"accumulation_steps": 2}, CPU, 2)
    monkeypatch.setattr("accel.techniques.cuda_graph.CudaGraph.find_obstacle", lambda _: None)
    assert not tune.is_available(six, {"cuda_graph": True}, CPU, 2)
    four = replace(cfg, accumulation_steps=4)
    assert tuner.list_micro_batches(four) == [{"accumulation_steps": n} for n in (8, 2)]


def test_the_tuner_leaves_kernels_to_the_run_and_skips_what_the_model_does_not_use(monkeypatch):
    monkeypatch.setattr("accel.techniques.fused_kernels.FusedKernel.find_obstacle", lambda _: None)
    search = make_search(compose([*TINY_SYNTHETIC, "runtime=auto"]).cfg)
    search.reference = {"unused": ["cuda_graph"]}
    assert {key for way in search.list_ways() for values in way for key in values} == {
        "compile",
        "compile_scope",
    }
    configs = []
    result = {"refusal": "x"}
    monkeypatch.setattr(search, "run_candidate", lambda cfg, _: configs.append(cfg) or result)
    search.time_candidate({})
    assert configs[0].runtime.fused_scan is True
    assert search.tried[0]["words"] == "as given"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("deterministic=true", "=true chooses techniques by their time, so runs differ"),
        ("runtime.tune_seconds=0", "_seconds=0.0 must be above 0"),
        ("runtime.parallel.mode=fsdp", "=true contradicts runtime.parallel.mode=fsdp"),
        ("runtime.tune_seconds=1800", "_seconds=1800.0 must be below the 30"),
    ],
)
def test_a_run_that_cannot_be_tuned_is_refused(word, sentence):
    with expect_refusal(f"runtime.tune{sentence}"):
        compose([*TINY_SYNTHETIC, "runtime=auto", word])


def test_a_run_says_what_was_chosen_and_keeps_it(tmp_path):
    words = [*TINY_SYNTHETIC, *TINY_RUN, "runtime=auto", f"run_dir={tmp_path}"]
    file = save_choice(tmp_path, HALVES)
    choice = read_object(file)
    for samples in (16, 32):
        row = train(compose([*words, f"total_samples={samples}"]))["ledger"]["trials"]
        assert row["active"] == "accumulation_steps=2"
    assert read_object(file) == choice


def test_tune_writes_a_runtime_file(tmp_path, monkeypatch, capsys):
    changes = {"compile": True, "compile_scope": "model"} | HALVES
    row = {"words": "", "step_ms": 5.0, "steps": 8, "note": "5 ms"}
    choice = {"words": "", "changes": changes, "tried": [row]}
    monkeypatch.setattr(tune, "settle", lambda *_: {"runtime": choice})
    out = tmp_path / "tuned.yaml"
    main(["tune", *TINY_SYNTHETIC, f"out={out}"])
    assert f"written to {out}" in capsys.readouterr().out
    text = out.read_text()
    assert "# It goes with accumulation_steps=2." in text
    assert text.endswith("defaults:\n- fast\n- _self_\ncompile: true\ncompile_scope: model\n")

    row["step_ms"] = None
    for name, sentence in (
        ("no/tuned.yaml", "out=.*there is no folder"),
        ("fast.yaml runtime=fast", "runtime=fast would be based on itself"),
        ("tuned.yaml", r"seconds=120.0: nothing was measured .* give more seconds"),
    ):
        with expect_refusal(sentence):
            main(["tune", *TINY_SYNTHETIC, *f"out={tmp_path}/{name}".split()])
