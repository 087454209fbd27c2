"""Functions that measure the cases of the bench's commands: each takes a case and the command's
keys, and returns the figures of the case. A child process calls them."""

from __future__ import annotations

import gc
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch

from accel.techniques.precision import Precision
from common.config.compose import compose
from common.config.schema import OnUnavailable
from common.environment import CARDS, memory_of, pick_device
from common.files import ROOT
from common.text import shorten_error
from scripts import doctor
from scripts.bench import BenchConfig, Case, Figures, SeedsConfig, Words
from scripts.bench.newcomer import NewcomersLoop
from scripts.bench.step import Loop, Workload, time_steps
from scripts.capabilities import find_capabilities
from scripts.plan.memory import forecast
from scripts.plan.question import make_question
from scripts.timing import (
    compute_ratios,
    disable_compiler_caches,
    measure_seconds,
    summarise,
    synchronise,
)
from training.evaluate import evaluate
from training.preflight.memory import count_lasting_bytes

PYTEST_COMMAND = [
    *(sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfs", "--tb=short", "-Wdefault"),
    *("-p", "no:cacheprovider", "-o", "addopts=-p tests.harness.reliability"),
    *("-n", str(min(8, (os.cpu_count() or 2) // 2))),
]
"""Command that runs GPU tests, in several processes: they mostly wait for compilers."""
REPORT_LINES = 200
"""Number of lines at the end of pytest's output that a result keeps."""


def device_of(words: Words) -> torch.device:
    """Returns the device on which a run with these overrides would train."""
    values = dict(word.split("=", 1) for word in words if "=" in word)
    return pick_device(values.get("runtime.device", "auto"))


def find_refusals(words: Words, device: torch.device) -> tuple[dict[str, str], Words]:
    """Returns override among `words` that this machine does not support, such as runtime.tf32=true
    -> the reason; and the overrides that PyTorch emulates in software on a CPU, if the override
    `runtime.on_unavailable=emulate` asks for it."""
    reasons = find_capabilities(device)
    refusals = {word: reasons.get(word.replace("=auto", "=true")) for word in words}
    lacking = {word: reason for word, reason in refusals.items() if reason}
    emulates = device.type == "cpu" and f"runtime.on_unavailable={OnUnavailable.emulate}" in words
    emulable = {Precision.make_override(v) for v in Precision.emulated if emulates}
    emulated = sorted(emulable & lacking.keys())
    for word in emulated:
        del lacking[word]
    return lacking, emulated


def measure_case(case: Case, cfg: BenchConfig) -> Figures:
    """Measures a case and returns its figures; or, in one sentence, the `reason` why this machine
    does not measure the case, or the `error` that ended the measurement.

    It prints the traceback of an error to stderr, and leaves the device idle and its memory free.
    """
    device = device_of(case.overrides)
    if tuple(case.baseline) not in BASELINE_CACHE:
        BASELINE_CACHE.clear()
        free_memory()
    try:
        if case.compiles and not cfg.inductor:
            return {"reason": "left out: inductor=false"}
        refusals, emulated = find_refusals([*case.overrides, *case.needs], device)
        for word in case.needs:
            if word in refusals:
                return {"reason": refusals[word]}

        figures = case.measure(case, cfg)
        synchronise(device)
        return figures | ({"emulated": emulated} if emulated else {})
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory: {shorten_error(error)}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {shorten_error(error)}"}
    finally:
        free_memory()


def free_memory() -> None:
    """Frees objects that only reference cycles keep alive, and the unused memory that PyTorch's GPU
    allocator holds."""
    gc.collect()
    torch.cuda.empty_cache()


def build_loop(words: Words) -> Loop:
    """Builds the plain PyTorch loop of scripts/bench/newcomer.py if `words` have keys such as
    newcomer.storage=files, else the framework's training step."""
    prefix = "newcomer."
    options = dict(
        word.removeprefix(prefix).split("=") for word in words if word.startswith(prefix)
    )
    overrides = [word for word in words if not word.startswith(prefix)]
    return NewcomersLoop(overrides, **options) if options else Workload(overrides)


class Baseline(NamedTuple):
    """The run with which a case is compared, its mean loss over late steps, and its milliseconds
    per step: empty if they are measured in turn with each case."""

    loop: Loop
    loss: float
    step_ms: list[float]


BASELINE_CACHE: dict[tuple[str, ...], Baseline] = {}
"""Overrides -> baseline that was trained with them. Holds only the latest baseline, because
consecutive cases often share one."""


def train_baseline(words: tuple[str, ...], cfg: BenchConfig) -> Baseline:
    """Builds the baseline with the overrides `words` and trains it for `cfg.loss_steps` steps, or
    returns the cached baseline if the case before had the same overrides."""
    if words not in BASELINE_CACHE:
        loop = build_loop(list(words))
        loss = loop.measure_loss(cfg.loss_steps)

        # The newcomer's loop in fp32 is so slow that it would take most of the time of a ladder,
        # and a GPU's speed hardly drifts.
        step_ms = []
        if isinstance(loop, NewcomersLoop) and loop.device.type == "cuda":
            step_ms = time_steps({"base": loop}, cfg.steps, min(cfg.repeats, 3))["base"]
        BASELINE_CACHE[words] = Baseline(loop, loss, step_ms)
    return BASELINE_CACHE[words]


def compare(
    case: Case, cfg: BenchConfig, clock: Callable[[], float] = time.perf_counter
) -> Figures:
    """Trains the case's run and its baseline from the same weights on the same samples, then times
    both in turn by `clock`. The figure `speed` is the case's samples per second divided by the
    baseline's, not a ratio of step times, because batch sizes may differ.

    The case's run leaves out the techniques that this machine does not support.
    """
    base, base_loss, base_ms = train_baseline(tuple(case.baseline), cfg)
    loop = base
    loss = base_loss
    if case.overrides != case.baseline:
        refused, _ = find_refusals(case.overrides, base.device)
        # The ladder, whose baseline is the newcomer's loop, reports how long the first start takes
        # without stored compiled code. So disable the compiler's caches for its cases.
        with disable_compiler_caches() if isinstance(base, NewcomersLoop) else nullcontext():
            loop = build_loop([word for word in case.overrides if word not in refused])
        loss = loop.measure_loss(cfg.loss_steps)

    loops = {} if base_ms else {"base": base}
    if loop is not base:
        loops["case"] = loop
    times = {"base": base_ms} | (time_steps(loops, cfg.steps, cfg.repeats, clock) if loops else {})
    step_ms = times.get("case", times["base"])
    if base_ms:
        times["base"] = [statistics.median(base_ms)] * len(step_ms)
    batch_ratio = loop.cfg.batch_size / base.cfg.batch_size
    return {
        **summarise("baseline_step_ms", times["base"]),
        **loop.describe_steps(step_ms),
        **summarise("speed", [batch_ratio * r for r in compute_ratios(times["base"], step_ms)]),
        "baseline_flops_a_sample": base.flops_a_sample,
        "baseline_memory_reserved_peak": base.memory_peak,
        "baseline_not_on": base.list_missing(),
        "final_loss": loss,
        "loss_deviation": loss / base_loss - 1.0,
    }


def measure_compiling(case: Case, cfg: BenchConfig) -> Figures:
    """Measures the seconds from nothing to a step at each of the case's `batch_sizes`, and the
    graphs that are compiled for them, of the case and of its baseline; `times` is the ratio of the
    seconds."""
    figures: Figures = {}

    def take_steps(words: Words) -> None:
        workload = Workload(words)
        for size in case.labels["batch_sizes"]:
            workload.training.loader.batch_size = int(size * workload.cfg.batch_size)
            workload.take_step()

    # Load the compiler, which no run is to pay for.
    torch.compile(torch.sin)(torch.ones(1, device=device_of(case.overrides)))
    for prefix, words in (("", case.overrides), ("baseline_", case.baseline)):
        with disable_compiler_caches():
            figures[f"{prefix}start_s"] = measure_seconds(
                partial(take_steps, words), device_of(words)
            )
        figures[f"{prefix}graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return figures | {"times": figures["start_s"] / figures["baseline_start_s"]}


def measure_seeds(case: Case, cfg: SeedsConfig) -> Figures:
    """Trains a configuration from several seeds. Returns the losses with their range over the
    seeds, and the bytes per parameter of each part of the training state."""
    figures: Figures = {"seeds": len(cfg.seeds), "skipped": 0}
    losses: dict[str, list[float]] = {"loss": [], "eval_loss": []}
    step_ms = []
    for seed in cfg.seeds:
        workload = Workload([*case.overrides, f"seed={seed}"])
        workload.prepare()
        outputs = [workload.training.take_step() for _ in range(cfg.steps)]
        figures["skipped"] += sum(int(output.skipped) for output in outputs)

        # Average the losses of the second half of the steps, which vary less than those of the
        # first half.
        late_losses = torch.stack([output.loss for output in outputs[cfg.steps // 2 :]])
        losses["loss"].append(late_losses.mean().item())
        losses["eval_loss"].append(evaluate(workload.training)["eval_loss"])
        step_ms += time_steps({"case": workload}, max(1, cfg.steps // 10), cfg.repeats)["case"]
        figures |= workload.describe_steps(step_ms)
        for kind, size in count_lasting_bytes(workload.training)._asdict().items():
            figures[f"{kind}_bytes_a_parameter"] = size / figures["parameters"]
        del workload

    for name, values in losses.items():
        figures |= summarise(name, values)
    return figures


def measure_planned(case: Case, cfg: BenchConfig) -> Figures:
    """Measures the memory of a training run and compares it with the prediction of scripts.plan.

    The measured bytes are the peak that PyTorch's GPU allocator reserved (None on a CPU). They do
    not include the driver's context, so it is subtracted from the predicted bytes.
    """
    workload = Workload(case.overrides)
    step_ms = time_steps({"case": workload}, cfg.steps, cfg.repeats)["case"]
    device = workload.device
    plan = forecast(make_question(workload.cfg, memory_of(device), gpu=device.type == "cuda"))
    predicted = plan.needs.total - plan.needs.context
    measured = workload.memory_peak
    return workload.describe_steps(step_ms) | {
        "predicted_bytes": predicted,
        "phase": plan.phase,
        "memory_error": predicted / measured - 1.0 if measured else None,
    }


def count_savings(case: Case, cfg: BenchConfig) -> Figures:
    """Forecasts memory on an H100 for the case's overrides and for its baseline: the peak bytes of
    a step, and the bytes of activations kept for the backward pass. Returns these four figures, and
    the two relative changes from the baseline to the case."""
    figures: Figures = {}
    for prefix, words in (("baseline_", case.baseline), ("", case.overrides)):
        plan = forecast(make_question(compose(words).cfg, CARDS["h100"].memory))
        figures[f"{prefix}peak_bytes"] = plan.needs.total
        figures[f"{prefix}activations_bytes"] = plan.kept
    for name in ("peak", "activations"):
        ratio = figures[f"{name}_bytes"] / figures[f"baseline_{name}_bytes"]
        figures[f"{name}_change"] = ratio - 1.0
    return figures


def measure_machine(case: Case, cfg: BenchConfig) -> Figures:
    """Returns what scripts.doctor finds on this machine (facts and measured rates), and for each
    precision its rate of matrix products divided by that of fp32."""
    findings = doctor.examine(measure=True)
    rates = findings["rates"]
    times = {
        f"{name.partition('_')[0]}_times": rate / rates["fp32_product_tflops"]
        for name, rate in rates.items()
        if "product" in name
    }
    return findings | rates | times | {"text": doctor.format_findings(findings)}


def run_gpu_tests(case: Case, cfg: BenchConfig) -> Figures:
    """Runs the tests that need a GPU with pytest, and counts the outcomes in its last line. Keeps
    the end of its output, which has the reports of failed tests.

    A warning does not fail a test here, because the warnings of a GPU, its driver and its libraries
    are not known in advance.
    """
    if not torch.cuda.is_available():
        return {"reason": "needs an NVIDIA GPU"}
    if not (ROOT / "tests").is_dir():
        return {"reason": "left out: the folder tests/ is not here; a clone of the project has it"}
    done = subprocess.run(
        [*PYTEST_COMMAND, *case.overrides], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    return count_outcomes(done.stdout, done.returncode)


def count_outcomes(output: str, status: int) -> Figures:
    """Counts the tests in the output of pytest, which ended with `status`."""
    lines = output.strip().splitlines() or ["pytest printed nothing"]
    figures: Figures = dict.fromkeys(("passed", "failed", "skipped", "errors"), 0)
    figures |= {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", lines[-1])}
    figures["text"] = "\n".join(lines[-REPORT_LINES:])
    return figures | ({"error": f"pytest: {lines[-1].strip('= ')}"} if status else {})
