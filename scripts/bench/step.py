"""One configuration by phases, with a verdict: what bounds it, and which keys to try next.

    python -m scripts.bench step setting=s32 runtime=fast
    python -m scripts.bench step setting=b256 model=mamba_b runtime=production steps=20

On a GPU the phases are timed by CUDA events that are read after the window, so nothing waits inside
it; a naive host timer stands beside them, to show the error that asynchronous launches cause.
Inside a CUDA graph there are no phases.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from scripts.bench.report import entries_table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig
from scripts.bench.workload import Workload, time_steps
from scripts.capabilities import capabilities
from scripts.timing import Spread, profiler_activities, synchronise
from training.config.schema import KERNELS
from training.goodput import bound_of, keys_for, reason_of

PHASES = ("data", "forward", "backward", "optimizer", "ema", "logging")


class PhaseClock:
    """Notes the end of each phase twice: as an event in the device's stream and on the host's
    clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, torch.cuda.Event | None, float]] = []

    def mark(self, phase: str) -> None:
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((phase, event, time.perf_counter()))

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Milliseconds by phase as the device took them, and as the host saw them. Waits for the
        device."""
        synchronise(self.device)
        device = defaultdict(float)
        host = defaultdict(float)
        for (_, start, began), (phase, event, ended) in zip(
            self.marks, self.marks[1:], strict=False
        ):
            host[phase] += 1e3 * (ended - began)
            device[phase] += start.elapsed_time(event) if start and event else 1e3 * (ended - began)
        return dict(device), dict(host)


def phases_of(workload: Workload, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds a step by phase: device's and host's."""
    clock = PhaseClock(workload.device)
    workload.step.mark = clock.mark
    meter = workload.state.meter
    workload.prepare()
    meter.restart()
    clock.mark("start")
    for _ in range(steps):
        batches = workload.training.next_batches()
        clock.mark("data")
        workload.step.schedule(workload.state.samples)
        output = workload.step(batches)
        clock.mark("rest")
        meter.update(output)
        clock.mark("logging")
        workload.state.advance(workload.batch_size)
    device, host = clock.read()
    workload.step.mark = lambda phase: None
    graphed = any(row.key == "cuda_graph" and row.active for row in workload.ledger)
    if graphed:  # the phases inside were not marked: all of it is one launch
        device["whole step"], host["whole step"] = device.pop("rest"), host.pop("rest")
    device, host = ({phase: ms / steps for phase, ms in part.items()} for part in (device, host))
    return device, host


class Work(NamedTuple):
    """Milliseconds of one step that the device was busy."""

    busy: float
    products: float
    """In matrix products, attention and convolutions."""


PRODUCTS = (
    *(
        "gemm",
        "nvjet",
        "cutlass",
        "splitk",
        "xmma",
        "wgmma",
        "triton_tem",
        "triton_mm",
        "triton_bmm",
    ),
    *(
        "::mm",
        "::_scaled_mm",
        "::addmm",
        "::bmm",
        "::baddbmm",
        "::convolution",
        "::mkldnn",
        "::conv",
    ),
    *("attention", "flash", "fmha", "conv2d", "cudnn"),
)
"""Parts of the names of kernels and ops that multiply; pointwise and reduction kernels of Inductor
are no products, though their names may list what they stand next to."""
POINTWISE = ("triton_poi", "triton_red", "triton_per")


def work_of(workload: Workload) -> Work:
    """From a profile of one step: kernels on a GPU, operators on a CPU."""
    cuda = workload.device.type == "cuda"
    workload.prepare()
    with torch.profiler.profile(activities=profiler_activities(), acc_events=True) as profiler:
        workload.run(1)
        synchronise(workload.device)
    times: Counter[str] = Counter()
    for event in profiler.key_averages():
        if not cuda:
            times[event.key.lower()] += event.self_cpu_time_total
        elif (
            event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ):  # an op's row repeats its kernels'
            times[event.key.lower()] += event.self_device_time_total
    return work(times)


def work(times: Mapping[str, float]) -> Work:
    """Sorts microseconds by name into products and the rest."""

    def multiplies(name: str) -> bool:
        return not name.startswith(POINTWISE) and any(part in name for part in PRODUCTS)

    return Work(
        sum(times.values()) / 1e3, sum(us for name, us in times.items() if multiplies(name)) / 1e3
    )


class Verdict(NamedTuple):
    """What bounds a step, why, and what to try."""

    bound: str
    reason: str
    keys: list[str]


def verdict(
    step_ms: float,
    data_ms: float,
    done: Work,
    left: Collection[str],
    cuda: bool,
    data: Mapping[str, Any] | None = None,
) -> Verdict:
    """Data, then launches, then the kind of work that takes most of the device's time.

    `left` are the words, such as runtime.compile=true, that this machine can do and this run has
    not on; only these are proposed.
    """

    def propose(*words: str) -> list[str]:
        return [f"runtime.{word}" for word in words if f"runtime.{word}" in left]

    busy = done.busy if cuda else None
    if bound := bound_of(step_ms, data_ms, busy):
        return Verdict(
            bound,
            reason_of(bound, step_ms, data_ms, busy),
            keys_for(bound, propose("cuda_graph=true", "compile=true"), data or {}),
        )
    share = done.products / done.busy if done.busy else 0.0
    reason = f"{share:.0%} of the busy time goes into products"
    if share >= 0.5:
        keys = propose("precision=bf16", "tf32=true")
        return Verdict("compute-bound", reason, keys or ["a smaller model, or a faster device"])
    keys = propose(
        *(f"{key}=true" for key in (*KERNELS, "compile", "fused_adamw")), "precision=bf16"
    )
    return Verdict(
        "bandwidth-bound", f"{reason}, the rest into moving data", keys or ["a larger patch_size"]
    )


def measure(cfg: BenchConfig, overrides: list[str]) -> dict[str, Any]:
    """The whole step, its phases, and the verdict."""
    workload = Workload(overrides)
    print(workload.ledger.table(), flush=True)
    step_ms = time_steps({"step": workload}, cfg.steps, cfg.repeats)["step"]
    device, host = phases_of(workload, cfg.steps)
    done = work_of(workload)
    active = {row.key: row.active for row in workload.ledger}
    left = {
        c.word
        for c in capabilities(workload.device)
        if c.reason is None and active[c.key] != c.value
    }
    median = Spread.of(step_ms).median
    found = verdict(
        median, device["data"], done, left, workload.device.type == "cuda", workload.cfg.data
    )
    shown = [phase for phase in (*PHASES, "whole step", "rest") if phase in device]
    return {
        **workload.figures(step_ms),
        "phases": [{"name": p, "device_ms": device[p], "host_ms": host[p]} for p in shown],
        "busy_ms": done.busy,
        "products_ms": done.products,
        "verdict": found._asdict(),
        "ledger": workload.ledger.as_dict(),
    }


def plan(cfg: BenchConfig, overrides: list[str], device: torch.device) -> list[Row]:
    return [Row("step", partial(measure, cfg, overrides), 60)]


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    columns = {"ms": "{device_ms:.3f}", "naive host timer, ms": "{host_ms:.3f}"}
    found = []
    for e in entries:
        if "verdict" not in e:
            found.append(entries_table({}, [e]))
            continue
        whole = (
            f"step, phases unmarked: {e['step_ms']:.3f} ms "
            f"({e['step_ms_q1']:.3f}–{e['step_ms_q3']:.3f})"
        )
        judged = e["verdict"]
        judgement = f"{judged['bound']}: {judged['reason']}.\nTry next: {', '.join(judged['keys'])}"
        found += [f"{entries_table(columns, e['phases'])}\n{whole}\n", judgement]
    return found


BENCHMARKS = {"step": Benchmark(BenchConfig, plan, texts, __doc__ or "")}
