"""The benchmarks, at their tiny size: what they measure is real, what they say follows from it."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from scripts.bench.naive import NaiveLoop, stream_order
from scripts.bench.report import entries_table, table
from scripts.bench.rows import Results, Row, figures_of
from scripts.bench.settings import SETTINGS, BenchConfig, parse
from scripts.bench.workload import Workload

from accel.kernels.add_norm import add_norm
from accel.kernels.bidirectional_ssd import bidirectional_ssd
from accel.stack import TECHNIQUES
from accel.techniques.compilation import Compile
from accel.techniques.gradient_checkpointing import CheckpointBlocks
from common.files import ROOT
from scripts.bench import compare, kernels, ladder, peers, seeds, step, tests, trace, variants
from scripts.bench.__main__ import COMMANDS
from scripts.bench.__main__ import main as bench
from scripts.bench.step import PhaseClock, Work, verdict
from scripts.timing import Spread, difference, interleaved
from training.config.compose import compose

CPU = torch.device("cpu")
TINY = [
    *SETTINGS["tiny"],
    "runtime.device=cpu",
    "schedule.kind=constant",
    "schedule.warmup_samples=0",
]
QUICK = ["setting=tiny", "steps=1", "repeats=1", "runtime.device=cpu"]


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    yield
    torch._dynamo.config.recompile_limit = 8


def result(command: str, tmp_path, *words: str) -> dict[str, dict]:
    """Row -> entry, in the order of the plan; no row may have failed."""
    bench([command, *QUICK, f"out={tmp_path}", *words])
    return {entry["name"]: entry for entry in Results(tmp_path).of(f"{command}_tiny")}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_what_they_say(setting):
    cfg = compose(SETTINGS[setting]).cfg
    if setting == "tiny":
        return
    assert cfg.batch_size == int(setting[1:])
    data = cfg.data
    assert (data["channels"], data["height"], data["width"], data["count"]) == (4, 32, 32, 50_000)
    assert cfg.model == compose([f"model=ssd_mlp_{setting[0]}"]).cfg.model


def test_words_are_the_commands_own_or_overrides():
    cfg, overrides = parse(
        BenchConfig, "step", ["setting=s32", "steps=7", "runtime=max", "model=dit_s"], ""
    )
    assert (cfg.setting, cfg.steps, cfg.repeats, cfg.name, cfg.out) == (
        "s32",
        7,
        5,
        "step_s32",
        "bench",
    )
    assert "model=ssd_mlp_s" not in overrides
    assert overrides[-2:] == ["runtime=max", "model=dit_s"]
    _, overrides = parse(BenchConfig, "step", ["setting=tiny", "data=digits"], "")
    # those were of the data that it replaces
    assert not any(word.startswith("data.") for word in overrides)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "nonsense.*choose one of ladder"),
        (["step", "setting=huge"], "setting=huge.*tiny, s256"),
        (["step", "steps=-1"], "steps=-1 must be at least 1"),
        (["step", "stuff"], "stuff is not of the form key=value"),
        (["compare", "one"], "takes two run folders"),
        (["step", "setting=tiny", "again=true"], "again=True: choose all, failed"),
        (["publish", "nowhere"], "nowhere has no rows.jsonl"),
        (
            ["techniques", "setting=tiny", "precisions=[bf8]"],
            r"precisions=\[bf8\]: choose some of fp32",
        ),
        (["ladder", "setting=tiny", "model.depht=3"], "depht"),
        (["precision", "setting=tiny", "steps=1"], "at least 2 steps"),
    ],
)
def test_mistakes_become_one_sentence(words, message):
    with pytest.raises(ValueError, match=message):
        bench(words)


def test_every_command_has_help(capsys):
    bench([])
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command} " in overview
        if command not in ("compare", "publish"):
            with pytest.raises(SystemExit) as stopped:
                bench([command, "--help"])
            assert stopped.value.code == 0
            assert f"python -m scripts.bench {command}" in capsys.readouterr().out


def test_repeats_are_interleaved_and_turned_round():
    order = []
    taken = interleaved({name: lambda name=name: order.append(name) for name in "abc"}, 2, CPU)
    assert "".join(order) == "abccba"
    assert {name: len(values) for name, values in taken.items()} == {"a": 2, "b": 2, "c": 2}
    # a slow round is no matter
    assert Spread.of_ratio([4.0, 8.0, 4.0], [2.0, 4.0, 4.0]).median == 2.0
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3, 1.5, 2.5)
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0, 1, 4.0, 4.0)


def test_a_ratio_whose_quartiles_straddle_one_is_no_difference():
    for q1, q3, said in (
        (1.1, 1.2, "gain"),
        (0.8, 0.9, "loss"),
        (0.9, 1.1, "no difference"),
        (1.0, 1.0, "no difference"),
    ):
        assert difference({"speed_q1": q1, "speed_q3": q3}, "speed") == said


DIGITS = [word for word in TINY if not word.startswith("data")] + ["data=digits"]


@pytest.mark.parametrize(
    ("storage", "overrides"),
    [("npy", TINY), ("memory", TINY), ("resident", TINY), ("memory", DIGITS)],
)
def test_the_newcomers_loop_learns_as_the_framework_does(storage, overrides, tmp_path):
    """Same weights, samples, noise, rates: what differs is how, not what."""
    naive = NaiveLoop(overrides, storage=tmp_path / "items" if storage == "npy" else storage)
    ours = Workload([*overrides, "runtime=eager"])
    assert math.isclose(naive.final_loss(6), ours.final_loss(6), rel_tol=1e-5)
    assert naive.final_loss(2) != ours.final_loss(3)
    for a, b in zip(naive.model.parameters(), ours.model.parameters(), strict=True):
        assert a.shape == b.shape


def test_the_newcomers_order_is_the_streams():
    ours = Workload([*TINY, "runtime=eager"])
    ids = [i for _ in range(3) for i in next(ours.loader).ids.tolist()]
    order = stream_order(ours.loader.spec.count, ours.cfg.seed)
    assert ids == [next(order) for _ in ids]


def test_the_ladder_climbs_from_a_newcomer_to_max(tmp_path, capsys):
    found = result("ladder", tmp_path, "num_workers=0", "loss_steps=2")
    assert len(found) == 5 + len(ladder.TECHNIQUES)
    assert next(iter(found)) == "0 newcomer, a file per sample"
    assert found[ladder.RUNG_0]["speed"] == 1.0
    measured = {name: rung for name, rung in found.items() if "reason" not in rung}
    for rung in measured.values():
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
    assert measured["+ compiled blocks"]["not_on"] == []
    last = compose([*TINY, "runtime=max"]).cfg.runtime
    words = {added for _, added in ladder.TECHNIQUES}
    for kind in TECHNIQUES:  # the top of the ladder is max and what this version cannot do yet
        on = getattr(last, kind.key) is True
        assert not on or f"runtime.{kind.key}=true" in words or kind.key == "residual_in_fp32"
    assert "runtime.precision=bf16" in words
    _, bars = ladder.bars(
        [*found.values(), found["+ compiled blocks"] | {"name": "asked for", "not_on": ["compile"]}]
    )
    assert {bar.label for bar in bars} == set(measured)  # a rung that was not on is not drawn
    assert str(ROOT) not in (tmp_path / "rows.jsonl").read_text()  # results are published
    assert "×rung 0" in capsys.readouterr().out


def test_what_was_measured_with_this_code_is_not_measured_again(tmp_path, capsys):
    result("doctor", tmp_path)
    once = (tmp_path / "rows.jsonl").read_bytes()
    result("doctor", tmp_path)
    assert (tmp_path / "rows.jsonl").read_bytes() == once
    assert capsys.readouterr().out.count("with this code") == 2
    result("doctor", tmp_path, "again=all")
    assert len((tmp_path / "rows.jsonl").read_bytes().splitlines()) == 4


def test_a_step_is_taken_apart(tmp_path, capsys):
    found = result("step", tmp_path, "runtime=fast")["step"]
    names = {phase["name"] for phase in found["phases"]}
    assert set(step.PHASES) <= names
    assert all(phase["device_ms"] >= 0 for phase in found["phases"])
    assert found["verdict"]["bound"] in ("data-bound", "compute-bound", "bandwidth-bound")
    assert "Try next" in capsys.readouterr().out


def test_the_phase_clock_sums_what_lies_between_marks():
    clock = PhaseClock(CPU)
    clock.marks = [
        ("start", None, 0.0),
        ("forward", None, 1.0),
        ("backward", None, 3.0),
        ("forward", None, 3.5),
    ]
    device, host = clock.read()
    assert device == host == {"forward": 1500.0, "backward": 2000.0}


def test_products_are_told_from_the_rest_by_name():
    times = {
        "nvjet_tst_128x256_64x4_2x1": 3e3,
        "triton_poi_fused_convolution_mm_3": 2e3,
        "aten::mm": 1e3,
        "memcpy": 4e3,
    }
    assert step.work(times) == Work(10.0, 4.0)


ALL = {f"runtime.{key}=true" for key in ("compile", "cuda_graph", "fused_adamw", "tf32")} | {
    "runtime.precision=bf16"
}


@pytest.mark.parametrize(
    ("step_ms", "data_ms", "work", "bound", "first"),
    [
        (10.0, 2.0, Work(9.0, 8.0), "data-bound", "data=resident"),
        (10.0, 0.1, Work(4.0, 3.0), "launch-bound", "runtime.cuda_graph=true"),
        (10.0, 0.1, Work(9.5, 8.0), "compute-bound", "runtime.precision=bf16"),
        (10.0, 0.1, Work(9.5, 2.0), "bandwidth-bound", "runtime.compile=true"),
    ],
)
def test_the_verdict(step_ms, data_ms, work, bound, first):
    found = verdict(step_ms, data_ms, work, ALL, cuda=True)
    assert (found.bound, found.keys[0]) == (bound, first)
    on_already = verdict(step_ms, data_ms, work, set(), cuda=True)
    assert on_already.keys
    assert not any(key.startswith("runtime.") for key in on_already.keys)


def test_a_cpu_is_never_bound_by_launches():
    assert verdict(10.0, 0.1, Work(4.0, 3.0), ALL, cuda=False).bound == "compute-bound"


def test_a_trace_opens(tmp_path):
    trace.main([*QUICK, f"out={tmp_path}"])
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "trace_tiny.json").read_text())["traceEvents"]
    }
    assert "aten::mm" in names


@pytest.mark.slow
def test_techniques_are_measured_alone_and_removed(tmp_path):
    found = result("techniques", tmp_path, "loss_steps=1").values()
    alone = [e for e in found if e["part"] == "alone"]
    by_key = {kind.key: [e for e in alone if e["key"] == kind.key] for kind in TECHNIQUES}
    assert all(by_key.values())
    for entries in by_key.values():
        for e in entries:
            assert ("reason" in e) != ("speed" in e)
            assert "speed" not in e or e["lost"] == []
    removed = [e for e in found if e["part"] == "removed"]
    assert {e["key"] for e in removed} >= {"compile", "fused_adamw"}
    assert all(
        e["ledger"][e["key"]] is False for e in removed if e["key"] in ("compile", "fused_adamw")
    )
    assert len(by_key["gradient_checkpointing"]) == 2 * len(CheckpointBlocks.examples)
    # not unused
    assert {e["ledger"]["attention"] for e in by_key["attention"] if "speed" in e} == {
        "flash",
        "math",
    }


def test_techniques_are_judged_over_eager_in_fp32_and_in_bf16():
    cfg = variants.TechniquesConfig(setting="tiny")
    found = list(variants.alone(cfg, TINY, CPU))
    assert {(v.labels["key"], v.labels["over"]) for v in found} == {
        (kind.key, over)
        for kind in TECHNIQUES
        for over in ("fp32", "bf16")
        if variants.ONLY_OVER.get(kind.key, over) == over
    }
    some = {variant.labels["key"]: variant for variant in found if variant.labels["over"] == "bf16"}
    for key in ("attention", "residual_in_fp32", "fused_adamw"):
        base, own = (compose(words).cfg for words in (some[key].baseline, some[key].overrides))
        assert base.runtime.precision.value == "bf16"
        assert base.runtime != own.runtime
        assert base.model == own.model
        assert ("Attention" in str(own.model)) == (key == "attention")


def test_operators_are_measured_beside_their_definitions(tmp_path, monkeypatch):
    found = result("kernels", tmp_path, "inductor=false")
    assert len(found) == 7 * 3 * 2
    assert "bidirectional_ssd, gated fused, both passes" in found
    measured = [entry for entry in found.values() if "reason" not in entry]
    assert len(measured) == 7 * 2  # a CPU has no fused ones
    assert all(entry["us"] > 0 and entry["gb_s"] > 0 and entry["speed"] == 1 for entry in measured)
    assert kernels.bars(measured)[1] == []  # the definition beside itself
    op = next(op for op in kernels.operators("tiny", CPU) if op.name == "local_mix")
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    def definition(*inputs: torch.Tensor):
        now[0] += 1.0
        return op.definition(*inputs)

    monkeypatch.setattr("scripts.timing.time", SimpleNamespace(perf_counter=clock))
    timed = op._replace(definition=definition)
    shared = kernels.Kernels(BenchConfig(setting="tiny", steps=1, repeats=3), CPU)
    four = shared.measure(
        timed, lambda *inputs: [definition(*inputs) for _ in range(4)].pop(), backward=False
    )
    assert four["speed"] == pytest.approx(0.25, rel=1e-4)


def scan_of_raw_steps(x, dt, A, B_in, C_out, chunk_size, *, D, dt_bias, dt_softplus):
    """What mamba-ssm's function of these arguments computes."""
    assert dt_softplus
    step = torch.nn.functional.softplus(dt + dt_bias)
    y = causal_scan(x, step, step * A, B_in, C_out)
    return y if D is None else y + D[:, None] * x


def causal_scan(x, step, a, B_in, C_out):
    """Token by token."""
    state = torch.zeros(x.shape[0], x.shape[2], B_in.shape[-1], x.shape[3], dtype=x.dtype)
    y = []
    for i in range(x.shape[1]):
        decay = a[:, i].exp()[..., None, None]
        state = state * decay + torch.einsum("bk,bn,bkp->bknp", step[:, i], B_in[:, i, 0], x[:, i])
        y.append(torch.einsum("bn,bknp->bkp", C_out[:, i, 0], state))
    return torch.stack(y, 1)


def test_other_packages_are_called_for_the_same_work():
    """Their glue, on stand-ins that compute what their documentation says."""
    from tests.test_kernels import ssd_inputs
    from tests.test_operators import add_norm_inputs

    def rms_norm(x, weight, bias, *, residual, eps, prenorm, residual_in_fp32, is_rms_norm=True):
        assert prenorm
        assert residual_in_fp32
        z = x + residual
        return torch.nn.functional.rms_norm(z, weight.shape, weight.to(z), eps), z

    def liger(x, residual, weight, eps):
        return rms_norm(
            x, weight, None, residual=residual, eps=eps, prenorm=True, residual_in_fp32=True
        )

    def simple_gla(q, k, v, *, g, scale):
        one = torch.ones_like(g)
        heads = [
            causal_scan(v[:, :, [h]], one[..., [h]], g[..., [h]], k[:, :, [h]], q[:, :, [h]])
            for h in range(v.shape[2])
        ]
        return scale * torch.cat(heads, 2), None

    inputs = [t.detach() for t in add_norm_inputs()]
    for made in (
        peers.add_norm_by_layer_norm_fn(SimpleNamespace(layer_norm_fn=rms_norm)),
        peers.add_norm_by_rms_norm(SimpleNamespace(rms_norm=rms_norm)),
        peers.add_norm_by_liger(
            SimpleNamespace(LigerFusedAddRMSNormFunction=SimpleNamespace(apply=liger))
        ),
    ):
        for a, e in zip(made(*inputs), add_norm(*inputs), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
    scan = [t.detach() for t in ssd_inputs(9)]
    by_mamba = peers.ssd_by_mamba(SimpleNamespace(mamba_chunk_scan_combined=scan_of_raw_steps))
    by_fla = peers.ssd_by_simple_gla(SimpleNamespace(chunk_simple_gla=simple_gla))
    x, dt, dt_bias, _, B_in, C_out, _ = scan
    step = torch.nn.functional.softplus(dt + dt_bias)[:, :, 1]
    # which it counts twice
    own = (B_in * C_out)[:, :, 1].sum(-1)[..., None, None] * step[..., None] * x
    for made in (by_mamba, by_fla):
        torch.testing.assert_close(
            made(*scan)[0], bidirectional_ssd(*scan) + own, rtol=1e-5, atol=1e-6
        )


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    gone = peers.Peer("fla", "no_such_module", "add_norm", peers.add_norm_by_rms_norm)
    monkeypatch.setattr(peers, "PEERS", (gone,))
    assert peers.found() == (
        {},
        {"add_norm of fla": "ModuleNotFoundError: No module named 'no_such_module'"},
    )


def test_mixers_are_compared_at_equal_parameters_and_at_equal_flops(tmp_path, capsys):
    assert [*variants.models_of("xs", [])] == ["dit", "conv", "mamba", "ssd_mlp", "zigzag"]
    found = result("mixers", tmp_path, "size=xs", "batch_size=8", "families=[ssd_mlp]")
    assert list(found) == ["dit", "ssd_mlp"]
    assert found["dit"]["speed"] == 1.0
    assert all(
        abs(entry["parameters"] / found["dit"]["parameters"] - 1) < 0.2 for entry in found.values()
    )
    base = {
        "speed_q1": 1.9,
        "speed_q3": 2.1,
        "not_on": [],
        "samples_per_s": 1.0,
        "mfu": None,
    } | found["dit"]
    double = base | {
        "name": "mamba",
        "speed": 2.0,
        "speed_q1": 1.9,
        "flops_a_sample": base["flops_a_sample"] / 2,
    }
    lines = variants.mixers_texts([found["dit"], double])[-1].splitlines()
    cells = dict(zip(re.split(r"  +", lines[0].strip()), lines[2].split()[1:], strict=False))
    assert (cells["×attention"], cells["at equal FLOPs"]) == ("2.00", "1.00")
    with pytest.raises(ValueError, match="size=huge"):
        bench(["mixers", "setting=tiny", "size=huge", f"out={tmp_path}"])
    with pytest.raises(ValueError, match=r"families=\[mambda\]: choose some of conv, dit, mamba"):
        bench(["mixers", "setting=tiny", "families=[mambda]", f"out={tmp_path}"])


@pytest.mark.slow
def test_precisions_are_compared_over_seeds(tmp_path, monkeypatch):
    from accel.techniques.precision import Precision

    monkeypatch.setattr(Precision, "unavailable", lambda self: None)
    found = list(result("precision", tmp_path, "steps=4", "seeds=[0,1]").values())
    assert [(entry["seed"], entry["precision"]) for entry in found] == [
        (seed, name) for seed in (0, 1) for name in variants.PRECISIONS
    ]
    assert found[0]["final_loss"] != found[3]["final_loss"]
    shown = seeds.precision_texts(found)[0].splitlines()
    assert [line.split()[:2] for line in shown[2:]] == [[name, "2"] for name in variants.PRECISIONS]


@pytest.mark.slow
def test_measures_against_too_little_memory_are_counted(tmp_path):
    found = result("memory", tmp_path, "steps=2", "seeds=[0,1]", "pretend=true")
    assert {entry["measure"] for entry in found.values() if entry["seed"] == 0} == {*seeds.MEASURES}
    assert {entry["measure"] for entry in found.values() if entry["seed"] == 1} == {*seeds.SEEDED}
    assert not [name for name, entry in found.items() if "error" in entry or entry["lost"]]
    each = {e["measure"]: e["optimizer_bytes"] / e["parameters"] for e in found.values()}
    assert (
        each["adamw"]
        == pytest.approx(8.0, abs=0.1)
        > 3 * each["adamw_8bit"]
        > 3 * each["adamw_4bit"]
    )
    moved = found["offload_optimizer, seed 0"]
    assert moved["on_host_bytes"] > 0.9 * (moved["on_host_bytes"] + moved["optimizer_bytes"])
    lines = seeds.memory_texts(list(found.values()))[0].splitlines()
    assert [line.partition("  ")[0] for line in lines[2:]] == list(seeds.MEASURES)
    refused = result("memory", tmp_path / "refused", "steps=2", "seeds=[0]")[
        "offload_optimizer, seed 0"
    ]
    assert "on cpu" in refused["reason"]


def test_a_gpu_test_is_a_row_with_its_outcome(tmp_path):
    """On planted tests, by a pytest within this one."""
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
    assert len(tests.pytest_main("--collect-only", str(file)).ids) == 3
    rows = [Row(name, partial(tests.run_test, f"{file}::test_{name}")) for name in outcomes]
    entries = [{"name": f"t.py::test_x[{row.name}]"} | figures_of(row) for row in rows]
    assert entries[0]["passed"] is True
    assert "planted" in entries[1]["error"]
    assert entries[2]["reason"] == "no such card"
    assert tests.texts(entries)[0].splitlines()[1].split() == ["t.py::test_x", "1", "1", "1"]
    assert "planted" in tests.texts(entries)[1]
    with pytest.raises(RuntimeError, match="pytest ended with status 4"):
        tests.run_test(f"{file}::test_gone")
    (row,) = tests.plan(tests.TestsConfig(), [], CPU)
    assert row.measure() == {"reason": "needs an NVIDIA GPU"}


def test_two_runs_are_compared(run, tmp_path, capsys):
    run("runtime=eager", folder="a")
    run("runtime=eager", "runtime.fused_adamw=true", "optim.lr=1e-4", folder="b")
    bench(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    shown = capsys.readouterr().out.partition("configuration")[2]
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "optim.lr 0.002 0.0001" in lines
    assert "runtime.fused_adamw False True" in lines
    assert "fused_adamw False → False True → True" in lines
    assert "versions: the same" in lines
    assert any(line.startswith("samples_per_s") and "×" in line for line in lines)
    assert not any(line.startswith("run_dir") for line in lines)


def test_saves_say_how_much_longer_the_steps_take(tmp_path, monkeypatch):
    from scripts.bench import saves

    one_round = saves.one_round

    def clocked(workload, checkpoints, described, steps):
        one_round(workload, checkpoints, described, steps)
        return [1.0, 0.0, 0.0] if checkpoints is None else [3.0, 0.5, 0.0]

    monkeypatch.setattr(saves, "one_round", clocked)
    monkeypatch.chdir(tmp_path)
    ways = result("saves", tmp_path)
    assert {name: way["times_as_long"] for name, way in ways.items()} == {
        "background": 3.0,
        "foreground": 3.0,
    }
    assert ways["background"]["stall_ms"] == 500.0


def test_a_ratio_is_the_second_run_over_the_first():
    assert compare.ratio(200.0, 300) == "×1.500"
    assert compare.ratio(0.0, 300) is None
    assert compare.ratio(None, 300) is None


def test_tables_align():
    lines = table([("name", "ms"), ("a", "1.5"), ("longer", "10.25"), ("none", None)]).splitlines()
    assert lines == ["name       ms", "a         1.5", "longer  10.25", "none        –"]
    assert compare.number(0.1234567) == "0.123457"


def test_a_table_of_entries_has_dashes_where_nothing_was_measured():
    columns = {"ms": "{ms:.1f}", "GiB": "{bytes:GiB}"}
    entries = [
        {"name": "a", "ms": 1.25, "bytes": 2**29, "remark": "fine"},
        {"name": "b", "ms": 10.0, "bytes": None},
        {"name": "c", "reason": "no GPU"},
    ]
    lines = [line.split() for line in entries_table(columns, entries).splitlines()]
    assert lines == [
        ["ms", "GiB"],
        ["a", "1.2", "0.50", "fine"],
        ["b", "10.0", "–"],
        ["c", "–", "–", "no", "GPU"],
    ]
    with pytest.raises(KeyError):
        entries_table({"ms": "{mss}"}, entries)
