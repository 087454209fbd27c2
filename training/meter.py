"""Meters a run: losses, rates, memory. Only `report`, at log steps, waits for the device."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.evidence import graphs, reason_of_last_graph
from training.distributed.ranks import SINGLE, Ranks
from training.goodput import CLOCK
from training.step import StepOutput

SUMS = ("loss", "skipped", "backed_off", "in_row")
"""Device scalars of a window that a checkpoint keeps."""
TRAINING = ("steps", "data_wait")
"""Kinds of time that count as training."""


@dataclass
class Meter:
    """Sums over a log window, kept on the device; its time is that of the run's clock.

    The loss is the mean over steps that were not skipped. Of several processes the loss is the
    mean, waiting for data and memory are the most of all; `batch_size` is global and `mfu` per
    process. Time spent inside `paused()` (evaluation, sampling, saving) counts as maintenance, not
    as training, and so do graphs that are compiled there. `waiting()` wraps the calls that wait for
    data: `data_wait` is the share of the time in which the device had nothing else to do. A step
    counts as `passes` forward passes: three, fewer where weights are frozen under an adapter;
    recomputation is left out. PyTorch's counter finds 2.99 to 3.00 for our families in size b, but
    where it takes the backward pass of a depthwise convolution for that of a dense one: then up to
    9.8.
    """

    batch_size: int
    tokens: int
    flops_per_sample: int
    peak_flops: float | None
    ranks: Ranks = SINGLE
    passes: float = 3.0

    def __post_init__(self) -> None:
        self.train_flops = self.passes * self.flops_per_sample
        self.in_row: Tensor | float = 0.0
        self.in_row_seen: Tensor | None = None
        """In host memory, a few steps behind: the device copies `in_row` there when it gets to
        it."""
        self.trained_samples = 0
        self.train_seconds = 0.0
        """Seconds of training of this process that were reported."""
        self.earlier_seconds = 0.0
        """Seconds of training that earlier processes of the run had logged."""
        self.waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """On a GPU: where its queue stood when waiting for data began and ended, of waits that are
        not summed yet."""
        self.recompiles = 0
        self.first_graph = graphs()
        self.expected_graphs = self.first_graph
        self.restart()

    def start(self) -> None:
        """Starts the clock and the peak of memory, after set-up and warm-up."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.expected_graphs = graphs()
        CLOCK.switch("steps")

    def restart(self) -> None:
        """Begins a window."""
        # In fp64: with `log_every=0` a window is the whole run.
        self.loss = torch.zeros((), dtype=torch.float64)
        self.skipped: Tensor | float = 0.0
        self.backed_off: Tensor | float = 0.0
        self.steps = 0
        self.carried = 0
        """Steps of the window that an earlier process took."""
        self.seconds_before = CLOCK.spent(*TRAINING)
        self.wait_before = CLOCK.spent("data_wait")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        # On a GPU by its own clock: the host also waits here while the queue of launches is full,
        # and starves nobody.
        if on_gpu():
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self.waits.append((began, ended))
            self.sum_waits()
        else:
            with CLOCK.spending("data_wait"):
                yield

    def sum_waits(self) -> None:
        """Has the waits that the device has behind it count as waiting, not as steps."""
        while self.waits and self.waits[0][1].query():
            began, ended = self.waits.popleft()
            CLOCK.move(began.elapsed_time(ended) / 1e3, "steps", "data_wait")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds maintenance. Also a decorator."""
        if on_gpu():
            torch.cuda.synchronize()  # what is queued is training
        compiled = graphs()
        with CLOCK.spending("logging"):
            yield
        self.expected_graphs += graphs() - compiled

    def update(self, output: StepOutput) -> None:
        """Adds one step; device scalars stay on the device."""
        self.grad_norm = output.grad_norm
        self.loss = torch.where(output.skipped > 0, 0.0, output.loss) + self.loss  # stays fp64
        self.skipped = output.skipped + self.skipped
        self.backed_off = output.backed_off + self.backed_off
        self.in_row = (output.skipped + self.in_row) * output.skipped
        if self.in_row_seen is None:
            self.in_row_seen = torch.zeros((), pin_memory=self.in_row.is_cuda)
        self.in_row_seen.copy_(self.in_row, non_blocking=True)
        self.steps += 1

    @property
    def skipped_in_row(self) -> int:
        """Steps skipped without one between them that was not. Waits for the device."""
        return int(float(self.in_row))

    def skips(self, limit: int) -> bool:
        """Whether so many were skipped in a row, a few steps ago. Waits for nothing."""
        return self.in_row_seen is not None and float(self.in_row_seen) >= limit

    def state_dict(self) -> dict[str, Tensor | int]:
        """This process's sums of the window, where they lie; nothing waits for the device."""
        return {name: torch.as_tensor(getattr(self, name)) for name in SUMS} | {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continues a window; its clock starts now, so the first rate after a resume counts only
        new steps."""
        self.restart()
        for name in SUMS:
            dtype = torch.float64 if name == "loss" else torch.float32  # older ones: all in fp32
            setattr(self, name, torch.as_tensor(state[name]).reshape(()).to(dtype))
        self.steps = int(state["steps"])
        self.carried = self.steps

    def report(self, lr: float) -> dict[str, Any]:
        """Figures of the window since the last report (the one wait for the device), and starts the
        next window."""
        ranks = self.ranks
        loss = float(ranks.reduced(torch.tensor(float(self.loss), dtype=torch.float64)))
        skipped = int(float(self.skipped))
        taken = self.steps - skipped
        self.sum_waits()
        seconds = max(1e-9, CLOCK.spent(*TRAINING) - self.seconds_before)
        samples = (self.steps - self.carried) * self.batch_size
        self.train_seconds += seconds
        self.trained_samples += samples

        wait = CLOCK.spent("data_wait") - self.wait_before
        memory = memory_reserved_peak()
        most = torch.tensor([wait, memory or 0.0], dtype=torch.float64)
        most_wait, most_memory = ranks.reduced(most, "max").tolist()

        rate = samples / seconds
        flops = rate * self.train_flops
        report = {
            "loss": loss / taken if taken > 0 else math.nan,
            "grad_norm": float(self.grad_norm),
            "lr": lr,
            "skipped": skipped,
            "backed_off": int(float(self.backed_off)),
            "train_seconds": self.earlier_seconds + self.train_seconds,
            "samples_per_s": rate,
            "tokens_per_s": rate * self.tokens,
            "model_tflops": flops / 1e12,
            "mfu": flops / self.peak_flops / ranks.world_size if self.peak_flops else None,
            "data_wait": most_wait / seconds,
            "memory_reserved_peak": None if memory is None else int(most_memory),
            "graphs": graphs() - self.first_graph,
            "recompiles": self.count_recompiles(),
        }
        self.restart()
        return report

    def count_recompiles(self) -> int:
        """Graphs that training steps compiled since `start`; warns of new ones, with the reason of
        the last."""
        new = graphs() - self.expected_graphs
        if new > 0:
            self.recompiles += new
            self.expected_graphs += new
            warnings.warn(
                f"{new} graphs were compiled after warm-up, {self.recompiles} by now, and "
                f"training waited for it: {reason_of_last_graph()}",
                stacklevel=3,
            )
        return self.recompiles


def on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def memory_reserved_peak() -> int | None:
    """Bytes that PyTorch's caching allocator held at most; None without a GPU."""
    return torch.cuda.max_memory_reserved() if on_gpu() else None
