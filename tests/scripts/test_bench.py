"""The benchmarks, at their tiny size: what they measure is real, what they say follows from it."""

from __future__ import annotations

import json
import math
import string
import sys
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from accel.kernels.bidirectional_ssd import bidirectional_ssd
from accel.stack import TECHNIQUES
from accel.techniques.compilation import Compile
from accel.techniques.gradient_checkpointing import CheckpointBlocks
from common.files import ROOT
from scripts.bench import TABLES, data, kernels, measure, runner
from scripts.bench.__main__ import main as bench
from scripts.bench.cases import COMMANDS, SETTINGS, Case, plan_job
from scripts.bench.measure import measure_case
from scripts.bench.newcomer import NewcomersLoop, yield_order
from scripts.bench.publish import texts
from scripts.bench.step import Workload, find_bound, sum_busy_ms, sum_phases
from scripts.timing import compute_ratios, shows_no_difference, summarise, time_in_turn
from tests.harness.operators import Sizes, make_ssd
from training.components import foresee_latents
from training.config.compose import compose
from training.weights.pretrained import build_on_meta

CPU = torch.device("cpu")
TINY = [*SETTINGS["tiny"]["words"].split(), "runtime.device=cpu"]
QUICK = ["setting=tiny", "steps=1", "repeats=1", "runtime.device=cpu"]


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    yield
    measure.BASELINE_CACHE.clear()


def measured(command: str, tmp_path, *words: str) -> dict[str, dict]:
    """Case -> entry, measured here; none failed, and the table has a figure in every column."""
    planned = plan_job(command, [*QUICK, f"out={tmp_path}", *words])
    entries = [
        {"name": case.name, **case.labels, **measure_case(case, planned.cfg)}
        for case in planned.cases
    ]
    assert not [entry for entry in entries if "error" in entry]
    given = {key for entry in entries for key in entry} | {"times_before"}
    for form in TABLES["columns"].get(command, {}).values():
        assert {key for _, key, _, _ in string.Formatter().parse(form) if key} <= given
    assert all(entry["name"] in texts(command, entries)[0] for entry in entries)
    return {entry["name"]: entry for entry in entries}


def test_the_setting_of_512_tokens_has_them():
    cfg = compose(SETTINGS["s32x512"]["words"].split()).cfg
    model = build_on_meta(cfg.model, foresee_latents(cfg.data, cfg.seed, 2**40)[0])
    assert (model.tokens, cfg.batch_size) == (kernels.SHAPES["s32x512"][1], 32) == (512, 32)
    sizes = kernels.find_sizes("s32x512") | {"B": 1}
    for name in ("local_mix", "qk_rope"):  # those that know the grid
        made = kernels.make_operators("s32x512", CPU)[name].definition(
            *kernels.draw_inputs(name, sizes, CPU)
        )
        assert 512 in tree_leaves(made)[0].shape


@pytest.mark.parametrize("setting", ["s32", "s256", "b256"])
def test_settings_are_what_they_say(setting):
    cfg = compose(SETTINGS[setting]["words"].split()).cfg
    assert cfg.batch_size == int(setting[1:])
    shape = tuple(cfg.data[key] for key in ("channels", "height", "width", "count"))
    assert shape == (4, 32, 32, 50_000)
    assert cfg.model == compose([f"model=ssd_mlp_{setting[0]}"]).cfg.model
    assert set(kernels.SHAPES) == set(SETTINGS)


def test_words_are_the_commands_own_or_overrides():
    planned = plan_job(
        "step", ["setting=s32", "steps=7", "runtime=max", "model=dit_s", "out=x", "again=all"]
    )
    cfg = planned.cfg
    overrides = planned.cases[0].overrides
    assert (cfg.setting, cfg.steps, cfg.repeats, cfg.loss_steps, cfg.name) == (
        "s32",
        7,
        5,
        7,
        "step_s32",
    )
    assert "model=ssd_mlp_s" not in overrides
    assert overrides[-2:] == ["runtime=max", "model=dit_s"]
    assert (
        planned.command
        == "python -m scripts.bench step setting=s32 steps=7 runtime=max model=dit_s"
    )
    overrides = plan_job("step", ["setting=tiny", "data=digits"]).cases[0].overrides
    assert not any(
        word.startswith("data.") for word in overrides
    )  # those were of the data that it replaces


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "nonsense.*choose one of doctor"),
        (["step", "setting=huge"], "setting=huge.*tiny, s32"),
        (["step", "steps=-1"], "steps=-1 must be at least 0"),
        (["step", "stuff"], "stuff is not of the form key=value"),
        (["publish", "nowhere"], "nowhere has no results"),
        (
            ["techniques", "setting=tiny", "precisions=[bf8]"],
            r"precisions=\[bf8\]: choose some of fp32",
        ),
        (["ladder", "setting=tiny", "model.depht=3"], "depht"),
        (["mixers", "setting=tiny", "size=huge"], "size=huge: there is no such size"),
        (
            ["mixers", "setting=tiny", "families=[mambda]"],
            r"families=\[mambda\]: choose some of conv, dit, mamba",
        ),
        (["tests", "select=some"], "select=some: choose all, smoke or rest"),
    ],
)
def test_mistakes_become_one_sentence(words, message):
    with pytest.raises(ValueError, match=message):
        bench(words)


def test_every_command_has_help(capsys):
    bench([])
    overview = capsys.readouterr().out
    assert all(f"\n    {command} " in overview for command in (*COMMANDS, "gpu", "publish"))
    for command in (*COMMANDS, "gpu"):
        with pytest.raises(SystemExit) as stopped:
            bench([command, "--help"])
        assert stopped.value.code == 0
        assert "\nsetting: " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_command_prints_its_table_and_fails_with_a_case(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "SPAWN", get_context("fork"))
    bench(["doctor", "setting=tiny", f"out={tmp_path}"])
    once = [file.read_bytes() for file in tmp_path.glob("*/*.json")]
    assert "copy_gb_s" in capsys.readouterr().out
    assert str(ROOT) not in once[0].decode()  # results are published
    with pytest.raises(SystemExit, match="1 of 1 cases failed: step"):
        bench(["step", "setting=tiny", "data=resident", f"data.path={tmp_path}", f"out={tmp_path}"])
    assert "manifest.json" in capsys.readouterr().out


def test_repeats_are_interleaved_and_turned_round():
    order = []
    taken = time_in_turn({name: lambda name=name: order.append(name) for name in "abc"}, 2, CPU)
    assert "".join(order) == "abccba"
    assert {name: len(values) for name, values in taken.items()} == {"a": 2, "b": 2, "c": 2}
    assert compute_ratios([4.0, 8.0, 4.0], [2.0, 4.0, 4.0]) == [2.0, 2.0, 1.0]
    ends = {"ms_min": 1.0, "ms_q1": 1.5, "ms": 2.0, "ms_q3": 2.5, "ms_max": 3.0}
    assert summarise("ms", [3.0, 1.0, 2.0]) == ends | {"n": 3}
    assert summarise("ms", [4.0]) == dict.fromkeys(ends, 4.0) | {"n": 1}


def test_a_ratio_whose_quartiles_straddle_one_is_no_difference():
    for q1, q3, same in ((1.1, 1.2, False), (0.8, 0.9, False), (0.9, 1.1, True), (1.0, 1.0, True)):
        assert shows_no_difference({"speed_q1": q1, "speed_q3": q3}, "speed") == same


DIGITS = [word for word in TINY if not word.startswith("data")] + ["data=digits"]


@pytest.mark.parametrize(
    ("storage", "overrides"),
    [("files", TINY), ("memory", TINY), ("resident", TINY), ("memory", DIGITS)],
)
def test_the_newcomers_loop_learns_as_the_framework_does(storage, overrides, tmp_path, monkeypatch):
    """Same weights, samples, noise, rates: what differs is how, not what."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    naive = NewcomersLoop(overrides, storage)
    ours = Workload([*overrides, "runtime=eager"])
    assert math.isclose(naive.measure_loss(6), ours.measure_loss(6), rel_tol=1e-5)
    assert naive.measure_loss(2) != ours.measure_loss(3)
    for a, b in zip(naive.model.parameters(), ours.training.model.parameters(), strict=True):
        assert a.shape == b.shape


def test_the_newcomers_order_is_the_streams():
    loader = Workload([*TINY, "runtime=eager"]).training.loader
    ids = [i for _ in range(3) for i in next(loader).ids.tolist()]
    order = yield_order(loader.spec.count, 0)
    assert ids == [next(order) for _ in ids]


def test_the_ladder_climbs_from_a_newcomer_to_max(tmp_path, monkeypatch):
    monkeypatch.setattr(
        measure, "count_bytes", lambda loop: None
    )  # counting takes longer than these steps
    found = measured("ladder", tmp_path, "num_workers=0", "loss_steps=2")
    rungs = TABLES["rungs"]
    assert len(found) == 4 + len(rungs)
    assert next(iter(found)) == "0 newcomer, a file per sample"
    assert found["0 newcomer, items in memory"]["speed"] == 1.0
    there = {name: rung for name, rung in found.items() if "reason" not in rung}
    for rung in there.values():
        assert (
            rung["step_ms_min"]
            <= rung["step_ms_q1"]
            <= rung["step_ms"]
            <= rung["step_ms_q3"]
            <= rung["step_ms_max"]
        )
        assert rung["n"] == 1
        assert abs(rung["loss_deviation"]) < 1e-2
    assert "GPU" in found["+ tf32"]["reason"]
    assert there["+ compiled blocks"]["not_on"] == []
    last = compose([*TINY, "runtime=max"]).cfg.runtime
    for kind in TECHNIQUES:  # the top of the ladder is max and what this version cannot do yet
        on = getattr(last, kind.key) is True
        assert (
            not on or f"runtime.{kind.key}=true" in rungs.values() or kind.key == "residual_in_fp32"
        )
    assert "runtime.precision=bf16" in rungs.values()


def test_a_step_is_taken_apart(tmp_path):
    found = measured("step", tmp_path, "runtime=fast")["step"]
    assert {"data", "forward", "backward", "optimizer", "ema", "logging"} <= set(found["phases_ms"])
    assert all(ms >= 0 for ms in found["phases_ms"].values())
    assert found["verdict"]["bound"] in ("data-bound", "compute-bound", "bandwidth-bound")
    assert "Try next" in found["text"]


def test_a_phase_takes_what_lies_between_its_marks():
    marks = [("start", 0.0), ("forward", 1.0), ("backward", 3.0), ("forward", 3.5)]
    assert sum_phases(marks) == {"forward": 1500.0, "backward": 2000.0}


def test_products_are_told_from_the_rest_by_name():
    times = {
        "nvjet_tst_128x256": 3e3,
        "triton_poi_fused_convolution_mm_3": 2e3,
        "aten::mm": 1e3,
        "Memcpy": 4e3,
    }
    assert sum_busy_ms(
        [SimpleNamespace(key=name, self_cpu_time_total=us) for name, us in times.items()], False
    ) == (10, 4)


ALL = {f"runtime.{key}=true" for key in ("compile", "cuda_graph", "fused_adamw", "tf32")} | {
    "runtime.precision=bf16"
}


@pytest.mark.parametrize(
    ("step_ms", "data_ms", "busy", "share", "bound", "first"),
    [
        (10.0, 2.0, 9.0, 0.9, "data-bound", "data=resident"),
        (10.0, 0.1, 4.0, 0.8, "launch-bound", "runtime.cuda_graph=true"),
        (10.0, 0.1, 9.5, 0.8, "compute-bound", "runtime.precision=bf16"),
        (
            10.0,
            0.1,
            None,
            0.8,
            "compute-bound",
            "runtime.precision=bf16",
        ),  # a CPU is never bound by launches
        (10.0, 0.1, 9.5, 0.2, "bandwidth-bound", "runtime.compile=true"),
    ],
)
def test_the_verdict(step_ms, data_ms, busy, share, bound, first):
    found, _, keys = find_bound(step_ms, data_ms, busy, share, ALL, {})
    assert (found, keys[0]) == (bound, first)
    _, _, on_already = find_bound(step_ms, data_ms, busy, share, set(), {})
    assert on_already
    assert not any(key.startswith("runtime.") for key in on_already)


def test_a_profile_is_a_table_and_a_trace(tmp_path):
    found = measured("profile", tmp_path)["profile"]
    assert "aten::mm" in found["text"]
    trace = json.loads((tmp_path / found["trace"]).read_text())["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in trace}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_techniques_are_measured_alone_and_removed(tmp_path):
    found = measured("techniques", tmp_path, "loss_steps=1").values()
    alone = [e for e in found if e["part"] == "alone"]
    by_key = {kind.key: [e for e in alone if e["key"] == kind.key] for kind in TECHNIQUES}
    assert all(by_key.values())
    for entries in by_key.values():
        for e in entries:
            assert ("reason" in e) != ("speed" in e)
            assert "speed" not in e or {*e["not_on"]} <= {*e["baseline_not_on"]}
    removed = [e for e in found if e["part"] == "removed" and "reason" not in e]
    assert {e["key"] for e in removed} >= {"compile", "fused_adamw"}
    assert all(
        e["ledger"][e["key"]]["active"] is False
        for e in removed
        if e["key"] in ("compile", "fused_adamw")
    )
    assert len(by_key["gradient_checkpointing"]) == 2 * len(CheckpointBlocks.examples)
    attention = {e["ledger"]["attention"]["active"] for e in by_key["attention"] if "speed" in e}
    assert attention == {"flash", "math"}  # not unused


def test_techniques_are_judged_over_eager_in_fp32_and_in_bf16():
    found = [case for case in plan_job("techniques", QUICK).cases if case.labels["part"] == "alone"]
    exceptions = TABLES["techniques"]
    assert {(case.labels["key"], case.labels["over"]) for case in found} == {
        (kind.key, over)
        for kind in TECHNIQUES
        for over in ("fp32", "bf16")
        if exceptions.get(kind.key, {}).get("over", over) == over
    }
    some = {case.labels["key"]: case for case in found if case.labels["over"] == "bf16"}
    for key in ("attention", "residual_in_fp32", "fused_adamw"):
        base, own = (compose(words).cfg for words in (some[key].baseline, some[key].overrides))
        assert base.runtime.precision.value == "bf16"
        assert base.runtime != own.runtime
        assert base.model == own.model
        assert ("Attention" in str(own.model)) == (key == "attention")


def test_what_cannot_be_had_is_a_reason_and_what_compiles_can_be_left_out():
    cfg = plan_job("step", [*QUICK, "inductor=false"]).cfg
    case = Case("x", lambda case, cfg: {"value": 1}, TINY)
    assert measure_case(case, cfg) == {"value": 1}
    assert "GPU" in measure_case(case._replace(needs=["runtime.tf32=true"]), cfg)["reason"]
    assert "error" not in measure_case(case._replace(needs=["runtime.tf32=false"]), cfg)
    assert measure_case(case._replace(needs=["runtime.compile=true"]), cfg) == {
        "reason": "left out: inductor=false"
    }
    assert case._replace(overrides=["runtime=max"]).expected > 2 * case.expected


def test_operators_are_measured_beside_their_definitions(tmp_path, monkeypatch):
    found = measured("kernels", tmp_path, "inductor=false")
    assert len(found) == len(kernels.INPUTS) * 3 + 2
    there = [entry for entry in found.values() if "reason" not in entry]
    assert len(there) == len(kernels.INPUTS)  # a CPU has no fused ones
    assert all(entry["us"] > 0 and entry["gb_s"] > 0 and entry["speed"] == 1 for entry in there)
    assert kernels.count_bytes(kernels.Op(torch.neg, torch.neg), [torch.zeros(4)]) == 5 * 16
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    def definition(*inputs: torch.Tensor):
        now[0] += 1.0
        return torch.stack([t.float().sum() for t in inputs]).sum()

    def four(*inputs: torch.Tensor):
        return [definition(*inputs) for _ in range(4)].pop()

    monkeypatch.setattr("scripts.timing.time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(
        kernels, "make_operators", lambda setting, device: {"swiglu": kernels.Op(definition, four)}
    )
    monkeypatch.setattr(
        kernels, "measure_rates_once", lambda device: {"copy_gb_s": 1.0, "fp32_product_tflops": 1.0}
    )
    monkeypatch.setitem(kernels.OURS, "compiled", lambda op: op.fused)
    case = Case("x", kernels.time_kernel, labels={"operator": "swiglu", "way": "compiled"})
    entry = kernels.time_kernel(case, plan_job("kernels", QUICK).cfg)
    assert (entry["speed"], entry["forward_speed"]) == pytest.approx((0.25, 0.25), rel=1e-4)


def causal_scan(x, dt, A, B_in, C_out, *, chunk_size, D, dt_bias, dt_softplus):
    """What mamba-ssm's function of these arguments computes, token by token."""
    assert dt_softplus
    step = torch.nn.functional.softplus(dt + dt_bias)
    state = torch.zeros(x.shape[0], x.shape[2], B_in.shape[-1], x.shape[3], dtype=x.dtype)
    y = []
    for i in range(x.shape[1]):
        decay = (step * A)[:, i].exp()[..., None, None]
        state = state * decay + torch.einsum("bk,bn,bkp->bknp", step[:, i], B_in[:, i, 0], x[:, i])
        y.append(torch.einsum("bn,bknp->bkp", C_out[:, i, 0], state))
    return torch.stack(y, 1) + D[:, None] * x


def test_other_packages_are_called_for_the_same_work(monkeypatch):
    """Their glue, on stand-ins that compute what their documentation says."""
    scan = SimpleNamespace(mamba_chunk_scan_combined=causal_scan)
    product = SimpleNamespace(apply=lambda a, b: torch.nn.functional.silu(a) * b)
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", scan)
    monkeypatch.setitem(
        sys.modules, "liger_kernel.ops.swiglu", SimpleNamespace(LigerSiLUMulFunction=product)
    )
    x, dt, dt_bias, A_log, B_in, C_out, D = (t.detach() for t in make_ssd(Sizes()).inputs)
    B_in[:, :, 1] = 0.0  # nothing comes from behind
    ours = bidirectional_ssd(x, dt, dt_bias, A_log, B_in, C_out, D)
    theirs = kernels.make_mamba_scan()(x, dt, dt_bias, A_log, B_in, C_out, D)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    joined = torch.randn(2, 3, 8)
    torch.testing.assert_close(kernels.make_liger_swiglu()(joined), kernels.swiglu(joined))


def test_mixers_are_compared_at_equal_parameters(tmp_path):
    families = [case.name for case in plan_job("mixers", [*QUICK, "size=xs"]).cases]
    assert families == ["dit", "conv", "mamba", "mamba1", "ssd_mlp", "zigzag"]
    found = measured("mixers", tmp_path, "size=xs", "batch_size=8", "families=[ssd_mlp]")
    assert list(found) == ["dit", "ssd_mlp"]
    assert found["dit"]["speed"] == 1.0
    assert all(
        abs(entry["parameters"] / found["dit"]["parameters"] - 1) < 0.2 for entry in found.values()
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
def test_loaders_feed_the_same_latents(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LATENTS", {"tiny": (2048, 256, 4)})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = measured("data", tmp_path, "step_ms=1")
    assert list(found) == list(data.LOADERS)
    assert all(entry["samples_per_s"] > 0 and 0 <= entry["wait"] <= 1 for entry in found.values())


def test_precisions_are_compared_over_seeds_also_without_their_instructions(tmp_path, monkeypatch):
    lacking = "_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"
    for name in lacking:
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    refused = plan_job("precision", QUICK)
    assert all("reason" in measure_case(case, refused.cfg) for case in refused.cases[1:])

    words = ["steps=2", "seeds=[0,1]", "runtime.on_unavailable=emulate"]
    found = measured("precision", tmp_path, *words)
    assert all(entry["loss_min"] < entry["loss"] < entry["loss_max"] for entry in found.values())
    assert len({entry["loss"] for entry in found.values()}) == 3  # none is another's arithmetic
    told = [entry.get("emulated") for entry in found.values()]
    assert told == [None, ["runtime.precision=bf16"], ["runtime.precision=fp16"]]
    table = texts("precision", list(found.values()))[0]
    assert "emulated: runtime.precision=fp16" in table


@pytest.mark.parametrize(("batch", "speed"), [(8, 0.5), (32, 2.0)])
def test_another_batch_is_compared_by_samples(batch, speed, monkeypatch):
    """Each step takes as long: half the batch is half as fast."""
    monkeypatch.setattr(
        measure, "time_steps", lambda loops, steps, repeats: {name: [7.0] for name in loops}
    )
    eager = [*TINY, "runtime=eager"]
    case = Case("x", measure.compare, [*eager, f"batch_size={batch}"], eager)
    found = measure.compare(case, plan_job("step", QUICK).cfg)
    assert (found["speed"], found["samples_per_s"]) == (speed, pytest.approx(1e3 * batch / 7.0))
    fewer = found["counted_bytes"] < found["baseline_counted_bytes"]
    assert fewer == (batch < 16)


def test_features_are_planned_over_eager_and_can_be_composed():
    found = [
        case for case in plan_job("techniques", QUICK).cases if case.labels["part"] == "feature"
    ]
    for name, feature in TABLES["features"].items():
        overs = [case.labels["over"] for case in found if case.labels["key"] == name]
        assert overs == ["fp32", "bf16"] if "over" not in feature else [feature["over"]]
    assert {"batch_size=8", "batch_size=32", "batch_size=64"} <= {
        w for c in found for w in c.overrides
    }
    for case in (case for case in found if case.labels["over"] == "fp32"):
        compose([word for word in case.overrides if not word.startswith("newcomer.")])
    loader = next(case for case in found if case.name.startswith("DataLoader, 2 workers × 4"))
    loop = measure.build_loop([*loader.overrides, "data.count=64"])
    assert (loop.num_workers, loop.prefetch_factor) == (2, 4)
    assert loop.measure_loss(2) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("techniques_of_a_gpu")
def test_measures_against_too_little_memory_are_counted(tmp_path):
    found = measured("memory", tmp_path, "steps=2", "seeds=[0]")
    assert list(found) == list(TABLES["memory"])
    each = {name: entry["optimizer_bytes_a_parameter"] for name, entry in found.items()}
    assert (
        each["adamw"]
        == pytest.approx(8.0, abs=0.1)
        > 3 * each["adamw_8bit"]
        > 3 * each["adamw_4bit"]
    )
    moved = found["offload_optimizer"]
    on_host = moved["on_host_bytes_a_parameter"]
    assert on_host > 0.9 * (on_host + moved["optimizer_bytes_a_parameter"])


def test_planned_memory_stands_beside_the_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(TABLES, "planned", {"eager": "runtime=eager"})
    assert plan_job("plan", QUICK).cases[0].overrides[-1] == "runtime=eager"
    case = plan_job("plan", QUICK).cases[0]
    found = measure.measure_planned(case, plan_job("plan", QUICK).cfg)
    assert found["predicted_bytes"] > 4 * found["parameters"]
    assert (found["memory_reserved_peak"], found["memory_error"]) == (None, None)


def test_saves_say_how_fast_the_steps_still_are(tmp_path, monkeypatch):
    clock = {"own": 3.0, "base": 1.0}

    def timed(runs, repeats, device, prepare):
        for name, run in runs.items():
            prepare(name)
            run()
        return {name: [clock[name]] * repeats for name in runs}

    monkeypatch.setattr(measure, "interleaved", timed)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for way in measured("saves", tmp_path).values():
        assert way["speed"] == pytest.approx(1 / 3)
        assert way["stall_ms"] > 0
        assert way["bytes"] > 10_000


def test_the_outcomes_of_gpu_tests_are_counted(tmp_path, monkeypatch):
    """On planted tests; without a GPU there is a reason."""
    assert measure_case(
        plan_job("tests", ["select=smoke"]).cases[0], plan_job("tests", []).cfg
    ) == {"reason": "needs an NVIDIA GPU"}
    file = tmp_path / "test_planted.py"
    outcomes = {
        "good": "pass",
        "bad": "assert 1 == 2, 'planted'",
        "absent": "pytest.skip('no such card')",
    }
    bodies = (
        f"@pytest.mark.gpu\ndef test_{name}():\n    {body}\n" for name, body in outcomes.items()
    )
    file.write_text("import pytest\n" + "\n".join(bodies))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = measure.run_gpu_tests(Case("x", measure.run_gpu_tests, [str(file)]), None)
    assert (found["tests"], found["failed"], found["skipped"]) == (3, 1, 1)
    assert found["error"].startswith("1 failed: test_bad: AssertionError: planted")
    assert "test_absent: no such card" in found["text"]
    monkeypatch.setattr(
        measure.subprocess, "run", lambda *given, **more: SimpleNamespace(returncode=4)
    )
    with pytest.raises(RuntimeError, match="pytest ended with status 4"):
        measure.run_gpu_tests(Case("x", measure.run_gpu_tests, [str(file)]), None)
