"""What a practice gains or costs here: the same work done two ways, measured in turn.

    python -m scripts.bench claims setting=s256
    python -m scripts.bench claims setting=s256 model=dit_s out=docs/benchmarks/claims_dit_s_h200_2026-11.json
    python -m scripts.bench antipatterns setting=s32 runtime=fast

`claims` measures what guides to fast training promise. A claim is confirmed where the measured figure lies in the
claimed range or beyond it, refuted where it falls short. `antipatterns` measures known mistakes; factors above 1 are
what the mistake costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from accel.kernels.add_norm import add_norm
from scripts.bench.data import random_autoencoder
from scripts.bench.naive import NaiveLoop
from scripts.bench.report import entries_table, publish
from scripts.bench.settings import BenchConfig, device_of, parse
from scripts.bench.step import phases_of
from scripts.bench.workload import Workload, time_steps
from scripts.capabilities import capabilities
from scripts.timing import Spread, fresh_compiler, interleaved, rates, seconds, times_as_fast

CUDA = "an NVIDIA GPU"


class Pair(NamedTuple):
    """Figures of both ways, round by round."""

    one: list[float]
    other: list[float]


class Bench(NamedTuple):
    """What practices are measured with."""

    overrides: list[str]
    cfg: BenchConfig
    device: torch.device

    def workload(self, *words: str) -> Workload:
        return Workload([*self.overrides, *words])

    def in_turn(self, one: Callable[[], object], other: Callable[[], object], count: int, **how: Any) -> Pair:
        """Milliseconds of one of the `count` equal pieces that a run consists of; both runs are warmed up first."""
        one()
        other()
        taken = interleaved({"one": one, "other": other}, self.cfg.repeats, self.device, **how)
        return Pair(*([1e3 * s / count for s in values] for values in taken.values()))


Measure = Callable[[Bench], Pair]


def step(word: str, *base: str) -> Measure:
    """A training step with the overrides `base`, and with `word` added."""

    def measure(bench: Bench) -> Pair:
        pair = {"one": bench.workload(*base), "other": bench.workload(*base, word)}
        return Pair(**time_steps(pair, bench.cfg.steps, bench.cfg.repeats))

    return measure


def step_and(extra_for: Callable[[Workload], Callable[[torch.Tensor], object]]) -> Measure:
    """A training step with something more done to its loss, and without; `extra_for(workload)` returns what."""

    def measure(bench: Bench) -> Pair:
        workload = bench.workload()

        def run(extra: Callable[[torch.Tensor], object]) -> None:
            for _ in range(bench.cfg.steps):
                extra(workload.one_step())

        extra = extra_for(workload)
        return bench.in_turn(lambda: run(extra), lambda: run(lambda loss: None), bench.cfg.steps)

    return measure


def resident_over_dataloader(bench: Bench) -> Pair:
    """A batch from the newcomer's DataLoader of samples in memory, and by indexing on the device."""
    workers = 4 if bench.device.type == "cuda" else 0
    naive = NaiveLoop(bench.overrides, storage="memory", num_workers=workers)
    loader = bench.workload("runtime=eager").loader

    def read(batches: Iterator[object]) -> None:
        for _ in range(20):
            next(batches)

    return bench.in_turn(lambda: read(naive.batches), lambda: read(loader), 20, prepare=lambda name: naive.prepare())


def product_rates(bench: Bench) -> Pair:
    found = rates(bench.device)
    return Pair([found["bf16_product_tflops"]], [found["fp32_product_tflops"]])


def optimizer_phase(bench: Bench) -> Pair:
    """Norm, clipping, decision and update, unfused and fused."""
    pair = [bench.workload("runtime=eager", f"runtime.fused_adamw={on}") for on in ("false", "true")]
    rounds = [[phases_of(w, bench.cfg.steps)[0]["optimizer"] for w in pair] for _ in range(bench.cfg.repeats)]
    return Pair(*map(list, zip(*rounds, strict=True)))


def checkpointing_memory(bench: Bench) -> Pair:
    """Reserved bytes without and with checkpointing."""
    words = (f"runtime.gradient_checkpointing={on}" for on in ("false", "true"))
    return Pair(*([float(bench.workload("runtime=fast", word).memory_peak or 0)] for word in words))


def warm_ups(bench: Bench) -> Pair:
    """Warm-up of the whole model as one graph and of its blocks, nothing cached."""
    found = []
    for scope in ("model", "blocks"):
        with fresh_compiler():
            workload = bench.workload("runtime=production", f"runtime.compile_scope={scope}")
        found.append([workload.warm_up_seconds])
    return Pair(*found)


def encoder_in_the_loop(workload: Workload) -> Callable[[torch.Tensor], object]:
    """Encodes as many images as a batch has samples."""
    encoder = random_autoencoder(workload.device)
    scale = 2 ** (len(encoder.config.block_out_channels) - 1)
    spec = workload.loader.spec
    images = torch.randn(workload.batch_size, 3, spec.height * scale, spec.width * scale, device=workload.device)

    @torch.no_grad()
    def encode(loss: torch.Tensor) -> None:
        with torch.amp.autocast(workload.device.type, torch.bfloat16):
            for part in images.split(32):
                encoder.encode(part)

    return encode


def changing_shapes(bench: Bench, one: tuple[str, bool], other: tuple[str, bool]) -> Pair:
    """Compiles anew in each scope, and trains a step of each of four batch sizes, or four of one size."""

    def run(scope: str, changing: bool) -> None:
        with fresh_compiler():
            torch.compile(torch.sin)(torch.ones(1))  # what the compiler loads once is nobody's cost
            words = ["runtime.compile=true", f"runtime.compile_scope={scope}", "runtime.cuda_graph=false"]
            workload = bench.workload(*words)
            full = workload.batch_size
            for size in (full, full // 2, full // 4, 3 * full // 4) if changing else (full,) * 4:
                workload.loader.batch_size = size  # pyright: ignore[reportAttributeAccessIssue]
                workload.one_step()

    return Pair(*([1e3 * seconds(partial(run, *way), bench.device)] for way in (one, other)))


def strided_call(device: torch.device, wrong: bool) -> Callable[[], None]:
    """The op between two blocks on a stream whose channels are neighbours, and on one whose tokens are."""
    batch, tokens, dim = (64, 256, 768) if device.type == "cuda" else (8, 64, 128)
    x = torch.randn(batch, dim, tokens, device=device).transpose(1, 2)
    x = x if wrong else x.contiguous()
    gate, scale, shift = torch.randn(3, batch, dim, device=device)

    def run() -> None:
        for _ in range(20):
            add_norm(x, gate, x, scale, shift)

    return run


def clock_error(bench: Bench) -> Pair:
    """A training step by a clock that waits for the device, and by one that does not."""
    workload, steps = bench.workload(), bench.cfg.steps

    def unsynchronised() -> float:
        start = time.perf_counter()
        workload.run(steps)
        return time.perf_counter() - start

    seen, true = [], []
    for _ in range(5):
        true.append(1e3 * seconds(lambda: workload.run(steps), bench.device) / steps)
        seconds(lambda: seen.append(1e3 * unsynchronised() / steps), bench.device)
    return Pair(true, seen)


FIGURES: dict[str, Callable[[float], float]] = {
    "×": lambda ratio: ratio,
    "× as long": lambda ratio: ratio,
    "% faster": lambda ratio: 100.0 * (ratio - 1.0),
    "% slower": lambda ratio: 100.0 * (1.0 / ratio - 1.0),
    "% saved": lambda ratio: 100.0 * (1.0 - 1.0 / ratio),
}
"""Unit of a claim -> its figure, from how many times as fast or as small the other way is."""
COSTS = ("× as long", "% slower")


class Practice(NamedTuple):
    """The same work done two ways; without a claim, the first way is a mistake."""

    name: str
    measure: Measure
    claimed: tuple[float, float] | None = None
    """From the least to the most that guides promise, in `unit`."""
    unit: str = "×"
    needs: str | None = None
    """The override of the technique, or the hardware, without which it cannot be measured."""


EMPTY_CACHE = Practice(
    "empty_cache() every step",
    step_and(lambda workload: lambda loss: torch.cuda.empty_cache()),
    (1, 2),
    "× as long",
    CUDA,
)
CLAIMS = (
    Practice("resident indexing over a DataLoader", resident_over_dataloader, (10, 50)),
    Practice("TF32, a step", step("runtime.tf32=true", "runtime=eager"), (2, 3), needs="runtime.tf32=true"),
    Practice("bf16 over fp32, matrix products", product_rates, (8, 16), needs="runtime.precision=bf16"),
    Practice("fused AdamW: norm, clipping and update", optimizer_phase, (10, 20), "% saved"),
    Practice("checkpointing, a step", step("runtime.gradient_checkpointing=true"), (10, 10), "% slower"),
    Practice("checkpointing, memory", checkpointing_memory, (50, 50), "% saved", CUDA),
    Practice("compiling, a step", step("runtime.compile=true"), (10, 30), "% faster"),
    Practice("compiling blocks, not the model: start-up", warm_ups, (7, 7)),
    Practice(
        "a CUDA graph at a small batch",
        step("runtime.cuda_graph=true", "batch_size=8"),
        (5, 5),
        needs="runtime.cuda_graph=true",
    ),
    EMPTY_CACHE,
)
"""On top of runtime=fast."""
MISTAKES = (
    EMPTY_CACHE,
    Practice(".item() every step", step_and(lambda workload: torch.Tensor.item)),
    Practice("the encoder inside the loop", step_and(encoder_in_the_loop)),
    Practice(
        "changing shapes: the whole model compiled, not its blocks",
        lambda bench: changing_shapes(bench, ("model", True), ("blocks", True)),
    ),
    Practice(
        "changing shapes: blocks compiled, not a constant shape",
        lambda bench: changing_shapes(bench, ("blocks", True), ("blocks", False)),
    ),
    Practice(
        "a non-contiguous call",
        lambda bench: bench.in_turn(strided_call(bench.device, True), strided_call(bench.device, False), 20),
    ),
    Practice("timing without synchronisation (true / seen)", clock_error),
)


def judged(claim: Practice, measured: float) -> str:
    """The verdict, with a fifth of tolerance; of a cost, less is said as such and refutes nothing."""
    assert claim.claimed is not None
    low, high = claim.claimed[0] / 1.2, claim.claimed[1] * 1.2
    if low <= measured <= high:
        return "confirmed"
    if claim.unit in COSTS:
        return "costs less" if measured < low else "costs more"
    return "refuted: less" if measured < low else "confirmed: more"


def entries_of(
    practices: Sequence[Practice], bench: Bench, figures: Callable[[Practice, Pair, float], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """An entry for each practice: `figures(practice, pair, ratio)`, or the reason why it cannot be measured here."""
    torch._dynamo.config.recompile_limit = 64  # many models pass through the same code
    cannot = {c.word: c.reason for c in capabilities(bench.device)}
    cannot[CUDA] = None if bench.device.type == "cuda" else f"needs {CUDA}"
    for practice in practices:
        entry: dict[str, Any] = {"name": practice.name}
        if practice.claimed:
            low, high = practice.claimed
            entry["claimed"] = f"{low if low == high else f'{low}–{high}'} {practice.unit}"
        reason = cannot.get(practice.needs or "")
        if reason:
            yield entry | {"reason": f"not measured: {reason}"}
            continue
        pair = practice.measure(bench)
        ratio = times_as_fast(*pair)
        print(f"{practice.name}: ×{ratio:.2f}", flush=True)
        yield entry | figures(practice, pair, ratio)


def claims(words: list[str]) -> None:
    """Guides' claims, each of a run that is fast otherwise."""

    def figures(claim: Practice, pair: Pair, ratio: float) -> dict[str, Any]:
        measured = FIGURES[claim.unit](ratio)
        return {"measured": measured, "unit": claim.unit, "verdict": judged(claim, measured)}

    cfg, overrides = parse(BenchConfig, "claims", words, __doc__ or "")
    device = device_of(overrides)
    entries = list(entries_of(CLAIMS, Bench([*overrides, "runtime=fast"], cfg, device), figures))
    columns = {"claimed": "{claimed}", "measured here": "{measured:.2f} {unit}", "verdict": "{verdict}"}
    publish(cfg, overrides, device, {"claims": entries}, entries_table(columns, entries))


def antipatterns(words: list[str]) -> None:
    """Known mistakes, each in the configuration that the words choose."""

    def figures(mistake: Practice, pair: Pair, ratio: float) -> dict[str, Any]:
        wrong, right = (Spread.of(values) for values in pair)
        return {**wrong.as_json("wrong_ms"), **right.as_json("right_ms"), "factor": ratio}

    cfg, overrides = parse(BenchConfig, "antipatterns", words, __doc__ or "")
    device = device_of(overrides)
    entries = list(entries_of(MISTAKES, Bench(overrides, cfg, device), figures))
    columns = {"wrong ms": "{wrong_ms:.2f}", "right ms": "{right_ms:.2f}", "factor": "×{factor:.2f}"}
    publish(cfg, overrides, device, {"antipatterns": entries}, entries_table(columns, entries))
