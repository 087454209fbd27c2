"""Holds the results of a step, measures the metrics of a run, writes them to metrics.jsonl, and
passes them to an optional logger.

metrics.jsonl has one line per logged step, a JSON object. If writing or logging fails, the run
continues.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.evidence import count_graphs, explain_last_graph
from common.clock import CLOCK
from common.distributed.ranks import SINGLE, Ranks
from common.files import go_on_without, rename, write_atomically
from common.text import is_figure, replace_non_finite, shorten_error, to_json

METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file in a run folder."""
TRAINING_KINDS = ("steps", "data_wait")
"""Kinds of time (see common/clock.py) that make up the training time, from which rates are
computed."""
ZERO = torch.zeros(())
"""A window's sums of flags before its first step; no code changes a sum in place."""
NO_LOSS = torch.zeros((), dtype=torch.float64)
"""First summand of a window's losses, which makes their sums fp64: with `log_every=0` a window is
the whole run, and a sum over all its steps is too inexact in fp32."""


class StepOutput(NamedTuple):
    """Results of one training step, as scalar tensors on the device."""

    losses: Mapping[str, Tensor]
    """Mean over this rank's samples of the step of each term that training minimises: `loss`, and
    `loss_<name>` for each extra term of the objective."""
    grad_norm: Tensor
    """Norm of the gradient before clipping."""
    skipped: Tensor
    """1.0 if the gradient norm was not finite or a spike, so that parameters, moments and averages
    did not change; otherwise 0.0, also if `backed_off` is 1.0."""
    backed_off: Tensor
    """1.0 if nothing changed because fp16's loss scale was too large, which is normal while the
    scale is being searched; otherwise 0.0."""

    @property
    def loss(self) -> Tensor:
        """The loss without extra terms."""
        return self.losses["loss"]


@dataclass
class Window:
    """Sums of a log window, which is the steps between two reports, as scalar tensors on the
    device. A checkpoint stores them, so that a resumed run continues the window in which the
    checkpoint was saved."""

    in_row: Tensor = ZERO
    """Number of consecutive steps, up to the last one, that were skipped; some of them may have
    come before the window."""
    skipped: Tensor = ZERO
    backed_off: Tensor = ZERO
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Metric `loss`, or `loss_<name>` of an extra term of the objective -> sum over the window of
    this rank's means, without skipped steps."""
    steps: int = 0
    carried: int = 0
    """Number of steps of the window that an earlier process of the run took, before a resume."""
    seconds_before: float = field(default_factory=lambda: CLOCK.count_seconds(*TRAINING_KINDS))
    """Seconds of training that the clock had counted when the window began."""
    wait_before: float = field(default_factory=lambda: CLOCK.count_seconds("data_wait"))
    """Seconds of waiting for data that the clock had counted when the window began."""

    def state_dict(self) -> dict[str, Tensor | int]:
        """Returns this rank's sums and the number of steps, without waiting for the device."""
        return {
            "skipped": self.skipped,
            "backed_off": self.backed_off,
            "in_row": self.in_row,
            **self.losses,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continues the sums that a checkpoint stored. The time of the window still counts from
        when this object was made, so the first rate after a resume covers only new steps."""
        sums = {name: torch.as_tensor(number).reshape(()) for name, number in state.items()}
        self.steps = int(sums.pop("steps"))
        self.carried = self.steps
        self.skipped = sums.pop("skipped")
        self.backed_off = sums.pop("backed_off")
        self.in_row = sums.pop("in_row")
        self.losses = sums


@dataclass
class Meter:
    """Sums losses and skipped steps over a log window, and measures the window's training time with
    the run's clock.

    A loss is the mean over ranks and over steps that were not skipped. `data_wait` and memory are
    the maximum over ranks; `batch_size` is global and `mfu` per rank. Memory is the peak of a
    window, `memory_reserved_peak` the peak of this process so far. `gpu_busy` is an estimate: the
    profiler's kernel time of a warm-up step, as a share of the window's time per step. The rates
    leave out the time inside `pause()` (evaluation, sampling, saving), and `recompiles` leaves out
    the graphs compiled there. `measure_wait()` surrounds calls that wait for data; `data_wait` is
    the share of the training time in which the device was idle because it had no batch.

    `train_flops` is 3 times the FLOPs of a forward pass, or less where an adapter's base is frozen;
    recomputation is left out. PyTorch's FLOP counter gives 2.99 to 3.00
    for fastlatent's models of size b, but up to 9.8 if it takes the backward pass of a depthwise
    convolution for a dense one.
    """

    batch_size: int
    tokens: int
    train_flops: float
    """FLOPs of a sample in a step, forward and backward."""
    peak_flops: float | None
    ranks: Ranks = SINGLE

    window: Window = field(default_factory=Window)
    in_row_seen: Tensor | None = None
    """Copy of the window's `in_row` in host memory. It is a few steps old, because the device
    writes it asynchronously; None before the first step."""
    trained_samples: int = 0
    train_seconds: float = 0.0
    """Seconds of training in this process, up to the last report."""
    earlier_seconds: float = 0.0
    """Seconds of training that earlier processes of the run logged."""
    waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)
    """CUDA events at begin and end of each wait for data that `sum_waits` has not yet added to the
    clock."""
    recompiles: int = 0
    """Number of graphs that torch.compile compiled in training steps since `start`."""
    first_graph: int = field(default_factory=count_graphs)
    expected_graphs: int = field(default_factory=count_graphs)
    busy_ms: float | None = None
    """Milliseconds for which the GPU worked in a warm-up step; None if that was not measured."""
    reserved_peak: int = 0

    def start(self) -> None:
        """Starts counting training time and peak memory, after set-up and warm-up."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.expected_graphs = count_graphs()
        CLOCK.switch("steps")

    @contextmanager
    def measure_wait(self) -> Iterator[None]:
        # Use CUDA events, not wall time: the host also waits here if the queue of kernel launches
        # is full, while the GPU is busy.
        if uses_gpu():
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self.waits.append((began, ended))
            self.sum_waits()
        else:
            with CLOCK.count_as("data_wait"):
                yield

    def sum_waits(self) -> None:
        """For each wait for data that has ended on the device, moves the seconds of the wait from
        the clock's kind `steps` to the kind `data_wait`."""
        while self.waits and self.waits[0][1].query():
            began, ended = self.waits.popleft()
            CLOCK.move(began.elapsed_time(ended) / 1e3, "steps", "data_wait")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time of the `with` block, and the graphs compiled in the block, out of the
        training metrics. Also works as a decorator."""
        # Wait until the queued kernels have ended, because their time is still training time.
        if uses_gpu():
            torch.cuda.synchronize()
        graphs_before = count_graphs()
        with CLOCK.count_as("logging"):
            yield
        self.expected_graphs += count_graphs() - graphs_before

    def update(self, output: StepOutput) -> None:
        """Adds the losses and the flags of one step to the window's sums, on the device."""
        window = self.window
        for name, loss in output.losses.items():
            kept = torch.where(output.skipped > 0, 0.0, loss)
            window.losses[name] = kept + window.losses.get(name, NO_LOSS)
        window.skipped = output.skipped + window.skipped
        window.backed_off = output.backed_off + window.backed_off
        window.in_row = (output.skipped + window.in_row) * output.skipped
        window.steps += 1

        self.grad_norm = output.grad_norm
        if self.in_row_seen is None:
            self.in_row_seen = torch.zeros((), pin_memory=window.in_row.is_cuda)
        self.in_row_seen.copy_(window.in_row, non_blocking=True)

    def report(self, lr: float) -> dict[str, Any]:
        """Returns metric name -> value for the current log window, and begins the next window.
        Waits for the device, because the sums of the window are on the device."""
        ranks = self.ranks
        window = self.window
        # The mean loss includes the window's steps that an earlier process took; the rates include
        # only steps of this process.
        sums = torch.tensor([float(loss) for loss in window.losses.values()], dtype=torch.float64)
        sums = ranks.all_reduce(sums)
        skipped = int(window.skipped)
        taken = window.steps - skipped
        self.sum_waits()
        seconds = max(1e-9, CLOCK.count_seconds(*TRAINING_KINDS) - window.seconds_before)
        steps = window.steps - window.carried
        samples = steps * self.batch_size
        self.train_seconds += seconds
        self.trained_samples += samples

        wait = CLOCK.count_seconds("data_wait") - window.wait_before
        maxima = torch.tensor([wait, *read_peak_memory()], dtype=torch.float64)
        max_wait, allocated, reserved = ranks.all_reduce(maxima, "max").tolist()
        self.reserved_peak = max(self.reserved_peak, int(reserved))
        busy = (self.busy_ms or 0.0) / 1e3 * steps / seconds

        new = count_graphs() - self.expected_graphs
        if new > 0:
            self.recompiles += new
            self.expected_graphs += new
            warnings.warn(
                f"{new} graphs were compiled after warm-up, {self.recompiles} by now, and "
                f"training waited for it: {explain_last_graph()}",
                stacklevel=2,
            )

        rate = samples / seconds
        flops = rate * self.train_flops
        means = sums / taken if taken > 0 else sums * math.nan
        self.window = Window(in_row=window.in_row)
        return {
            **dict(zip(window.losses, means.tolist(), strict=True)),
            "grad_norm": float(self.grad_norm),
            "lr": lr,
            "skipped": skipped,
            "backed_off": int(window.backed_off),
            "train_seconds": self.earlier_seconds + self.train_seconds,
            "samples_per_s": rate,
            "tokens_per_s": rate * self.tokens,
            "model_tflops": flops / 1e12,
            "mfu": flops / self.peak_flops / ranks.world_size if self.peak_flops else None,
            "data_wait": max_wait / seconds,
            "gpu_busy": min(1.0, busy) or None,
            "memory_allocated": int(allocated) or None,
            "memory_reserved": int(reserved) or None,
            "memory_reserved_peak": self.reserved_peak or None,
            "graphs": count_graphs() - self.first_graph,
            "recompiles": self.recompiles,
        }


def read_peak_memory() -> tuple[int, int]:
    """Returns the peak bytes allocated and reserved on the GPU since the last call, and resets
    them; zeros without a GPU."""
    if not uses_gpu():
        return 0, 0
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peaks


def uses_gpu() -> bool:
    """Says whether this process has used a GPU, without initialising CUDA."""
    return torch.cuda.is_initialized()


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], int, bool]:
    """Reads a metrics file; returns its valid lines, the number of damaged lines, and whether the
    last line is damaged because a process was killed while writing it. Returns no lines if there is
    no file."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return [], 0, False
    except OSError:
        return [], 1, False
    lines = [parse_metrics(line) for line in content.splitlines()]
    torn = lines[-1:] == [None] and not content.endswith(b"\n")
    return [line for line in lines if line is not None], lines.count(None), torn


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """Parses one line of the metrics file: a JSON object with an integer `step`, whose values are
    all numbers or null. Returns None for any other line."""
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    has_step = isinstance(metrics, dict) and type(metrics.get("step")) is int
    valid = has_step and all(y is None or is_figure(y) for y in metrics.values())
    return metrics if valid else None


class MetricsFile:
    """Writes the metrics file of a run (metrics.jsonl), one line per report."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.torn = False
        """True after a failed write: the file may end within a line, so the next write begins with
        a line break."""

    def drop_after(self, step: int) -> list[dict[str, Any]]:
        """Removes the lines of steps after `step`, which the run will repeat; returns the remaining
        lines, parsed.

        If the file has damaged lines, also removes these lines, with a warning, and keeps the old
        file as `<file>.damaged`. Makes the file if there is none, so that `append` follows no link.
        If the disk refuses, only warns.
        """
        file = self.file
        lines, damaged, torn = read_metrics(file)
        kept = [line for line in lines if line["step"] <= step]
        lost = damaged - torn
        with go_on_without(file):
            if lost:
                backup = file.with_name(f"{file.name}.damaged")
                rename(file, backup)
                warnings.warn(
                    f"{file}: {lost} lines cannot be read; they are left out, and kept in "
                    f"{backup}.",
                    stacklevel=2,
                )
            write_atomically(file, "".join(f"{to_json(line)}\n" for line in kept))
        return kept

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Appends `metrics` as a line, with null for NaN and infinity; the line's key `not_finite`
        is the number of these values.

        If a line cannot be written, the run continues; only the first such failure causes a
        warning.
        """
        line = replace_non_finite(metrics)
        not_finite = sum(line[name] is None and metrics[name] is not None for name in line)
        if not_finite:
            line["not_finite"] = not_finite
        text = "\n" * self.torn + to_json(line) + "\n"
        self.torn = True
        with go_on_without(self.file):
            with self.file.open("a") as stream:
                stream.write(text)
            self.torn = False


class SafeLogger:
    """Wraps a logger and switches it off, with a warning, at its first exception."""

    def __init__(self, logger: Any, silent: bool = False) -> None:
        self.name = type(logger).__name__
        self.off = silent
        self.known: dict[str, Any] = {}
        """Summary that `finish` receives if the run is stopped or fails."""
        self.start = self.guard(logger.start)
        self.log = self.guard(logger.log)
        self.image = self.guard(logger.image)
        self.finish = self.guard(logger.finish)

    def guard(self, method: Callable[..., None]) -> Callable[..., None]:
        """Wraps a method of the logger: an exception in it causes a warning and switches the logger
        off."""

        def call(*arguments: Any, **named: Any) -> None:
            if self.off:
                return
            try:
                method(*arguments, **named)
            except Exception as error:
                self.off = True
                warnings.warn(
                    f"{self.name} failed ({type(error).__name__}: {shorten_error(error)}) and is "
                    "off; the run folder has all metrics.",
                    stacklevel=2,
                )

        return call

    def __enter__(self) -> SafeLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finishes the log of a run that was stopped or failed; a complete run calls `finish` with
        its summary."""
        if kind is not None:
            self.finish(self.known)
