"""Cases with planted faults, for the runner of the benchmarks."""

import os
import signal
import time
from multiprocessing import get_start_method

import torch

from scripts.bench.cases import BenchConfig, Case, Job


def value(case, cfg):
    return {"value": case.name, "workers": get_start_method()}


def raises(case, cfg):
    raise TypeError("planted")


def exhausts(case, cfg):
    raise torch.OutOfMemoryError("planted, of 80 GiB")


def hangs(case, cfg):
    time.sleep(1000)
    return {}


def is_killed(case, cfg):
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def plan_job(*measures, seconds=0.1):
    cases = [Case(f"case {i}", measure) for i, measure in enumerate(measures)]
    cfg = BenchConfig(setting="tiny", name="step_tiny")
    return Job("python -m scripts.bench step", cfg, cases, seconds)
