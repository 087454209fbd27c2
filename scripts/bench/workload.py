"""A training run without its folder: what the benchmarks measure, assembled as train.py does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from accel.ledger import Ledger
from accel.technique import first_line
from scripts.bench.timing import MemoryPeak, interleaved
from training.assemble import assemble
from training.config.compose import compose
from training.environment import pick_device


class Runnable(Protocol):
    """What the benchmarks time and compare."""

    name: str
    device: torch.device
    batch_size: int
    warm_up_seconds: float

    def prepare(self) -> None:
        """Sets the process-wide flags of this one and does what must not be timed; call it before `run`."""
        ...

    def run(self, steps: int) -> None:
        """Takes `steps` steps; may return before the device has finished."""
        ...

    def final_loss(self, steps: int) -> float:
        """Takes `steps` steps with the stateless noise and returns the mean loss of their second half."""
        ...


class Workload:
    """The framework's own training step under `overrides`; built, warmed up and observed.

    `warm_up_seconds` are those of a first start where it is built inside `fresh_compiler()`.
    """

    def __init__(self, name: str, overrides: list[str]) -> None:
        composed = compose([*overrides, "sample_every=0", "eval_every=0", "save_every=0", "log_every=0"])
        cfg = composed.cfg
        self.composed = composed
        self.name, self.overrides, self.cfg = name, composed.overrides, cfg
        self.device = pick_device(cfg.runtime.device.value)
        self.batch_size = cfg.batch_size
        memory = MemoryPeak(self.device)
        memory.start()
        torch.manual_seed(cfg.seed)
        self.training = assemble(cfg, self.device)
        self.loader, self.model, self.stack = self.training.loader, self.training.model, self.training.stack
        self.state, self.step = self.training.state, self.training.step
        began = time.perf_counter()
        self.ledger: Ledger = self.training.warm_up()
        self.warm_up_seconds = time.perf_counter() - began
        self.memory_peak = memory.read()

    def prepare(self) -> None:
        self.stack.on_process()

    def one_step(self) -> torch.Tensor:
        return self.training.take_step().loss

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def final_loss(self, steps: int) -> float:
        self.prepare()
        losses = [self.one_step() for _ in range(steps)]
        return torch.stack(losses[len(losses) // 2 :]).mean().item()

    def missing(self) -> list[str]:
        """Techniques that were asked for and are not on."""
        return [row.key for row in self.ledger if row.missing]

    def mfu(self, step_seconds: float) -> float | None:
        meter = self.state.meter
        return self.batch_size * meter.train_flops / step_seconds / meter.peak if meter.peak else None


def attempt(make: Callable[[], Any], errors: type[Exception] = torch.OutOfMemoryError) -> Any:
    """What `make` returns, or a sentence on the error of kind `errors` that it raised."""
    try:
        return make()
    except errors as error:
        kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        message = f"{kind}: {first_line(error)}"
    torch.cuda.empty_cache()
    return message


def time_steps(workloads: Mapping[str, Runnable], steps: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds a step of each runnable, round by round, after one more warm step for all."""
    for workload in workloads.values():
        workload.prepare()
        workload.run(1)
    device = next(iter(workloads.values())).device
    runs = {name: partial(workload.run, steps) for name, workload in workloads.items()}
    taken = interleaved(runs, repeats, device, prepare=lambda name: workloads[name].prepare())
    return {name: [1e3 * s / steps for s in values] for name, values in taken.items()}
