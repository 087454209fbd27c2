"""Builds a training step as train.py does; times the step, splits it into phases and profiles
it."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accel.ledger import AUTO, Ledger
from accel.stack import AccelerationStack
from common.config.schema import KERNEL_KEYS
from common.environment import pick_device
from common.files import make_folder, replace_file
from common.text import format_table
from scripts.bench import BenchConfig, Case, Figures, Words
from scripts.capabilities import measure_rates
from scripts.timing import MemoryPeak, measure_seconds, summarise, synchronise, time_in_turn
from training.assemble import assemble
from training.weights.first_weights import compose_pretrained

NO_INTERRUPTIONS = ["sample_every=0", "eval_every=0", "save_every=0", "log_every=0"]
PHASES = ("data", "forward", "backward", "optimizer", "ema", "logging", "whole step", "rest")


class Loop:
    """A training loop that the bench times and compares with other loops; it takes one step at a
    time."""

    stack: AccelerationStack
    warm_up_seconds: float
    memory_peak: int | None
    ledger: Ledger
    flops_a_sample = 0.0
    """FLOPs of training for one sample; 0: not counted."""

    def __init__(self, overrides: Words) -> None:
        self.composed = compose_pretrained(overrides)
        self.cfg = self.composed.cfg
        self.device = pick_device(self.cfg.runtime.device)

    def prepare(self) -> None:
        """Sets PyTorch's process-wide flags for this loop. The timer calls this before the loop
        runs, outside the measured time."""
        self.stack.on_process()

    def take_step(self) -> torch.Tensor:
        """Takes a training step and returns its loss."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """Takes `steps` steps; may return before the device has finished."""
        for _ in range(steps):
            self.take_step()

    def measure_loss(self, steps: int) -> float:
        """Takes `steps` steps, and returns the mean loss of the second half of them."""
        self.stack.on_process()
        losses = [self.take_step() for _ in range(steps)]
        return torch.stack(losses[steps // 2 :]).mean().item()

    def list_missing(self) -> Words:
        """Lists the keys of the techniques that the configuration requests and that are not on in
        this run."""
        return [row.key for row in self.ledger if row.missing]

    def describe_steps(self, step_ms: Sequence[float]) -> Figures:
        """Returns the figures of this loop, such as samples_per_s; `step_ms` are the milliseconds
        per step of each round."""
        figures: Figures = summarise("step_ms", step_ms)
        samples = self.cfg.batch_size
        return figures | {
            "batch_size": samples,
            "samples_per_s": 1e3 * samples / figures["step_ms"],
            "memory_reserved_peak": self.memory_peak,
            "warm_up_s": self.warm_up_seconds,
            "ledger": self.ledger.as_dict(),
            "not_on": self.list_missing(),
        }


class Workload(Loop):
    """The framework's own training step, built from overrides and warmed up.

    On a GPU a kernel that is requested with `auto` is taken if it has parity, whether or not it is
    faster: to time kernels takes minutes under a compiler, and `scripts.doctor --kernels` does it.
    """

    def __init__(self, overrides: Words) -> None:
        super().__init__([*overrides, *NO_INTERRUPTIONS])
        values = self.cfg.runtime.values()
        on = [f"runtime.{key}=true" for key in KERNEL_KEYS if values[key] == AUTO]
        if on and self.device.type == "cuda":
            super().__init__([*overrides, *NO_INTERRUPTIONS, *on])
        memory = MemoryPeak(self.device)

        torch.manual_seed(self.cfg.seed)
        self.training = assemble(self.cfg, self.device)
        self.stack = self.training.stack
        self.flops_a_sample = self.training.state.meter.train_flops

        began = time.perf_counter()
        self.ledger = self.training.warm_up()
        self.warm_up_seconds = time.perf_counter() - began
        self.memory_peak = memory.read()

    def take_step(self) -> torch.Tensor:
        return self.training.take_step().loss

    def describe_steps(self, step_ms: Sequence[float]) -> Figures:
        figures = super().describe_steps(step_ms)
        flops_a_second = figures["samples_per_s"] * self.flops_a_sample
        network = self.training.state.network
        peak = self.training.state.meter.peak_flops
        rates = measure_rates(self.device) if peak else {}
        rate = 1e12 * rates.get(f"{self.cfg.runtime.precision}_product_tflops", 0.0)
        return figures | {
            "mfu": flops_a_second / peak if peak else None,
            "product_share": flops_a_second / rate if rate else None,
            "parameters": sum(p.numel() for p in network.parameters()),
            "tokens": network.tokens,
            "flops_a_sample": self.flops_a_sample,
        }


def time_steps(
    loops: Mapping[str, Loop],
    steps: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times the loops in turn by `clock`, after a warm-up step of each loop. Returns name of a loop
    -> its milliseconds per step in each of the `repeats` rounds."""
    for loop in loops.values():
        loop.prepare()
        loop.run(1)
    device = next(iter(loops.values())).device
    runs = {name: partial(loop.run, steps) for name, loop in loops.items()}
    measure = partial(measure_seconds, clock=clock)
    seconds = time_in_turn(runs, repeats, device, lambda name: loops[name].prepare(), measure)
    return {name: [1e3 * s / steps for s in values] for name, values in seconds.items()}


def sum_phases(marks: Sequence[tuple[str, Any]]) -> dict[str, float]:
    """Returns phase of a step -> sum of its milliseconds. Each of `marks` is a pair (phase, time at
    which the phase ended); a time is in seconds of the host, or a CUDA event that has finished. The
    first mark only gives the time at which the first phase began."""
    phase_ms = defaultdict(float)
    for (_, start), (phase, end) in itertools.pairwise(marks):
        on_host = isinstance(start, float)
        phase_ms[phase] += 1e3 * (end - start) if on_host else start.elapsed_time(end)
    return phase_ms


def time_phases(workload: Workload, steps: int) -> dict[str, float]:
    """Returns phase of a step -> milliseconds per step. If one CUDA graph runs the step, the
    forward pass, backward pass and updates are one phase, "whole step"."""
    training = workload.training
    marks = []

    def mark(phase: str) -> None:
        """Adds the time at which a phase ends to `marks`. On a GPU this time is a CUDA event,
        because launches return before the device has finished, and waiting for the device would
        slow down the step."""
        end: Any = time.perf_counter()
        if workload.device.type == "cuda":
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        marks.append((phase, end))

    training.step.mark = mark
    workload.prepare()
    mark("start")
    for _ in range(steps):
        training.take_step()
    training.step.mark = lambda phase: None

    synchronise(workload.device)
    phase_ms = sum_phases(marks)
    if "forward" not in phase_ms:
        phase_ms["whole step"] = phase_ms.pop("rest")
    return {phase: phase_ms[phase] / steps for phase in PHASES if phase in phase_ms}


def measure_phases(case: Case, cfg: BenchConfig) -> Figures:
    """Measures a whole training step, its phases, and the part of a step (`launch_ms`) that a clock
    shows which does not wait for the device."""
    workload = Workload(case.overrides)
    step_ms = time_steps({"step": workload}, cfg.steps, cfg.repeats)["step"]
    seconds = measure_seconds(partial(workload.run, cfg.steps), torch.device("cpu"))
    phases_ms = time_phases(workload, cfg.steps)
    text = format_table([("", "ms"), *((phase, f"{ms:.3f}") for phase, ms in phases_ms.items())])
    figures = workload.describe_steps(step_ms) | {"launch_ms": 1e3 * seconds / cfg.steps}
    return figures | {"phases_ms": phases_ms, "text": text}


def write_profile(case: Case, cfg: BenchConfig) -> Figures:
    """Lists the 20 ops that take most of a step, and writes the profiler's trace, which
    https://ui.perfetto.dev shows."""
    workload = Workload(case.overrides)
    workload.prepare()
    with torch.profiler.profile(acc_events=True) as profiler:
        workload.run(1)
        synchronise(workload.device)
    cuda = workload.device.type == "cuda"
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    text = profiler.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=50)
    file = Path(cfg.out).expanduser() / f"{cfg.name}.trace.json"
    make_folder(file.parent)
    with replace_file(file) as temporary:
        profiler.export_chrome_trace(str(temporary))
    return {"trace": file.name, "text": text}
