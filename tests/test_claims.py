"""What guides promise: every claim has a source, a verdict that follows from its figures, and a
line in the docs."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from types import SimpleNamespace

import pytest
import torch
from scripts.bench.claim_list import CLAIMS, UNSOURCED
from scripts.bench.practices import Bench, NotHereError, Pair, Practice, rows_of
from scripts.bench.rows import LEFT_OUT
from scripts.bench.settings import BenchConfig, parse

from accel.ledger import LedgerRow
from accel.stack import TECHNIQUES
from accel.techniques.compilation import Compile
from common.files import ROOT
from scripts.bench import claim_measures as measures
from scripts.bench import claims, practices
from scripts.capabilities import override
from scripts.timing import Spread
from training.config.compose import CONF
from training.config.schema import RuntimeConfig

CPU = torch.device("cpu")
PAGE = ROOT / "docs" / "techniques.md"
RUN = {
    "device": "cpu",
    "hardware": "a CPU",
    "versions": {"torch": "9"},
    "date": "2026-11-22",
    "command": "bench claims",
}


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    yield
    torch._dynamo.config.recompile_limit = 8


def bench_of(*words: str) -> Bench:
    """On a CPU, one step a round, two rounds."""
    cfg, overrides = parse(
        BenchConfig, "claims", ["setting=tiny", "steps=1", "repeats=2", *words], ""
    )
    return Bench([*overrides, "runtime.device=cpu"], cfg, CPU)


def named(name: str) -> Practice:
    return next(claim for claim in CLAIMS if claim.name == name)


def planned(*words: str) -> dict:
    bench = bench_of(*words)
    return {row.name: row for row in claims.plan(bench.cfg, bench.overrides, CPU)}


def test_every_claim_is_planned_and_the_cheap_ones_are_measured():
    rows = planned("inductor=false", "model.depth=1")
    assert len(rows) == len(CLAIMS)  # so no two have the same name
    entries = []
    for claim, row in zip(CLAIMS, rows.values(), strict=True):
        assert row.labels["claimed"]
        assert claim.source.startswith(("https://", UNSOURCED))
        if row.seconds == 0:
            assert row.measure().keys() == {"reason"}
            entries.append({"name": row.name, **row.labels, **row.measure()})
    assert rows["compiling, a step"].measure() == {"reason": LEFT_OUT}
    assert rows["flash attention, 256 tokens"].measure() == {"reason": "needs an NVIDIA GPU"}
    for name in ("latents over pixels: numbers to store", "checkpointing, a step"):
        entries.append({"name": name, **rows[name].labels, **rows[name].measure()})
    stored, step = entries[-2:]
    assert (stored["measured"], stored["verdict"], "ratio" in stored) == (
        48.0,
        "refuted: less, one round",
        False,
    )
    assert step["ratio_q1"] <= step["ratio"] <= step["ratio_q3"]
    again = rows["checkpointing, a step, by its paper and Transformers"].measure()
    assert again["one"] == step["one"]  # the same figures, not measured twice
    table = claims.texts(entries)[0]
    assert "pixels 786,432 numbers, latents 16,384 numbers" in table
    assert claims.texts([])


@pytest.mark.slow
def test_all_claims_are_measured_or_say_why_not(monkeypatch):
    entries = [
        {"name": row.name, **row.labels, **row.measure()}
        for row in planned("model.depth=1").values()
    ]
    for entry in entries:
        assert ("measured" in entry) != ("reason" in entry), entry
    found = {entry["name"]: entry for entry in entries}
    assert found["start-up with a warm compiler cache"]["measured"] > 1.0
    assert all(
        "measured" in found[name]
        for name in ("compiling, a step", "compiling blocks, not the model: start-up")
    )
    claims.texts(entries)


@pytest.mark.slow
def test_mistakes_are_measured_or_left_out():
    bench = bench_of("runtime=fast", "model.depth=1")
    entries = [
        {"name": row.name, **row.measure()}
        for row in practices.plan(bench.cfg, bench.overrides, CPU)
    ]
    assert len(entries) == 7
    assert "reason" in entries[0]  # no cache to empty on a CPU
    assert all(entry["factor"] > 0 for entry in entries[1:])
    assert len(practices.texts(entries)[0].splitlines()) == 8
    bench = bench_of("inductor=false")
    left_out = [row for row in practices.plan(bench.cfg, bench.overrides, CPU) if row.seconds == 0][
        1:
    ]
    assert [row.measure() for row in left_out] == [{"reason": LEFT_OUT}] * 2


def test_strided_inputs_give_the_same_answer():
    for wrong in (True, False):
        practices.strided_call(CPU, wrong)()


@pytest.mark.parametrize(
    ("name", "measured", "verdict"),
    [
        ("TF32, a step", 1.0, "refuted: less"),
        ("TF32, a step", 1.9, "confirmed"),
        ("TF32, a step", 3.3, "confirmed"),
        ("TF32, a step", 9.0, "confirmed: more"),
        # a fifth of tolerance makes no gain of a loss
        ("reduce-overhead at a small batch", 0.9, "refuted: less"),
        ("reduce-overhead at a small batch", 1.1, "confirmed"),
        ("checkpointing, a step", 5.0, "costs less"),
        ("checkpointing, a step", 40.0, "costs more"),
        ("copying a batch to the device", 0.2, "costs less"),
        ("TF32, error of a product", 0.2, "confirmed"),
        ("nvidia-smi shows what is reserved", 0.5, "refuted: more"),
        ("ladder 1: latents on the device", 2.0, "no figure is promised"),
    ],
)
def test_a_claim_is_judged_by_its_range(name, measured, verdict):
    assert claims.judged(named(name), measured) == verdict


def test_a_ratio_on_both_sides_of_one_is_no_difference():
    claim = named("flash attention, 256 tokens")
    assert claims.figures(claim, Pair([2.0, 1.0, 3.0], [1.0, 1.1, 1.1]))["verdict"] == "confirmed"
    found = claims.figures(claim, Pair([1.0, 2.0, 1.0, 2.0], [1.1, 1.1, 1.1, 1.1]))
    assert (found["verdict"], found["ratio_q1"] < 1 < found["ratio_q3"]) == ("no difference", True)
    # one round says nothing of the spread
    assert claims.judged(claim, 1.0, Spread.of([1.0])) == "refuted: less"


def test_a_technique_that_is_not_on_is_not_measured(monkeypatch):
    ledger = [
        LedgerRow("fused_adamw", True, False, "0 calls"),
        LedgerRow("tf32", True, False, "no GPU"),
    ]
    monkeypatch.setattr(practices, "Workload", lambda words: SimpleNamespace(ledger=ledger))
    asked = [Practice("fused", practices.step("runtime.fused_adamw=true", "runtime=eager"))]
    (row,) = rows_of(asked, bench_of(), claims.figures)
    # tf32 was not asked for
    assert row.measure() == {"reason": "asked for and not on: fused_adamw: 0 calls"}


def test_attention_is_timed_both_ways():
    pair = measures.attention(32)[0](bench_of())
    assert len(pair.one) == len(pair.other) == 2
    assert min(*pair.one, *pair.other) > 0
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


def test_nvidia_smi_is_read(monkeypatch):
    said = {"compute-apps=pid,used_memory": "12, 100\n34, 512\n", "gpu=memory.used": "2048\n"}
    pair = measures.smi_beside(256 * 2**20, 128 * 2**20, 34, said.__getitem__)
    assert pair == Pair([0.25], [0.5], {"memory_allocated": 0.125})
    assert claims.figures(named("nvidia-smi shows what is reserved"), pair)["measured"] == 0.25
    in_a_container = measures.smi_beside(256 * 2**20, 128 * 2**20, 56, said.__getitem__)
    assert in_a_container.other == [2.0]
    assert len(in_a_container.beside) == 2
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0")
    )
    monkeypatch.setenv("PATH", "")
    ask = measures.nvidia_smi(CPU)
    with pytest.raises(NotHereError, match="does not answer"):
        ask("gpu=memory.used")


def test_convolution_plans_of_the_two_ways_do_not_meet():
    """PyTorch caches them by thread; what would be cached by the first way must not serve the
    second."""
    import threading

    flags: dict[int, set[bool]] = {}

    class Encoder:
        def encode(self, images: torch.Tensor) -> None:
            flags.setdefault(threading.get_ident(), set()).add(torch.backends.cudnn.benchmark)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures, "random_autoencoder", lambda device: Encoder())
        measures.autotuner(bench_of())
    assert sorted(flags.values(), key=str) == [{False}, {True}]
    assert torch.backends.cudnn.benchmark is False


def test_what_is_collated_is_copied():
    pair = measures.batch_to_device(bench_of())
    assert min(*pair.one, *pair.other, *pair.beside.values()) > 0


def keys_of(schema: type, prefix: str = "runtime.") -> set[str]:
    found = set()
    for field in fields(schema):
        nested = field.default_factory
        inner = isinstance(nested, type) and is_dataclass(nested)
        found |= keys_of(nested, f"{prefix}{field.name}.") if inner else {prefix + field.name}
    return found


def test_the_page_and_the_keys_know_each_other():
    text = PAGE.read_text()
    named_there = set(re.findall(r"`(runtime\.[a-z0-9_.]+)", text))
    assert named_there <= keys_of(RuntimeConfig)
    assert {override(kind.key, True).partition("=")[0] for kind in TECHNIQUES} <= named_there
    for group, choice in (
        claim.key.split("=") for claim in CLAIMS if claim.key and "=" in claim.key
    ):
        assert (CONF / group / f"{choice}.yaml").exists()


def test_the_pages_figures_come_from_results():
    def entry(name: str, **figures: object) -> dict:
        return {"name": name, "unit": "×", **figures}

    shown = claims.section(
        [entry("flash attention, 256 tokens", reason="needs an NVIDIA GPU")],
        "a CPU, `bench claims`",
    )
    assert "| 2–4 × | not measured: needs an NVIDIA GPU |" in shown
    assert shown.endswith("\n\na CPU, `bench claims`.\n")
    assert shown.count("| not measured |") == sum(claim.reason is None for claim in CLAIMS) - 1
    measured = entry("flash attention, 256 tokens", measured=2.345, verdict="confirmed")
    shown = claims.section([measured, entry("TF32, a step", error="out of memory: 1")], "")
    assert "| 2–4 × | 2.35 ×: confirmed |" in shown or "| 2–4 × | 2.34 ×: confirmed |" in shown
    assert "| 2–3 × | not measured: out of memory: 1 |" in shown
