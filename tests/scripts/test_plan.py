"""scripts.plan: the plan of a run, the largest model, rates and refusals."""

import json

import pytest
import torch

from common.environment import CARDS
from common.memory import GIB
from scripts.plan.__main__ import main
from scripts.plan.changes import find_largest, list_savings
from scripts.plan.report import PlanConfig, choose_card, find_largest_micro_batch, plan_run
from tests.harness.plans import PLANNED, PLANNED_RUN, forecast_words


def test_the_largest_micro_batch_is_where_the_memory_ends():
    memory = forecast_words().needs.total + 40e6
    most = find_largest_micro_batch(forecast_words(), memory)
    assert most > 32
    inside, beyond = (forecast_words(f"batch_size={n}").needs.total for n in (most, most + 2))
    assert inside <= 1.001 * memory < 1.002 * beyond
    assert find_largest_micro_batch(forecast_words(), 1e6) == 0


def run_plan(capsys, *words):
    main([*PLANNED_RUN, *words])
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_plan_of_a_run(capsys, monkeypatch):
    """The parts add up to the peak; a run that does not fit gets the cheapest change that fits."""
    plan = json.loads(run_plan(capsys, "hardware=rtx4090", "--json"))
    assert plan["fits"] is True
    assert plan["change"] is None
    assert sum(plan["parts_gib"].values()) == pytest.approx(plan["peak_gib"])
    assert max(plan["phases_gib"].values()) == pytest.approx(plan["peak_gib"])

    micro_batches = [
        saving
        for saving in list_savings(forecast_words("batch_size=256").question)
        if "accumulation_steps" in saving.values
    ]
    monkeypatch.setattr("scripts.plan.report.list_savings", lambda *_: micro_batches)
    card = CARDS["a10"]._replace(memory=0.7 * GIB)
    monkeypatch.setitem(CARDS, "a10", card)
    text = run_plan(capsys, "batch_size=256", "hardware=a10")
    assert "on 1 × a10, in phase backward: does not fit" in text
    change = text.partition("cheapest change that fits: ")[2].partition(" (")[0]
    assert change.startswith("accumulation_steps=")
    assert forecast_words("batch_size=256", *change.split()).needs.total <= card.memory
    monkeypatch.setitem(CARDS, "a10", card._replace(memory=0.2 * GIB))
    text = run_plan(capsys, "batch_size=256", "hardware=a10")
    assert "no change that this plan knows" in text


def test_the_largest_model_fits_and_one_step_more_does_not(capsys, monkeypatch):
    """Each way has its own line; one that is not available does not stop the others."""
    card = CARDS["a10"]._replace(memory=0.9 * GIB)
    monkeypatch.setitem(CARDS, "a10", card)
    words = [word for word in PLANNED_RUN if word != "runtime=eager"]
    fsdp = "runtime=eager runtime.parallel.mode=fsdp"
    hybrid = "runtime=eager model=hybrid_xs model.depth=6 model.internal_block=3"
    ways = f"runtime=eager,{fsdp},runtime=eager optim=nothing,{hybrid},{hybrid} batch_size=960"
    main(["largest", *words, "hardware=a10", "gpus=2", f"ways=[{ways}]"])

    # lines 1 and 2 are the ways that are available, each with its largest depth
    lines = capsys.readouterr().out.splitlines()
    sizes = [int(line.partition(" ")[0].removeprefix("depth=")) for line in lines[1:3]]
    for size, way, gpus in ((sizes[0], "runtime=eager", 1), (sizes[1], fsdp, 2)):
        grown = [*way.split(), f"batch_size={32 * gpus}"]
        inside, beyond = (
            forecast_words(*grown, f"model.depth={depth}", gpus=gpus) for depth in (size, size + 1)
        )
        assert inside.needs.total <= card.memory < beyond.needs.total
    assert sizes[0] < sizes[1]
    assert "optim=nothing: there is no such file in conf/optim" in lines[3]
    # A hybrid has at least the blocks that its keys name.
    assert lines[4].startswith("depth=")
    assert lines[5].endswith("model.depth=3 does not fit.")


@pytest.mark.parametrize("start", [2, 12, 4096])
def test_the_search_ends_at_the_last_depth_that_fits(start):
    """Also if the bytes are no line."""

    for memory, depth in ((0.5, 0), (1.0, 1), (1000.0, 100), (1014.9, 100), (1e9, 4096)):
        assert find_largest(lambda depth: depth**1.5, memory, start, 1, 4096) == depth


def test_hours_and_cost_follow_a_rate(tmp_path, capsys):
    """The rate of a run, a given one, or a share of the peak; without one the plan has none."""
    (tmp_path / "summary.json").write_text('{"samples_per_s": 1024.0}')
    words = ["hardware=h100", "gpus=2", "total_samples=3686400", "price_per_hour=2"]
    for rate in (f"rate_of={tmp_path}", "samples_per_s=1024"):
        assert "1.00 hours for 3686400 samples at 1024.0 a second, 4.00 in all" in run_plan(
            capsys, *words, rate
        )
    assert "no hours and no cost without a rate" in run_plan(capsys, *words)
    by_peak = plan_run(PlanConfig(hardware="h100", gpus=2, mfu=0.5), PLANNED_RUN)["samples_per_s"]
    flops = 3.0 * forecast_words().network.model.flops_per_sample()
    assert by_peak == pytest.approx(2 * 0.5 * 989e12 / flops)


def test_the_card_of_this_machine_has_its_own_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("scripts.plan.report.memory_of", lambda device: 2**30)
    for name, half in (("NVIDIA H100 PCIe", 756e12), ("Abacus 9000", 0.0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        called, card = choose_card("here")
        assert (called, card.flops_16bit, card.memory) == ("here", half, 2**30)


@pytest.mark.parametrize(
    ("command", "words", "sentence"),
    [
        (["cost"], [], "plan cost: there is no such command; give overrides to plan a run, or"),
        ([], ["gpus=3"], "batch_size=64 is not a multiple of accumulation_steps=1 × gpus=3"),
        ([], ["hardware=abacus"], "hardware=abacus is not known; choose one of h200"),
        ([], ["mfu=0.4", "samples_per_s=9"], "samples_per_s and mfu each say how fast"),
        ([], ["hardware=here", "mfu=0.4"], "mfu=0.4 is a share of a peak, and that of cpu"),
        ([], ["rate_of=nowhere"], "rate_of=nowhere: nowhere/summary.json does not say"),
    ],
)
def test_what_cannot_be_planned_is_refused(command, words, sentence):
    with pytest.raises(ValueError, match=sentence):
        main([*command, *PLANNED, *words])
