"""A benchmark's batch fits its device, by a prediction that agrees with what is really kept."""

from __future__ import annotations

import weakref

import pytest
import torch
from scripts.bench.fitting import (
    Needs,
    fitted,
    fitted_pairs,
    kept_at,
    memory_of,
    needs_of,
    predicted,
)
from scripts.bench.settings import SETTINGS
from torch import nn

from accel.evidence import observe_step
from accel.saved_tensors import keeping
from data.loader import Batch
from scripts.bench import fitting
from training.assemble import assemble
from training.config.compose import compose

CPU = torch.device("cpu")
GIB = 2**30
TINY = (*SETTINGS["tiny"], "runtime.device=cpu")


@pytest.fixture(autouse=True)
def nothing_remembered():
    needs_of.cache_clear()


@pytest.fixture
def planted(monkeypatch):
    """`planted(a=Needs(…))` gives configurations whose needs are known; their only override is
    their name."""

    def plant(**known: Needs) -> None:
        monkeypatch.setattr(fitting, "needs_of", lambda words, device: known[words[0]])

    return plant


def needs(
    kept_gib: float, *, batch_size: int = 256, captured: bool = False, steps: int = 1, constant=0.0
) -> Needs:
    """Of a model of 5 GiB of state."""
    return Needs(kept_gib * GIB, constant * GIB, GIB // 4, captured, batch_size, steps)


def test_each_storage_counts_once_and_parameters_do_not():
    """A linear layer keeps its input, ReLU its output, which is the next layer's input: 8 + 16
    numbers a sample."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    found = []
    for samples in (2, 5):
        with keeping(model) as kept:
            model(torch.randn(samples, 8))
        found.append(kept.bytes)
    assert found == [2 * 96, 5 * 96]


@pytest.mark.parametrize(
    "words", [[], ["model=dit_xs", "runtime=lowmem"], ["accumulation_steps=2"]]
)
def test_what_is_predicted_is_what_is_kept(words):
    """At the configuration's own micro-batch, from batches of 2 and 4, within 1 %."""
    given = [
        *(word for word in TINY if words[:1] != ["model=dit_xs"] or not word.startswith("model")),
        *words,
    ]
    needed = needs_of(tuple(given), CPU)
    training = assemble(compose(given).cfg, CPU)
    assert training.micro_batch == 16 // needed.accumulation_steps
    assert needed.activations(16) == pytest.approx(
        kept_at(training, training.micro_batch), rel=0.01
    )
    assert needed.parameters == sum(p.numel() for p in training.model.parameters())
    assert needed.kept > 0


def test_one_more_block_keeps_what_the_ledgers_probe_sees_a_block_keep():
    """But for a small share: of its inputs the probe counts the bytes that came in, not whole
    storages."""
    deeper = needs_of((*TINY, "model.depth=3"), CPU).kept - needs_of(tuple(TINY), CPU).kept
    training = assemble(compose(list(TINY)).cfg, CPU)
    samples = next(training.loader)
    seen = []
    for n in (2, 4):
        batch = Batch(*(t[:n] for t in samples))
        found = observe_step(lambda batch=batch: training.step.losses(batch), training.model.blocks)
        seen.append(found.blocks[1][0].saved_bytes)
    assert deeper == pytest.approx((seen[1] - seen[0]) / 2, rel=0.05)


def test_techniques_are_seen_and_nothing_is_compiled():
    fast, compiled, little = (
        needs_of((*TINY, f"runtime={name}"), CPU).kept for name in ("fast", "production", "lowmem")
    )
    assert fast == compiled > 3 * little
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_measuring_leaves_nothing_behind_and_happens_once(monkeypatch):
    models = []

    def watched(cfg, device):
        training = assemble(cfg, device)
        models.append(weakref.ref(training.model))
        return training

    monkeypatch.setattr(fitting, "assemble", watched)
    before = torch.get_rng_state()
    first = needs_of(tuple(TINY), CPU).kept
    assert torch.equal(torch.get_rng_state(), before)
    assert models[0]() is None
    assert needs_of(tuple(TINY), CPU).kept == first
    assert fitted([TINY, TINY], CPU) == fitted_pairs(TINY, [TINY], CPU) == (16, None)
    assert len(models) == 1


def test_a_batch_is_halved_until_it_fits_and_that_is_said(planted):
    planted(own=needs(0.25), base=needs(0.4))
    assert fitted([["own"], ["base"]], CPU, 130 * GIB) == (256, None)
    said = "batch 256 needs a predicted 113 GiB of 79: measured at 128"
    assert fitted([["own"], ["base"]], CPU, 79 * GIB) == (128, said)
    assert fitted([["own"], ["base"]], CPU, 41 * GIB)[0] == 64


def test_what_is_captured_keeps_its_activations():
    """1 GiB in reserve, 5 a model; 256 samples of 1/4 and 3/8 GiB."""
    own = needs(0.25)
    base = needs(0.375, constant=0.5)
    graph = needs(0.25, captured=True)
    assert predicted([own], 256) == (1 + 5 + 64) * GIB
    assert predicted([own, base], 256) == (1 + 10 + 96.5) * GIB
    assert predicted([graph, base], 256) == (1 + 10 + 96.5 + 64) * GIB
    assert predicted([graph, graph], 256) == (1 + 10 + 128) * GIB
    assert predicted([needs(0.25, steps=4)], 256) == (1 + 5 + 16) * GIB


def test_what_cannot_fit_is_refused(planted):
    planted(own=needs(2.0, batch_size=12, steps=4), other=needs(2.0))
    assert fitted([["own"]], CPU, 9.5 * GIB)[0] == 4
    with pytest.raises(ValueError, match=r"batch 4 needs a predicted 8 GiB of 8: it does not fit"):
        fitted([["own"]], CPU, 8 * GIB)
    with pytest.raises(
        ValueError, match=r"batch sizes \[12, 256\]: what is compared must have one"
    ):
        fitted([["own"], ["other"]], CPU)


def test_memory_is_the_devices(monkeypatch):
    assert memory_of(CPU) > 2**28
    total = type("Properties", (), {"total_memory": 79})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    assert memory_of(torch.device("cuda")) == 79


@pytest.mark.gpu
def test_a_gpus_memory_is_given_back():
    device = torch.device("cuda")
    # libraries keep a workspace from then on
    first = needs_of(tuple(SETTINGS["tiny"]), device).kept
    needs_of.cache_clear()
    before = torch.cuda.memory_allocated()
    generator = torch.cuda.get_rng_state()
    assert needs_of(tuple(SETTINGS["tiny"]), device).kept == first > 0
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), generator)
