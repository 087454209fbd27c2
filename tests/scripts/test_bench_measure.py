"""Measurements of the benchmarks, at their tiny size."""

import gc
import re

import pytest
import torch

from accel.stack import TECHNIQUES
from accel.techniques.compilation import Compile
from common.config.compose import compose
from common.files import read_object
from scripts.bench import TABLES, data, kernels, measure
from scripts.bench.cases import SETTINGS, Case, plan_job
from scripts.bench.measure import measure_case
from scripts.bench.rows import format_entries

TINY = [*SETTINGS["tiny"]["words"].split(), "runtime.device=cpu"]
QUICK = ["setting=tiny", "steps=1", "repeats=1", "runtime.device=cpu", "model.depth=1"]


@pytest.fixture(autouse=True)
def forget_baselines(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "eager")
    gc.freeze()  # measuring collects garbage often, and other tests leave much to search
    yield
    measure.BASELINE_CACHE.clear()


def measure_tiny(command, tmp_path, *words):
    """Measures a command's cases; returns the entry of each. None may fail, and the table must find
    a figure for every column."""
    job = plan_job(command, [*QUICK, f"out={tmp_path}", *words])
    entries = [
        {"name": case.name, **case.labels, **measure_case(case, job.cfg)} for case in job.cases
    ]
    assert not [entry for entry in entries if "error" in entry]
    keys = {key for entry in entries for key in entry} | {"times_before"}
    assert {*re.findall(r"{(\w+)", str(TABLES["columns"].get(command)))} <= keys
    return {entry["name"]: entry for entry in entries}


def test_what_cannot_be_had_is_a_reason_and_what_compiles_can_be_left_out():
    cfg = plan_job("step", [*QUICK, "inductor=false"]).cfg
    case = Case("x", lambda case, cfg: {"reason": "none"}, TINY)
    expected = {"tf32=false": "none", "compile=true": "inductor=false", "tf32=true": "GPU"}
    for word, reason in expected.items():
        assert reason in measure_case(case._replace(needs=[f"runtime.{word}"]), cfg)["reason"]


def test_the_ladder_climbs_from_a_newcomer_to_max(tmp_path):
    entries = measure_tiny("ladder", tmp_path, "num_workers=0", "loss_steps=2")
    assert "GPU" in entries["+ tf32"]["reason"]
    for entry in entries.values():
        assert "reason" in entry or abs(entry["loss_deviation"]) < 1e-2
    assert entries["+ compiled blocks"]["not_on"] == []

    # The top of the ladder is max.
    runtime = compose([*TINY, "runtime=max"]).cfg.runtime
    on = {f"runtime.{t.key}=true" for t in TECHNIQUES if getattr(runtime, t.key) is True}
    (*_, top) = plan_job("ladder", QUICK).cases
    assert on - {"runtime.residual_in_fp32=true"} <= {*top.overrides}


def test_a_step_is_taken_apart(tmp_path):
    entry = measure_tiny("step", tmp_path, "runtime=fast")["step"]
    phases = {"data", "forward", "backward", "optimizer", "ema", "logging"}
    assert phases <= entry["phases_ms"].keys()
    assert "forward" in entry["text"]


def test_the_compiled_model_stands_beside_its_blocks(tmp_path, monkeypatch):
    """On the test's clock everything takes a second."""
    monkeypatch.setattr(measure, "measure_seconds", lambda run, device: run() or 1.0)
    (entry,) = measure_tiny("compiling", tmp_path, "model=dit_xs", "rows=[four]").values()
    assert entry["times"] == 1.0
    assert entry["graphs"] > 1  # one, and another as the batch changes


def test_a_profile_has_a_trace(tmp_path):
    entry = measure_tiny("profile", tmp_path / "new")["profile"]
    trace = read_object(tmp_path / "new" / entry["trace"])["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in trace}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_techniques_are_measured_alone_and_removed(tmp_path):
    entries = measure_tiny("techniques", tmp_path, "loss_steps=1").values()
    measured = [entry for entry in entries if "reason" not in entry]
    for entry in measured:
        assert entry["part"] != "alone" or {*entry["not_on"]} <= {*entry["baseline_not_on"]}
    removed = {entry["key"]: entry for entry in measured if entry["part"] == "removed"}
    assert removed["compile"]["ledger"]["compile"]["active"] is False


def test_operators_are_measured_beside_their_definitions(monkeypatch, tmp_path):
    """On the test's clock an operator takes 3 s, and its definition 1 s."""

    def take_fixed_times(runs, repeats, device, measure=None):
        for run in runs.values():
            run()
        return {name: [3.0 if name == "case" else 1.0] * repeats for name in runs}

    monkeypatch.setattr(kernels, "time_in_turn", take_fixed_times)
    monkeypatch.setitem(kernels.WAYS, "compiled", lambda op: op.definition)
    entries = measure_tiny("kernels", tmp_path)
    # A CPU has no fused operators.
    measured = [entry for entry in entries.values() if "reason" not in entry]
    assert len(measured) == 2 * len(kernels.INPUTS)
    assert all(entry["us"] > 0 and entry["gb_s"] > 0 for entry in measured)
    swiglu = entries["swiglu compiled"]
    assert swiglu["speed"] == swiglu["forward_speed"] == pytest.approx(1 / 3)
    assert kernels.count_bytes(kernels.Op(torch.neg, torch.neg), [torch.zeros(4)]) == 5 * 16


def test_mixers_are_compared_at_equal_parameters(tmp_path):
    entries = measure_tiny("mixers", tmp_path, "size=xs", "batch_size=8", "families=[ssd_mlp]")
    assert list(entries) == ["dit", "ssd_mlp"]
    assert entries["dit"]["speed"] == 1.0
    assert entries["ssd_mlp"]["parameters"] == pytest.approx(entries["dit"]["parameters"], rel=0.2)


def test_loaders_feed_the_same_latents(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SETTING_SIZES", {"tiny": (2048, 256, 4)})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = [name for name in TABLES["cases"]["data"] if "4" not in name]  # four are as two
    entries = measure_tiny("data", tmp_path, f"rows={names}")
    assert list(entries) == names
    assert all(entry["samples_per_s"] > 0 for entry in entries.values())


def test_precisions_are_compared_over_seeds_also_without_their_instructions(tmp_path, monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    words = ["steps=2", "seeds=[0,1]", "batch_size=4", "runtime.on_unavailable=emulate"]
    entries = list(measure_tiny("precision", tmp_path, *words).values())
    assert all(entry["loss_min"] < entry["loss"] < entry["loss_max"] for entry in entries)
    # Each precision has its own arithmetic.
    assert len({entry["loss"] for entry in entries}) == 3
    assert "emulated: runtime.precision=fp16" in format_entries("precision", entries)[0]


@pytest.mark.parametrize(("batch", "speed"), [(8, 0.5), (32, 2.0)])
def test_another_batch_is_compared_by_samples(batch, speed, monkeypatch):
    """Each step takes as long: half the batch is half as fast."""
    monkeypatch.setattr(measure, "time_steps", lambda loops, *_: {key: [7.0] for key in loops})
    eager = [*TINY, "runtime=eager"]
    case = Case("x", measure.compare, [*eager, f"batch_size={batch}"], eager)
    entry = measure.compare(case, plan_job("step", QUICK).cfg)
    assert entry["speed"] == speed
    assert entry["samples_per_s"] == pytest.approx(1e3 * batch / 7.0)


def test_planned_memory_stands_beside_the_measured():
    job = plan_job("plan", [*QUICK, "rows=[eager]"])
    assert job.cases[0].overrides[-1] == "runtime=eager"
    entry = measure.measure_planned(job.cases[0], job.cfg)
    assert entry["predicted_bytes"] > 4 * entry["parameters"]
    # A CPU's allocator tells no peak.
    assert entry["memory_reserved_peak"] is entry["memory_error"] is None


PLANTED_TESTS = """
from pytest import mark, skip

@mark.gpu
def test_good(): pass

@mark.gpu
def test_bad(): assert 1 == 2, 'planted'

@mark.gpu
def test_absent(): skip('no such card')
"""
"""Tests as a file; the bench takes a file for one of GPU tests that spells the mark in full."""


def test_an_image_without_tests_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    entry = measure.run_gpu_tests(Case("smoke", None), None)
    assert "the folder tests/ is not here" in entry["reason"]


@pytest.mark.slow
def test_the_outcomes_of_gpu_tests_are_counted(tmp_path, monkeypatch):
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED_TESTS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    entry = measure.run_gpu_tests(Case("x", None, [str(file)]), None)
    assert [entry[kind] for kind in ("passed", "failed", "skipped", "errors")] == [1, 1, 1, 0]
    assert entry["error"].startswith("pytest: 1 failed, 1 passed, 1 skipped")
    assert "assert 1 == 2" in entry["text"]
    assert "SKIPPED [1] " in entry["text"]
    assert measure.count_outcomes("", 4)["error"] == "pytest: pytest printed nothing"
