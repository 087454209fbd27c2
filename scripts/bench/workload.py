"""A training run without its folder: what the benchmarks measure, assembled as train.py does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from accel.ledger import Ledger
from accel.stack import AccelerationStack
from scripts.bench.settings import BenchConfig
from scripts.timing import MemoryPeak, Spread, interleaved
from training.assemble import assemble
from training.environment import pick_device
from training.weights.adapter_base import settled

Made = TypeVar("Made")


class Runnable:
    """What the benchmarks time and compare: a training loop that takes one step at a time."""

    device: torch.device
    batch_size: int
    stack: AccelerationStack
    warm_up_seconds: float
    memory_peak: int | None
    ledger: Ledger
    """Of the techniques that it was asked for."""

    def prepare(self) -> None:
        """Sets the process-wide flags of this one and does what must not be timed; call it before
        `run`."""
        self.stack.on_process()

    def one_step(self, comparable: bool = False) -> torch.Tensor:
        """Takes a step and returns its loss; a `comparable` one draws the framework's stateless
        noise."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """Takes `steps` steps; may return before the device has finished."""
        for _ in range(steps):
            self.one_step()

    def final_loss(self, steps: int) -> float:
        """Takes `steps` comparable steps and returns the mean loss of their second half."""
        self.stack.on_process()
        return second_half([self.one_step(comparable=True) for _ in range(steps)])

    def missing(self) -> list[str]:
        """Techniques that were asked for and are not on."""
        return [row.key for row in self.ledger if row.missing]

    def mfu(self, step_seconds: float) -> float | None:
        """The share of the device's 16-bit peak that a step of this length uses; None where
        products are in fp32."""

    def figures(self, step_ms: Sequence[float]) -> dict[str, Any]:
        """What a result says of this one, whose steps took `step_ms`."""
        spread = Spread.of(step_ms)
        return {
            **spread.as_json("step_ms"),
            "batch_size": self.batch_size,
            "samples_per_s": 1e3 * self.batch_size / spread.median,
            "mfu": self.mfu(spread.median / 1e3),
            "memory_reserved_peak": self.memory_peak,
            "warm_up_s": self.warm_up_seconds,
            "not_on": self.missing(),
        }


class Workload(Runnable):
    """The framework's own training step under `overrides`; built, warmed up and observed.

    `warm_up_seconds` are those of a first start where it is built inside `fresh_compiler()`.
    """

    def __init__(self, overrides: list[str]) -> None:
        composed = settled(
            [*overrides, "sample_every=0", "eval_every=0", "save_every=0", "log_every=0"]
        )
        cfg = composed.cfg
        self.composed = composed
        self.cfg = cfg
        self.device = pick_device(cfg.runtime.device.value)
        self.batch_size = cfg.batch_size
        memory = MemoryPeak(self.device)
        torch.manual_seed(cfg.seed)
        self.training = assemble(cfg, self.device)
        self.loader = self.training.loader
        self.model = self.training.model
        self.stack = self.training.stack
        self.state = self.training.state
        self.step = self.training.step
        began = time.perf_counter()
        self.ledger = self.training.warm_up()
        self.warm_up_seconds = time.perf_counter() - began
        self.memory_peak = memory.read()

    def one_step(self, comparable: bool = True) -> torch.Tensor:
        return self.training.take_step().loss

    def mfu(self, step_seconds: float) -> float | None:
        meter = self.state.meter
        return (
            self.batch_size * meter.train_flops / step_seconds / meter.peak_flops
            if meter.peak_flops
            else None
        )


def second_half(losses: list[torch.Tensor]) -> float:
    """The mean over the later half of the losses of a stretch."""
    return torch.stack(losses[len(losses) // 2 :]).mean().item()


class Kept(Generic[Made]):
    """Keeps what was made last, so that rows that follow each other share what they are compared
    with."""

    def __init__(self) -> None:
        self.made: tuple[object, Made] | None = None

    def get(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` returned for an equal key just before, or returns now; the last one is freed
        before."""
        if self.made is None or self.made[0] != key:
            self.made = None
            self.made = key, make()
        return self.made[1]


def time_steps(
    workloads: Mapping[str, Runnable], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds a step of each runnable, round by round, after one more warm step for all."""
    for workload in workloads.values():
        workload.prepare()
        workload.run(1)
    device = next(iter(workloads.values())).device
    runs = {name: partial(workload.run, steps) for name, workload in workloads.items()}
    taken = interleaved(runs, repeats, device, prepare=lambda name: workloads[name].prepare())
    return {name: [1e3 * s / steps for s in values] for name, values in taken.items()}


def beside(base: Runnable, own: Runnable, cfg: BenchConfig) -> dict[str, Any]:
    """Figures of `own`, timed in turn with what it is compared with; `speed` is a ratio of rounds,
    with quartiles."""
    times = time_steps(
        {"own": own} if own is base else {"base": base, "own": own}, cfg.steps, cfg.repeats
    )
    base_ms = times.get("base", times["own"])
    return {
        **Spread.of(base_ms).as_json("baseline_step_ms"),
        **own.figures(times["own"]),
        **Spread.of_ratio(base_ms, times["own"]).as_json("speed"),
        "baseline_memory_reserved_peak": base.memory_peak,
        "baseline_not_on": base.missing(),
    }
