"""What a practice gains or costs here: the same work done two ways, measured in turn.

    python -m scripts.bench antipatterns setting=s32 runtime=fast

`antipatterns` measures known mistakes in the configuration that the words choose; factors above 1
are what a mistake costs. What guides promise is in claims.py, which measures with the same means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from accel.kernels.add_norm import add_norm
from scripts.bench.data import random_autoencoder
from scripts.bench.report import entries_table, with_difference
from scripts.bench.rows import LEFT_OUT, Benchmark, Row
from scripts.bench.settings import BenchConfig
from scripts.bench.workload import Runnable, Workload, time_steps
from scripts.capabilities import capabilities
from scripts.timing import Spread, fresh_compiler, interleaved, seconds

CUDA = "an NVIDIA GPU"


class NotHereError(Exception):
    """A practice cannot be measured on this machine; the message says why."""


class Pair(NamedTuple):
    """Figures of both ways, round by round."""

    one: list[float]
    other: list[float]
    beside: Mapping[str, float] = {}
    """What else was measured, in the same unit."""

    @classmethod
    def of(cls, ways: Iterable[list[float]]) -> Pair:
        one, other = ways
        return cls(one, other)


class Bench(NamedTuple):
    """What practices are measured with."""

    overrides: list[str]
    cfg: BenchConfig
    device: torch.device

    def workload(self, *words: str) -> Workload:
        """A workload of these words; NotHereError if one of them asks for a technique that its
        ledger shows to be off.

        The last word that sets a key is the one that counts.
        """
        workload = Workload([*self.overrides, *words])
        asked = {
            word.removeprefix("runtime.").partition("=")[0]
            for word in words
            if word.startswith("runtime.")
        }
        if off := [
            f"{row.key}: {row.evidence}"
            for row in workload.ledger
            if row.missing and row.key in asked
        ]:
            raise NotHereError(f"asked for and not on: {'; '.join(off)}")
        return workload

    def in_turn(
        self,
        one: Callable[[], object],
        other: Callable[[], object],
        count: int,
        prepare: Callable[[str], object] = lambda name: None,
    ) -> Pair:
        """Milliseconds of one of the `count` equal pieces that a run consists of; both runs are
        warmed up first.

        `prepare("one")` or `prepare("other")` comes before each run and is not timed.
        """
        runs = {"one": one, "other": other}
        for name, run in runs.items():
            prepare(name)
            run()
        taken = interleaved(runs, self.cfg.repeats, self.device, prepare)
        return Pair.of([1e3 * s / count for s in values] for values in taken.values())

    def steps_of(self, one: Runnable, other: Runnable) -> Pair:
        """Milliseconds a training step of each."""
        return Pair.of(
            time_steps({"one": one, "other": other}, self.cfg.steps, self.cfg.repeats).values()
        )


Measure = Callable[[Bench], Pair]


def steps(one: Sequence[str], other: Sequence[str]) -> Measure:
    """A training step with the overrides `one`, and with `other`."""
    return lambda bench: bench.steps_of(bench.workload(*one), bench.workload(*other))


def step(word: str, *base: str) -> Measure:
    """A training step with the overrides `base`, and with `word` added."""
    return steps(base, (*base, word))


def step_and(extra_for: Callable[[Workload], Callable[[torch.Tensor], object]]) -> Measure:
    """A training step with something more done to its loss, and without; `extra_for(workload)`
    returns what."""

    def measure(bench: Bench) -> Pair:
        workload = bench.workload()

        def run(extra: Callable[[torch.Tensor], object]) -> None:
            for _ in range(bench.cfg.steps):
                extra(workload.one_step())

        extra = extra_for(workload)
        return bench.in_turn(lambda: run(extra), lambda: run(lambda loss: None), bench.cfg.steps)

    return measure


def encoder_in_the_loop(workload: Workload) -> Callable[[torch.Tensor], object]:
    """Encodes as many images as a batch has samples."""
    encoder = random_autoencoder(workload.device)
    scale = 2 ** (len(encoder.config.block_out_channels) - 1)
    spec = workload.loader.spec
    images = torch.randn(
        workload.batch_size, 3, spec.height * scale, spec.width * scale, device=workload.device
    )

    @torch.no_grad()
    def encode(loss: torch.Tensor) -> None:
        with torch.amp.autocast(workload.device.type, torch.bfloat16):
            for part in images.split(32):
                encoder.encode(part)

    return encode


def changing_shapes(bench: Bench, one: tuple[str, bool], other: tuple[str, bool]) -> Pair:
    """Compiles anew in each scope, and trains a step of each of four batch sizes, or four of one
    size."""

    def run(scope: str, changing: bool) -> None:
        with fresh_compiler():
            torch.compile(torch.sin)(torch.ones(1))  # what the compiler loads once is nobody's cost
            words = [
                "runtime.compile=true",
                f"runtime.compile_scope={scope}",
                "runtime.cuda_graph=false",
            ]
            workload = bench.workload(*words)
            full = workload.batch_size
            for size in (full, full // 2, full // 4, 3 * full // 4) if changing else (full,) * 4:
                workload.loader.batch_size = size  # pyright: ignore[reportAttributeAccessIssue]
                workload.one_step()

    return Pair.of([1e3 * seconds(partial(run, *way), bench.device)] for way in (one, other))


def strided_call(device: torch.device, wrong: bool) -> Callable[[], None]:
    """The op between two blocks on a stream whose channels are neighbours, and on one whose tokens
    are."""
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
    workload = bench.workload()
    count = bench.cfg.steps

    def unsynchronised() -> float:
        start = time.perf_counter()
        workload.run(count)
        return time.perf_counter() - start

    seen = []
    true = []
    for _ in range(5):
        true.append(1e3 * seconds(lambda: workload.run(count), bench.device) / count)
        seconds(lambda: seen.append(1e3 * unsynchronised() / count), bench.device)
    return Pair(true, seen)


class Practice(NamedTuple):
    """The same work done two ways; without a claim, the first way is a mistake."""

    name: str
    measure: Measure | None
    """None where there is a `reason`."""
    needs: str | None = None
    """The override of the technique, or the hardware, without which it cannot be measured."""
    inductor: bool = False
    """Whether Inductor compiles for it."""
    seconds: float = 20.0
    """How long it should take on a GPU."""
    claimed: tuple[float, float] | str | None = None
    """From the least to the most that guides promise, in `unit`; or in words, where nothing is
    measured."""
    unit: str = "×"
    source: str = ""
    """The address of who promises it, and in brackets what is said there."""
    key: str | None = None
    """Our override, such as runtime.tf32 or data=resident."""
    ways: tuple[str, str] = ("without", "with")
    """What the two ways are called."""
    of: str = "ms"
    """Unit of both figures of a pair."""
    reason: str | None = None
    """Why no machine with one GPU measures it."""


EMPTY_CACHE = Practice(
    "empty_cache() every step",
    step_and(lambda workload: lambda loss: torch.cuda.empty_cache()),
    CUDA,
)
MISTAKES = (
    EMPTY_CACHE,
    Practice(".item() every step", step_and(lambda workload: torch.Tensor.item)),
    Practice("the encoder inside the loop", step_and(encoder_in_the_loop)),
    Practice(
        "changing shapes: the whole model compiled, not its blocks",
        lambda bench: changing_shapes(bench, ("model", True), ("blocks", True)),
        inductor=True,
        seconds=180,
    ),
    Practice(
        "changing shapes: blocks compiled, not a constant shape",
        lambda bench: changing_shapes(bench, ("blocks", True), ("blocks", False)),
        inductor=True,
        seconds=120,
    ),
    Practice(
        "a non-contiguous call",
        lambda bench: bench.in_turn(
            strided_call(bench.device, True), strided_call(bench.device, False), 20
        ),
        seconds=5,
    ),
    Practice("timing without synchronisation (true / seen)", clock_error),
)


def rows_of(
    practices: Sequence[Practice],
    bench: Bench,
    figures: Callable[[Practice, Pair], dict[str, Any]],
    labels: Callable[[Practice], dict[str, Any]] = lambda practice: {},
) -> Iterator[Row]:
    """A row for each practice: `figures(practice, pair)`, or the reason why it cannot be measured
    here.

    Practices with the same `measure` share its figures.
    """
    cannot = {c.word: c.reason for c in capabilities(bench.device)}
    cannot[CUDA] = None if bench.device.type == "cuda" else f"needs {CUDA}"
    known: dict[Measure, Pair] = {}

    def pair_of(measure: Measure) -> Pair:
        if measure not in known:
            known[measure] = measure(bench)
        return known[measure]

    def measured(practice: Practice, measure: Measure) -> dict[str, Any]:
        try:
            return figures(practice, pair_of(measure))
        except NotHereError as error:
            return {"reason": str(error)}

    for practice in practices:
        reason = practice.reason or cannot.get(practice.needs or "")
        reason = reason or (LEFT_OUT if practice.inductor and not bench.cfg.inductor else None)
        if reason or practice.measure is None:
            yield Row(practice.name, partial(dict[str, Any], reason=reason), 0, labels(practice))
        else:
            measure = partial(measured, practice, practice.measure)
            yield Row(practice.name, measure, practice.seconds, labels(practice))


def plan(cfg: BenchConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    def figures(mistake: Practice, pair: Pair) -> dict[str, Any]:
        wrong = Spread.of(pair.one)
        right = Spread.of(pair.other)
        ratio = Spread.of_ratio(pair.one, pair.other)
        return {**wrong.as_json("wrong_ms"), **right.as_json("right_ms"), **ratio.as_json("factor")}

    return rows_of(MISTAKES, Bench(overrides, cfg, device), figures)


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    columns = {
        "wrong ms": "{wrong_ms:.2f}",
        "right ms": "{right_ms:.2f}",
        "factor": "×{factor:.2f}",
        "its quartiles": "{factor_q1:.2f}–{factor_q3:.2f}",
    }
    return [entries_table(columns, with_difference(entries, "factor"))]


BENCHMARKS = {"antipatterns": Benchmark(BenchConfig, plan, texts, __doc__ or "")}
