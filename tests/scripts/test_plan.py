"""scripts.plan: arithmetic whose parts are checked by themselves, and predictions that every key
moves rightly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel.techniques.gradient_checkpointing import CheckpointBlocks
from accel.techniques.offload_activations import OffloadActivations
from accel.techniques.parallel import DataParallel
from scripts.plan import largest, memory
from scripts.plan.__main__ import main
from scripts.plan.memory import Forecast, Question
from scripts.plan.report import (
    PlanConfig,
    choose_card,
    find_largest_micro_batch,
    forecast_run,
    plan_run,
)
from scripts.plan.savings import count_savings, list_savings
from scripts.plan.scale import Step, share_over_gpus, time_all_reduce, time_exposed, time_gather
from tests.harness.sets import kept_at
from training.assemble import assemble
from training.config.compose import compose
from training.environment import CARDS, GIB, match_card
from training.weights.pretrained import build_on_meta

H200 = CARDS["h200"]
CPU = torch.device("cpu")
SMALL = [
    "model=ssd_mlp_xs",
    "data=synthetic",
    "data.height=8",
    "data.width=8",
    "data.count=4",
    "model.dim=64",
]
BASE = [*SMALL, "model.head_dim=32", "model.depth=6", "batch_size=32", "runtime=eager"]


@contextmanager
def pretended_processes(count: int) -> Iterator[None]:
    """This process is the first of so many inside; what it sends goes nowhere."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of FSDP2 on the block's views, which nobody writes to
def test_fsdp_reduces_once_a_block_and_once_for_the_rest():
    """And gathers as often in each pass, but for the root in the backward pass: what the plan of
    many GPUs takes for granted, at a thousand processes."""
    question = forecast().question
    model = build_on_meta(question.cfg.model, question.spec).to_empty(device="cpu")
    with pretended_processes(1024), CommDebugMode() as seen:
        mesh = dist.init_device_mesh("cpu", (1024,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        latents = torch.zeros(1, 4, 8, 8)
        model(latents, torch.zeros(1), torch.zeros(1, dtype=torch.long)).sum().backward()
    counts = {str(op): n for op, n in seen.get_comm_counts().items()}
    scatters = sum(n for op, n in counts.items() if "scatter" in op)
    assert scatters == model.depth + 1
    assert sum(counts.values()) - scatters == 2 * model.depth + 1


def test_a_gather_moves_the_bytes_that_are_not_there_yet():
    assert time_gather(1e9, 1, H200) == 0.0
    assert time_gather(370e9, 2, H200) == pytest.approx(0.5, rel=1e-4)
    assert time_gather(370e9, 8, H200) == pytest.approx(7 / 8, rel=1e-4)
    assert time_gather(0.0, 16, H200) == pytest.approx(14 * 1e-6 + 5e-6)
    assert time_all_reduce(50e9, 2, 50e9) == pytest.approx(1.0, rel=1e-4)


def test_what_nothing_hides_is_added():
    """Nothing for one GPU; a slow network shows; hsdp sends an eighth between machines, here at 1
    GB/s; narrow gradients take half as long."""
    step = Step(compute=0.01, parameters=648_000_000, width=4, scatters=29)
    large = Step(compute=0.0, parameters=10**9, width=4, scatters=1)
    for way in ("ddp", "fsdp", "hsdp"):
        assert time_exposed(way, 1, step, H200) == 0.0
        fast, slow = (
            time_exposed(way, 64, step, card) for card in (H200, H200._replace(inter_bandwidth=1e9))
        )
        assert 0.0 < fast < slow / 2
    lone = time_exposed("hsdp", 64, large, H200._replace(intra_bandwidth=1e18, inter_bandwidth=1e9))
    assert lone == pytest.approx(2 * 7 / 8 * 0.5, rel=1e-3)
    narrow = large._replace(width=2)
    assert time_exposed("ddp", 64, narrow, H200) < 0.6 * time_exposed("ddp", 64, large, H200)


@cache
def forecast(*words: str, gpus: int = 1) -> Forecast:
    return forecast_run([*BASE, *words], PlanConfig(gpus=gpus), CARDS["h100"])


CHECKPOINTS = ["runtime.gradient_checkpointing=true"]
LESS = [
    (["runtime.precision=bf16"], "kept"),
    (["runtime.residual_in_fp32=false", "runtime.precision=bf16"], "kept"),
    (["runtime.fused_add_norm=auto", "runtime.fused_scan=true"], "kept"),
    (["model=conv_xs", "model.dim=64", "runtime.fused_conv=true"], "kept"),
    pytest.param(["runtime.compile=true"], "kept", marks=pytest.mark.slow),
    (CHECKPOINTS, "kept"),
    ([*CHECKPOINTS, "runtime.checkpoint_policy=every_2"], "kept"),
    ([*CHECKPOINTS, "runtime.checkpoint_policy=selective"], "kept"),
    (["accumulation_steps=4"], "kept"),
    (["runtime.weights=bf16"], "weights"),
    (["optim=adafactor"], "optimizer"),
    (["optim=muon"], "optimizer"),
    (["runtime.offload_optimizer=true"], "optimizer"),
]


@pytest.mark.parametrize(("words", "part"), LESS)
def test_what_saves_memory_saves_it(words: list[str], part: str):
    base = forecast(*[word for word in words if word.startswith("model")])
    assert getattr(forecast(*words).needs, part) < 0.95 * getattr(base.needs, part)


def test_every_key_moves_the_forecast_the_right_way():
    """What LESS does not show."""
    blocks, every_2, selective = (
        forecast(*CHECKPOINTS, f"runtime.checkpoint_policy={policy}").needs.kept
        for policy in ("blocks", "every_2", "selective")
    )
    assert blocks < every_2 < forecast().needs.kept
    assert blocks < selective < forecast().needs.kept
    dit = ["model=dit_xs", "model.dim=64", "model.depth=6", "data.height=32", "data.width=32"]
    assert forecast(*dit, "runtime.attention=math").needs.kept > 1.2 * forecast(*dit).needs.kept
    assert (
        forecast("runtime.fused_adamw=true").phases["optimizer"].workspace
        < forecast().phases["optimizer"].workspace
    )
    assert (
        forecast("batch_size=512", "runtime.offload_activations=true").needs.total
        < forecast("batch_size=512").needs.total
    )


@pytest.mark.parametrize(("n", "recomputed"), [(2, 3), (4, 2), (5, 2), (6, 1), (9, 1)])
def test_recomputing_one_block_in_n_saves_its_share(n: int, recomputed: int):
    """Of six blocks the first and each n-th after it; neighbours share a tensor or two."""
    none, every, some = (
        forecast(*words).kept
        for words in ([], CHECKPOINTS, [*CHECKPOINTS, f"runtime.checkpoint_policy=every_{n}"])
    )
    assert some == pytest.approx(none - (none - every) * recomputed / 6, rel=0.03)


def test_what_is_counted_alike_is_counted_once():
    """Another optimizer, and more processes with as many samples each, change no pass; a key of the
    blocks does."""
    forecast()
    with patch("scripts.plan.counting.build_without_data", side_effect=ValueError("counts")):
        forecast("batch_size=64", gpus=2)
        with pytest.raises(ValueError, match="counts"):
            forecast("runtime.precision=bf16", "seed=1")
    passes = len([key for key in memory.COUNT_CACHE if key.startswith("('passed'")])
    forecast("optim=sgd")
    assert passes == len([key for key in memory.COUNT_CACHE if key.startswith("('passed'")])


def test_sharding_cuts_the_state():
    one = forecast()
    on_64 = {
        way: memory.forecast(share_over_gpus(one.question, way, 64))
        for way in ("ddp", "fsdp", "hsdp")
    }
    totals = {way: found.needs.total for way, found in on_64.items()}
    assert totals["fsdp"] < totals["hsdp"] < totals["ddp"] == one.needs.total
    start = on_64["fsdp"].phases["start"]
    assert start.weights == one.needs.weights  # it is built whole
    assert on_64["fsdp"].lasting["optimizer"] == pytest.approx(one.lasting["optimizer"] / 64)
    mode = "runtime.parallel.mode="
    copied = forecast(f"{mode}ddp", "runtime.parallel.gradient_as_bucket_view=false", gpus=2)
    assert copied.buckets == copied.lasting["gradients"] > 0.0
    assert forecast(gpus=2).buckets == 0.0
    away = forecast(f"{mode}fsdp", "runtime.parallel.cpu_offload=true", gpus=2)
    assert away.lasting["weights"] == 0.0 < away.lasting["on_host"]
    whole = forecast(f"{mode}fsdp", "runtime.parallel.reshard_after_forward=false", gpus=2)
    cut = forecast(f"{mode}fsdp", gpus=2)
    assert whole.gathered > cut.gathered > 0.0
    once, often = (
        forecast(f"{mode}fsdp", f"accumulation_steps={n}", gpus=8).phases["backward"]
        for n in (1, 4)
    )
    assert often.gradients >= 8 * once.gradients > 0.0  # whole until the last micro-batch


def test_one_of_many_processes_counts_as_one_that_is_alone(monkeypatch: pytest.MonkeyPatch):
    """In a process group as in none, where each would have ddp."""
    question = Question(compose(BASE).cfg, forecast().question.spec, gpus=2, gpu=False)
    monkeypatch.setattr(memory, "COUNT_CACHE", {})
    alone = memory.forecast(question).needs
    monkeypatch.setattr(memory, "COUNT_CACHE", {})
    with pretended_processes(2):
        assert memory.forecast(question).needs == alone


def test_kept_bytes_are_those_of_a_real_forward_pass():
    training = assemble(compose(BASE).cfg, CPU)
    assert forecast().kept == pytest.approx(kept_at(training, 32), rel=0.02)


def test_the_largest_micro_batch_is_where_the_memory_ends():
    memory = forecast().needs.total + 40e6
    most = find_largest_micro_batch(forecast(), memory)
    assert most > 32
    inside, beyond = (forecast(f"batch_size={n}").needs.total for n in (most, most + 2))
    assert inside <= 1.001 * memory < 1.002 * beyond
    assert find_largest_micro_batch(forecast(), 1e6) == 0


def test_the_plan_of_a_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The object adds up, and where a run does not fit the cheapest change that does is named."""
    main([*BASE, "hardware=rtx4090", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["change"] is None
    assert (
        sum(found["parts_gib"].values())
        == pytest.approx(found["peak_gib"])
        == max(found["phases_gib"].values())
    )
    words = [*BASE, "batch_size=256", "hardware=a10"]
    every = list_savings(forecast("batch_size=256").question)
    few = [saving for saving in every if "accumulation_steps" in saving.values]
    monkeypatch.setattr("scripts.plan.savings.list_savings", lambda *_: few)
    monkeypatch.setitem(CARDS, "a10", CARDS["a10"]._replace(memory=0.7 * GIB))
    main(words)
    said = capsys.readouterr().out
    assert "on 1 × a10, in phase backward: does not fit" in said
    change = said.partition("cheapest change that fits: ")[2].partition(" (")[0].split()
    assert change[0].startswith("accumulation_steps=")
    assert (
        forecast_run([*words[:-1], *change], PlanConfig(), CARDS["a10"]).needs.total
        <= CARDS["a10"].memory
    )
    monkeypatch.setitem(CARDS, "a10", CARDS["a10"]._replace(memory=0.2 * GIB))
    main(words)
    assert "no change that this plan knows" in capsys.readouterr().out


def test_what_saves_memory_is_tried_from_the_cheapest_on():
    """Kernels together; as many micro-batches as leave samples enough, then recomputing, then
    smaller ones; and what moves losses only where nobody asked for the same ones."""
    question = forecast("batch_size=32").question
    found = [saving.values for saving in list_savings(question)]
    assert set(found[0].values()) == {"auto"}
    steps = [i for i, changes in enumerate(found) if "accumulation_steps" in changes]
    assert [found[i]["accumulation_steps"] for i in steps] == [2, 4, 8, 16, 32]
    recomputing = found.index({"gradient_checkpointing": True, "checkpoint_policy": "blocks"})
    assert steps[1] < recomputing < steps[2]
    exact = [saving.values for saving in list_savings(question, exact=True)]
    assert {"optim": "adamw_8bit"} in found
    assert not any("optim" in changes or "weights" in changes for changes in exact)


def test_what_each_change_saves_is_counted_and_the_most_comes_first(
    monkeypatch: pytest.MonkeyPatch,
):
    """For this very run: another one has another order. A key that cannot be had is not told."""
    kinds = (CheckpointBlocks, DataParallel, OffloadActivations)
    monkeypatch.setattr("scripts.plan.savings.TECHNIQUES", kinds)
    now = forecast("batch_size=256")
    rows = count_savings(now)
    sizes = [row["bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    told = [row["words"][-1].removeprefix("runtime.") for row in rows]
    blocks, selective = (f"checkpoint_policy={policy}" for policy in ("blocks", "selective"))
    assert told == [blocks, "offload_activations=true", "accumulation_steps=2", selective]
    other = forecast("batch_size=256", *rows[0]["words"])
    assert sizes[0] == pytest.approx(now.needs.total - other.needs.total)

    wide = count_savings(forecast("batch_size=2", "model.dim=256", gpus=2))
    assert [row["words"][-1] for row in wide[:2]] == [
        "runtime.parallel.cpu_offload=true",
        "runtime.parallel.mode=fsdp",
    ]
    rest = count_savings(now, barred=["gradient_checkpointing"])
    assert [row["words"] for row in rest] == [rows[i]["words"] for i in (1, 2)]
    assert count_savings(now, until=0.0) == []


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("answer", [0, 1, 7, 56, 4096])
def test_the_largest_size_is_found_in_few_forecasts(power: int, answer: int):
    """Of sizes that rise faster once another phase has the peak."""
    counted: list[int] = []

    def at(n: int) -> Any:
        counted.append(n)
        x = n**power
        return SimpleNamespace(needs=SimpleNamespace(total=max(5.0 + 2 * x, 3.0 * x - 40)))

    most = at(answer).needs.total + 0.5
    counted.clear()
    assert largest.find_largest(at, most, 12, power) == answer
    assert len(counted) <= 7


def test_the_largest_model_fits_and_one_step_more_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """By each way, of which one that cannot be had costs itself alone."""
    card = CARDS["a10"]._replace(memory=0.9 * GIB)
    monkeypatch.setitem(CARDS, "a10", card)
    words = [word for word in BASE if word != "runtime=eager"]
    fsdp = "runtime=eager runtime.parallel.mode=fsdp"
    ways = f"ways=[runtime=eager,{fsdp},runtime=eager optim=nothing]"
    main(["largest", *words, "hardware=a10", "gpus=2", ways])
    lines = capsys.readouterr().out.splitlines()
    sizes = [int(line.partition(" ")[0].removeprefix("depth=")) for line in lines[1:3]]
    for size, more, gpus in zip(sizes, ([], [fsdp]), (1, 2), strict=True):
        grown = [
            *words,
            *" ".join(["runtime=eager", *more]).split()[-2:],
            f"batch_size={32 * gpus}",
        ]
        inside, beyond = (
            forecast_run([*grown, f"model.depth={size + i}"], PlanConfig(gpus=gpus), card)
            for i in (0, 1)
        )
        assert inside.needs.total <= card.memory < beyond.needs.total
    assert sizes[0] < sizes[1]
    assert "1.0  " in lines[1]
    assert "optim=nothing: there is no such file in conf/optim" in lines[3]
    main(["largest", *words, "hardware=a10", "of=dim", "ways=[runtime=eager]"])
    assert "dim=" in capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("runtime.weights=bf16", "runtime.offload_optimizer=true")])
def test_the_updates_of_a_narrower_model_stand_for_those_of_a_wide_one(words: tuple[str, ...]):
    """Real tensors of a wide one might not fit the machine that plans."""
    narrow, wide = (forecast(f"model.dim={dim}", *words) for dim in (128, 384))
    with patch("scripts.plan.memory.count_update", side_effect=AssertionError("real tensors")):
        found = memory.forecast(wide.question, narrow)
    for phase, needs in wide.phases.items():
        assert found.phases[phase].total == pytest.approx(needs.total, rel=0.02), phase


def test_hours_and_cost_follow_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """That of a run, one that is given, or a share of the peak; without one nothing is said."""
    (tmp_path / "summary.json").write_text('{"samples_per_s": 1024.0}')
    words = [*BASE, "hardware=h100", "gpus=2", "total_samples=3686400", "price_per_hour=2"]
    for rate in (f"rate_of={tmp_path}", "samples_per_s=1024"):
        main([*words, rate, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (found["samples_per_s"], found["hours"], found["cost"]) == (1024.0, 1.0, 4.0)
    main([*words, f"rate_of={tmp_path}"])
    assert "1.00 hours for 3686400 samples at 1024.0 a second, 4.00 in all" in (
        capsys.readouterr().out
    )
    by_peak = plan_run(PlanConfig(hardware="h100", gpus=2, mfu=0.5), BASE)["samples_per_s"]
    flops = 3.0 * forecast().model.flops_per_sample()
    assert by_peak == pytest.approx(2 * 0.5 * 989e12 / flops)
    main(words)
    assert "no hours and no cost without a rate" in capsys.readouterr().out


def test_the_plan_of_many_gpus_says_what_it_assumes_and_where_it_ends(
    capsys: pytest.CaptureFixture[str],
):
    main(["scale", *SMALL, "gpus=[1,8,64]", "batch_per_gpu=2", "mfu=0.4"])
    said = capsys.readouterr().out
    assert "assumed: h200, MFU 40% on one GPU, 2 samples a GPU" in said
    assert "with fsdp 3 reduce-scatters a step" in said
    assert all(f"{way}: " in said for way in ("ddp", "fsdp", "hsdp"))


def test_a_plan_for_this_cpu_says_nothing_of_a_gpu(capsys: pytest.CaptureFixture[str]):
    main([*BASE, "runtime.fused_scan=auto", "hardware=here"])
    said = capsys.readouterr().out
    assert "fits" in said
    for of_a_gpu in ("fused_scan", "context", "allocator"):
        assert of_a_gpu not in said


def test_the_card_of_this_machine_has_its_own_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("scripts.plan.report.memory_of", lambda device: 2**30)
    for name, half in (("NVIDIA H100 PCIe", 756e12), ("Abacus 9000", 0.0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        called, card = choose_card("here")
        assert (called, card.flops_16bit, card.memory) == ("here", half, 2**30)
    assert match_card("NVIDIA H100 80GB HBM3") == CARDS["h100"]
    assert match_card("NVIDIA A100 80GB PCIe") == CARDS["a100_pcie"]
    for other in (
        "GeForce RTX 4090 Laptop GPU",
        "GeForce RTX 3090 Ti",
        "H100 80GB HBM3 MIG 1g.10gb",
    ):
        assert match_card(f"NVIDIA {other}") is None


def test_models_of_other_makes_are_counted_whole_or_refused():
    words = [word for word in BASE if word != "model.depth=6"]
    of_ours = forecast_run([*words, "model.depth=3"], PlanConfig(), H200).needs.total
    own = ["extensions=[tests]", "model._target_=tests.harness.planted_tuning."]
    fixed = forecast_run([*words, own[0], f"{own[1]}Fixed", "~model.depth"], PlanConfig(), H200)
    assert fixed.depths == [3]
    assert fixed.needs.total == pytest.approx(of_ours, rel=1e-3)
    with pytest.raises(
        ValueError, match=r"model._target_=tests.harness.planted_tuning.Looking: its step cannot be"
    ):
        forecast_run([*BASE, own[0], f"{own[1]}Looking"], PlanConfig(), H200)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["cost"],
            "plan cost: there is no such command; give overrides to plan a run, or choose scale, "
            "largest or tune",
        ),
        ([*SMALL, "gpus=0"], "gpus=0 must be at least 1"),
        ([*SMALL, "gpus=3"], "batch_size=64 is not a multiple of accumulation_steps=1 × gpus=3"),
        (
            [*SMALL, "hardware=abacus"],
            "hardware=abacus is not known; choose one of h200, h100, h100_pcie, a100",
        ),
        (
            ["scale", *SMALL, "mfu=0.4", "hardware=abacus"],
            "hardware=abacus is not known; choose one of h200, h100",
        ),
        (["largest", *SMALL, "of=mlp"], "of=mlp must be depth or dim"),
        (
            ["largest", *SMALL, "hardware=abacus"],
            "hardware=abacus is not known; choose one of h200",
        ),
        (
            ["largest", *SMALL, "~model.depth=2"],
            "of=depth must be depth or dim, and the model of this run must have",
        ),
        (["scale", *SMALL, "gpus=[0]"], r"gpus=\[0\] .* must be at least 1"),
        (["scale", *SMALL, "mfu=2"], r"mfu=2.0 must be at most 1"),
        (["scale", *SMALL], "mfu is missing: say which share of its peak one GPU reaches"),
        ([*SMALL, "mfu=0.4", "samples_per_s=9"], "samples_per_s and mfu each say how fast"),
        ([*SMALL, "samples_per_s=0"], "samples_per_s=0.0 must be above 0"),
        ([*SMALL, "hardware=here", "mfu=0.4"], "mfu=0.4 is a share of a peak, and that of cpu"),
        ([*SMALL, "rate_of=nowhere"], "rate_of=nowhere: nowhere/summary.json does not say"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        main(words)
