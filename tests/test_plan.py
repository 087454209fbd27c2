"""scripts.plan: arithmetic whose parts are checked by themselves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from scripts.capabilities import pretended
from scripts.plan import HARDWARE, Model, ScaleConfig, all_reduce, collectives, forecast, gather, main
from scripts.plan_memory import measures_of, needs_of
from training.assemble import assemble
from training.config.compose import compose
from training.memory import kept_at

HW = HARDWARE["h200"]
SMALL = ["model=ssd_mlp_xs", "data=synthetic", "data.height=8", "data.width=8", "data.count=4"]


def test_collectives_are_counted_at_a_thousand_processes():
    """One reduce-scatter a block and one of the root; as many gathers forward, and as many backward but the root's."""
    for depth in (2, 5):
        assert collectives(depth, 1024) == {"all_gather": 2 * depth + 1, "reduce_scatter": depth + 1, "all_reduce": 0}


def test_a_gather_moves_the_bytes_that_are_not_there_yet():
    assert gather(1e9, 1, HW) == 0.0
    assert gather(370e9, 2, HW) == pytest.approx(0.5, rel=1e-4)
    assert gather(370e9, 8, HW) == pytest.approx(7 / 8, rel=1e-4)
    assert gather(0.0, 16, HW) == pytest.approx(14 * 1e-6 + 5e-6)
    assert all_reduce(50e9, 2, 50e9) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "hsdp"])
def test_more_gpus_never_do_less_work_and_one_is_ideal(way: str):
    model = Model(648_000_000, 23_000_000, 28, 2e12, 1e9)
    counts = Counter(all_gather=57, reduce_scatter=29)
    found = [forecast(way, gpus, model, ScaleConfig(), HW, counts) for gpus in (8, 16, 64, 512)]
    assert all(0.0 < f.efficiency <= 1.0 for f in found)
    one = forecast("ddp", 1, model, ScaleConfig(), HW, counts)
    assert one.efficiency == 1.0
    assert one.seconds == pytest.approx(2e12 * 32 / (989e12 * 0.4))
    assert one.memory == pytest.approx(20 * 648e6 + 32e9)


def test_sharding_cuts_the_state():
    model, counts = Model(648_000_000, 23_000_000, 28, 2e12, 0.0), Counter(reduce_scatter=29)
    memory = {w: forecast(w, 64, model, ScaleConfig(), HW, counts).memory for w in ("ddp", "fsdp", "hsdp")}
    assert memory["fsdp"] < memory["hsdp"] < memory["ddp"]
    assert memory["fsdp"] == pytest.approx(20 * 648e6 / 64 + 8 * 23e6)


def test_between_machines_hsdp_sends_only_a_machines_share_of_the_gradients():
    """With nothing to hide behind and machines that are fast inside: 8 of them reduce 1/8 of 4 GB, at 1 GB/s."""
    model, counts = Model(1_000_000_000, 0, 1, 0.0, 0.0), Counter(reduce_scatter=1)
    found = forecast("hsdp", 64, model, ScaleConfig(), HW._replace(intra=1e18, inter=1e9), counts)
    assert found.seconds == pytest.approx(2 * 7 / 8 * 0.5, rel=1e-3)


def test_slow_networks_are_seen():
    model, counts = Model(648_000_000, 23_000_000, 28, 2e11, 0.0), Counter(reduce_scatter=29)
    fast = forecast("fsdp", 64, model, ScaleConfig(), HW, counts)
    slow = forecast("fsdp", 64, model, ScaleConfig(), HW._replace(inter=1e9), counts)
    assert slow.efficiency < fast.efficiency / 2


def test_the_plan_says_what_it_assumes_and_where_it_ends(capsys: pytest.CaptureFixture[str]):
    main(["scale", *SMALL, "gpus=[1,8,64]", "batch_per_gpu=2"])
    said = capsys.readouterr().out
    assert "assumed: h200, MFU 40% on one GPU, 2 samples a GPU" in said
    assert "counted at 64 GPUs" in said
    assert all(f"{way}: " in said for way in ("ddp", "fsdp", "hsdp"))


def test_the_bytes_of_a_step_are_counted(capsys: pytest.CaptureFixture[str]):
    """The states by hand; a step without measures takes more; what is kept is what a real forward pass keeps."""
    pytest.importorskip("bitsandbytes")
    size = ["model.dim=64", "model.depth=3", "model.head_dim=32", *SMALL[1:]]
    words = ["experiment=small_card", "runtime.offload_optimizer=true", *size]
    found = pretended(lambda: needs_of([*words, "runtime.precision=fp32"]))()
    assert {name for name, _ in measures_of(words)} == {
        *("runtime.weights=bf16", "optim=adamw_8bit", "runtime.offload_optimizer=true"),
        *("runtime.gradient_checkpointing=true", "accumulation_steps=4"),
    }
    training = assemble(compose([*words, "runtime.precision=fp32"]).cfg, torch.device("cpu"))
    parameters = list(training.model.parameters())
    linear = sum(m.weight.numel() for m in training.model.modules() if isinstance(m, torch.nn.Linear))
    assert found.weights == found.gradients == sum(p.nbytes for p in parameters) == found.averages - 2 * linear
    assert found.kept == pytest.approx(kept_at(training, 8), rel=0.05)
    assert found.on_host > 5 * found.optimizer
    main(["memory", *size, "optim=adamw_8bit", "card_gb=0.001"])
    said = capsys.readouterr().out
    assert "GB of 0.001 on the device: does not fit" in said
    assert [line.split()[0] for line in said.split("measure ")[1].splitlines()[1:] if line] == ["optim=adamw_8bit"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cost"], "plan cost: there is no such command; choose scale or memory"),
        (["memory", "card_gb=0"], "card_gb=0.0 must be above 0"),
        (["scale", "hardware=abacus"], "hardware=abacus is not known; choose one of h200, h100, a100"),
        (["scale", "gpus=[0]"], r"gpus=\[0\] .* must be at least 1"),
        (["scale", "mfu=2"], r"mfu=2.0 above 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        main([*words, *SMALL] if words[0] == "scale" else words)
