"""scripts.plan: arithmetic whose parts are checked by themselves, and predictions that every key
moves rightly."""

from __future__ import annotations

import json
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from scripts.plan.network import all_reduce, collectives, exposed, gather
from scripts.plan.run import (
    CHANGES,
    PlanConfig,
    chosen_card,
    forecast_of,
    largest_micro_batch,
    planned,
    step_time,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from training.forecast import PASSES, Forecast, predicted

from scripts.plan.__main__ import main
from training.assemble import assemble
from training.config.compose import compose
from training.hardware import CARDS, GIB, card_called, keep_rates, this_card
from training.memory import kept_at, lasting_bytes

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


def test_collectives_are_counted_at_a_thousand_processes():
    """One reduce-scatter a block and one of the root; as many gathers forward, and as many backward
    but the root's."""
    for depth in (2, 5):
        assert collectives(depth, 1024) == {
            "all_gather": 2 * depth + 1,
            "reduce_scatter": depth + 1,
            "all_reduce": 0,
        }


def test_a_gather_moves_the_bytes_that_are_not_there_yet():
    assert gather(1e9, 1, H200) == 0.0
    assert gather(370e9, 2, H200) == pytest.approx(0.5, rel=1e-4)
    assert gather(370e9, 8, H200) == pytest.approx(7 / 8, rel=1e-4)
    assert gather(0.0, 16, H200) == pytest.approx(14 * 1e-6 + 5e-6)
    assert all_reduce(50e9, 2, 50e9) == pytest.approx(1.0, rel=1e-4)


def test_what_nothing_hides_is_added():
    """Nothing for one GPU; a slow network shows; hsdp sends an eighth between machines, here at 1
    GB/s."""
    assert all(
        exposed(way, 1, 0.01, 648_000_000, 4, H200, 29) == 0.0 for way in ("ddp", "fsdp", "hsdp")
    )
    for way in ("ddp", "fsdp", "hsdp"):
        fast, slow = (
            exposed(way, 64, 0.01, 648_000_000, 4, card, 29)
            for card in (H200, H200._replace(inter=1e9))
        )
        assert 0.0 < fast < slow / 2
    lone = exposed("hsdp", 64, 0.0, 10**9, 4, H200._replace(intra=1e18, inter=1e9), 1)
    assert lone == pytest.approx(2 * 7 / 8 * 0.5, rel=1e-3)
    assert exposed("ddp", 64, 0.0, 10**9, 2, H200, 1) < 0.6 * exposed(
        "ddp", 64, 0.0, 10**9, 4, H200, 1
    )
    # a micro-batch that is not the last reduces nothing
    assert exposed("ddp", 64, 0.0, 10**9, 0, H200, 1) == 0.0
    assert (
        0.0
        < exposed("fsdp", 64, 0.0, 10**9, 0, H200, 29)
        < 0.7 * exposed("fsdp", 64, 0.0, 10**9, 4, H200, 29)
    )


@cache
def forecast(*words: str, gpus: int = 1) -> Forecast:
    return forecast_of([*BASE, *words], PlanConfig(gpus=gpus), CARDS["h100"])


def ms(*words: str, gpus: int = 1) -> float:
    time = step_time(forecast(*words, gpus=gpus), CARDS["h100"])
    assert time is not None
    return 1e3 * time.middle


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


def test_every_key_moves_the_prediction_the_right_way():
    """Of memory what LESS does not show, and of time: what is faster on paper is faster, what costs
    time costs it."""
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
    assert ms("runtime.precision=bf16", "runtime.cuda_graph=true", "runtime.fused_adamw=true") < ms(
        "runtime.precision=bf16"
    )
    wide = ["model.dim=512", "batch_size=256"]
    assert ms(*wide, "runtime.tf32=true") < ms(*wide)
    assert ms(*wide, "runtime.precision=bf16") < ms(*wide)
    assert ms(*wide, *CHECKPOINTS) > ms(*wide)
    assert ms(*wide, "runtime.offload_optimizer=true") > ms(*wide)


def test_what_is_counted_alike_is_counted_once():
    """Another optimizer, and more processes with as many samples each, change no pass; a key of the
    blocks does."""
    forecast()
    with patch("training.forecast.passed", side_effect=ValueError("counts")):
        forecast("optim=sgd", "runtime.offload_optimizer=true")
        forecast("batch_size=64", gpus=2)
        with pytest.raises(ValueError, match="counts"):
            forecast("runtime.precision=bf16", "optim=sgd", "seed=1")


def test_sharding_cuts_the_state():
    one = forecast()
    memory = {way: one.on(64, way).needs.total for way in ("ddp", "fsdp", "hsdp")}
    assert memory["fsdp"] < memory["hsdp"] < memory["ddp"] == one.needs.total
    assert one.on(64, "fsdp").lasting["optimizer"] == pytest.approx(one.lasting["optimizer"] / 64)
    mode = "runtime.parallel.mode="
    copied = forecast(f"{mode}ddp", "runtime.parallel.gradient_as_bucket_view=false", gpus=2)
    assert copied.buckets == copied.lasting["gradients"] > forecast(gpus=2).buckets == 0.0
    away = forecast(f"{mode}fsdp", "runtime.parallel.cpu_offload=true", gpus=2)
    assert away.lasting["weights"] == 0.0 < away.lasting["on_host"]
    whole = forecast(f"{mode}fsdp", "runtime.parallel.reshard_after_forward=false", gpus=2)
    assert whole.gathered > forecast(f"{mode}fsdp", gpus=2).gathered > 0.0
    once, often = (
        forecast(f"{mode}fsdp", f"accumulation_steps={n}", gpus=8).phases["backward"]
        for n in (1, 4)
    )
    assert often.gradients >= 8 * once.gradients > 0.0  # whole until the last micro-batch


def test_one_of_many_processes_predicts_as_one_that_is_alone():
    """In a process group as in none; and one that cannot predict leaves the run's flags as they
    were."""
    training = assemble(compose(BASE).cfg, CPU)
    training.warm_up()
    alone = predicted(training)
    training.held = lasting_bytes(training).weights + lasting_bytes(training).averages + GIB
    assert predicted(training)["peak_gib"] == pytest.approx(alone["peak_gib"] + 1.0)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    PASSES.clear()
    try:
        among = Forecast(training.cfg, training.loader.spec, gpus=2, gpu=False).needs.total
    finally:
        dist.destroy_process_group()
        PASSES.clear()
    assert among == Forecast(training.cfg, training.loader.spec, gpus=2, gpu=False).needs.total
    failing = patch("training.forecast.passed", side_effect=ValueError("no"))
    with (
        failing,
        patch.object(training.stack, "on_process") as on,
        pytest.raises(ValueError, match="no"),
    ):
        predicted(training)
    on.assert_called_once()


def test_kept_bytes_are_those_of_a_real_forward_pass():
    training = assemble(compose(BASE).cfg, CPU)
    assert forecast().kept == pytest.approx(kept_at(training, 32), rel=0.02)


def test_the_largest_micro_batch_is_where_the_memory_ends():
    card = CARDS["h100"]._replace(memory=forecast().needs.total + 40e6)
    most = largest_micro_batch(forecast(), card)
    assert most > 32
    inside, beyond = (forecast(f"batch_size={n}").needs.total for n in (most, most + 2))
    assert inside <= 1.001 * card.memory < 1.002 * beyond
    assert largest_micro_batch(forecast(), card._replace(memory=1e6)) == 0


def test_the_plan_of_a_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The object adds up, prices follow hours, and where a run does not fit the cheapest change
    that does is named."""
    main([*BASE, "hardware=rtx4090", "price_per_hour=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["change"] is None
    assert (
        sum(found["parts_gib"].values())
        == pytest.approx(found["peak_gib"])
        == max(found["phases_gib"].values())
    )
    assert found["cost"] == pytest.approx([2 * hours for hours in found["hours"]])
    assert found["hours"] == pytest.approx([ms * found["steps"] / 3.6e6 for ms in found["step_ms"]])
    words = [*BASE, "batch_size=256", "hardware=a10"]
    monkeypatch.setattr("scripts.plan.run.CHANGES", CHANGES[2:6:3])
    monkeypatch.setitem(CARDS, "a10", CARDS["a10"]._replace(memory=0.7 * GIB))
    main(words)
    said = capsys.readouterr().out
    assert "on 1 × a10, in phase backward: does not fit" in said
    change = said.partition("cheapest change that fits: ")[2].partition(" (")[0].split()
    assert change[0] == "accumulation_steps=2"
    assert (
        forecast_of([*words[:-1], *change], PlanConfig(), CARDS["a10"]).needs.total
        <= CARDS["a10"].memory
    )
    monkeypatch.setitem(CARDS, "a10", CARDS["a10"]._replace(memory=0.6 * GIB))
    main(words)
    assert "no change that this plan knows" in capsys.readouterr().out


def test_the_plan_of_many_gpus_says_what_it_assumes_and_where_it_ends(
    capsys: pytest.CaptureFixture[str],
):
    main(["scale", *SMALL, "gpus=[1,8,64]", "batch_per_gpu=2", "mfu=0.4"])
    said = capsys.readouterr().out
    assert "assumed: h200, MFU 40% on one GPU, 2 samples a GPU" in said
    assert "counted at 64 GPUs" in said
    assert all(f"{way}: " in said for way in ("ddp", "fsdp", "hsdp"))


def test_no_times_are_predicted_for_a_cpu(capsys: pytest.CaptureFixture[str]):
    """They were off by 0.6 to 2.4 times, with the order of two models inverted; and nothing of a
    GPU is said."""
    keep_rates(CPU, {"fp32_product_tflops": 0.1, "copy_gb_s": 10.0})  # of an earlier version
    found = planned(
        PlanConfig(hardware="here", price_per_hour=1.0), [*BASE, "runtime.fused_scan=auto"]
    )
    assert [found[key] for key in ("step_ms", "hours", "kwh", "cost")] == [None] * 4
    assert found["fits"] is True
    main([*BASE, "runtime.fused_scan=auto", "hardware=here"])
    said = capsys.readouterr().out
    assert said.count("no time is predicted for a CPU") == 1
    for of_a_gpu in ("ms a step", "hours", "fused kernels", "context", "allocator", "launch"):
        assert of_a_gpu not in said


def test_measured_rates_take_the_place_of_a_data_sheets(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert this_card(CPU, 1e9) is None
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Abacus 9000")
    monkeypatch.setattr("scripts.plan.run.memory_of", lambda device: 2**30)
    with pytest.raises(
        ValueError, match=r"hardware=here: the rates of this machine are not known; run `python -m"
    ):
        chosen_card("here")
    keep_rates(gpu, {"fp32_product_tflops": 0.0, "copy_gb_s": 10.0})
    assert this_card(gpu, 1e9) is None
    keep_rates(gpu, {"fp32_product_tflops": 0.1, "copy_gb_s": 10.0})
    card = this_card(gpu, 1e9)
    assert card is not None
    assert (card.fp32, card.half, card.bandwidth, card.measured) == (1e11, 1e11, 1e10, True)
    time = step_time(forecast(), card)
    assert time is not None
    assert time.best > 3 * forecast().model.flops_per_sample() * 32 / 1e11 > 0
    assert card_called("NVIDIA H100 PCIe").half == 756e12
    assert card_called("NVIDIA H100 80GB HBM3").half == 989e12
    assert card_called("NVIDIA A100 80GB PCIe").watts == 300
    for other in (
        "GeForce RTX 4090 Laptop GPU",
        "GeForce RTX 3090 Ti",
        "H100 80GB HBM3 MIG 1g.10gb",
    ):
        assert card_called(f"NVIDIA {other}") is None


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_warm_run_predicts_what_the_plan_does(compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """From what warm-up counted: with an eager pass on few blocks, and of compiled ones what they
    were seen to keep."""
    monkeypatch.setattr(
        "accel.techniques.compilation.Compile.backend", "aot_eager_decomp_partition"
    )
    cfg = compose([*BASE, f"runtime.compile={str(compiled).lower()}"]).cfg
    training = assemble(cfg, CPU)
    training.warm_up()
    plan = Forecast(cfg, training.loader.spec, gpu=False).needs.total / GIB
    assert predicted(training)["peak_gib"] == pytest.approx(plan, rel=0.05)


def test_models_of_other_makes_are_counted_whole_or_refused():
    words = [word for word in BASE if word != "model.depth=6"]
    of_ours = forecast_of([*words, "model.depth=3"], PlanConfig(), H200).needs.total
    own = ["extensions=[tests]", "model._target_=tests.planted_tuning."]
    fixed = forecast_of([*words, own[0], f"{own[1]}Fixed", "~model.depth"], PlanConfig(), H200)
    assert fixed.depths == [3]
    assert fixed.needs.total == pytest.approx(of_ours, rel=1e-3)
    with pytest.raises(
        ValueError, match=r"model._target_=tests.planted_tuning.Looking: its step cannot be counted"
    ):
        forecast_of([*BASE, own[0], f"{own[1]}Looking"], PlanConfig(), H200)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["cost"],
            "plan cost: there is no such command; give overrides to plan a run, or choose scale "
            "or tune",
        ),
        ([*SMALL, "gpus=0"], "gpus=0 must be at least 1"),
        ([*SMALL, "gpus=3"], "batch_size=64 is not a multiple of accumulation_steps=1 × gpus=3"),
        (
            [*SMALL, "hardware=abacus"],
            "hardware=abacus is not known; choose one of h200, h100, h100_pcie, a100",
        ),
        (
            ["scale", *SMALL, "hardware=abacus"],
            "hardware=abacus is not known; choose one of h200, h100",
        ),
        (["scale", *SMALL, "gpus=[0]"], r"gpus=\[0\] .* must be at least 1"),
        (["scale", *SMALL, "mfu=2"], r"mfu=2.0 above 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        main(words)
